"""Megatron's options by name: what a user may set, against the installed version and against our own keys."""

import dataclasses

import pytest
import torch
from installed_megatron import is_megatron_since
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.config.megatron_fields import OWNED, REFUSED, found_in
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy.megatron import options
from megatron_dapo.policy.megatron.options import check_options, ddp_config, hardware_needs, optimizer_config, passed_on
from megatron_dapo.selfcheck.synthetic import synthetic_shape

CLASSES = {"model": TransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}
DENSE, MOE = synthetic_shape("dense"), synthetic_shape("moe")


def policy_of(**keys):
    return parse_config({"policy": keys}).policy


def test_fields_reach_megatrons_objects():
    policy = policy_of(
        megatron={
            "model": {"moe_router_dtype": "fp64", "fp8_margin": 2, "disable_parameter_transpose_cache": True},
            "ddp": {"bucket_size": 1000, "check_for_nan_in_grad": True},
            "optimizer": {"apply_wd_to_qk_layernorm": True},
        }
    )
    model = options.transformer_config(MOE, policy)
    assert (model.moe_router_dtype, model.fp8_margin, model.disable_parameter_transpose_cache) == ("fp64", 2, True)
    ddp = ddp_config(policy, on_cuda=False, replicas=1)
    assert (ddp.bucket_size, ddp.check_for_nan_in_grad) == (1000, True)
    assert optimizer_config(policy).apply_wd_to_qk_layernorm


def test_every_field_that_we_set_is_ours_or_may_be_overridden():
    """Otherwise a user's value would silently replace one that the trainer relies on."""
    ours = {"model": set(), "ddp": set(), "optimizer": set()}

    def recording(kind):
        class Recorder(CLASSES[kind]):
            def __init__(self, **options):
                ours[kind].update(options)
                super().__init__(**options)

        return Recorder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "TransformerConfig", recording("model"))
        patch.setattr(options, "DistributedDataParallelConfig", recording("ddp"))
        patch.setattr(options, "MegatronOptimizerConfig", recording("optimizer"))
        policy = policy_of(recompute="full", recompute_layers=1)
        options.transformer_config(MOE, policy)
        ddp_config(policy, on_cuda=False, replicas=1)
        optimizer_config(policy)
    free = {"masked_softmax_fusion", "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion",
            "moe_router_dtype"}  # fmt: skip
    known = free | {"hidden_dropout", "attention_dropout", "optimizer"}
    for kind, fields in ours.items():
        assert len(fields) >= 5
        assert {field for field in fields if not found_in(OWNED[kind], field)} <= known


GONE = {"model": {"moe_extended_tp", "moe_use_legacy_grouped_gemm"}, "ddp": {"preserve_fp32_weights"}}  # in 0.19


@pytest.mark.parametrize("kind", CLASSES)
def test_the_tables_name_only_fields_that_exist(kind):
    """Of this version, or (listed above) of an older one."""
    fields = {field.name for field in dataclasses.fields(CLASSES[kind])}
    wildcards = {pattern for table in (OWNED, REFUSED) for pattern in table[kind] if "*" in pattern}
    named = {pattern for table in (OWNED, REFUSED) for pattern in table[kind]} - wildcards
    assert named - (GONE.get(kind, set()) if is_megatron_since("0.19") else set()) <= fields


def owned_keys():
    return [(kind, field, owner) for kind, fields in OWNED.items() for field, owner in fields.items()]


