"""Builds this rank's chunks of a Qwen model on Megatron-Core, from a HF shape and a layout.

Layers are Transformer Engine's where it is installed, else ours (`local_spec`); parameters and results are the same.
`PolicyModel` adds one thing to GPTModel: with a `HeadRequest` its hidden states go to our output layer (`head/`)
instead of becoming full logits.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
from collections.abc import Iterator
from typing import Any

import megatron.core
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from megatron_dapo.config import ConfigError, ModelShape, check_model
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy.head.fused import HeadRequest, output_processor
from megatron_dapo.policy.megatron import cpu
from megatron_dapo.policy.megatron.options import DTYPES, check_hardware, fusion_provider, megatron_refuses, passed_on
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.policy.model.gated_delta_net import use_gated_delta_net
from megatron_dapo.policy.model.local_spec import inverse_frequencies
from megatron_dapo.policy.model.router import install_hooks, separate_expert_gradients, use_policy_routers
from megatron_dapo.weights.mapping import padded_vocab


def has_transformer_engine() -> bool:
    """Transformer Engine is used on CUDA where it is installed. A broken installation is an error, not a fallback."""
    if cpu.needed() or importlib.util.find_spec("transformer_engine") is None:
        return False
    import transformer_engine.pytorch  # noqa: F401

    return True


def transformer_config(shape: ModelShape, policy: PolicyConfig) -> TransformerConfig:
    dtype = DTYPES[policy.precision]
    on_cpu, te = cpu.needed(), has_transformer_engine()
    options: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_hidden,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "attention_output_gate": shape.attention_gate,
        "layernorm_zero_centered_gamma": shape.zero_centred_norms,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": policy.precision == "bf16",
        # Sums per rank, divided once by the global count: the exact normaliser (see step.py).
        "calculate_per_token_loss": True,
        "tensor_model_parallel_size": policy.tensor_parallel,
        "pipeline_model_parallel_size": policy.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": policy.virtual_pipeline if policy.virtual_pipeline > 1 else None,
        "context_parallel_size": policy.context_parallel,
        "expert_model_parallel_size": policy.expert_parallel,
        "expert_tensor_parallel_size": policy.expert_tensor_parallel,
        "sequence_parallel": policy.uses_sequence_parallel,
        # Packed micro-batches differ in length. Only pipeline stages need to know.
        "variable_seq_lengths": policy.pipeline_parallel > 1,
        "moe_token_dispatcher_type": policy.moe.dispatcher,
        "use_cpu_initialization": on_cpu,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": uses_gradient_fusion(policy, te),
        "apply_rope_fusion": te,
        "bias_activation_fusion": not on_cpu,
        "bias_dropout_fusion": False,
        "tp_comm_overlap": policy.tp_comm_overlap,
        "cp_comm_type": policy.cp_comm_type,
        "deterministic_mode": policy.deterministic,
        "attention_backend": AttnBackend[policy.attention_backend],
        **_pipeline_options(policy, on_cpu),
        **_recompute_options(policy),
        **_fp8_options(policy),
    }
    if te and shape.yarn:
        options["softmax_scale"] = _yarn_softmax_scale(shape)
    if shape.is_moe:
        options |= _moe_options(shape, policy, te)
    if shape.linear:  # checkpoints then have one tensor per layer
        options["linear_attention_freq"] = [int(layer in shape.linear.layers) for layer in range(shape.layers)]
    with megatron_refuses("TransformerConfig"):
        return TransformerConfig(**(options | passed_on("model", policy)))


def _yarn_softmax_scale(shape: ModelShape) -> float:
    """Transformer Engine's rotation cannot scale, so the scores are scaled: the same if every channel is rotated."""
    assert shape.yarn
    if shape.rotated < shape.head_dim and shape.yarn.attention_factor != 1:
        raise ConfigError(
            f"YaRN with an attention factor of {shape.yarn.attention_factor:.3g} on {shape.rotated} of "
            f"{shape.head_dim} channels of a head is not supported with Transformer Engine; remove rope_scaling from "
            "config.json, or set attention_factor to 1 in it (also for the engine)"
        )
    return shape.yarn.attention_factor**2 / math.sqrt(shape.head_dim)


def uses_gradient_fusion(policy: PolicyConfig, te: bool) -> bool:
    wanted = policy.gradient_accumulation_fusion
    return bool(fusion_provider(te)) if wanted is None else wanted


