"""The value head: one number per token from its hidden state, in fp32.

Every tensor-parallel rank has the whole head and computes all values, so gradients need no sum over these ranks: with
sequence parallelism the gathered hidden states' gradient is cut to the rank's own part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear


class ValueHead(MegatronModule):
    """Stands where GPTModel has its output layer. Its weights stay in fp32 when the model becomes bf16."""

    def __init__(self, config: Any, tp_group: Any, device: torch.device) -> None:
        super().__init__(config=config)
        self.weight = Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32, device=device))
        self.bias = Parameter(torch.zeros(1, dtype=torch.float32, device=device))
        self.tp_group = tp_group

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden [s, b, h] of this rank (s/tp under sequence parallelism) to [1, tokens], those at `positions`."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        chosen = hidden.flatten(0, 1).index_select(0, positions)
        return linear(chosen.float(), self.weight, self.bias).T

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ValueHead:
        """A conversion of the whole model to bf16 leaves the parameters as they are."""
        kept = [parameter.data for parameter in self.parameters()]
        super()._apply(fn, recurse)
        for parameter, data in zip(self.parameters(), kept, strict=True):
            if parameter.dtype != data.dtype and not parameter.is_meta:
                parameter.data = data.to(parameter.device)
        return self
