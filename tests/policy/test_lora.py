"""LoRA: adapters get the gradients of transformers' model in fp64, in every layout, and travel as PEFT's files."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from joined_ranks import RankJobs
from long_lists import some
from reference_models import fp64, hf_model, hf_weights, in_fp64, naive_gradients
from safetensors.torch import load_file, save_file
from save_policy import save_policy

from megatron_dapo.checkpoints.policy_state import load_policy
from megatron_dapo.cli import main
from megatron_dapo.config import ConfigError
from megatron_dapo.config.policy import LoraConfig
from megatron_dapo.files import safetensors_header
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.model import lora
from megatron_dapo.policy.policy import Policy
from megatron_dapo.selfcheck.cases import OPTIONS, Case, LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_adapters, synthetic_shape
from megatron_dapo.selfcheck.trace import compare, gather_full, trace_updates
from megatron_dapo.weights.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_mappings,
    adapter_name,
    initial_adapter,
    merge_adapter,
    read_adapter,
)
from megatron_dapo.weights.fp8_checkpoint import hf_to_fp8
from megatron_dapo.weights.mapping import WeightsError, parameter_mappings
from megatron_dapo.weights.model_weights import use_server_weights
from megatron_dapo.weights.names import packed, packing_order
from megatron_dapo.weights.verify import verify

LORA = OPTIONS["lora"]["lora"]
jobs = RankJobs()
references = {}


def identity(tensor, **_):
    return tensor


def no_sequence_sum(self, mapping, value, base, original=lora.Adapters._register):
    parameter = original(self, mapping, value, base)
    parameter.sequence_parallel = False
    return parameter


PLANTED = {
    "": [],
    "no sum of A's gradient": [("copy_to_tensor_model_parallel_region", identity)],
    "no sum of A·x": [("reduce_from_tensor_model_parallel_region", identity)],
    "no sum over the sequence's parts": [("Adapters._register", no_sequence_sum)],
}


def plant(name):
    stack = ExitStack()
    for attribute, replacement in PLANTED.get(name, []):
        owner, _, last = attribute.rpartition(".")
        stack.enter_context(mock.patch.object(getattr(lora, owner) if owner else lora, last, replacement))
    return stack


def trace_with(rendezvous, case, planted):
    with plant(planted):
        return trace_updates(rendezvous, case, 2)


def traced(layout, model, planted="", *options):
    case = Case(LayoutSpec.parse(layout), model, options=("lora", *options))
    one = case.reference
    if one.key not in references:
        references[one.key] = jobs.add(1, trace_with, one, "")
    return jobs.add(case.layout.world_size, trace_with, case, planted), references[one.key]


LAYOUTS = {
    (layout, model): traced(layout, model)
    for layout, model in some(
        [("tp2", "dense"), ("tp2sp", "dense"), ("pp2vpp2", "tied"), ("cp2", "dense"), ("dp2do", "moe"), ("ep2", "moe"),
         ("tp2sp", "hybrid"), ("ep2tp2sp", "moe-shared")],
        ("tp2", "dense"), ("pp2vpp2", "tied"), ("cp2", "dense"), ("ep2", "moe"), ("tp2sp", "hybrid"),
    )
}  # fmt: skip
LAYOUTS["tp2sp", "recomputed"] = traced("tp2sp", "dense", "", "full")
WRONG = {
    planted: traced(layout, "dense", planted)
    for planted, layout in some(
        [("no sum of A's gradient", "tp2"), ("no sum of A·x", "tp2"), ("no sum over the sequence's parts", "tp2sp")],
        ("no sum of A's gradient", "tp2"),
    )
}  # fmt: skip


@pytest.mark.parametrize(("layout", "model"), LAYOUTS)
def test_layout_gives_the_update_of_one_process(layout, model):
    found = compare(*(job.results()[0] for job in LAYOUTS[layout, model]))
    assert found.ok, found


@pytest.mark.parametrize("planted", WRONG)
def test_a_missing_sum_is_found(planted):
    try:
        found = compare(*(job.results()[0] for job in WRONG[planted]))
    except AssertionError as error:  # replicas with different values are an error of their own
        assert "diverged" in str(error)
    else:
        assert not found.ok


def make_policy(rendezvous, layout, shape, folder, tensors=None, **settings):
    config = selfcheck_config(LayoutSpec.parse(layout), policy={"lora": LORA | settings, "model": folder})
    policy = Policy(config, shape, initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(folder)
    if tensors is not None:
        lora.load_adapters(policy.model, tensors, policy.position)
        policy.optimizer.reload_model_params()
    return policy


def gradients(rendezvous, shape, folder, tensors):
    policy = make_policy(rendezvous, "single", shape, folder, tensors)
    loss = policy.gradients(awkward_batch(shape, 0))["loss"]
    trained = sum(parameter.requires_grad for chunk in policy.model for parameter in chunk.parameters())
    found = gather_full(policy, policy.runtime, gradient=True)
    return loss, found, policy.reference_log_probs(awkward_batch(shape, 0)).tolist(), trained


def base_log_probs(rendezvous, shape, folder):
    return make_policy(rendezvous, "single", shape, folder).log_probs(awkward_batch(shape, 0))[0].tolist()


@pytest.fixture(scope="module", params=["dense", "moe-shared", "hybrid"])
def oracle(request, tmp_path_factory):
    """A HF directory, random adapters as a PEFT directory, and the merged model as transformers loads it."""
    shape = synthetic_shape(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    reference = hf_model(shape)
    base = hf_weights(reference, folder / "base")
    tensors = random_adapters(adapter_mappings(shape, LORA["rank"]))
    write_peft(folder / "adapter", tensors)
    report = merge_adapter(base, folder / "adapter", str(folder / "merged"))
    assert f"{len(tensors) // 2} tensors have their adapter added" in report.notes and not report.not_finite
    return shape, base, tensors, type(reference).from_pretrained(folder / "merged", config=reference.config)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("adapter_config.json", None, "is not a PEFT adapter: it has no adapter_config.json"),
        ("adapter_config.json", b"{", "adapter_config.json cannot be read: JSONDecodeError"),
        ("adapter_config.json", b"[" * 100_000, "adapter_config.json cannot be read: RecursionError"),
        ("adapter_config.json", b'{"r": 4}', "adapter_config.json cannot be read: KeyError: 'lora_alpha'"),
        ("adapter_config.json", b'{"r": 4, "lora_alpha": 8, "target_modules": ".*_proj"}', "target_modules as a list"),
        ("adapter_model.safetensors", b"cut off", "adapter_model.safetensors cannot be read"),
    ],
)
def test_what_is_no_adapter_is_not_merged(name, content, said, tmp_path):
    shape = synthetic_shape("dense")
    base = hf_weights(hf_model(shape), tmp_path / "base")
    write_peft(tmp_path / "adapter", random_adapters(adapter_mappings(shape, LORA["rank"])))
    (tmp_path / "adapter" / name).unlink()
    if content is not None:
        (tmp_path / "adapter" / name).write_bytes(content)
    with pytest.raises(WeightsError, match=said):
        merge_adapter(base, tmp_path / "adapter", str(tmp_path / "merged"))
    assert not (tmp_path / "merged").exists()


def test_a_merged_model_is_replaced_only_when_asked(tmp_path, capsys):
    shape = synthetic_shape("dense")
    base = hf_weights(hf_model(shape), tmp_path / "base")
    write_peft(tmp_path / "adapter", random_adapters(adapter_mappings(shape, LORA["rank"])))
    command = ["convert", "merge-adapter", str(base), str(tmp_path / "adapter"), str(tmp_path / "merged")]
    assert main(command) == 0
    assert main(command) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert main([*command[:-1], str(base), "--overwrite"]) == 2
    assert "must be outside the source" in capsys.readouterr().err


def test_adapters_of_packed_experts_are_merged(tmp_path):
    """As of a model that has a tensor for each expert. Weights in other files would be those before the merge."""
    shape = synthetic_shape("moe")
    tensors = random_adapters(adapter_mappings(shape, LORA["rank"]))
    write_peft(tmp_path / "adapter", tensors)
    single = hf_weights(hf_model(shape), tmp_path / "single")
    weights = load_file(f"{single}/model.safetensors")
    entries = [(name, weights[name].dtype, tuple(weights[name].shape)) for name in sorted(weights, key=packing_order)]
    shutil.copytree(single, tmp_path / "packed")
    content = b"".join(weights[name].view(torch.uint8).numpy().tobytes() for name, *_ in entries)
    (tmp_path / "packed/model.safetensors").write_bytes(safetensors_header(packed(entries)) + content)
    for other in ("consolidated.safetensors", "pytorch_model.bin"):
        (tmp_path / "packed" / other).write_bytes(b"the model before")
    for kind in ("single", "packed"):
        merge_adapter(tmp_path / kind, tmp_path / "adapter", str(tmp_path / f"merged-{kind}"))
    assert verify(tmp_path / "merged-single", tmp_path / "merged-packed").same
    assert not verify(single, tmp_path / "merged-packed").same
    assert load_file(tmp_path / "merged-packed/model.safetensors").keys() == {name for name, *_ in packed(entries)}
    assert {p.name for p in (tmp_path / "merged-packed").iterdir()} == {p.name for p in Path(single).iterdir()}


def test_merging_names_weights_that_are_not_finite(tmp_path, capsys):
    """In the adapter, and in a sum that is too large for its type; the exit code is that of the other conversions."""
    shape = synthetic_shape("dense")
    base = hf_weights(hf_model(shape).half(), tmp_path / "base")
    tensors = random_adapters(adapter_mappings(shape, LORA["rank"]))
    first, *_, last = (name for name in tensors if ".lora_B." in name)
    tensors[first][0, 0] = torch.nan
    tensors[last] += 1e6
    write_peft(tmp_path / "adapter", tensors)
    command = ["convert", "merge-adapter", str(base), str(tmp_path / "adapter"), str(tmp_path / "merged")]
    assert main(command) == 3
    warnings = [line for line in capsys.readouterr().err.splitlines() if "NaN or infinite" in line]
    changed = [name.removeprefix("base_model.model.").replace(".lora_B", "") for name in (first, last)]
    expected = [f"{tmp_path}/adapter: tensor {first}"]
    expected += [f"merged/model.safetensors: tensor {name}" for name in changed]
    assert len(warnings) == 3 and all(any(part in line for line in warnings) for part in expected)


def test_an_adapter_is_not_added_to_fp8_values(tmp_path):
    """They are not the weights: their scales are tensors of their own."""
    shape = synthetic_shape("dense")
    hf_to_fp8(hf_weights(hf_model(shape), tmp_path / "base"), tmp_path / "fp8")
    write_peft(tmp_path / "adapter", random_adapters(adapter_mappings(shape, LORA["rank"])))
    with pytest.raises(WeightsError, match="is in fp8; merge into the bf16 checkpoint"):
        merge_adapter(tmp_path / "fp8", tmp_path / "adapter", str(tmp_path / "merged"))


def as_served(tensors, wrong):
    """As a server of SGLang has them: q, k and v are one, gate and up are one, the vocabulary is padded."""
    served = {}
    for name, tensor in tensors.items():
        for fused, parts in (("qkv_proj", ("q", "k", "v")), ("gate_up_proj", ("gate", "up"))):
            if f".{parts[0]}_proj." in name:
                pieces = [tensors[name.replace(f".{parts[0]}_", f".{part}_")] for part in parts]
                served[name.replace(f"{parts[0]}_proj", fused)] = torch.cat(pieces)
        served[name] = torch.cat([tensor, tensor[:3]]) if "embed_tokens" in name else tensor
    name, change = WRONG_SERVERS.get(wrong, ("model.norm.weight", lambda tensor: tensor))
    served[name] = change(served[name])
    return served


WRONG_SERVERS = {
    "model.layers.1.mlp.down_proj.weight in the server is not": ("model.layers.1.mlp.down_proj.weight", torch.neg),
    "rows, but has one of shape": ("model.layers.0.mlp.gate_up_proj.weight", lambda tensor: tensor[1:]),
    "is torch.bfloat16 on cpu in the server": ("model.norm.weight", torch.Tensor.bfloat16),
    "but has none": ("model.layers.0.self_attn.qkv_proj.weight", lambda tensor: None),
}


def use_servers(rendezvous, shape, folder):
    own, files = make_policy(rendezvous, "single", shape, folder), load_file(f"{folder}/model.safetensors")
    servers = own.config.rollout.servers.model_copy(update={"share_base": True})
    rollout = own.config.rollout.model_copy(update={"engine": "sglang", "servers": servers})
    config = own.config.model_copy(update={"rollout": rollout})
    policy, served, batch = Policy(config, shape, own.runtime), as_served(files, ""), awkward_batch(shape, 0)
    refusals = []
    for wrong in WRONG_SERVERS:
        with pytest.raises(WeightsError) as refused:
            use_server_weights(policy.model, shape, as_served(files, wrong), files)
        refusals.append(str(refused.value))
    use_server_weights(policy.model, shape, served, files)
    pointers = {tensor.data_ptr() for tensor in served.values()}
    base = {name: p for name, p in policy.model[0].named_parameters() if not name.startswith("adapters")}
    copied = {name.split(".", 3)[-1] for name, weight in base.items() if weight.data_ptr() not in pointers}
    return refusals, copied, [p.log_probs(batch)[0].tolist() for p in (own, policy)]


def test_the_base_can_be_in_a_servers_memory(tmp_path):
    """The same model, bit for bit. Only q, k and v have memory of their own: Megatron orders their rows differently."""
    shape = synthetic_shape("dense")
    refusals, copied, (own, shared) = jobs.add(1, use_servers, shape, hf_weights(hf_model(shape), tmp_path)).results()[
        0
    ]
    assert own == shared and {name.rsplit(".", 1)[0] for name in copied} == {"self_attention.linear_qkv"}
    assert all(wrong in refusal for wrong, refusal in zip(WRONG_SERVERS, refusals, strict=True)), refusals


def write_peft(folder, tensors, **changes):
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_FILE)
    targets = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors})
    config = {"r": LORA["rank"], "lora_alpha": LORA["alpha"], "target_modules": targets, "peft_type": "LORA"}
    (folder / CONFIG_FILE).write_text(json.dumps(config | changes))


def test_gradients_are_those_of_the_merged_model(oracle):
    """dA = scale·Bᵀ·dW and dB = scale·dW·Aᵀ with the gradient dW of transformers' model in fp64."""
    shape, base, tensors, merged = oracle
    config = selfcheck_config(LayoutSpec.parse("single"))
    with fp64():
        loss, weights = naive_gradients(in_fp64(merged, shape), awkward_batch(shape, 0), config)
    ours, found, without, trained = jobs.add(1, gradients, shape, base, tensors).results()[0]
    assert ours == pytest.approx(loss, rel=1e-5)
    scale, checked = LORA["alpha"] / LORA["rank"], 0
    for name, change in weights.items():
        if adapter_name(name, "A") not in tensors:
            continue
        a, b = (tensors[adapter_name(name, half)].double() for half in "AB")
        for half, expected in (("A", scale * b.T @ change), ("B", scale * change @ a.T)):
            error = (found[adapter_name(name, half)].double() - expected).norm() / expected.norm().clamp_min(1e-12)
            assert error < 1e-5, (name, half)
            checked += 1
    assert checked == len(tensors) == len(found) == trained, "the base is not trained"
    # The reference policy is the base without adapters.
    assert without == pytest.approx(jobs.add(1, base_log_probs, shape, base).results()[0][:], abs=1e-6)


