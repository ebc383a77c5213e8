"""HF → Megatron → HF is bit-exact, complete and loadable, and a dtype is changed only on request."""

import ctypes
import io
import json
import mmap
import os
import pickle

import pytest
import tiny_qwen
import torch
import transformers
from safetensors.torch import load_file

from megatron_dapo.config.model import ModelShape
from megatron_dapo.weights.convert import hf_to_megatron, megatron_to_hf
from megatron_dapo.weights.formats.megatron_reader import MegatronAsHF, TorchDistReader
from megatron_dapo.weights.formats.readers import HFReader
from megatron_dapo.weights.formats.safe_pickle import load_metadata
from megatron_dapo.weights.fp8 import quantization_config
from megatron_dapo.weights.verify import verify


def tensors(folder):
    """Read by the safetensors library, not by our reader."""
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", tiny_qwen.KINDS)
def test_a_round_trip_is_bit_exact(kind, dtype, tmp_path):
    """Tensors of multi-token prediction and vision come back, too."""
    source = tiny_qwen.save(tiny_qwen.build(kind, dtype), tmp_path / "hf", shard="200KB")
    there = hf_to_megatron(source, tmp_path / "megatron")
    back = megatron_to_hf(tmp_path / "megatron", tmp_path / "again", reference=source, max_shard=150_000)
    before, after = tensors(source), tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype == dtype
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
    as_hf = MegatronAsHF(tmp_path / "megatron", ModelShape.from_dir(source))  # what policy.megatron_checkpoint reads
    assert [name for name, tensor in as_hf.items() if not torch.equal(tensor, before[name])] == []
    found = verify(source, tmp_path / "megatron")
    assert found.same  # the reports count what verify compares, also tensors that are not trained
    assert [(r.tensors, r.nbytes) for r in (there, back)] == [(found.tensors, found.nbytes)] * 2
    index = json.loads((tmp_path / "again/model.safetensors.index.json").read_text())
    assert (index["metadata"]["total_size"], index["weight_map"].keys()) == (found.nbytes, after.keys())
    assert ("mtp.fc.weight" in after) == (kind in tiny_qwen.HYBRID)
    vision = kind.startswith("qwen3.5")
    assert any(name.startswith("model.visual.") for name in after) == vision
    loads = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    assert not loads.from_pretrained(tmp_path / "again", output_loading_info=True)[1]["missing_keys"]


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3-moe"])
def test_the_result_is_a_complete_hf_model(models, kind, tmp_path):
    hf_to_megatron(models[kind], tmp_path / "megatron")
    report = megatron_to_hf(tmp_path / "megatron", tmp_path / "again", max_shard=150_000)
    assert report.notes == []
    index = json.loads((tmp_path / "again/model.safetensors.index.json").read_text())
    found = tensors(tmp_path / "again")
    assert set(index["weight_map"]) == set(found)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    assert len(set(index["weight_map"].values())) > 1
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (models[kind] / name).read_bytes()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_qwen.build(kind)(ids).logits)


def test_dtype_changes_on_request_and_config_says_so(models, tmp_path):
    hf_to_megatron(models["qwen3"], tmp_path / "megatron", dtype="bfloat16")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "kept")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "wide", dtype="float32")
    original = tensors(models["qwen3"])
    for name, t in tensors(tmp_path / "kept").items():
        assert torch.equal(t, original[name].bfloat16())
        assert torch.equal(tensors(tmp_path / "wide")[name], t.float())
    said = {name: json.loads((tmp_path / name / "config.json").read_text()) for name in ("kept", "wide")}
    assert said["kept"]["dtype"] == "bfloat16" and said["wide"]["dtype"] == "float32"


def test_the_dtype_of_an_inner_config_changes_too(copy_of, tmp_path):
    """Of a model with a vision tower; published ones have both."""
    config = json.loads(((folder := copy_of("qwen3.5")) / "config.json").read_text())
    config["text_config"] |= {"dtype": "float32", "quantization_config": quantization_config([])}
    (folder / "config.json").write_text(json.dumps(config))
    hf_to_megatron(folder, tmp_path / "megatron", dtype="bfloat16")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "again")
    said = json.loads((tmp_path / "again/config.json").read_text())
    assert said["dtype"] == said["text_config"]["dtype"] == ModelShape.from_dir(tmp_path / "again").dtype == "bfloat16"
    assert "quantization_config" not in said["text_config"] and "dtype" not in said["vision_config"]


