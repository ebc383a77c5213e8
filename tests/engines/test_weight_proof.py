"""A server proves that it holds what it was sent: checksums of its memory add up to the sender's."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from installed_sglang import SGLANG_VERSIONS, require_sglang
from subject import Subject, settings
from test_weight_updates import fake_fleet
from torch import nn

from megatron_dapo.engines.sglang.server_process import IN_SERVER
from megatron_dapo.engines.sglang.weight_proof import Probes, checksums_of, compare
from megatron_dapo.sync.bucket import flatten

sys.path += [str(IN_SERVER), str(Path(__file__).resolve().parents[2] / "benchmarks")]
import megatron_dapo_checksums
import planted_faults

HIDDEN, HEAD, EXPERTS, ROWS, VOCABULARY, PADDED = 16, 4, 3, 8, 30, 32
SHAPES = {
    "embed": (VOCABULARY, HIDDEN), "norm": (HIDDEN,), "q": (4 * HEAD, HIDDEN), "k": (HEAD, HIDDEN), "o": (HIDDEN, 16),
    "conv": (HIDDEN, 1, 4), **{f"experts.{i}.{m}": (ROWS, HIDDEN) for i in range(EXPERTS) for m in ("gate", "up")},
    **{f"experts.{i}.down": (HIDDEN, ROWS) for i in range(EXPERTS)}, "unused": (3,), "cast": (5,),
}  # fmt: skip


class Rank(nn.Module):
    """One of two ranks. Parameters are fused, split, padded and transposed as in SGLang; k is on both ranks."""

    def __init__(self, rank, dtype):
        super().__init__()
        self.rank = rank
        shapes = {
            "embed": (PADDED // 2, HIDDEN), "norm": (HIDDEN,), "qk": (3 * HEAD, HIDDEN), "o": (HIDDEN, 8),
            "conv": (HIDDEN // 2, 4), "w13": (EXPERTS, ROWS, HIDDEN), "w2": (EXPERTS, ROWS // 2, HIDDEN),
        }  # fmt: skip
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
        self.cast = nn.Parameter(torch.zeros(5, dtype=torch.float64), requires_grad=False)

    def load_weights(self, weights):
        for name, loaded in weights:
            half = slice(self.rank * loaded.shape[0] // 2, (self.rank + 1) * loaded.shape[0] // 2)
            if name == "embed":
                start = self.rank * PADDED // 2
                mine = loaded[start : start + PADDED // 2]
                self.embed.data[: len(mine)].copy_(mine)
                self.embed.data[len(mine) :].fill_(0)
            elif name in ("norm", "cast"):
                getattr(self, name).data.copy_(loaded)
            elif name == "q":
                self.qk.data.narrow(0, 0, 2 * HEAD).copy_(loaded[half])
            elif name == "k":
                self.qk.data[2 * HEAD :] = loaded
            elif name == "o":
                self.o.data.copy_(loaded.narrow(1, self.rank * 8, 8))
            elif name == "conv":
                self.conv.data.copy_(loaded.squeeze(1)[half])
            elif name.startswith("experts."):
                _, expert, matrix = name.split(".")
                if matrix == "down":
                    self.w2.data[int(expert)].copy_(loaded.narrow(1, self.rank * ROWS // 2, ROWS // 2).t())
                else:
                    first = ROWS // 2 * (matrix == "up")
                    self.w13.data[int(expert), first : first + ROWS // 2] = loaded[half]


def weights(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return [(name, torch.randn(shape).to(dtype)) for name, shape in SHAPES.items()]


class Server:
    def __init__(self, dtype):
        self.ranks = [Rank(rank, dtype) for rank in range(2)]
        self.recorders = [megatron_dapo_checksums.Recorder(rank) for rank in self.ranks]

    def load(self, bucket):
        for rank, recorder in zip(self.ranks, self.recorders, strict=True):
            recorder.load(rank.load_weights, list(flatten(bucket)))

    def checksums(self):
        return [recorder.checksums() for recorder in self.recorders]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_fused_split_and_padded_parameters_add_up_to_what_was_sent(dtype):
    server = Server(dtype)
    for seed in (1, 2):  # where tensors go is recorded with the first update
        sent = weights(seed, dtype)
        server.load(sent)
        found = compare(checksums_of(flatten(sent)).read(), server.checksums())
        assert not found.differing and sorted(found.unproven) == ["cast", "unused"]
    stale = compare(checksums_of(flatten(weights(1, dtype))).read(), server.checksums())
    assert set(stale.differing) == SHAPES.keys() - {"cast", "unused"}


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        (lambda ranks: ranks[1].qk.data[:8].copy_(ranks[0].qk.data[:8]), {"q"}),  # the other rank's shard
        (lambda ranks: ranks[1].qk.data[8].zero_(), {"k"}),  # of a part that both ranks have
        (lambda ranks: ranks[0].w13.data.copy_(ranks[0].w13.data.roll(1, 0)),
         {f"experts.{i}.{m}" for i in range(EXPERTS) for m in ("gate", "up")}),
        (lambda ranks: ranks[0].w2.data[1, 0, 0].add_(1e-6), {"experts.1.down"}),
        (lambda ranks: ranks[1].embed.data[14:].fill_(7), set()),  # padding
        (lambda ranks: ranks[1].conv.data.copy_(ranks[1].conv.data.flip(1)), {"conv"}),
    ],
)  # fmt: skip
def test_a_fault_on_one_rank_is_found_and_named(spoil, wrong):
    server, sent = Server(torch.float32), weights(1)
    server.load(sent)
    spoil(server.ranks)
    assert set(compare(checksums_of(flatten(sent)).read(), server.checksums()).differing) == wrong


@pytest.mark.parametrize(
    ("ranks", "differing"),
    [
        ([{"a": "4:x:7"}], {}),
        ([{"a": "4:x:7"}, {"a": "4:x:7"}], {}),
        ([{"a": "4:x:7"}, {"a": "4:x:8"}], {"a": "ranks that hold the same part of it disagree"}),
        ([{"a": "2:x:3"}, {"a": "2:y:4"}], {}),
        ([{"a": "2:x:3"}, {"a": "2:y:5"}], {"a": "other values"}),
        ([{"a": "2:x:7"}, {}], {"a": "2 of 4 elements are there"}),
        ([{"a": "8:x:14"}], {}),  # twice, as replicas of an expert
        ([{}], {"a": "it did not arrive"}),
        ([{"a": f"4:x:{7 - 2**64}"}], {}),
    ],
)
def test_parts_of_ranks(ranks, differing):
    assert compare({"a": (4, 7)}, ranks).differing == differing


async def test_one_server_of_a_fleet_that_holds_something_else_does_not_serve(tmp_path):
    """It is given the snapshot once. The next update records anew where its loader puts tensors."""
    sent = [("a", torch.ones(3)), ("b", torch.zeros(2, 2))]
    sums = {name: f"{n}:x:{total}" for name, (n, total) in checksums_of(flatten(sent)).read().items()}
    servers, engine = await fake_fleet(tmp_path)
    for server in servers:
        server.checksums = dict(sums)
        engine.servers[servers.index(server)]._capabilities = None
    servers[2].checksums["b"] = "4:x:1"
    report = await engine.update_weights(1, [sent])
    assert set(report.failed) == {servers[2].url}
    assert "1 tensors differ from what was sent: b: other values" in report.failed[servers[2].url]
    assert "2 with the checksums of 2 of 2 tensors" in report.proof
    assert [sum("version-1" in what for what in server.loaded) for server in servers] == [1, 1, 2]
    servers[2].checksums = dict(sums)
    assert not (await engine.update_weights(2, [sent])).failed
    again = [server.loaded.count("megatron_dapo_checksums.record_again") for server in servers]
    assert again == [0, 0, 2]
    await engine.close()


def test_the_tolerance_of_the_probe_comes_from_the_noise():
    probes = Probes()
    one, two = torch.tensor([-1.0, -2.0]).numpy(), torch.tensor([-1.0, -2.03]).numpy()
    assert not probes.compare(1, {"a": one, "b": one}) and "differ" in probes.compare(1, {"c": two})["c"]
    assert probes.measured([one, one + 0.01]) is one
    assert probes.tolerance == pytest.approx(0.04, rel=1e-3) and not probes.compare(1, {"c": two})
    assert probes.measured([one, one + 9.0]) is one and "differ" in probes.compare(1, {"c": one + 0.6})["c"]


@pytest.mark.parametrize("transport", ["tensor", "distributed", "disk"])
async def test_a_real_server_finds_every_fault_on_the_wire(sglang_server, transport, tmp_path):
    """benchmarks/planted_faults.py, which also plants faults in the server's memory."""
    base = settings(transport)
    config = base.model_copy(update={"weights": base.weights.model_copy(update={"keep_snapshot": False})})
    subject = Subject(sglang_server)
    noisy = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in subject.model.state_dict().items()}
    planned = [fault for fault in planted_faults.faults(list(noisy)) if not fault.parameters]
    chosen = planned if transport == "tensor" else planned[::6]
    async with subject.open(config=config) as engine:
        updates = planted_faults.Updates(engine, noisy, 60_000, tmp_path / "fault.json")
        found, refused, _ = await planted_faults.plant(updates, chosen)
        assert not (await updates.send(None)).failed
        found, refused, last = found, refused, updates.now
    subject.model.load_state_dict(last)
    assert (found, refused) == (len(chosen), 0) and len(planned) >= 30