def saved(rendezvous, layout, shape, folder, tensors, directory):
    policy = make_policy(rendezvous, layout, shape, folder, tensors)
    policy.update(awkward_batch(shape, 0))
    save_policy(policy, directory)
    policy.update(awkward_batch(shape, 1))
    return gather_full(policy, policy.runtime, gradient=False)


def resumed(rendezvous, layout, shape, folder, directory):
    policy = make_policy(rendezvous, layout, shape, folder)
    load_policy(policy, directory)
    policy.update(awkward_batch(shape, 1))
    return gather_full(policy, policy.runtime, gradient=False)


def started(rendezvous, layout, shape, folder, directory):
    policy = make_policy(rendezvous, layout, shape, folder, start=directory)
    merged = {name: t.clone() for bucket in policy.weight_buckets().buckets() for name, t in bucket}
    return gather_full(policy, policy.runtime, gradient=False), merged


def test_a_checkpoint_holds_adapters_only_and_resumes_in_another_layout(tmp_path):
    shape = synthetic_shape("dense")
    base = hf_weights(hf_model(shape), tmp_path / "base")
    tensors = random_adapters(adapter_mappings(shape, LORA["rank"]))
    directory = str(tmp_path / "checkpoint")
    expected = jobs.add(2, saved, "tp2spdo", shape, base, tensors, directory).results()[0]
    found = jobs.add(2, resumed, "dp2do", shape, base, directory).results()[0]
    assert expected.keys() == found.keys() == tensors.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-6) for name in expected)
    other = hf_weights(hf_model(shape, seed=1), tmp_path / "other")
    with pytest.raises(AssertionError, match="another base model"):
        jobs.add(2, resumed, "dp2do", shape, other, directory).results()
    # The adapter beside it is PEFT's: it is read back bit for bit, trained from, and merged as SGLang would need it.
    exported = load_file(f"{directory}/adapter/{WEIGHTS_FILE}")
    again, sent = jobs.add(2, started, "tp2sp", shape, base, f"{directory}/adapter").results()[0]
    assert exported.keys() == again.keys()
    assert all(torch.equal(exported[name], again[name]) for name in exported)
    merge_adapter(base, f"{directory}/adapter", str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() <= sent.keys()
    assert all(torch.allclose(merged[name], sent[name], rtol=0, atol=1e-6) for name in merged)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, "rank 8"), ({"lora_alpha": 4}, "alpha 4"), ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"base_fingerprint": "0"}, "another base"), ({"missing": True}, "missing tensor"),
        ({"extra": True}, "unexpected"), ({"type": torch.int32}, "in int32, expected"),
        ({"type": torch.float8_e4m3fn}, "in float8_e4m3fn, expected"),
    ],
)  # fmt: skip
def test_an_adapter_of_something_else_is_refused(tmp_path, changes, message):
    shape = synthetic_shape("dense")
    tensors = random_adapters(adapter_mappings(shape, LORA["rank"]))
    if changes.pop("missing", False):
        tensors.popitem()
    if changes.pop("extra", False):
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 8)
    first = next(iter(tensors))
    tensors[first] = tensors[first].to(changes.pop("type", torch.float32))
    write_peft(tmp_path / "adapter", tensors, **changes)
    with pytest.raises(WeightsError, match=message):
        read_adapter(tmp_path / "adapter", shape, LoraConfig(**LORA), base="1")


