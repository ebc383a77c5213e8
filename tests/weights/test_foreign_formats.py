"""Checkpoints that others write: paths, legacy Megatron files, pytorch_model.bin, formats that are refused by name."""

import json
import mmap
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model_weights import build_policy
from test_safe_pickle import Evil

from megatron_dapo.cli import main
from megatron_dapo.engines.sglang.transports import WeightManifest
from megatron_dapo.errors import UserError
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.weights.convert import hf_to_megatron, megatron_to_hf
from megatron_dapo.weights.formats.readers import HFReader, map_file
from megatron_dapo.weights.locate import check_model_directory, locate
from megatron_dapo.weights.mapping import WeightsError
from megatron_dapo.weights.verify import verify


@pytest.fixture(scope="module")
def converted(models, tmp_path_factory):
    """A torch_dist checkpoint, flat. Read only."""
    hf_to_megatron(models["qwen2"], tmp_path_factory.mktemp("converted") / "root")
    return next(tmp_path_factory.getbasetemp().glob("converted*/root/release"))


# ---- paths ----


def make_run(folder, converted, steps):
    for name in steps:
        shutil.copytree(converted, folder / "checkpoints" / name / "policy")
        (folder / "checkpoints" / name / "trainer.json").write_text("{}")


def test_a_path_may_be_a_run_or_megatrons_save_directory(converted, models, tmp_path):
    make_run(tmp_path / "run", converted, ["step_9", "step_10", "step_10+3", "step_2"])
    shutil.copytree(converted, tmp_path / "run/checkpoints/step_11/policy")  # without manifest: incomplete
    checkpoints = tmp_path / "run/checkpoints"
    assert locate(tmp_path / "run") == checkpoints / "step_10+3/policy"
    assert locate(tmp_path / "run", 10) == locate(checkpoints, 10) == checkpoints / "step_10/policy"
    assert locate(checkpoints / "step_2") == checkpoints / "step_2/policy"
    with pytest.raises(WeightsError, match=r"no checkpoint of step 5; it has steps 2, 9, 10"):
        locate(tmp_path / "run", 5)
    root = tmp_path / "megatron"
    for name in ("iter_0000007", "iter_0012345", "release"):
        shutil.copytree(converted, root / name)
    with pytest.raises(WeightsError, match=r"no latest_checkpointed_iteration.txt; .*--step \(there are: 7, 12345\)"):
        locate(root)
    for said, found in (("7", "iter_0000007"), ("12345\n", "iter_0012345"), ("release", "release")):
        (root / "latest_checkpointed_iteration.txt").write_text(said)
        assert locate(root) == root / found
        assert locate(root, 7) == root / "iter_0000007"
    (root / "latest_checkpointed_iteration.txt").write_text("99")
    with pytest.raises(WeightsError, match=r"says '99', but .*iter_0000099 does not exist"):
        locate(root)
    with pytest.raises(WeightsError, match="is one checkpoint; --step chooses"):
        locate(root / "release", 3)
    assert locate(models["qwen2"]) == models["qwen2"]
    with pytest.raises(WeightsError, match="has no iteration 3; it has only 'release': leave out --step"):
        locate(converted.parent, 3)


