"""Speed of the converters and of `verify` beside `cp` and beside the libraries, and their peak memory, in one run.

    python benchmarks/convert.py                      # a random-weight bf16 model of about 3.7 GB, cold and warm
    python benchmarks/convert.py --layers 4 --rounds 1 --no-library
    python benchmarks/convert.py --workers 1          # one thread
    python benchmarks/convert.py --tensors            # 235B's 37 k tensors: real shapes in sparse files, and tiny ones
    python benchmarks/convert.py --memory             # peak memory of a 7B of zeros; needs 31 GB of disk

Needs about four times the size of the model on the disk of --folder, and removes what it wrote. Every measurement is a
new process, and for the converters the whole command with its start; rounds begin with another one in turn, and medians
are shown. Cold: the source is dropped from the page cache first.
The converters flush to disk before they return and `cp` does not, so `cp` is shown with and without a flush. CPU
seconds (user and system, all threads) depend less on the load of the machine. The library way is what a script would
do: safetensors' load_file, torch.cat, megatron-core's dist_checkpointing.save, and back. `verify` is compared with
reading both checkpoints with `cat`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import Dtype, safetensors_header
from megatron_dapo.weights.copy import copy_tensors
from megatron_dapo.weights.formats.hf_writer import HFWriter
from megatron_dapo.weights.formats.readers import CheckpointReader
from megatron_dapo.weights.mapping import hf_shapes, stored_mappings

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "model_type": "qwen2",
}  # fmt: skip
QWEN_7B = CONFIG | {
    "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "vocab_size": 151936,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rope_theta": 1e6, "model_type": "qwen3_moe",
}  # fmt: skip
TINY = {"hidden_size": 64, "moe_intermediate_size": 16, "head_dim": 16, "num_attention_heads": 8, "vocab_size": 4096}
Figures = dict[str, float]
BF16 = Dtype("bfloat16")


class RandomReader(CheckpointReader):
    """Random rows, sliced from one buffer: creating the model must not take longer than measuring it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(Path("noise"))
        self._widths = {mapping.name: mapping.shape[1:] for mapping in stored_mappings(shape)}
        self._noise = (torch.randn(32 * 2**20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()

    def dtype(self, name: str) -> Dtype:
        return BF16

    def rows(self, name: str, start: int, count: int) -> Tensor:
        width = self._widths[name]
        size = count * (width[0] if width else 1)
        at = (hash(name) + start * 7919) % (self._noise.numel() - size)
        return self._noise[at : at + size].view(count, *width)

    def spans(self, name: str, start: int, count: int) -> Iterator[tuple[int, None]]:
        yield count, None

    def where(self, name: str) -> str:
        return name


def make_model(path: Path, config: dict[str, object]) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.from_dir(path)
    writer = HFWriter(shape, {mapping.name: BF16 for mapping in stored_mappings(shape)})
    copy_tensors(RandomReader(shape), writer.writes, writer.files(path))
    writer.write_index(path)


# -- one measurement, each in a process of its own --------------------------------------------------------------------

# Peak RSS in bytes, and CPU seconds since `before`.
USAGE = """
import json, resource
def usage(before):
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_maxrss * 1024, now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime
"""

# The usual script: whole tensors in memory, Megatron's own writer. Imports and process groups are not timed.
LIBRARY = """
import os, queue, sys, time
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron_dapo.config.model import ModelShape
from megatron_dapo.weights.mapping import stored_mappings
from megatron_dapo.policy.megatron import patches
from megatron_dapo.weights.model_weights import hf_tensors, megatron_tensor
import torch._dynamo
patches.install()
kind, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
store = torch.distributed.FileStore(str(out) + ".store", 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
filesystem_async._results_queue = queue.Queue()
shape = ModelShape.from_dir(source if kind == "hf-to-megatron" else source / "release/hf")
out.mkdir()
before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
if kind == "hf-to-megatron":
    hf = {}
    for file in source.glob("*.safetensors"):
        hf |= load_file(file)
    state = {m.name: ShardedTensor.from_rank_offsets(m.name, megatron_tensor(m, hf)) for m in stored_mappings(shape)}
    dist_checkpointing.save(state, str(out))
else:
    made = {m.name: torch.empty(m.shape, dtype=torch.bfloat16) for m in stored_mappings(shape)}
    state = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in made.items()}
    state = dist_checkpointing.load(state, sys.argv[4])
    shards, size = [{}], 0
    for m in stored_mappings(shape):
        whole = {m.hf[0]: state[m.name]} if len(m.segments) == 1 else hf_tensors(m, [state[m.name]])
        for name, tensor in whole.items():
            if size + tensor.nbytes > 5 * 10**9:
                shards.append({})
                size = 0
            shards[-1][name] = tensor.contiguous()
            size += tensor.nbytes
    for number, shard in enumerate(shards):
        save_file(shard, out / f"model-{number}.safetensors")
        os.fsync(os.open(out / f"model-{number}.safetensors", os.O_RDONLY))
print(json.dumps([time.monotonic() - began, *usage(before)]))
os._exit(0)
"""


def run_child(script: str, *arguments: object) -> tuple[float, float, float]:
    """Seconds, peak RSS in bytes and CPU seconds, as the child measured them."""
    command = [sys.executable, "-c", USAGE + script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    seconds, rss, cpu = json.loads(done.stdout.splitlines()[-1])
    return seconds, rss, cpu


# A child begins with the peak memory of the process that starts it: this one has torch, the launcher next to nothing.
LAUNCHER = """
import json, os, subprocess, sys, time
began = time.monotonic()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(child.pid, 0)
seconds = time.monotonic() - began
print(json.dumps([os.waitstatus_to_exitcode(status), seconds, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime]))
"""


def run_command(command: str, source: Path, target: Path) -> tuple[float, float, float]:
    """`megatron-dapo convert`, with its start: seconds, peak RSS in bytes and CPU seconds."""
    workers = ["--workers", os.environ["WORKERS"]] if int(os.environ["WORKERS"]) else []
    arguments = [sys.executable, "-m", "megatron_dapo", "convert", command, str(source), str(target), *workers]
    done = subprocess.run([sys.executable, "-c", LAUNCHER, *arguments], stdout=subprocess.PIPE, check=True)
    code, seconds, rss, cpu = json.loads(done.stdout)
    if code:
        raise RuntimeError(f"convert {command}: exit code {code}")
    return seconds, rss, cpu


def run_cp(source: Path, destination: Path) -> Figures:
    """Seconds of `cp -r`, and the same with a flush of what it wrote."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "-r", str(source), str(destination)], check=True)
    copied, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    for file in files_of(destination):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cp": copied, "cp_flush": time.monotonic() - began, "cp_cpu": cpu}


def files_of(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob("*") if path.is_file()]


def set_cache(cold: bool, *folders: Path) -> None:
    """Drop the files from the page cache, or read them into it."""
    for file in files_of(*folders):
        fd = os.open(file, os.O_RDONLY)
        if cold:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(fd, 1 << 24):
                pass
        os.close(fd)


def measure(kind: str, source: Path, folder: Path, library: Path | None, *, cold: bool, rounds: int) -> Figures:
    """`library`: a checkpoint that the libraries wrote, to be read by them; None: without the library way."""
    target, found = folder / "out", []
    ways = ["cp", "ours", "library"] if library else ["cp", "ours"]
    for number in range(rounds):
        figures: Figures = {}
        for who in ways[number % len(ways) :] + ways[: number % len(ways)]:  # disks may be fast for the first one
            os.sync()
            set_cache(cold, source, *([library] if library else []))
            if who == "cp":
                figures |= run_cp(source, target)
            else:
                run = run_command if who == "ours" else partial(run_child, LIBRARY)
                values = run(kind, source, target, *([library] if who == "library" else []))
                figures |= dict(zip((who, f"{who}_rss", f"{who}_cpu"), values, strict=True))
            shutil.rmtree(target)
        found.append(figures)
    return {key: statistics.median(figures[key] for figures in found) for key in found[0]}


def measure_verify(a: Path, b: Path, *, cold: bool, rounds: int) -> Figures:
    found = []
    for number in range(rounds):
        figures: Figures = {}
        for who in ("read", "ours") if number % 2 == 0 else ("ours", "read"):
            set_cache(cold, a, b)
            if who == "ours":
                figures["ours"], figures["rss"], _ = run_command("verify", a, b)
                continue
            began = time.monotonic()
            subprocess.run(f"cat {a}/*.safetensors {b}/release/*.distcp > /dev/null", shell=True, check=True)
            figures["read"] = time.monotonic() - began
        found.append(figures)
    return {key: statistics.median(figures[key] for figures in found) for key in found[0]}


def show(label: str, nbytes: int, m: Figures) -> None:
    line = (
        f"{label:<22}{nbytes / 1e9:6.2f} GB   cp {m['cp']:6.2f} s   cp+flush {m['cp_flush']:6.2f} s   "
        f"convert {m['ours']:6.2f} s ({nbytes / m['ours'] / 1e9:.2f} GB/s)   "
        f"{m['ours'] / m['cp']:.2f} x cp, {m['ours'] / m['cp_flush']:.2f} x cp+flush   "
        f"CPU {m['cp_cpu']:.1f} s and {m['ours_cpu']:.1f} s   RSS {m['ours_rss'] / 1e9:.2f} GB"
    )
    if "library" in m:
        line += f"   library {m['library']:.2f} s, CPU {m['library_cpu']:.1f} s, RSS {m['library_rss'] / 1e9:.2f} GB"
    print(line, flush=True)


def measure_model(layers: int, folder: Path, args: argparse.Namespace) -> None:
    hf, megatron, library = folder / "hf", folder / "megatron", folder / "library"
    make_model(hf, {**CONFIG, "num_hidden_layers": layers})
    nbytes = sum(f.stat().st_size for f in hf.iterdir())
    run_command("hf-to-megatron", hf, megatron)
    if args.library:
        run_child(LIBRARY, "hf-to-megatron", hf, library)
    for cold in (True, False):
        state = "cold" if cold else "warm"
        options = {"cold": cold, "rounds": args.rounds}
        for label, kind, source in (("in", "hf-to-megatron", hf), ("out", "megatron-to-hf", megatron)):
            found = measure(kind, source, folder, library if args.library else None, **options)
            show(f"{label}, {state}, {layers} layers", nbytes, found)
        m = measure_verify(hf, megatron, **options)
        print(
            f"verify, {state:<14}{2 * nbytes / 1e9:6.2f} GB   reading both {m['read']:6.2f} s   "
            f"verify {m['ours']:6.2f} s   {m['ours'] / m['read']:.2f} x   RSS {m['rss'] / 1e9:.2f} GB",
            flush=True,
        )


# -- many tensors -----------------------------------------------------------------------------------------------------

PLAN = """
import sys, time
from pathlib import Path
from megatron_dapo.files import Dtype
from megatron_dapo.weights.convert import open_hf
from megatron_dapo.weights.formats.torch_dist_writer import TorchDistWriter
from megatron_dapo.weights.mapping import stored_mappings
before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
shape, weights = open_hf(Path(sys.argv[2]))
writer = TorchDistWriter(shape, {m.name: Dtype("bfloat16") for m in stored_mappings(shape)}, files=8)
writer.metadata()
print(json.dumps([time.monotonic() - began, *usage(before)]))
"""


def make_sparse(path: Path, config: dict[str, object]) -> tuple[dict[str, tuple[int, ...]], int]:
    """A model of zeros that takes no space. Returns the shapes of its tensors and its size."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    shapes = hf_shapes(ModelShape.from_hf(config))
    header = safetensors_header([(name, BF16, shape) for name, shape in shapes.items()])
    size = len(header) + 2 * sum(math.prod(shape) for shape in shapes.values())
    with (path / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(size)
    return shapes, size


def measure_memory(folder: Path) -> None:
    """The peak memory of a 7B, both ways."""
    _, size = make_sparse(folder / "hf", QWEN_7B)
    for kind, source, target in (
        ("hf-to-megatron", "hf", "m"),
        ("megatron-to-hf", "m", "again"),
        ("verify", "m", "again"),
    ):
        seconds, rss, _ = run_command(kind, folder / source, folder / target)
        print(f"{kind}: {size / 1e9:.1f} GB in {seconds:.1f} s, RSS {rss / 1e9:.2f} GB", flush=True)


def measure_tensors(folder: Path) -> None:
    """The cost per tensor: checks, plan and metadata of the real model, and a conversion of as many tiny tensors."""
    real = folder / "real"
    shapes, size = make_sparse(real, QWEN3_235B)
    seconds, rss, _ = run_child(PLAN, "plan", real)
    print(f"{len(shapes)} tensors, {size / 1e9:.0f} GB, sparse: check and plan {seconds:.1f} s, RSS {rss / 1e9:.2f} GB")
    make_model(folder / "tiny", {**QWEN3_235B, **TINY})
    nbytes = sum(f.stat().st_size for f in (folder / "tiny").iterdir())
    for kind, source, target in (("hf-to-megatron", "tiny", "m"), ("megatron-to-hf", "m", "again")):
        seconds, rss, _ = run_command(kind, folder / source, folder / target)
        print(f"{kind}: {len(shapes)} tensors, {nbytes / 1e9:.2f} GB: {seconds:.1f} s, RSS {rss / 1e9:.2f} GB")
    seconds, rss, _ = run_command("verify", folder / "tiny", folder / "m")
    print(f"verify: {len(shapes)} tensors: {seconds:.1f} s, RSS {rss / 1e9:.2f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[16], help="sizes to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0, help="threads of the converters and of verify (0: default)")
    parser.add_argument("--no-library", dest="library", action="store_false", help="without the library way")
    parser.add_argument("--tensors", action="store_true", help="measure the cost per tensor instead")
    parser.add_argument("--memory", action="store_true", help="measure the peak memory of a 7B instead")
    parser.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    args = parser.parse_args()
    os.environ["WORKERS"] = str(args.workers)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for layers in [0] if args.tensors or args.memory else args.layers:
        with tempfile.TemporaryDirectory(prefix="convert-", dir=args.folder) as name:
            if args.tensors or args.memory:
                (measure_tensors if args.tensors else measure_memory)(Path(name))
            else:
                measure_model(layers, Path(name), args)


if __name__ == "__main__":
    main()