def _pipeline_options(policy: PolicyConfig, on_cpu: bool) -> dict[str, Any]:
    stages = {
        "num_layers_in_first_pipeline_stage": policy.first_stage_layers,
        "num_layers_in_last_pipeline_stage": policy.last_stage_layers,
    }
    if policy.virtual_pipeline > 1:
        # Batched p2p gives wrong results for interleaved stages on two ranks, without an error. On gloo, a send may
        # read an output after it was deallocated.
        p2p = {"overlap_p2p_comm": True, "batch_p2p_comm": False, "deallocate_pipeline_outputs": not on_cpu}
    else:
        p2p = {"overlap_p2p_comm": False, "batch_p2p_comm": True, "deallocate_pipeline_outputs": True}
    return stages | p2p


def _recompute_options(policy: PolicyConfig) -> dict[str, Any]:
    if policy.recompute == "none":
        return {}
    if policy.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(policy.recompute_modules)}
    method, layers = ("uniform", 1) if policy.recompute_layers is None else ("block", policy.recompute_layers)
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def _fp8_options(policy: PolicyConfig) -> dict[str, Any]:
    fp8 = policy.fp8
    if fp8.recipe == "none":
        return {}
    return {"fp8": fp8.format, "fp8_recipe": fp8.recipe, "first_last_layers_bf16": fp8.first_last_layers_bf16}


def _moe_options(shape: ModelShape, policy: PolicyConfig, te: bool) -> dict[str, Any]:
    moe = policy.moe
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn_hidden,
        "moe_shared_expert_intermediate_size": shape.shared_ffn_hidden or None,
        "moe_shared_expert_gate": shape.has_shared_expert,
        # Softmax over the selected experts equals normalising their probabilities afterwards.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        # Ours is exact for every layout and micro-batch split (see router.py).
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": te if moe.grouped_gemm is None else moe.grouped_gemm,
        "moe_permute_fusion": te if moe.permute_fusion is None else moe.permute_fusion,
        "moe_router_fusion": moe.router_fusion,
        "moe_flex_dispatcher_backend": moe.flex_backend,
    }


class PolicyModel(GPTModel):
    """GPTModel whose last stage can score given tokens instead of returning all logits.

    `forward(…, head=HeadRequest)` returns [2, tokens]: log-probs and entropies. Without `head` it is GPTModel.
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


def build_model(shape: ModelShape, policy: PolicyConfig, runtime: Runtime) -> list[PolicyModel]:
    """This rank's model chunks (one per virtual pipeline stage), randomly initialised, on the runtime's device."""
    check_model(policy, shape)
    te = has_transformer_engine()
    check_hardware(policy, te)
    check_grouped_experts(shape, policy, te, megatron.core.__version__)
    config = transformer_config(shape, policy)
    if policy.tp_comm_overlap:
        _make_communication_buffers(shape, policy)
    chunks = []
    for stage in range(policy.virtual_pipeline):
        vp_stage = stage if policy.virtual_pipeline > 1 else None
        with _fusion_without_apex(te and config.gradient_accumulation_fusion):
            chunk = PolicyModel(
                config,
                _block_spec(config, vp_stage, shape),
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
        if chunk.post_process:  # our head adds its gradient itself; plain cross-entropy leaves it to Megatron's DDP
            chunk.output_layer.gradient_accumulation_fusion = False
        if te and shape.yarn:
            chunk.rotary_pos_emb.inv_freq = inverse_frequencies(shape.rotated, shape.rope_theta, shape.yarn)
        install_hooks(chunk)
        separate_expert_gradients(chunk, config)
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


@contextlib.contextmanager
def _fusion_without_apex(wanted: bool) -> Iterator[None]:
    """Transformer Engine's layers add gradients to main_grad without apex. Only Megatron's own output layer would need
    apex, and refuses to be built without; its forward is not fused (see `build_model`)."""
    from megatron.core.tensor_parallel import layers

    found = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = found or wanted
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = found


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


def _block_spec(config: TransformerConfig, vp_stage: int | None, shape: ModelShape) -> Any:
    if has_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    else:
        from megatron_dapo.policy.model.local_spec import local_block_spec

        spec = local_block_spec(config, vp_stage, shape.rope_theta, shape.rotated, shape.yarn)
    if shape.linear:
        use_gated_delta_net(spec, config, vp_stage, shape.linear)
    use_policy_routers(spec.layer_specs)
    return spec
