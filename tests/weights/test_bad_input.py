"""Every kind of bad input through the command line: one message that names file and tensor, a non-zero exit code, and
nothing left at the destination or beside it."""

import contextlib
import dataclasses
import json
import math
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_dapo as md
from megatron_dapo.cli import main
from megatron_dapo.errors import UserError
from megatron_dapo.weights import destination as destination_module
from megatron_dapo.weights.convert import hf_to_megatron
from megatron_dapo.weights.verify import verify


def refused(capsys, *argv):
    """Runs the command, which must fail with exit code 2 and one line; returns that line."""
    capsys.readouterr()
    assert main(["convert", *map(str, argv)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("megatron-dapo: ")
    return lines[0]


def nothing_at(path):
    """Neither the directory nor a temporary one or a lock beside it."""
    return [p.name for p in path.parent.iterdir() if path.name in p.name] == []


def edit(folder, change):
    """Rewrite the single weights file with changed tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def truncate(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(os.path.getsize(file.name) - 100)


def cut_header(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:50])


def shift_offsets(folder, by=4):
    """A header whose tensors overlap."""
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    first = min((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"][0])
    header[first]["data_offsets"] = [x + by for x in header[first]["data_offsets"]]
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


UP = "model.layers.2.mlp.up_proj.weight"

CASES = {
    "truncated file": (truncate, ["model.safetensors", "truncated inside tensor", "download"]),
    "truncated header": (cut_header, ["model.safetensors", "truncated"]),
    "overlapping tensors": (shift_offsets, ["model.safetensors", "tensor", "starts at byte"]),
    "endless tensor": (lambda f: shift_offsets(f, math.inf), ["model.safetensors", "tensor", "damaged header entry"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["model.safetensors.index.json", "found"]),
    "missing tensor": (lambda f: edit(f, lambda t: t.pop(UP)), [UP, "missing"]),
    "extra tensor": (
        lambda f: edit(f, lambda t: t.update(extra=torch.ones(2))),
        ["extra", "unexpected", "config.json"],
    ),
    "wrong shape": (
        lambda f: edit(f, lambda t: t.update({UP: torch.ones(95, 64)})),
        ["model.safetensors", UP, "(95, 64)", "(96, 64)", "config.json"],
    ),
    "config disagrees": (
        lambda f: edit_config(f, num_attention_heads=8),
        ["model.safetensors", "k_proj.weight", "(32, 64)", "(16, 64)", "config.json"],
    ),
    "config has more layers": (
        lambda f: edit_config(f, num_hidden_layers=5, layer_types=None),
        ["missing", "model.layers.4."],
    ),
    "unknown architecture": (
        lambda f: edit_config(f, architectures=["LlamaForCausalLM"]),
        ["config.json", "LlamaForCausalLM", "Qwen3ForCausalLM"],
    ),
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json", "not found"]),
    "damaged config": (lambda f: (f / "config.json").write_text("{"), ["config.json", "JSON"]),
    "mixed dtypes": (lambda f: edit(f, lambda t: t.update({UP: t[UP].bfloat16()})), [UP, "bfloat16", "--dtype"]),
    "one layer of another dtype": (
        lambda f: edit(f, lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64).half()})),
        ["model.layers.2.input_layernorm.weight", "float16", "--dtype"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_hf_model_is_refused_in_one_line(copy_of, tmp_path, capsys, case):
    damage, words = CASES[case]
    folder, out = copy_of("qwen2"), tmp_path / "out"
    damage(folder)
    line = refused(capsys, "hf-to-megatron", folder, out)
    assert all(word in line for word in words), line
    assert nothing_at(out)


def sharded(folder):
    """Two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{1 + (i % 2)}-of-2.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def test_a_missing_shard_is_named(copy_of, tmp_path, capsys):
    folder, out = copy_of("qwen2"), tmp_path / "out"
    sharded(folder)
    (folder / "model-2-of-2.safetensors").unlink()
    line = refused(capsys, "hf-to-megatron", folder, out)
    assert "model-2-of-2.safetensors is missing" in line and nothing_at(out)


@pytest.mark.parametrize("change", ["moved", "unlisted", "absent", "outside"])
def test_an_index_that_does_not_match_its_files_is_refused(copy_of, tmp_path, capsys, change):
    folder, out = copy_of("qwen2"), tmp_path / "out"
    where = sharded(folder)
    if change == "moved":
        where[UP] = next(file for file in where.values() if file != where[UP])
    elif change == "unlisted":
        del where[UP]
    elif change == "absent":
        where["model.layers.0.ghost"] = "model-1-of-2.safetensors"
    else:
        where[UP] = "../model-1-of-2.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    line = refused(capsys, "hf-to-megatron", folder, out)
    assert "safetensors" in line and ("ghost" if change == "absent" else UP) in line and nothing_at(out)


def test_nan_weights_are_warned_about_and_kept(copy_of, tmp_path, capsys):
    folder = copy_of("qwen2")

    def poison(tensors):
        tensors[UP][-1, -1] = torch.nan
        tensors["model.norm.weight"][0] = torch.inf

    edit(folder, poison)
    assert main(["convert", "hf-to-megatron", str(folder), str(tmp_path / "m")]) == 3
    err = capsys.readouterr().err
    assert f"model.safetensors: tensor {UP} has values that are NaN or infinite" in err and "model.norm.weight" in err
    assert main(["convert", "megatron-to-hf", str(tmp_path / "m"), str(tmp_path / "hf")]) == 3
    assert "distcp: tensor decoder.layers.mlp.linear_fc1.weight has values" in capsys.readouterr().err
    assert main(["convert", "verify", str(folder), str(tmp_path / "hf")]) == 0
    assert main(["convert", "hf-to-megatron", str(folder), str(tmp_path / "n"), "--allow-nan"]) == 0
    for source, options in ((folder, {}), (tmp_path / "m", {"shard_size": 1})):
        with pytest.raises(UserError, match="NaN or infinite values; allow_nan=True"):
            md.convert(source, tmp_path / "python", overwrite=True, **options)
        out = md.convert(source, tmp_path / "python", overwrite=True, allow_nan=True, **options)
        assert out == tmp_path / "python" and verify(folder, out).same


def test_overflow_in_a_dtype_change_is_warned_about(copy_of, tmp_path, capsys):
    folder = copy_of("qwen2")
    edit(folder, lambda t: t[UP].fill_(1e30))
    assert main(["convert", "hf-to-megatron", str(folder), str(tmp_path / "m"), "--dtype", "float16"]) == 3
    assert UP in capsys.readouterr().err


def test_a_destination_without_space_is_refused(models, tmp_path, capsys, monkeypatch):
    usage = destination_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(destination_module.shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    line = refused(capsys, "hf-to-megatron", models["qwen2"], tmp_path / "out")
    assert "no space" in line and "GB are needed" in line and nothing_at(tmp_path / "out")


def test_a_disk_that_fills_up_while_writing_leaves_nothing(models, tmp_path, capsys):
    """A limit on the size of files stands in for a full disk: the system refuses the blocks."""
    import resource
    import signal

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, old[1]))
        line = refused(capsys, "hf-to-megatron", models["qwen2"], tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert "cannot write" in line and "File too large" in line and nothing_at(tmp_path / "out")


@contextlib.contextmanager
def as_somebody_else(*readable):
    """Root may read and write anywhere, so root becomes nobody for the attempt; `readable` are opened for nobody."""
    before = os.geteuid()
    folders = {parent for path in readable for parent in path.parents if parent.stat().st_mode & 0o005 != 0o005}
    files = {path for folder in readable for path in (folder, *folder.iterdir()) if path.is_file()}
    modes = {path: path.stat().st_mode for path in folders | files | set(readable)}
    for path in modes:
        path.chmod(0o644 if path.is_file() else path.stat().st_mode | 0o055)
    try:
        if before == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(before)
        for path, mode in modes.items():
            path.chmod(mode)


def test_a_read_only_destination_is_one_line(models, tmp_path, capsys):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    with as_somebody_else(models["qwen2"], locked):
        line = refused(capsys, "hf-to-megatron", models["qwen2"], locked / "out")
    assert str(locked / "out") in line and "Permission denied" in line and list(locked.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_an_unreadable_source_is_one_line(copy_of, tmp_path, capsys, name):
    folder = copy_of("qwen2")
    with as_somebody_else(folder):
        os.seteuid(0) if os.getuid() == 0 else None
        (folder / name).chmod(0o000)
        os.seteuid(65534) if os.getuid() == 0 else None
        line = refused(capsys, "hf-to-megatron", folder, tmp_path / "out")
    assert name in line and "Permission denied" in line and nothing_at(tmp_path / "out")


def test_destinations_that_are_refused(models, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    assert "exists" in refused(capsys, "hf-to-megatron", models["qwen2"], other)
    assert "not look like a checkpoint" in refused(capsys, "hf-to-megatron", models["qwen2"], other, "--overwrite")
    assert [p.name for p in other.iterdir()] == ["thesis.tex"]
    assert "outside the source" in refused(capsys, "hf-to-megatron", models["qwen2"], models["qwen2"] / "sub")
    assert "outside the source" in refused(capsys, "hf-to-megatron", models["qwen2"], models["qwen2"], "--overwrite")


@pytest.fixture
def checkpoint(models, tmp_path):
    hf_to_megatron(models["qwen2"], tmp_path / "megatron", workers=2)
    return tmp_path / "megatron" / "release"


def test_a_checkpoint_that_does_not_say_its_model_needs_a_reference(checkpoint, tmp_path, capsys):
    (checkpoint / "hf/config.json").unlink()
    assert "--reference" in refused(capsys, "megatron-to-hf", checkpoint, tmp_path / "out")


def test_a_reference_of_another_model_is_refused(models, checkpoint, tmp_path, capsys):
    line = refused(capsys, "megatron-to-hf", checkpoint, tmp_path / "out", "--reference", models["qwen3"])
    assert str(checkpoint) in line and "tensor" in line and nothing_at(tmp_path / "out")
    line = refused(capsys, "megatron-to-hf", checkpoint, tmp_path / "out", "--reference", models["qwen2-tied"])
    assert "unexpected tensor output_layer.weight" in line
    line = refused(capsys, "megatron-to-hf", models["qwen2"], tmp_path / "out", "--reference", models["qwen2"])
    assert "is a HF model; expected a Megatron checkpoint" in line


def test_a_checkpoint_of_adapters_names_the_command_for_them(models, tmp_path, capsys):
    hf_to_megatron(models["qwen2-tied"], tmp_path / "megatron", workers=2)
    command = ("megatron-to-hf", tmp_path / "megatron", tmp_path / "out", "--reference", models["qwen2"])
    assert "is missing; it lacks part of this model" in refused(capsys, *command)
    (tmp_path / "megatron" / "release" / "adapter").mkdir()
    assert "is missing; it has only adapters, for `convert merge-adapter`" in refused(capsys, *command)


@pytest.mark.parametrize("damage", ["truncated", "missing", "overwritten"])
def test_damaged_torch_dist_files_are_named(checkpoint, tmp_path, capsys, damage):
    file = checkpoint / "__0_1.distcp"
    if damage == "truncated":
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 10_000)
    elif damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"\0" * file.stat().st_size)
    line = refused(capsys, "megatron-to-hf", checkpoint, tmp_path / "out")
    assert "__0_1.distcp" in line and "tensor" in line and nothing_at(tmp_path / "out")


@pytest.mark.parametrize("damage", ["gap", "twice", "flat"])
def test_chunks_that_do_not_cover_their_tensor_are_refused(checkpoint, tmp_path, capsys, damage):
    key = "decoder.layers.mlp.linear_fc1.weight"
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    chunks = metadata.state_dict_metadata[key].chunks
    if damage == "gap":
        chunks.pop(3)
    elif damage == "flat":
        chunks[3] = dataclasses.replace(chunks[3], sizes=torch.Size([]))
    else:
        chunks[3] = chunks[2]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    line = refused(capsys, "megatron-to-hf", checkpoint, tmp_path / "out")
    said = "another number of axes" if damage == "flat" else "do not cover it exactly once"
    assert key in line and said in line and nothing_at(tmp_path / "out")
