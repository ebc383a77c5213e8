"""Builds this rank's chunks of a model on Megatron-Core, from a HF shape and a layout.

Layers are Transformer Engine's where it is installed, else ours (`local_spec`); parameters and results are the same.
`PolicyModel` adds one thing to GPTModel: with a `HeadRequest` its hidden states go to our output layer (`head/`)
instead of becoming full logits.
"""

from __future__ import annotations

import inspect
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_dapo.config import ConfigError, ModelShape
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy.head.fused import HeadRequest, output_processor
from megatron_dapo.policy.head.value import ValueHead
from megatron_dapo.policy.megatron.options import check_hardware, has_transformer_engine, layers_for, transformer_config
from megatron_dapo.policy.megatron.patches import fusion_without_apex, separate_expert_gradients
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.policy.model.gated_delta_net import use_gated_delta_net
from megatron_dapo.policy.model.local_spec import inverse_frequencies
from megatron_dapo.policy.model.router import install_hooks, use_policy_routers
from megatron_dapo.weights.mapping import padded_vocab


class PolicyModel(GPTModel):
    """GPTModel whose last stage can score given tokens instead of returning all logits.

    `forward(…, head=HeadRequest)` returns [2, tokens]: log-probs and entropies. Without `head` it is GPTModel. With a
    `ValueHead` as output layer it returns [1, tokens]: values.
    """

    def forward(self, *args: Any, head: HeadRequest | None = None, **kwargs: Any) -> Tensor:
        self._head_request = head
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._head_request = None

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._head_request is None or not self.post_process:
            return super()._postprocess(hidden_states, *args, **kwargs)
        if isinstance(self.output_layer, ValueHead):
            return self.output_layer(hidden_states, self._head_request.positions)
        for hook in self.output_layer._forward_pre_hooks.values():  # DDP's waits until the weight is gathered
            hook(self.output_layer, ())
        tied = self.share_embeddings_and_output_weights
        return output_processor(
            hidden_states=hidden_states,
            output_layer=self.output_layer,
            output_weight=self.shared_embedding_or_output_weight() if tied else None,
            context=self._head_request,
            config=self.config,
        )


def build_model(shape: ModelShape, policy: PolicyConfig, runtime: Runtime, *, empty: bool = False) -> list[PolicyModel]:
    """This rank's model chunks (one per virtual pipeline stage), randomly initialised, on the runtime's device.
    `empty`: parameters have no memory of their own until they are given some."""
    with layers_for(policy):
        return _build_chunks(shape, policy, runtime, empty)


def _build_chunks(shape: ModelShape, policy: PolicyConfig, runtime: Runtime, empty: bool) -> list[PolicyModel]:
    te = has_transformer_engine()
    check_hardware(policy, te)
    check_grouped_experts(shape, policy, te, megatron.core.__version__)
    config = transformer_config(shape, policy)
    if empty:  # host memory that is never written costs nothing
        config.use_cpu_initialization, config.perform_initialization = True, False
    if policy.tp_comm_overlap:
        _make_communication_buffers(shape, policy)
    chunks = []
    for stage in range(policy.virtual_pipeline):
        vp_stage = stage if policy.virtual_pipeline > 1 else None
        with fusion_without_apex(te and config.gradient_accumulation_fusion):
            chunk = PolicyModel(
                config,
                _block_spec(config, vp_stage, shape, te, exact=policy.uses_exact_kernels),
                vocab_size=padded_vocab(shape.vocab, policy.tensor_parallel),
                max_sequence_length=shape.max_positions,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                parallel_output=True,
                share_embeddings_and_output_weights=shape.tied_embeddings,
                position_embedding_type="rope" if te else "none",  # our attention rotates
                rotary_base=shape.rope_theta,
                rotary_percent=shape.rotated / shape.head_dim,
                pg_collection=runtime.groups,
                vp_stage=vp_stage,
            )
        if chunk.post_process and shape.head == "value":
            chunk.output_layer = ValueHead(config, runtime.groups.tp, chunk.output_layer.weight.device)
        elif chunk.post_process:  # our head adds its gradient itself; plain cross-entropy leaves it to Megatron's DDP
            chunk.output_layer.gradient_accumulation_fusion = False
        if policy.uses_exact_kernels:
            from megatron_dapo.policy.model.exact import use_exact_products

            use_exact_products(chunk)
        if te and shape.rope_scaling:
            chunk.rotary_pos_emb.inv_freq = inverse_frequencies(shape.rotated, shape.rope_theta, shape.rope_scaling)
        if shape.is_moe:
            install_hooks(chunk)
            separate_expert_gradients(chunk, config)
        for parameter in chunk.parameters() if empty else ():
            parameter.data = torch.empty(1, dtype=parameter.dtype, device=runtime.device).expand(parameter.shape)
        chunks.append(chunk.to(runtime.device))
    return chunks


def _make_communication_buffers(shape: ModelShape, policy: PolicyConfig) -> None:
    """Transformer Engine's buffers for `tp_comm_overlap`. Every pack has their size (see PackingSpec)."""
    from transformer_engine.pytorch.module import base

    options: dict[str, Any] = {"shape": [policy.micro_batch_tokens // policy.context_parallel, shape.hidden]}
    fp8 = policy.fp8.recipe != "none"
    if "quantization_modes" in inspect.signature(base.initialize_ub).parameters:  # from 2.7 on
        modes = base.UserBufferQuantizationMode
        options["quantization_modes"] = [modes.FP8] if fp8 else [modes.NONE]
        if fp8 and policy.fp8.first_last_layers_bf16:
            options["quantization_modes"].append(modes.NONE)
    else:
        options["use_fp8"] = fp8
    base.initialize_ub(tp_size=policy.tensor_parallel, bootstrap_backend="nccl", **options)


def check_grouped_experts(shape: ModelShape, policy: PolicyConfig, te: bool, version: str) -> None:
    """Refuses the layout in which the gradient norm would be too small, and clipping too weak."""
    tp, ep = policy.tensor_parallel, policy.expert_parallel
    before_019 = tuple(int(part) for part in version.split(".")[:2]) < (0, 19)
    if shape.is_moe and te and before_019 and tp > 1 and ep > 1:
        raise ConfigError(
            f"policy.tensor_parallel is {tp} and expert_parallel is {ep}: with Transformer Engine's grouped experts, "
            f"Megatron-Core {version} counts only the experts of the first tensor-parallel rank in the gradient norm; "
            "install megatron-core 0.19 or newer (Python 3.12), or set tensor_parallel or expert_parallel to 1"
        )


def _block_spec(config: TransformerConfig, vp_stage: int | None, shape: ModelShape, te: bool, *, exact: bool) -> Any:
    if te:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    else:
        from megatron_dapo.policy.model.local_spec import local_block_spec

        spec = local_block_spec(config, vp_stage, shape.rope_theta, shape.rotated, shape.rope_scaling, exact=exact)
    if shape.linear:
        use_gated_delta_net(spec, config, vp_stage, shape.linear)
    if shape.is_moe:
        use_policy_routers(spec.layer_specs)
    return spec
