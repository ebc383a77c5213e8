"""The small files of a torch_dist checkpoint: `.metadata` and `metadata.json`, which say where its tensors are, and
`common.pt` with Megatron-LM's arguments, the checkpoint version and the iteration.

Megatron-LM checks the shape of the model against the arguments, takes them over with `--use-checkpoint-args`, and
reads weights of version 0 as an old order of QKV rows. Other tools (slime's) read the shape from them.
"""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron_dapo.config.model import ModelShape
from megatron_dapo.errors import CheckpointError
from megatron_dapo.files import Dtype
from megatron_dapo.weights.formats.named_pickle import Maker, Name
from megatron_dapo.weights.locate import CONFIG, METADATA

VERSION = 3.0
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def megatron_args(shape: ModelShape, **more: Any) -> argparse.Namespace:
    """The arguments of Megatron-LM that describe this model; `more` adds or replaces some."""
    args: dict[str, Any] = {
        "num_layers": shape.layers, "hidden_size": shape.hidden, "ffn_hidden_size": shape.ffn_hidden,
        "num_attention_heads": shape.heads, "num_query_groups": shape.kv_heads, "group_query_attention": True,
        "kv_channels": shape.head_dim, "seq_length": shape.max_positions,
        "max_position_embeddings": shape.max_positions, "position_embedding_type": "rope",
        "add_position_embedding": True, "rotary_base": int(shape.rope_theta),
        "rotary_percent": shape.rotated / shape.head_dim,
        "rotary_interleaved": False, "add_bias_linear": False, "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm, "swiglu": True, "squared_relu": False, "normalization": "RMSNorm",
        "norm_epsilon": shape.norm_eps, "apply_layernorm_1p": shape.zero_centred_norms,
        "apply_query_key_layer_scaling": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not shape.tied_embeddings,
        "vocab_size": shape.vocab, "padded_vocab_size": shape.vocab, "make_vocab_size_divisible_by": 1,
        "tokenizer_type": "HuggingFaceTokenizer", "num_experts": None, "q_lora_rank": None,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None, "expert_model_parallel_size": 1, "context_parallel_size": 1,
        "world_size": 1, "data_parallel_size": 1, "ckpt_format": "torch_dist", "bf16": shape.dtype == "bfloat16",
        "fp16": shape.dtype == "float16", "consumed_train_samples": 0, "skipped_train_samples": 0,
        "consumed_valid_samples": 0, "no_save_optim": True, "no_save_rng": True,
    }  # fmt: skip
    if shape.is_moe:
        args |= {
            "num_experts": shape.experts, "moe_router_topk": shape.experts_per_token,
            "moe_layer_freq": shape.moe_pattern,
            "moe_ffn_hidden_size": shape.expert_ffn_hidden, "moe_router_pre_softmax": not shape.norm_topk_prob,
            "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
            "moe_shared_expert_intermediate_size": shape.shared_ffn_hidden or None,
            "moe_shared_expert_gate": shape.has_shared_expert,
        }  # fmt: skip
    return argparse.Namespace(**(args | more))


def common_state(args: argparse.Namespace, iteration: int = 0) -> dict[str, Any]:
    """What Megatron-LM's own save puts into `common.pt` besides optimizer and random states."""
    return {
        "args": args,
        "checkpoint_version": VERSION,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": dict(CONTENT),
    }


@dataclass(frozen=True, slots=True)
class Stored:
    """What the metadata says about one item: where it is, and which part of a tensor. Without `dtype`: an object."""

    key: str
    file: str
    offset: int
    length: int
    dtype: Any = None  # a torch dtype or its name
    shape: tuple[int, ...] = ()  # of the whole tensor
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


_META = "torch.distributed.checkpoint.metadata"
_INDEX, _WHOLE = Name(_META, "MetadataIndex"), Name(_META, "Metadata")
_SAVED = Name(_META, "StorageMeta")  # slime's exporter fails without it
_TENSOR, _BYTES = Name(_META, "TensorStorageMetadata"), Name(_META, "BytesStorageMetadata")
_CHUNK, _PROPERTIES = Name(_META, "ChunkStorageMetadata"), Name(_META, "TensorProperties")
_STORED, _SIZE = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"), Name("torch", "Size")
_LAYOUT, _FORMAT = Name("torch.serialization", "_get_layout"), Name(_META, "_MEM_FORMAT_ENCODING")


def torch_dist_metadata(stored: Iterable[Stored]) -> bytes:
    """The content of `.metadata`. Every element of every tensor must be stored, and none twice."""
    make = Maker(_META)
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    chunks: dict[str, list[Any]] = {}
    elements: dict[str, list[int]] = {}  # of the tensor, and how many of them are stored
    seen: set[Any] = set()
    for item in stored:
        if (item.key, item.offsets) in seen:
            raise CheckpointError(f"{item.key} at {item.offsets} would be written twice: by two ranks, or one twice")
        seen.add((item.key, item.offsets))
        offset = None if item.dtype is None else make.call(_SIZE, tuple(item.offsets))
        position = make.instance(_INDEX, {"fqn": item.key, "index": None, "offset": offset})
        place = {"relative_path": item.file, "offset": item.offset, "length": item.length}
        storage[position] = make.instance(_STORED, place)
        if item.dtype is None:
            described[item.key] = make.instance(_BYTES)
            continue
        if item.key not in described:
            layout, contiguous = make.call(_LAYOUT, "torch.strided"), make.call(_FORMAT, 0)
            dtype = make.name(Name("torch", Dtype.of(item.dtype)))
            properties = make.instance(_PROPERTIES, (dtype, layout, False, contiguous, False))
            chunks[item.key], elements[item.key] = [], [math.prod(item.shape), 0]
            state = {"properties": properties, "size": make.call(_SIZE, tuple(item.shape)), "chunks": chunks[item.key]}
            described[item.key] = make.instance(_TENSOR, state)
        sizes = make.call(_SIZE, tuple(item.sizes))
        chunks[item.key].append(make.instance(_CHUNK, {"offsets": offset, "sizes": sizes}))
        elements[item.key][1] += math.prod(item.sizes)
    for key, (count, written) in elements.items():
        if count != written:
            raise CheckpointError(f"{key} has {count} elements, {written} would be written")
    whole = {"state_dict_metadata": described, "planner_data": None, "storage_data": storage}
    saved = make.instance(_SAVED, {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []})
    return make.dump(make.instance(_WHOLE, whole | {"storage_meta": saved, "version": None}))


def description_files(metadata: bytes, common: bytes) -> dict[str, bytes]:
    """The small files of a checkpoint; `metadata.json`, which Megatron looks for first, comes last."""
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    return {METADATA: metadata, "common.pt": common, CONFIG: json.dumps(config).encode()}


def saved_object(value: Any) -> bytes:
    """By torch, because it may have tensors."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
