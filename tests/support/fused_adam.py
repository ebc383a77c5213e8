"""Stand-ins for the fused optimizers that Megatron prefers on CUDA, with their state: moments per parameter, and the
step count as an integer in the parameter group, absent before the first step. The arithmetic is AdamW's."""

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import distrib_optimizer


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, eps, weight_decay, adam_w_mode=True, capturable=False):
        assert adam_w_mode and not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            assert type(group["step"]) is int  # the kernels take a C integer
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)

    def _update(self, group, parameter):
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        assert set(state) == {"exp_avg", "exp_avg_sq"}
        state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = (state["exp_avg_sq"].sqrt() / (1 - beta2 ** group["step"]) ** 0.5).add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1 ** group["step"]))


def use(kind):
    """Makes Megatron pick `kind` in this process: torch, transformer_engine or apex."""
    if kind == "torch":
        return
    for module in (megatron_optimizer, distrib_optimizer):
        module.Adam = FusedAdam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_TE_OPTIMIZER = kind == "transformer_engine"
    distrib_optimizer.USING_APEX_OPTIMIZER = kind == "apex"
