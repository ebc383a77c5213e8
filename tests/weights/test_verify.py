"""`convert verify` says same only for the same, and names what differs."""

import json
import mmap
import os
import random
import shutil
import sys

import pytest
import tiny_qwen
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.cli import main
from megatron_dapo.files import DamagedFile, StoredTensor
from megatron_dapo.weights.convert import hf_to_megatron
from megatron_dapo.weights.formats.readers import ALIGN, CheckpointReader, HFReader
from megatron_dapo.weights.verify import verify

NAME = "model.layers.3.self_attn.v_proj.weight"


def changed(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def flip_last_bit(tensors):
    tensors[NAME].view(torch.int32)[-1, -1] ^= 1


@pytest.mark.parametrize(("kind", "size"), [("qwen2", 2**20), ("qwen2", 600), ("qwen3-moe", 2**20)])
def test_one_flipped_bit_is_found(models, copy_of, tmp_path, capsys, monkeypatch, reads, kind, size):
    """Also where a tensor is compared in blocks, and heads of q, k and v begin inside of them."""
    monkeypatch.setattr(sys.modules[verify.__module__], "BLOCK", 3 * size)
    monkeypatch.setattr(sys.modules[verify.__module__], "_CACHED", size)
    other = changed(copy_of(kind), flip_last_bit)
    hf_to_megatron(models[kind], tmp_path / "a")
    hf_to_megatron(other, tmp_path / "b")
    reads.clear()  # the converter's
    for left, right in ((models[kind], other), (models[kind], tmp_path / "b"), (tmp_path / "a", tmp_path / "b")):
        result = verify(left, right)
        assert len(result.differences) == 1 and result.differences[0].startswith(f"{NAME}: 1 of ")
        assert main(["convert", "verify", str(left), str(right)]) == 1
        assert NAME in capsys.readouterr().out
    assert main(["convert", "verify", str(models[kind]), str(tmp_path / "a")]) == 0
    assert "bitwise equal" in capsys.readouterr().out
    assert main(["convert", "verify", str(models[kind]), str(other), "--tolerance", "1e-3"]) == 0


def test_direct_reads_at_every_alignment(tmp_path, monkeypatch):
    content, numbers = random.Random(0).randbytes(5 * ALIGN + 77), random.Random(1)
    view = memoryview(mmap.mmap(-1, 2**16))
    (tmp_path / "file").write_bytes(content)
    monkeypatch.setattr(CheckpointReader, "reads_direct", lambda self, stored: True)
    reader = HFReader.__new__(HFReader)
    CheckpointReader.__init__(reader, tmp_path)
    for offset in range(ALIGN + 1):
        size = numbers.choice([1, 8, ALIGN, ALIGN + 1, len(content) - offset, numbers.randrange(1, 3 * ALIGN)])
        stored = StoredTensor("x", tmp_path / "file", "uint8", (size,), offset)
        view[:] = bytes(len(view))
        begin = reader.read_direct(stored, view, end := numbers.choice([0, 1, ALIGN]))
        if begin is None and offset == 0:
            pytest.skip("the file system of the temporary folder has no direct reads")
        assert begin >= end and view[begin : begin + size] == content[offset : offset + size], offset
    cut = StoredTensor("x", tmp_path / "file", "uint8", (len(content),), 1)
    for end in (len(content), ALIGN):
        os.truncate(tmp_path / "file", end)
        with pytest.raises(DamagedFile, match="ends inside tensor x"):  # some file systems leave it to the second read
            assert reader.read_direct(cut, view, 0) is None
            reader.read_into(cut, 0, view[: len(content)])


def test_only_what_is_not_cached_is_read_direct(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"large": torch.zeros(2**20), "small": torch.zeros(9)}, file)
    reader = HFReader(tmp_path)
    assert not reader.reads_direct(reader.stored["large"])
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not reader.reads_direct(reader.stored["large"]):
        pytest.skip("the file system of the temporary folder keeps its files in memory")
    assert not reader.reads_direct(reader.stored["small"])
    HFReader(tmp_path)["large"].sum()
    assert not reader.reads_direct(reader.stored["large"])


