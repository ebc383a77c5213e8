"""Plants faults in weight updates to one real SGLang server, and counts those that the proof finds.

    python benchmarks/planted_faults.py MODEL --transports tensor distributed -- --mem-fraction-static 0.3
    python benchmarks/planted_faults.py MODEL --device cpu --python .venv-sglang-0.5.23/bin/python

MODEL is an HF directory. Faults are planted on the wire, after the sender has computed its checksums, and in the
server's memory, after it has loaded everything (`corrupt` below runs in the server). Before each fault there is a clean
update with other weights, which must pass. The last lines say how many faults were found, how many clean updates were
refused, and which part of a clean update the checksums took (the time that the update would save without them).

`distributed` uses NCCL: with trainer and server on one GPU, NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1.
`disk` works as well. Exit code 1: a fault was missed, or a clean update was refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ablation import split_arguments
from torch import Tensor

FAULT_FILE = "PLANTED_FAULT"  # environment variable of the server: a file that says what `corrupt` does
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


# ---- what can happen to a tensor; in place ----


def flip_bit(tensor: Tensor) -> None:
    words = tensor.view(WORDS[tensor.element_size()]).view(-1)
    words[len(words) // 2] ^= 1


def flip_sign(tensor: Tensor) -> None:
    flat = tensor.view(-1)
    flat[flat.nonzero()[-1]] *= -1


def swap_elements(tensor: Tensor) -> None:
    flat = tensor.view(-1)
    other = int((flat != flat[0]).nonzero()[0])
    flat[[0, other]] = flat[[other, 0]]


def swap_first(tensor: Tensor) -> None:
    """Rows, or experts."""
    tensor[[0, 1]] = tensor[[1, 0]]


def zero_rows(tensor: Tensor) -> None:
    tensor[-2:] = 0


def swap_row_halves(tensor: Tensor) -> None:
    half = tensor.shape[-2] // 2
    tensor.copy_(tensor.roll(half, -2))


def swap_column_halves(tensor: Tensor) -> None:
    tensor.copy_(tensor.roll(tensor.shape[-1] // 2, -1))


def transpose(tensor: Tensor) -> None:
    size = min(tensor.shape[-2:])
    tensor[..., :size, :size] = tensor[..., :size, :size].mT.clone()


def shift(tensor: Tensor) -> None:
    tensor.copy_(tensor.flatten().roll(1).view_as(tensor))


def not_a_number(tensor: Tensor) -> None:
    tensor.view(-1)[0] = float("nan")


KINDS = {
    kind.__name__: kind
    for kind in (
        flip_bit, flip_sign, swap_elements, swap_first, zero_rows, swap_row_halves, swap_column_halves, transpose,
        shift, not_a_number,
    )
}  # fmt: skip


def corrupt(model: Any, named_tensors: Any) -> None:
    """In the server (--custom-weight-loader planted_faults.corrupt)."""
    fault = json.loads(Path(os.environ[FAULT_FILE]).read_text())
    parameter = next(p for name, p in model.named_parameters() if name.endswith(tuple(fault["parameters"])))
    KINDS[fault["kind"]](parameter.data)


# ---- the faults ----

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """`change(bucket, now, before)` edits the tensors of a bucket; `parameters`: in the server instead."""

    name: str
    change: Callable[[Tensors, Tensors, Tensors], None] = lambda bucket, now, before: None
    kind: str = ""
    parameters: tuple[str, ...] = ()


def faults(names: list[str]) -> Iterator[Fault]:
    def find(*endings: str, number: int = 0) -> str:
        return next(found[number] for e in endings if (found := [n for n in names if n.endswith(e)]))

    expert = {m: (f"mlp.{m}_proj.weight", f"mlp.experts.0.{m}_proj.weight") for m in ("gate", "up", "down")}
    targets = {m: find(f"self_attn.{m}_proj.weight") for m in "qkvo"} | {m: find(*e) for m, e in expert.items()}
    targets |= {"norm": find("input_layernorm.weight"), "embedding": find("embed_tokens.weight")}
    last = {m: find(f"self_attn.{m}_proj.weight", number=-1) for m in "qkvo"}
    last |= {"norm": find("input_layernorm.weight", number=-1), "down": find(*expert["down"], number=-1)}

    def on_wire(what: str, at: str, edit: Callable[..., Any]) -> Fault:
        def change(bucket: Tensors, now: Tensors, before: Tensors) -> None:
            if targets[at] in bucket:
                edit(bucket, targets[at], now, before)

        return Fault(f"wire: {what}, {at}", change)

    chosen = {
        "flip_bit": ("q", "norm", "embedding", "down"), "flip_sign": ("gate",), "swap_elements": ("k", "up"),
        "swap_first": ("v", "embedding"), "zero_rows": ("embedding", "o"), "swap_row_halves": ("q", "gate"),
        "swap_column_halves": ("o", "down"), "transpose": ("k", "o"), "shift": ("up", "norm"), "not_a_number": ("v",),
    }  # fmt: skip
    for kind, places in chosen.items():
        for at in places:
            yield on_wire(kind, at, lambda bucket, name, now, before, kind=kind: KINDS[kind](bucket[name]))
    for at in ("q", "embedding", "norm", "down"):
        yield on_wire("stale", at, lambda bucket, name, now, before: bucket[name].copy_(before[name]))
    for at in ("k", "o", "down"):
        yield on_wire("dropped", at, lambda bucket, name, now, before: bucket.pop(name))
    for at in ("q", "norm", "down"):
        yield on_wire("another layer's", at, lambda bucket, name, now, before, at=at: bucket[name].copy_(now[last[at]]))
    yield on_wire("gate and up swapped", "gate", _swapped(targets["gate"], targets["up"]))
    if experts := [n for n in names if n.endswith("mlp.experts.1.up_proj.weight")]:
        yield on_wire("two experts swapped", "up", _swapped(targets["up"], experts[0]))

    def all_stale(bucket: Tensors, now: Tensors, before: Tensors) -> None:
        for name, tensor in bucket.items():
            tensor.copy_(before[name])

    def end_stale(bucket: Tensors, now: Tensors, before: Tensors) -> None:
        name = list(bucket)[-1]
        bucket[name].view(-1)[-7:] = before[name].view(-1)[-7:]

    yield Fault("wire: the version before", all_stale)
    yield Fault("wire: the ends of buckets are stale", end_stale)
    fused = {
        "qkv": ("qkv_proj.weight",), "o": ("o_proj.weight",), "gate and up": ("gate_up_proj.weight", "w13_weight"),
        "down": ("mlp.down_proj.weight", "w2_weight"), "norm": ("input_layernorm.weight",),
        "embedding": ("embed_tokens.weight",),
    }  # fmt: skip
    in_memory = {
        "flip_bit": ("qkv", "gate and up", "down", "norm", "embedding"), "swap_first": ("gate and up", "down", "qkv"),
        "swap_row_halves": ("gate and up", "qkv"), "swap_column_halves": ("o",), "not_a_number": ("o",),
        "transpose": ("down",), "zero_rows": ("qkv",), "shift": ("gate and up",),
    }  # fmt: skip
    for kind, parameters in in_memory.items():
        for at in parameters:
            yield Fault(f"memory: {kind}, {at}", kind=kind, parameters=fused[at])


def _swapped(one: str, other: str) -> Callable[[Tensors, str, Tensors, Tensors], None]:
    def edit(bucket: Tensors, name: str, now: Tensors, before: Tensors) -> None:
        bucket[one].copy_(now[other])
        if other in bucket:
            bucket[other].copy_(now[one])

    return edit


# ---- the updates ----


class Updates:
    """Sends versions whose weights all differ, some of them with a fault."""

    def __init__(self, engine: Any, weights: Tensors, bucket_bytes: int, fault_file: Path) -> None:
        from megatron_dapo.sync.bucket import flatten

        self.engine, self.first, self.bytes, self.file = engine, weights, bucket_bytes, fault_file
        self.now = self.before = weights
        self.fault: Fault | None = None
        self.flatten = flatten
        transport = engine._update._transport
        if engine.config.weights.transport == "disk":
            add = engine.snapshot.add
            engine.snapshot.add = lambda bucket: add(self.spoiled(flatten(bucket)))
        else:
            make = transport._make
            transport._make = lambda bucket: make(self.spoiled(bucket))

    def spoiled(self, bucket: Any) -> Any:
        if self.fault is None or self.fault.parameters:
            return bucket
        tensors = {name: tensor.clone() for name, tensor in bucket}
        self.fault.change(tensors, self.now, self.before)
        return self.flatten(list(tensors.items()))

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        bucket: list[tuple[str, Tensor]] = []
        for pair in self.now.items():
            if bucket and sum(t.nbytes for _, t in [*bucket, pair]) > self.bytes:
                yield bucket
                bucket = []
            bucket.append(pair)
        yield bucket

    async def send(self, fault: Fault | None) -> Any:
        """The report; a `WeightUpdateError` if the server did not take the version."""
        version = self.engine.weight_version + 1
        self.fault, self.before = fault, self.now
        self.now = {name: tensor * (1 + version % 7 / 16) for name, tensor in self.first.items()}
        await self.engine.load_weights(version, self.buckets())
        if fault is not None and fault.parameters:
            self.file.write_text(json.dumps({"kind": fault.kind, "parameters": fault.parameters}))
            await self.engine.servers[0].call_loader("planted_faults.corrupt", 60)
        return await self.engine.serve_weights(version)


async def plant(updates: Updates, planned: list[Fault]) -> tuple[int, int, list[float]]:
    """Found faults, refused clean updates, and the checksums' part of each clean update."""
    from megatron_dapo.engines.protocol import WeightUpdateError

    found, refused, shares = 0, 0, []
    for fault in planned:
        try:
            report = await updates.send(None)
            shares.append(report.parts["checksums"] / (report.seconds - report.parts["memory"]))
        except WeightUpdateError as error:
            refused += 1
            print(f"  a clean update was refused: {error}", flush=True)
        try:
            await updates.send(fault)
            print(f"  MISSED  {fault.name}", flush=True)
        except WeightUpdateError as error:
            by_checksum = "differ from what was sent" in str(error)
            found += by_checksum
            cause = str(error).partition("differ from what was sent: ")[2] or str(error)
            print(f"  {'found ' if by_checksum else 'OTHER '}  {fault.name:<46} {cause[:110]}", flush=True)
    print(f"  the last clean update: {report.seconds:.3f} s, {report.parts}; {report.proof}")
    return found, refused, shares