KERNEL = """
import megatron_dapo_checksums as m, torch
for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
    t = torch.randn(12, 5000).to(dtype)
    size, parts = t.element_size(), m.Parts()
    parts.add(0, 0, size, 0, [(12, 5000, 5000), (5000, 1, 1)])
    parts.add(1, 7 * size, size, 7, [(12, 5000, 5000), (2501, 1, 1)])
    parts.add(2, 0, size, 3, [(5000, 1, 12), (12, 5000, 1)])
    parts.freeze()
    assert set(parts.tiles) == {(size, True), (size, False)}
    for (_, aligned), tiles in parts.tiles.items():
        on_cpu = m._sum_on_cpu(tiles, size, t.data_ptr())
        on_gpu = m._sum_on_gpu(torch.from_numpy(tiles), size, t.data_ptr(), aligned=aligned)
        assert torch.equal(on_cpu, on_gpu) and len(on_cpu.unique()) == len(on_cpu)
"""


def test_the_kernel_of_the_gpu_computes_the_same():
    """In Triton's interpreter, which comes with SGLang."""
    python = require_sglang(SGLANG_VERSIONS[-1])
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(IN_SERVER), "OMP_NUM_THREADS": "1"}
    subprocess.run([str(python), "-c", KERNEL], check=True, env=environment, timeout=200)