def test_a_run_exports_without_a_reference(converted, models, tmp_path):
    make_run(tmp_path / "run", converted, ["step_1", "step_2"])
    assert main(["convert", "megatron-to-hf", str(tmp_path / "run"), str(tmp_path / "hf"), "--step", "1"]) == 0
    assert verify(tmp_path / "hf", models["qwen2"]).same
    assert (tmp_path / "hf/tokenizer.json").exists() and (tmp_path / "hf/config.json").exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({".metadata": ""}, "torch_dcp or fsdp_dtensor"),
        ({"metadata.json": '{"sharded_backend": "zarr"}', ".zgroup": ""}, "backend 'zarr'"),
        ({"__0_0.distcp": ""}, "an incomplete torch_dist checkpoint"),
        ({"context/io.json": "", "weights/x": ""}, "a NeMo checkpoint"),
        ({"bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": ""}, "a DeepSpeed checkpoint"),
        ({"consolidated.00.pth": ""}, "consolidated.pth"),
        ({"qwen.gguf": ""}, "a GGUF model"),
        ({"notes.txt": ""}, "no checkpoint found; expected a HF model"),
        ({"latest_checkpointed_iteration.txt": "²"}, "says '²'; expected an iteration or 'release'"),
        ({"latest_checkpointed_iteration.txt": "9" * 5000}, "expected an iteration or 'release'"),
        ({"latest_checkpointed_iteration.txt": b"\xff"}, "expected an iteration or 'release'"),
        ({".metadata": "", "metadata.json": "[" * 100_000}, "torch_dcp or fsdp_dtensor"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_format(files, said, tmp_path, capsys):
    for name, content in files.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["convert", "megatron-to-hf", str(tmp_path / "source"), str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert said in line and str(tmp_path / "source") in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize("record", ["[]", "5", "{}", "[" * 100_000])
def test_a_damaged_record_of_a_conversion_is_no_record(converted, models, tmp_path, record):
    folder = shutil.copytree(converted, tmp_path / "megatron")
    (folder / "conversion.json").write_text(record)
    megatron_to_hf(folder, tmp_path / "hf")
    assert verify(models["qwen2"], tmp_path / "hf").same


# ---- legacy Megatron ----


def save_legacy(rendezvous, folder, root, options):
    """Files as Megatron-LM's legacy save writes them, from live models."""
    import argparse

    import numpy as np

    policy = build_policy(rendezvous, folder, options)
    policy.load_hf(folder)
    groups, layout = policy.runtime.groups, policy.config.policy
    name = f"mp_rank_{groups.tp.rank():02d}"
    name += f"_{groups.pp.rank():03d}" if groups.pp.size() > 1 else ""
    name += f"_{groups.ep.rank():03d}" if groups.ep.size() > 1 else ""
    args = argparse.Namespace(pipeline_model_parallel_size=layout.pipeline_parallel, params_dtype=torch.float32)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 5, "rng_state": [{"np": np.arange(3)}]}
    for i, chunk in enumerate(policy.model):
        state["model" if len(policy.model) == 1 else f"model{i}"] = chunk.state_dict_for_save_checkpoint()
    (root / name).mkdir(parents=True)
    torch.save(state, root / name / "model_optim_rng.pt")
    (root / name / "distrib_optim.pt").write_bytes(b"must not be opened")


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [
        ("qwen2", 4, {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2}),
        ("qwen2-tied", 2, {"tensor_parallel": 2}),
        ("qwen3-moe", 2, {"tensor_parallel": 2, "expert_parallel": 2}),
    ],
    ids=["tp2pp2vpp2", "tied-tp2", "moe-tp2ep2"],
)
def test_legacy_checkpoints_export(models, tmp_path, kind, world, options):
    root = tmp_path / "run"
    run_ranks(world, save_legacy, models[kind], root / "iter_0000005", options, timeout=120)
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    megatron_to_hf(root, tmp_path / "hf", reference=models[kind])
    assert verify(tmp_path / "hf", models[kind]).same
    for folder in list((root / "iter_0000005").iterdir())[1:]:
        shutil.rmtree(folder)
    with pytest.raises(WeightsError, match=r"missing|hold 2 layers|do not make"):
        megatron_to_hf(root, tmp_path / "no", reference=models[kind])