@pytest.mark.parametrize(("kind", "field", "owner"), owned_keys())
def test_fields_of_our_keys_name_the_key(kind, field, owner):
    field = field.replace("*", "embedding")
    with pytest.raises(ConfigError, match="is set by") as found:
        policy_of(megatron={kind: {field: 1}})
    assert owner in str(found.value)
    key = owner.split()[0].rstrip(":")
    if key.startswith("policy."):
        node = PolicyConfig
        for part in key.split(".")[1:]:
            node = node.model_fields[part].annotation if hasattr(node, "model_fields") else None
            assert node is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": {"hidden_dropout": 0.1}}, "model.hidden_dropout cannot be used: it makes log-probs random"),
        ({"model": {"cuda_graph_impl": "local"}}, "packed micro-batches differ in length"),
        ({"model": {"moe_expert_capacity_factor": 1.0}}, "tokens would be dropped"),
        ({"ddp": {"use_megatron_fsdp": True}}, "need Megatron's DDP, not FSDP"),
        ({"optimizer": {"muon_momentum": 0.9}}, "state of AdamW"),
        ({"optimizer": {"initial_loss_scale": 1.0}}, "belongs to fp16 training"),
        ({"optimiser": {}}, "did you mean 'policy.megatron.optimizer'"),
    ],
)
def test_fields_that_cannot_work_say_why(options, message):
    with pytest.raises(ConfigError, match=message):
        policy_of(megatron=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": {"fp8_marginn": 1}}, r"fp8_marginn: megatron-core .* no such field; did you mean 'fp8_margin'"),
        ({"model": {"_cpu_offloading_context": 1}}, "has no such field"),
        ({"model": {"fp8_margin": "x"}}, r"policy\.megatron\.model\.fp8_margin: expected int, found 'x'"),
        ({"model": {"fp8_margin": True}}, "expected int, found True"),
        ({"model": {"fp8_amax_compute_algo": "least"}}, "expected Literal.*'most_recent'.* found 'least'"),
        ({"model": {"timers": "print"}}, "Callable"),
        ({"ddp": {"bucket_size": 1.5}}, r"policy\.megatron\.ddp\.bucket_size: expected .*int.* found 1\.5"),
        ({"optimizer": {"log_num_zeros_in_grad": 1}}, "expected bool, found 1"),
    ],
)  # fmt: skip
def test_unknown_fields_and_wrong_types_are_errors(options, message):
    policy = policy_of(megatron=options)
    with pytest.raises(ConfigError, match=message):
        for kind in CLASSES:
            passed_on(kind, policy)


def test_an_integer_is_a_float_and_a_list_stays_one():
    policy = policy_of(megatron={"model": {"qk_clip_alpha": 1, "offload_modules": ["core_attn"]}})
    assert passed_on("model", policy) == {"qk_clip_alpha": 1.0, "offload_modules": ["core_attn"]}


def test_megatrons_own_refusal_is_an_error_of_the_configuration():
    policy = policy_of(megatron={"model": {"moe_router_padding_for_quantization": True}})
    with pytest.raises(ConfigError, match="refuses the TransformerConfig of section policy: fp8/fp4 must be specified"):
        options.transformer_config(MOE, policy)


# ---- combinations ----


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"first_stage_layers": 3}, "first_stage_layers needs pipeline_parallel of 2 or more"),
        ({"pipeline_parallel": 2, "virtual_pipeline": 2, "last_stage_layers": 3}, "must be a multiple of virtual_pip"),
        ({"recompute_modules": ["mlp"]}, "recompute_modules needs recompute: selective"),
        ({"recompute": "selective", "recompute_modules": []}, "recompute_modules is empty"),
        ({"recompute_layers": 2}, "recompute_layers needs recompute: full"),
        ({"pipeline_parallel": 2, "moe": {"dispatcher": "allgather"}}, "allgather needs pipeline_parallel 1"),
        ({"expert_parallel": 2, "moe": {"dispatcher": "allgather"}}, r"\(2\) to divide tensor_parallel × context_p"),
        ({"overlap_param_gather": True, "distributed_optimizer": False}, "overlap_param_gather needs distributed_opt"),
        ({"cp_comm_type": "a2a"}, "cp_comm_type needs context_parallel"),
        ({"tp_comm_overlap": True}, "tp_comm_overlap needs tensor_parallel"),
        ({"fp8": {"recipe": "blockwise"}, "precision": "fp32"}, "fp8.recipe needs precision: bf16"),
        ({"fp8": {"first_last_layers_bf16": True}}, "has no effect with recipe 'none'"),
        ({"gradient_reduction": "bf16", "precision": "fp32"}, "gradient_reduction: bf16 needs precision: bf16"),
        ({"optimizer": {"cpu_offload": 0.5}, "distributed_optimizer": False}, "need distributed_optimizer"),
        ({"optimizer": {"exp_avg_dtype": "bf16"}}, "exp_avg_dtype is bf16, but precision_aware is false"),
        ({"fp8": {"recipe": "blockwise"}, "micro_batch_tokens": 32800}, r"multiples of 128 \(fp8.recipe\): use 32896"),
    ],
)
def test_combinations_that_cannot_work_are_errors(keys, message):
    with pytest.raises(ConfigError, match=message):
        policy_of(**keys)