def test_values_in_another_dtype_are_not_called_bitwise_equal(tmp_path, capsys):
    source = tiny_qwen.save(tiny_qwen.build("qwen2", torch.bfloat16), tmp_path / "hf")
    hf_to_megatron(source, tmp_path / "wide", dtype="float32")
    assert main(["convert", "verify", str(source), str(tmp_path / "wide"), "--tolerance", "1e-3"]) == 0
    assert "compared: all values are equal" in capsys.readouterr().out


def test_a_sign_of_zero_and_a_nan_are_differences(copy_of, models):
    zero = changed(copy_of("qwen2"), lambda t: t[NAME].fill_(0.0))
    assert not verify(models["qwen2"], zero).same

    for value, tolerance in ((-0.0, 0.0), (torch.nan, 0.0), (torch.nan, 1e9)):
        other = shutil.copytree(zero, zero.with_name(f"other{value}{tolerance}"))
        changed(other, lambda t, value=value: t[NAME][5].fill_(value))
        assert not verify(zero, other, tolerance=tolerance).same
        assert verify(other, other).same


def test_equal_infinities_are_no_difference(models, copy_of, tmp_path):
    """The difference of two infinities is NaN, that of infinities with different signs is infinite."""

    def infinite(tensors):
        tensors[NAME][:2] = torch.tensor([torch.inf, -torch.inf])[:, None]

    left = changed(copy_of("qwen2"), infinite)
    right = changed(shutil.copytree(left, tmp_path / "right"), lambda t: t[NAME][5].add_(1e-4))
    assert verify(left, right).differences == [f"{NAME}: 64 of 2048 values differ, by at most 0.0001"]
    assert verify(left, right, tolerance=1e-3).same
    changed(right, lambda t: t[NAME][0].neg_())
    assert verify(left, right, tolerance=1e-3).differences == [f"{NAME}: 64 of 2048 values differ, by at most inf"]


def test_a_tied_head_is_the_embedding(models, copy_of, tmp_path):
    """Also when the other model has a head of its own, and in both directions."""
    tied, untied = models["qwen2-tied"], copy_of("qwen2-tied")
    config = json.loads((untied / "config.json").read_text()) | {"tie_word_embeddings": False}
    (untied / "config.json").write_text(json.dumps(config))
    changed(untied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    hf_to_megatron(untied, tmp_path / "untied")
    assert verify(tied, untied).same and verify(untied, tied).same and verify(tied, tmp_path / "untied").same
    changed(untied, lambda t: t["lm_head.weight"][0].add_(1))
    hf_to_megatron(untied, tmp_path / "untied", overwrite=True)
    for pair in ((tied, untied), (untied, tied), (tied, tmp_path / "untied")):
        assert verify(*pair).differences == ["lm_head.weight: 64 of 6464 values differ, by at most 1"]
    without_head = changed(untied, lambda t: t.pop("lm_head.weight"))
    assert verify(tmp_path / "untied", without_head).differences[0].startswith("lm_head.weight: only in")


def test_differences_in_names_shapes_and_dtypes_are_listed(models, copy_of):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
        tensors["model.layers.0.input_layernorm.weight"] = torch.ones(3)
        tensors["new"] = tensors.pop(NAME)

    found = "\n".join(verify(models["qwen2"], changed(copy_of("qwen2"), change)).differences)
    assert "model.norm.weight: dtype float32 and bfloat16" in found
    assert "model.layers.0.input_layernorm.weight: shape (64,) and (3,)" in found
    assert f"{NAME}: only in {models['qwen2']}" in found and "new: only in" in found
    assert found.count("\n") == 3


def test_two_megatron_checkpoints_need_to_know_the_model(models, tmp_path):
    from megatron_dapo.weights.mapping import WeightsError

    hf_to_megatron(models["qwen3"], tmp_path / "a")
    (tmp_path / "a/release/hf/config.json").unlink()
    with pytest.raises(WeightsError, match="--reference"):
        verify(tmp_path / "a", tmp_path / "a")
    assert verify(tmp_path / "a", tmp_path / "a", reference=models["qwen3"]).same
