"""The tensor transport: memory that another process maps, by CUDA IPC on a GPU and by shared files elsewhere.

Many updates through the reader, the channel and the snapshot, while the weights are offloaded as with
`rollout.servers.share_gpus`: every tensor must arrive unchanged, also in the snapshot, whose copies may end after the
update; and no process may crash.
"""

import asyncio
import contextlib
import multiprocessing

import pytest
import torch
from bucket_reader import read_payloads
from safetensors.torch import load_file

from megatron_dapo.config.rollout import WeightTransportConfig
from megatron_dapo.engines.sglang.transports import TensorTransport
from megatron_dapo.policy.policy import Offloader
from megatron_dapo.sync.bucket import bucket_in, wait_for_readers
from megatron_dapo.sync.bucket_stream import BucketStream
from megatron_dapo.sync.snapshot import Snapshot
from megatron_dapo.weights.tensor_spec import TensorSpec, flat_size

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
ELEMENTS, TENSORS, PARTS = 1 << (24 if ON_GPU else 12), 12, 8
UPDATES = 40


class Server:
    tensor_parallel = 1

    def __init__(self, pipe, name):
        self.pipe, self.name, self.sums, self.calls = pipe, name, {}, 1

    async def load_tensors(self, payload, timeout):
        for _ in range(self.calls):
            self.sums |= await asyncio.to_thread(self._talk, payload)

    async def answers(self):
        pass

    def _talk(self, payload):
        self.pipe.send(payload)
        return self.pipe.recv()


class AnyTensors:
    """A manifest that accepts every bucket."""

    def begin(self):
        pass

    def check(self, bucket):
        return ""

    def missing(self):
        return ""


async def send(version, servers, snapshot, buckets):
    config = WeightTransportConfig(transport="tensor", keep_snapshot=snapshot is not None)
    transport = TensorTransport(config, snapshot, AnyTensors())
    async with BucketStream.of(buckets).open(transport.prepare, transport.release) as stream:
        return await transport.send(version, servers, stream, [server.name for server in servers])


@pytest.fixture(scope="module")
def pipes():
    """To two other processes."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=read_payloads, args=(theirs, ON_GPU)) for _, theirs in pipes]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    assert all(ours.recv() == "ready" for ours, _ in pipes)
    yield [ours for ours, _ in pipes]
    for (ours, _), process in zip(pipes, processes, strict=True):
        with contextlib.suppress(BrokenPipeError):
            ours.send(None)
        process.join(20)
        assert process.exitcode == 0


def test_two_servers_read_a_payload_and_one_of_them_again(pipes):
    """Its reply was lost. torch removed the name of the memory before the last of them had opened it."""
    servers = [Server(pipe, f"process {number}") for number, pipe in enumerate(pipes)]
    servers[0].calls = 2
    specs = [TensorSpec("w", torch.uint8, (64,))]

    async def update(version):
        block = torch.full((64,), version, dtype=torch.uint8, device=DEVICE)
        return await send(version, servers, None, [bucket_in(block, specs)])

    for version in range(1, 6):
        assert not asyncio.run(update(version)).failed
        assert [server.sums for server in servers] == [{"w": 64.0 * version}] * 2


def named_pieces(weights):
    return [[(f"w{i}.{part}", piece) for part, piece in enumerate(w.view(PARTS, -1))] for i, w in enumerate(weights)]


def in_two_blocks(weights):
    """Flat buckets in two blocks that are used in turn, as `WeightBuckets` makes them."""
    size, readers = weights[0].nbytes, ([], [])
    blocks = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    for index, pieces in enumerate(named_pieces(weights)):
        specs = [TensorSpec(name, piece.dtype, tuple(piece.shape)) for name, piece in pieces]
        assert flat_size(specs) == size
        bucket = bucket_in(blocks[index % 2], specs, readers=readers[index % 2])
        wait_for_readers(bucket)
        for (_, target), (_, piece) in zip(bucket, pieces, strict=True):
            target.copy_(piece)
        yield bucket


@pytest.mark.parametrize("flat", [False, True])
def test_every_update_arrives_while_weights_are_offloaded_and_onloaded(pipes, flat, tmp_path):
    server = Server(pipes[0], "process 0")
    weights = [torch.randn(ELEMENTS, device=DEVICE).bfloat16() for _ in range(TENSORS)]
    offloader, snapshot = Offloader(DEVICE), Snapshot("/dev/shm" if flat else tmp_path, "")

    def buckets():
        if flat:
            yield from in_two_blocks(weights)
        else:
            yield from ([(name, piece.clone()) for name, piece in pieces] for pieces in named_pieces(weights))
        offloader.offload(weights)

    async def update(version):
        return await send(version, [server], snapshot if version % 2 else None, buckets())

    for version in range(UPDATES):
        for whole in weights:
            whole.add_(0.01)
        expected = {name: piece.double().sum().item() for pieces in named_pieces(weights) for name, piece in pieces}
        sent = asyncio.run(update(version))
        assert not sent.failed and sent.tensors == len(expected)
        assert server.sums == expected
        assert not any(whole.untyped_storage().nbytes() for whole in weights)
        offloader.empty_cache()
        offloader.onload()
        if version % 10 == 9:
            snapshot.wait()
            files = [load_file(path) for path in snapshot.current.glob("*.safetensors")]
            found = {name: tensor for file in files for name, tensor in file.items()}
            for name, piece in (pair for pieces in named_pieces(weights) for pair in pieces):
                assert torch.equal(found.pop(name), piece.cpu()), name
            assert not found
    snapshot.close()