# ---- options that need CUDA ----

ON_CUDA = [
    ({"fp8": {"recipe": "blockwise"}}, "policy.fp8.recipe: blockwise needs CUDA and Transformer Engine"),
    ({"attention_backend": "flash"}, "attention_backend: flash needs CUDA and Transformer Engine"),
    ({"moe": {"dispatcher": "flex"}}, r"moe.dispatcher: flex \(deepep\) needs CUDA and DeepEP"),
    ({"moe": {"permute_fusion": True}}, "moe.permute_fusion needs CUDA"),
    ({"moe": {"router_fusion": True}}, "moe.router_fusion needs CUDA"),
    ({"moe": {"grouped_gemm": True}}, "moe.grouped_gemm needs CUDA"),
    ({"gradient_accumulation_fusion": True}, "needs CUDA and Transformer Engine or NVIDIA's apex"),
    ({"optimizer": {"precision_aware": True}}, "optimizer.precision_aware needs CUDA and Transformer Engine"),
    ({"optimizer": {"cpu_offload": 1.0}}, "optimizer.cpu_offload needs CUDA"),
    ({"tensor_parallel": 2, "tp_comm_overlap": True}, "tp_comm_overlap needs CUDA"),
    ({"context_parallel": 2, "cp_comm_type": "a2a"}, "cp_comm_type: a2a needs CUDA"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(("keys", "message"), ON_CUDA)
def test_options_that_need_cuda_are_refused_without_it(keys, message):
    policy = policy_of(**keys)
    with pytest.raises(ConfigError, match=message):
        options.check_hardware(policy, te=False)
    lines = check_options(policy, MOE)  # but a login node may check the rest
    assert lines[-1].startswith("not checked here, because this machine has no CUDA: policy.")


def test_cpu_options_need_no_hardware():
    policy = policy_of(
        pipeline_parallel=2, first_stage_layers=1, recompute="selective", recompute_modules=["mlp"],
        gradient_reduction="bf16", overlap_param_gather=True, deterministic=True,
    )  # fmt: skip
    assert hardware_needs(policy) == {}


def test_the_report_shows_what_is_passed_on():
    policy = policy_of(megatron={"model": {"fp8_margin": 1}, "ddp": {"bucket_size": 7}})
    lines = check_options(policy, DENSE)
    assert lines[0].startswith(f"megatron-core {options.megatron_version()}: layers of ")
    assert lines[1] == "policy.megatron.model (TransformerConfig): fp8_margin=1"
    assert lines[2] == "policy.megatron.ddp (DistributedDataParallelConfig): bucket_size=7"


# ---- the objects for CUDA, as far as they can be built here ----


def test_defaults_on_cuda():
    ddp = ddp_config(policy_of(), on_cuda=True, replicas=8)
    assert ddp.overlap_grad_reduce
    assert ddp.overlap_param_gather
    assert ddp.grad_reduce_in_fp32
    assert not ddp_config(policy_of(), on_cuda=True, replicas=1).overlap_param_gather
    assert not ddp_config(policy_of(distributed_optimizer=False), on_cuda=True, replicas=8).overlap_param_gather


def test_optimizer_offload_is_megatrons(monkeypatch):
    monkeypatch.setattr("megatron.core.optimizer.optimizer_config.is_te_min_version", lambda version: True)
    config = optimizer_config(policy_of(optimizer={"cpu_offload": 0.75}, gradient_reduction="bf16"))
    assert (config.optimizer_cpu_offload, config.optimizer_offload_fraction) == (True, 0.75)
    assert config.use_precision_aware_optimizer
    assert config.main_grads_dtype == torch.bfloat16


def test_fp8_reaches_the_layers_and_the_optimizer():
    policy = policy_of(fp8={"recipe": "blockwise", "first_last_layers_bf16": True})
    model = options.transformer_config(DENSE, policy)
    assert (model.fp8, model.fp8_recipe, model.first_last_layers_bf16) == ("hybrid", "blockwise", True)
    assert optimizer_config(policy).fp8_recipe == "blockwise"
    assert policy.pack_alignment == 128
