"""A checkpoint is data: whatever its pickles say, no code runs."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch.distributed.checkpoint.planner import WriteItemType

from megatron_dapo.cli import main
from megatron_dapo.files import Dtype
from megatron_dapo.weights.convert import hf_to_megatron
from megatron_dapo.weights.formats import safe_pickle
from megatron_dapo.weights.formats.safe_pickle import UnsafePickle, load_metadata, load_tensor_pickle, load_torch_pickle
from megatron_dapo.weights.formats.torch_zip import BadArchive, TensorArchive, read_archive


class Evil:
    """Pickles as a call, e.g. os.system("touch FILE")."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.fixture
def checkpoint(models, tmp_path):
    hf_to_megatron(models["qwen2"], tmp_path / "megatron")
    return tmp_path / "megatron" / "release"


def test_the_attack_works_on_a_plain_unpickler(tmp_path):
    """So the tests below would notice."""
    pickle.loads(pickle.dumps(Evil(os.system, f"touch {tmp_path / 'proof'}")))
    assert (tmp_path / "proof").exists()


@pytest.mark.parametrize("command", ["megatron-to-hf", "verify"])
@pytest.mark.parametrize("where", [".metadata", "inside", "item"])
def test_malicious_pickle_is_refused_and_does_not_run(checkpoint, models, tmp_path, capsys, where, command):
    proof = tmp_path / "proof"
    evil = Evil(os.system, f"touch {proof}")
    if where == ".metadata":
        (checkpoint / ".metadata").write_bytes(pickle.dumps(evil))
    elif where == "inside":
        metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
        metadata.planner_data = {"x": evil}
        (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
        key = next(k for k in metadata.storage_data if k.fqn == "decoder.final_layernorm.weight")
        buffer = io.BytesIO()
        torch.save(evil, buffer)
        metadata.storage_data[key].relative_path = "__9_9.distcp"
        metadata.storage_data[key].offset, metadata.storage_data[key].length = 0, len(buffer.getvalue())
        (checkpoint / "__9_9.distcp").write_bytes(buffer.getvalue())
        (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    other = [str(tmp_path / "out")] if command == "megatron-to-hf" else [str(models["qwen2"])]
    assert main(["convert", command, str(checkpoint), *other]) == 2
    message = capsys.readouterr().err
    assert "posix.system" in message and str(checkpoint) in message
    assert not proof.exists() and not (tmp_path / "out").exists()


def test_common_pt_and_objects_are_never_opened(checkpoint, tmp_path):
    proof = tmp_path / "proof"
    torch.save(Evil(os.system, f"touch {proof}"), checkpoint / "common.pt")
    assert main(["convert", "megatron-to-hf", str(checkpoint), str(tmp_path / "out")]) == 0
    assert not proof.exists()


@pytest.mark.parametrize(
    "call",
    [
        Evil(eval, "1"),
        Evil(exec, "1"),
        Evil(getattr, 1, "real"),
        Evil(getattr, OrderedDict, "fromkeys"),
        Evil(__import__, "os"),
        Evil(torch.load, "x"),
        Evil(open, "x"),
    ],
    ids=["eval", "exec", "getattr", "method", "import", "torch.load", "open"],
)
def test_names_that_are_not_on_the_list_are_refused(call):
    with pytest.raises(UnsafePickle, match="it asks for"):
        load_metadata(pickle.dumps(call))
    with pytest.raises(UnsafePickle, match="it asks for"):
        load_tensor_pickle(pickle.dumps(call))


@pytest.mark.parametrize("protocol", [2, 4])  # of torch.save, of `.metadata`
def test_enums_as_python_3_11_2_pickles_them(checkpoint, protocol):
    member = Evil(getattr, AttnBackend, "flash")
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = {"type": Evil(getattr, WriteItemType, "SHARD")}
    found = load_metadata(pickle.dumps(metadata, protocol))["planner_data"]["type"]
    assert found.kind == "WriteItemType" and found.args == ("SHARD",)
    found = load_torch_pickle(pickle.dumps({"args": member}, protocol), opaque=True)["args"]
    assert found.kind == "AttnBackend" and found.args == ("flash",)
    with pytest.raises(UnsafePickle, match=r"it asks for builtins\.getattr"):  # of anything else
        load_torch_pickle(pickle.dumps(Evil(getattr, member, "name"), protocol), opaque=True)


SHARED = [("torch", "Size"), ("torch.serialization", "_get_layout"), ("builtins", "getattr"), ("torch", "float32"),
          ("collections", "OrderedDict"), ("torch.distributed.checkpoint.metadata", "Metadata"),
          ("torch._utils", "_rebuild_tensor_v2"), ("torch", "FloatStorage")]  # fmt: skip


@pytest.mark.parametrize("attribute", ["__name__", "__defaults__", "kind", "added"])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("name", SHARED, ids=".".join)
def test_what_a_pickle_names_cannot_be_changed_by_it(name, slots, attribute):
    """The opcode BUILD sets attributes of what is on the stack, also of one that was only named."""
    state = pickle.dumps({attribute: ("changed",)}, 2)[2:-1]
    state = b"N" + state + b"\x86" if slots else state
    data = b"\x80\x02c" + "\n".join(name).encode() + b"\n" + state + b"b."
    allowed = safe_pickle._STAND_INS | safe_pickle._PLAIN | safe_pickle._DTYPES
    target = allowed.get(name, safe_pickle._rebuild_tensor)
    before = getattr(target, attribute, None)
    for load in (load_metadata, load_tensor_pickle, lambda data: load_torch_pickle(data, opaque=True)):
        with pytest.raises(UnsafePickle):
            load(data)
    assert getattr(target, attribute, None) == before


def test_stand_ins_are_inert(checkpoint):
    """What the reader returns is made of our own stand-ins, numbers, strings and dtypes."""
    found = load_metadata((checkpoint / ".metadata").read_bytes())
    assert type(found).__module__ == "megatron_dapo.weights.formats.safe_pickle"
    properties = next(iter(found["state_dict_metadata"].values()))["properties"]
    assert (
        type(properties).__module__ == "megatron_dapo.weights.formats.safe_pickle" and properties.state[0] == "float32"
    )


def test_damaged_pickles_are_refused():
    for data in (b"", b"junk", pickle.dumps([1, 2]), pickle.dumps({"a": 1})[:-3]):
        with pytest.raises(UnsafePickle):
            load_metadata(data)


def test_paths_may_not_leave_the_checkpoint(checkpoint, tmp_path, capsys):
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../megatron/" + info.relative_path
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    assert main(["convert", "megatron-to-hf", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "not a file name in this directory" in capsys.readouterr().err


@pytest.mark.parametrize("tensor", [torch.randn(3, 5).bfloat16(), torch.randn(7), torch.randn(1, 2, 33).double()])
def test_archives_are_what_torch_reads_and_writes(tensor):
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    archive = TensorArchive(tensor.dtype, tuple(tensor.shape))
    ours = archive.head + data + archive.tail
    assert len(ours) == archive.length and archive.data_offset % 64 == 0
    assert torch.equal(torch.load(io.BytesIO(ours), weights_only=True), tensor)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    for item in (ours, buffer.getvalue()):
        dtype, shape, begin = read_archive(memoryview(item))
        assert (dtype, shape) == (Dtype.of(tensor.dtype), tuple(tensor.shape))
        assert item[begin : begin + len(data)] == data


def test_archives_of_anything_but_one_plain_tensor_are_refused():
    def saved(value):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()

    good = saved(torch.randn(4, 4))
    compressed = io.BytesIO()
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    for bad in (saved(torch.randn(4, 4).t()), saved([torch.ones(2)]), good[:-30], b"\0" * 200, compressed.getvalue()):
        with pytest.raises(BadArchive):
            read_archive(memoryview(bad))
