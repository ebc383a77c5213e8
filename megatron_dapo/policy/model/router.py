"""The router of a MoE layer, with what an RL update needs: an exact load-balancing loss, the load of the experts, and
the replay of given experts (`policy/routing_replay.py`).

The load-balancing loss is defined once, on the whole mini-batch of an update:

    coefficient · Σ_layers E · Σ_i f_i · P_i
    f_i  share of the (token, choice) pairs that are dispatched to expert i
    P_i  mean of the router's softmax probability of expert i

over all tokens of the mini-batch: prompts, responses, masked ones; not padding. It is added to the policy loss as it
is: aggregation, masks, layout and micro-batches do not change its strength. Megatron's own auxiliary losses are
computed per micro-batch and divided by the policy loss's denominator, so they are switched off.

f has no gradient, but the gradient of P in the first micro-batch needs the f of the last one. So an update with a
coefficient above 0 counts first, in a forward pass without gradient (`step.UpdateStep`).

A micro-batch carries its `MicroBatchRouting`. A hook before each layer hands it to the layer's router, in the forward
pass and again when the layer is recomputed: no order of micro-batches is assumed anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


@dataclass(slots=True, weakref_slot=True, eq=False)
class MicroBatchRouting:
    """What the routers need to know of one micro-batch on this rank, and what they report. Layers count from 1."""

    real: Tensor  # bool [tokens that this rank's routers see]: not padding
    slopes: Tensor | None = None  # [layers, experts]: the load-balancing loss is Σ slope · softmax probability
    load: dict[int, Tensor] = field(default_factory=dict)  # by layer: [2, experts], dispatched tokens and Σ probability
    # Routing replay, by layer. Experts count from 1 in `targets`; 0: the router chooses.
    targets: dict[int, Tensor] | None = None  # [tokens, experts per token]
    recorded: dict[int, Tensor] | None = None  # set: filled with the experts [tokens, experts per token]
    replayed: dict[int, Tensor] = field(default_factory=dict)  # [3]: tokens, replayed ones, those with other experts


class PolicyRouter(TopKRouter):
    """Megatron's router; `micro_batch` is set by the hook of its layer."""

    micro_batch: MicroBatchRouting | None = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._alone_recomputed = (
            "moe" in (config.recompute_modules or []) and config.recompute_granularity == "selective"
        )
        self._in_flight: WeakValueDictionary[int, MicroBatchRouting] = WeakValueDictionary()

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._alone_recomputed:
            # The hook does not run again. The recomputed layer's input is the same memory, which nothing else uses
            # between its forward and backward pass.
            if self.micro_batch is None:
                self.micro_batch = self._in_flight.get(input.data_ptr())
            else:
                self._in_flight[input.data_ptr()] = self.micro_batch
        try:
            return super().forward(input, *args, **kwargs)
        finally:
            self.micro_batch = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        micro = self.micro_batch
        if micro is None:
            return super().routing(logits, padding_mask)
        replays = micro.targets is not None or micro.recorded is not None
        self.router_replay = _Replay(micro, self.layer_number) if replays else None
        probs, chosen = super().routing(logits, padding_mask)
        real = micro.real[:, None]
        balances = micro.slopes is not None and self.training and torch.is_grad_enabled()
        with torch.set_grad_enabled(balances):
            probability = (logits.flatten(0, -2).softmax(-1, dtype=torch.float32) * real).sum(0)
        if balances:
            probs = _AddLoss.apply(probs, (probability * micro.slopes[self.layer_number - 1]).sum())  # type: ignore[index]
        # Assigned, not added: a recomputed layer comes here twice.
        micro.load[self.layer_number] = torch.stack([(chosen & real).sum(0).float(), probability.detach()])
        return probs, chosen


class _Replay:
    """Stands for Megatron's RouterReplay, which keeps queues of micro-batches and has no unknown experts."""

    def __init__(self, micro: MicroBatchRouting, layer: int) -> None:
        self._micro = micro
        self._layer = layer

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: Any
    ) -> tuple[Tensor, Tensor]:
        micro = self._micro
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if micro.recorded is not None:
            micro.recorded[self._layer] = own
        if micro.targets is None:
            return values, own
        given = micro.targets[self._layer].long() - 1
        if given.shape != own.shape:
            raise ValueError(
                f"layer {self._layer}: experts of {tuple(given.shape)} tokens × choices for a router that sees "
                f"{tuple(own.shape)}"
            )
        known = (given >= 0).all(-1)
        chosen = torch.where(known[:, None], given, own)
        ordered = chosen.sort(-1).values
        _require_distinct(ordered)
        changed = (ordered != own.sort(-1).values).any(-1)
        counts = (micro.real, known & micro.real, changed & micro.real)
        micro.replayed[self._layer] = torch.stack([count.sum() for count in counts])
        return scores.gather(1, chosen), chosen


def _require_distinct(ordered: Tensor) -> None:
    """Megatron would count an expert that is named twice once, and dispatch too few tokens."""
    message = "routed_experts names an expert twice for one token"
    distinct = (ordered[:, 1:] != ordered[:, :-1]).all()
    if ordered.is_cuda:
        torch._assert_async(distinct, message)  # does not wait for the device
    elif not distinct.item():
        raise ValueError(message)


class _AddLoss(torch.autograd.Function):
    """Passes `value` on and adds `loss` to what is differentiated."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)


def router_layers(chunks: Sequence[torch.nn.Module]) -> tuple[int, ...]:
    """The numbers of these chunks' layers with experts, counted from 1 over all pipeline stages."""
    routers = (module for chunk in chunks for module in chunk.modules() if isinstance(module, PolicyRouter))
    return tuple(sorted(router.layer_number for router in routers))


def use_policy_routers(layer_specs: Sequence[Any]) -> None:
    """Puts our router into the MoE layers of a block spec."""
    for spec in layer_specs:
        mlp = spec.submodules.mlp  # a ModuleSpec; a partial from 0.19 on
        submodules = mlp.keywords.get("submodules") if isinstance(mlp, partial) else mlp.submodules
        if submodules is not None and hasattr(submodules, "router"):
            submodules.router = PolicyRouter


def install_hooks(chunk: torch.nn.Module) -> None:
    """Lets every layer hand the micro-batch's routing to its router."""
    for layer in chunk.modules():
        router = getattr(layer.mlp, "router", None) if isinstance(layer, TransformerLayer) else None
        if router is not None:
            assert isinstance(router, PolicyRouter), f"layer {layer.layer_number} was built with a {type(router)}"
            layer.register_forward_pre_hook(partial(_before_layer, router), with_kwargs=True)


def _before_layer(router: PolicyRouter, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
    router.micro_batch = getattr(kwargs.get("packed_seq_params"), "routing", None)