def test_legacy_checkpoints_run_no_code(models, tmp_path):
    folder = tmp_path / "run" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save(
        {"checkpoint_version": 3.0, "model": {}, "x": Evil(os.system, f"touch {tmp_path / 'proof'}")},
        folder / "model_optim_rng.pt",
    )
    with pytest.raises(UserError, match=r"model_optim_rng\.pt: refused or damaged: it asks for posix.system"):
        megatron_to_hf(tmp_path / "run", tmp_path / "out", reference=models["qwen2"])
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"checkpoint_version": 1.0, "model": {}}, "checkpoint version 1.0, whose QKV rows have another order"),
        ({"checkpoint_version": 3.0, "model": {"language_model": {}}}, "--use-legacy-models"),
        ({"checkpoint_version": 3.0, "iteration": 1}, "no model in it; found checkpoint_version, iteration"),
    ],
)
def test_legacy_files_that_cannot_be_read_say_why(models, tmp_path, state, said):
    (tmp_path / "run" / "mp_rank_00").mkdir(parents=True)
    torch.save(state, tmp_path / "run" / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(WeightsError, match=said):
        megatron_to_hf(tmp_path / "run", tmp_path / "out", reference=models["qwen2"])


# ---- HF directories ----


def as_bin(source, folder, parts, change=lambda tensor: tensor):
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    found = list(load_file(source / "model.safetensors").items())
    for number in range(parts):
        name = "pytorch_model.bin" if parts == 1 else f"pytorch_model-{number + 1:05d}-of-{parts:05d}.bin"
        torch.save({key: change(tensor) for key, tensor in found[number::parts]}, folder / name)
    return folder


def transposed(tensor):
    """As others save `weight.t()`: the file holds its columns. Vectors are every second element."""
    return tensor.t().contiguous().t() if tensor.ndim > 1 else tensor.repeat_interleave(2)[::2]


@pytest.mark.parametrize(("parts", "change"), [(1, torch.clone), (3, torch.clone), (1, transposed)])
def test_pytorch_bin_files_are_read(models, tmp_path, parts, change):
    folder = as_bin(models["qwen3"], tmp_path / "bin", parts, change)
    check_model_directory(folder)
    hf_to_megatron(folder, tmp_path / "megatron")
    assert verify(models["qwen3"], tmp_path / "megatron").same and verify(models["qwen3"], folder).same
    assert not any((tmp_path / "megatron").rglob("*.bin"))


def test_pytorch_bin_files_run_no_code_and_damage_is_named(models, tmp_path):
    folder = as_bin(models["qwen3"], tmp_path / "bin", 2)
    file = folder / "pytorch_model-00001-of-00002.bin"
    whole = file.read_bytes()
    torch.save({"x": Evil(os.system, f"touch {tmp_path / 'proof'}")}, file)
    for content, said in (
        (file.read_bytes(), "it asks for posix.system"), (whole[:-500], "truncated"), (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
    ):  # fmt: skip
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"{file.name}.*{said}"):
            hf_to_megatron(folder, tmp_path / "out")
    file.unlink()
    with pytest.raises(UserError, match=f"{file.name} is missing"):
        hf_to_megatron(folder, tmp_path / "out")
    assert not (tmp_path / "proof").exists()


def test_shards_without_an_index_are_read(models, tmp_path):
    shutil.copytree(models["qwen2"], tmp_path / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    found = list(load_file(models["qwen2"] / "model.safetensors").items())
    for number in range(3):
        save_file(dict(found[number::3]), tmp_path / f"hf/model-{number + 1:05d}-of-00003.safetensors")
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    assert verify(models["qwen2"], tmp_path / "megatron").same
    (tmp_path / "hf/model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00003.safetensors is missing \(1 of 3 files\)"):
        hf_to_megatron(tmp_path / "hf", tmp_path / "out")


def with_tensors(source, folder, **more):
    shutil.copytree(source, folder)
    found = load_file(source / "model.safetensors") | {name.replace("__", "."): value for name, value in more.items()}
    save_file(found, folder / "model.safetensors")
    return folder


def test_computed_buffers_are_ignored_and_a_bias_of_the_output_is_explained(models, tmp_path):
    names = {f"model__layers__{i}__self_attn__rotary_emb__inv_freq": torch.ones(8) for i in range(4)}
    folder = with_tensors(models["qwen2"], tmp_path / "old", **names)
    hf_to_megatron(folder, tmp_path / "megatron")
    assert verify(models["qwen2"], tmp_path / "megatron").same and verify(folder, tmp_path / "megatron").same
    assert check_model_directory(folder) and not any("inv_freq" in name for name in HFReader(folder))
    manifest = WeightManifest(folder)
    assert not manifest.check(list(HFReader(models["qwen2"]).items())) and not manifest.missing()
    bias = {"model__layers__0__self_attn__o_proj__bias": torch.ones(64)}
    with pytest.raises(WeightsError, match=r"o_proj\.bias; a bias in the attention output .* is not supported"):
        hf_to_megatron(with_tensors(models["qwen2"], tmp_path / "llama", **bias), tmp_path / "out")


def test_a_stored_copy_of_a_tied_head_is_restored_if_it_is_one(models, tmp_path):
    head = load_file(models["qwen2-tied"] / "model.safetensors")["model.embed_tokens.weight"].clone()
    folder = with_tensors(models["qwen2-tied"], tmp_path / "hf", lm_head__weight=head)
    hf_to_megatron(folder, tmp_path / "megatron")
    assert verify(models["qwen2-tied"], tmp_path / "megatron").same
    megatron_to_hf(tmp_path / "megatron", tmp_path / "again")
    assert torch.equal(HFReader(tmp_path / "again")["lm_head.weight"], head)
    assert set(HFReader(tmp_path / "again")) == set(HFReader(folder))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "plain", reference=models["qwen2-tied"])
    assert "lm_head.weight" not in HFReader(tmp_path / "plain")
    other = with_tensors(models["qwen2-tied"], tmp_path / "other", lm_head__weight=head + 1)
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from the embedding"):
        hf_to_megatron(other, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_side_files_travel_and_others_are_named(models, tmp_path, capsys):
    folder = shutil.copytree(models["qwen2"], tmp_path / "hf")
    for name in ("modeling_qwen.py", "qwen.tiktoken", "preprocessor_config.json", "README.md", "chat_template.jinja"):
        (folder / name).write_text(name)
    (folder / "figures").mkdir()
    (folder / ".gitattributes").write_text("")
    (folder / "model.onnx").write_text("weights")
    assert main(["convert", "hf-to-megatron", str(folder), str(tmp_path / "megatron")]) == 0
    assert "figures/" in capsys.readouterr().err
    assert main(["convert", "megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "again")]) == 0
    expected = {p.name for p in folder.iterdir()} - {"figures", ".gitattributes", "model.onnx"}
    assert {p.name for p in (tmp_path / "again").iterdir()} == expected
    assert (tmp_path / "again/qwen.tiktoken").read_text() == "qwen.tiktoken"


def test_long_context_attention_converts_and_is_named(models, tmp_path):
    """YaRN, sliding windows and dual-chunk attention do not change the weights; training refuses sliding windows. They
    and keys that the converter does not know stay in config.json."""
    folder = shutil.copytree(models["qwen2"], tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text()) | {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}, "use_sliding_window": True,
        "dual_chunk_attention_config": {"chunk_size": 262144}, "something_new": [1, 2],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    report = hf_to_megatron(folder, tmp_path / "megatron")
    for said in ("rope type 'yarn'", "use_sliding_window", "dual_chunk_attention_config"):
        assert any(said in note for note in report.notes)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "again")
    assert (
        json.loads((tmp_path / "again/config.json").read_text()) == config and verify(folder, tmp_path / "again").same
    )
    with pytest.raises(UserError, match="sliding-window attention is not supported in training"):
        check_model_directory(folder)
    config |= {"use_sliding_window": False, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"rope type 'longrope' is not supported in training; .* The model can be converted"
    ):
        check_model_directory(folder)


def test_a_file_larger_than_the_memory_is_mapped(tmp_path):
    """A writable mapping of this size is refused by the kernel's default limits."""
    size = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(size)
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "0":
        with pytest.raises(OSError, match="memory"), (tmp_path / "sparse").open("rb") as file:
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    assert map_file(tmp_path / "sparse")[size - 1] == 0
