"""Builds this rank's chunks of a Qwen model on Megatron-Core, from a HF shape and a layout.

Layers are Transformer Engine's where it is installed, else ours (`local_spec`); parameters and results are the same.
`PolicyModel` adds one thing to GPTModel: with a `HeadRequest` its hidden states go to our output layer (`head/`)
instead of becoming full logits.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_dapo.config import ModelShape, check_model
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy import cpu
from megatron_dapo.policy.head.fused import HeadRequest, output_processor
from megatron_dapo.policy.runtime import Runtime
from megatron_dapo.weights.mapping import padded_vocab

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


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
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": policy.uses_sequence_parallel,
        "variable_seq_lengths": True,  # packed micro-batches differ in length
        "moe_token_dispatcher_type": "alltoall",
        "use_cpu_initialization": on_cpu,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": te,
        "bias_activation_fusion": not on_cpu,
        "bias_dropout_fusion": False,
        **_pipeline_options(policy, on_cpu),
        **_recompute_options(policy),
    }
    if shape.is_moe:
        options |= _moe_options(shape, policy, te)
    return TransformerConfig(**options)


def _pipeline_options(policy: PolicyConfig, on_cpu: bool) -> dict[str, Any]:
    if policy.virtual_pipeline > 1:
        # Batched p2p gives wrong results for interleaved stages on two ranks, without an error. On gloo, a send may
        # read an output after it was deallocated.
        return {"overlap_p2p_comm": True, "batch_p2p_comm": False, "deallocate_pipeline_outputs": not on_cpu}
    return {"overlap_p2p_comm": False, "batch_p2p_comm": True, "deallocate_pipeline_outputs": True}


def _recompute_options(policy: PolicyConfig) -> dict[str, Any]:
    if policy.recompute == "none":
        return {}
    if policy.recompute == "selective":
        return {"recompute_granularity": "selective"}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _moe_options(shape: ModelShape, policy: PolicyConfig, te: bool) -> dict[str, Any]:
    aux = policy.moe_aux_loss_coefficient
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn_hidden,
        # Softmax over the selected experts equals normalising their probabilities afterwards.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_load_balancing_type": "aux_loss" if aux else "none",
        "moe_aux_loss_coeff": aux,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": te,
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
    config = transformer_config(shape, policy)
    chunks = []
    for stage in range(policy.virtual_pipeline):
        vp_stage = stage if policy.virtual_pipeline > 1 else None
        chunk = PolicyModel(
            config,
            _block_spec(config, vp_stage, shape.rope_theta),
            vocab_size=padded_vocab(shape.vocab, policy.tensor_parallel),
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope" if has_transformer_engine() else "none",  # our attention rotates
            rotary_base=shape.rope_theta,
            pg_collection=runtime.groups,
            vp_stage=vp_stage,
        )
        chunks.append(chunk.to(runtime.device))
    return chunks


def _block_spec(config: TransformerConfig, vp_stage: int | None, rotary_base: float) -> Any:
    if has_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    from megatron_dapo.policy.model.local_spec import local_block_spec

    return local_block_spec(config, vp_stage, rotary_base)