async def run(args: argparse.Namespace, transport: str, fault_file: Path, logs: str) -> bool:
    from safetensors.torch import load_file

    from megatron_dapo.config import parse_config
    from megatron_dapo.engines import open_engine
    from megatron_dapo.engines.sglang.client import CHECKSUM_LOADERS
    from megatron_dapo.engines.sglang.server_process import CPU_STUBS, IN_SERVER

    folders = [str(Path(__file__).parent), str(IN_SERVER)] + ([str(CPU_STUBS)] if args.device == "cpu" else [])
    loaders = ["--custom-weight-loader", *CHECKSUM_LOADERS, "planted_faults.corrupt"]
    servers = {
        "device": args.device, "python": args.python, "dtype": "auto" if args.device == "cuda" else "float32",
        "arguments": [*args.server_arguments, *loaders], "start_timeout": 600, "port": args.port,
        "tensor_parallel": args.tensor_parallel,
        "environment": {
            "PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])]),
            FAULT_FILE: str(fault_file),
        },
    }  # fmt: skip
    weights = {
        "transport": transport, "backend": "nccl" if args.device == "cuda" else "gloo", "keep_snapshot": False,
        "bucket_bytes": args.bucket_mib << 20,
    }  # fmt: skip
    config = parse_config({"policy": {"model": str(args.model)}, "rollout": {
        "engine": "sglang", "servers": servers, "weights": weights,
    }}).rollout  # fmt: skip
    tensors = {n: t for file in sorted(args.model.glob("*.safetensors")) for n, t in load_file(file).items()}
    torch.manual_seed(0)  # noise: without it, norms that are all ones could be swapped without a fault
    tensors = {name: (t := tensor.to(args.device)) + 0.02 * torch.randn_like(t) for name, tensor in tensors.items()}
    engine: Any = await open_engine(config, str(args.model), logs)
    try:
        version = (await engine.servers[0].connection.get("/server_info"))["version"]
        print(f"SGLang {version}, transport {transport}, {len(tensors)} tensors", flush=True)
        planned = list(faults(list(tensors)))
        updates = Updates(engine, tensors, args.bucket_mib << 20, fault_file)
        found, refused, shares = await plant(updates, planned)
    finally:
        await engine.close()
    print(
        f"{transport}: {found} of {len(planned)} faults found by checksums, {refused} of {len(planned)} clean updates "
        f"refused; checksums {statistics.median(shares):.1%} of a clean update (median)",
        flush=True,
    )
    return found == len(planned) and not refused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--transports", nargs="+", choices=["tensor", "distributed", "disk"], default=["tensor"])
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="of the server")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--python", default="", help="the Python that has sglang; empty: this one")
    own, theirs = split_arguments()
    args = parser.parse_args(own)
    args.server_arguments = theirs
    right = True
    with tempfile.TemporaryDirectory() as folder:
        for transport in args.transports:
            right &= asyncio.run(run(args, transport, Path(folder, "fault.json"), folder))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