def test_a_new_adapter_changes_nothing_and_is_pefts():
    """B is 0, A uniform within 1/√inputs; each layer has its own."""
    tensors = {
        name: initial_adapter(mapping, seed=3)
        for name, mapping in adapter_mappings(synthetic_shape("dense"), 64, ("q_proj", "down_proj")).items()
    }
    for name, tensor in tensors.items():
        bound = tensor.shape[1] ** -0.5 if ".lora_A." in name else 0.0
        assert 0.95 * bound <= tensor.abs().max() <= bound and abs(tensor.mean()) <= 0.1 * bound
    found = [tensor for name, tensor in tensors.items() if "q_proj.lora_A" in name]
    assert len(found) > 1 and not torch.equal(*found[:2])


def test_targets_choose_layers():
    shape = synthetic_shape("dense")
    names = adapter_mappings(shape, 2, ("q_proj", "down_proj"))
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in names} == {"q_proj", "down_proj"}
    with pytest.raises(WeightsError, match="no linear layer gate"):
        adapter_mappings(shape, 2, ("gate",))


def test_rows_that_ranks_do_not_share_equally_are_refused():
    mapping = parameter_mappings(synthetic_shape("dense"))["decoder.layers.0.self_attention.linear_qkv.weight"]
    with pytest.raises(ConfigError, match="does not split"):
        lora.rows_in_shard_order(mapping, 0, 4, torch.empty(mapping.shape[0] // 4, mapping.shape[1]))