def test_large_tensors_are_cut_into_chunks(models, tmp_path, monkeypatch):
    """Chunks of a few rows and blocks of a few bytes give the same weights as whole ones."""
    from megatron_dapo.weights import copy
    from megatron_dapo.weights.formats import torch_dist_writer

    monkeypatch.setattr(torch_dist_writer, "MAX_CHUNK", 5_000)
    monkeypatch.setattr(torch_dist_writer, "MAX_FILE", 60_000)
    monkeypatch.setattr(copy, "BLOCK", 4096)
    hf_to_megatron(models["qwen3-moe"], tmp_path / "megatron", workers=3)
    assert len(list((tmp_path / "megatron/release").glob("*.distcp"))) > 5
    megatron_to_hf(tmp_path / "megatron", tmp_path / "again")
    before, after = HFReader(models["qwen3-moe"]), tensors(tmp_path / "again")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_opening_a_checkpoint_does_not_read_its_tensors(tmp_path):
    """On a cold disk the kernel would read megabytes ahead at both ends of every tensor, one after the other, before
    the copy begins: 0.7 s of 4.1 s."""
    config = transformers.Qwen2Config(tie_word_embeddings=True, **{**tiny_qwen.COMMON, "vocab_size": 65536})
    hf = tiny_qwen.save(transformers.Qwen2ForCausalLM(config), tmp_path / "hf")
    hf_to_megatron(hf, tmp_path / "megatron", workers=1)
    checkpoint = tmp_path / "megatron/release"
    file = checkpoint / "__0_0.distcp"
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(file):
        pytest.skip("this file system is in memory: it has no page cache to drop")
    TorchDistReader(checkpoint, ModelShape.from_dir(hf))
    # 0.13 MB of 17.3 MB: the pages at the ends of the embedding and of 40 tensors that are smaller than 0.03 MB.
    assert 0 < cached_pages(file) * mmap.PAGESIZE < 0.25e6


def cached_pages(file):
    """How many of the file's pages are in memory."""
    libc, size = ctypes.CDLL(None, use_errno=True), file.stat().st_size
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), size) as mapped:
        found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0
        return sum(page & 1 for page in found)


def test_metadata_is_what_torch_itself_would_write(models, tmp_path):
    """Loaded by pickle itself; the expected values are built by hand."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    hf_to_megatron(models["qwen3"], tmp_path / "m", workers=1)
    found = pickle.loads((tmp_path / "m/release/.metadata").read_bytes())
    key = "decoder.layers.self_attention.q_layernorm.weight"
    assert isinstance(found, dcp.Metadata) and found.planner_data is None
    assert found.state_dict_metadata[key] == dcp.TensorStorageMetadata(
        dcp.TensorProperties(dtype=torch.float32),
        torch.Size([4, 32]),
        [dcp.ChunkStorageMetadata(torch.Size([layer, 0]), torch.Size([1, 32])) for layer in range(4)],
    )
    info = found.storage_data[dcp.MetadataIndex(key, [2, 0])]
    assert isinstance(info, _StorageInfo) and info.transform_descriptors is None
    with (tmp_path / "m/release" / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        stored = torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
    assert torch.equal(stored[0], HFReader(models["qwen3"])["model.layers.2.self_attn.q_norm.weight"])
    state = found.state_dict_metadata["decoder.final_layernorm._extra_state/shard_0_1"]
    assert isinstance(state, dcp.BytesStorageMetadata)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 255, 256, 2**31, 2**40 + 7])
def test_safe_pickle_reads_any_offset_in_metadata(value):
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    storage = {dcp.MetadataIndex("key", [value]): _StorageInfo("__0_0.distcp", value, value + 1)}
    found = load_metadata(pickle.dumps(dcp.Metadata(state_dict_metadata={}, storage_data=storage)))
    ((index, info),) = found["storage_data"].items()
    assert (index["fqn"], index["offset"]) == ("key", (value,))
    assert (info["relative_path"], info["offset"], info["length"]) == ("__0_0.distcp", value, value + 1)
