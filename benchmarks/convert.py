"""Speed of the converters beside `cp` of the same bytes in the same run, and their peak memory.

    python benchmarks/convert.py                      # two random-weight bf16 models, about 3.7 and 6.2 GB
    python benchmarks/convert.py --layers 4 8 --rounds 1

Needs about four times the size of the largest model on the disk of --folder, and removes what it wrote. Every
measurement is a new process. Source files are in the page cache for `cp` and the converter; rounds alternate between
them, and the fastest of each is shown. The converters flush to disk before they return and `cp` does not, so `cp` is
shown with and without a flush. CPU seconds (user and system, all threads) depend less on the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.config.model import ModelShape
from megatron_dapo.weights.copy import copy_tensors
from megatron_dapo.weights.formats.hf_writer import HFWriter
from megatron_dapo.weights.mapping import stored_mappings

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "model_type": "qwen2",
}  # fmt: skip


class RandomReader:
    """Random rows, sliced from one buffer: creating the model must not take longer than measuring it."""

    path = Path("noise")

    def __init__(self, shape: ModelShape) -> None:
        self._widths = {mapping.name: mapping.shape[1:] for mapping in stored_mappings(shape)}
        self._noise = (torch.randn(32 * 2**20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def rows(self, name: str, start: int, count: int) -> Tensor:
        width = self._widths[name]
        size = count * (width[0] if width else 1)
        at = (hash(name) + start * 7919) % (self._noise.numel() - size)
        return self._noise[at : at + size].view(count, *width)

    def release(self, name: str, start: int, count: int) -> None:
        pass

    def where(self, name: str) -> str:
        return name


def make_model(path: Path, layers: int) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    shape = ModelShape.from_dir(path)
    writer = HFWriter(shape, {mapping.name: torch.bfloat16 for mapping in stored_mappings(shape)})
    copy_tensors(RandomReader(shape), writer.writes, writer.files(path))
    writer.write_index(path)


CHILD = """
import json, resource, sys
from megatron_dapo.weights import convert
before = resource.getrusage(resource.RUSAGE_SELF)
report = getattr(convert, sys.argv[1])(sys.argv[2], sys.argv[3])
after = resource.getrusage(resource.RUSAGE_SELF)
cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps([report.seconds, after.ru_maxrss * 1024, cpu]))
"""


def run_convert(kind: str, source: Path, destination: Path) -> dict[str, float]:
    """Seconds of the conversion with its flush, seconds with the start of the process, peak RSS in bytes, CPU."""
    began = time.monotonic()
    command = [sys.executable, "-c", CHILD, kind, str(source), str(destination)]
    seconds, rss, cpu = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"ours": seconds, "process": time.monotonic() - began, "rss": rss, "ours_cpu": cpu}


def run_cp(source: Path, destination: Path) -> dict[str, float]:
    """Seconds of `cp -r`, the same with a flush of what it wrote, and its CPU."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "-r", str(source), str(destination)], check=True)
    copied, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    for file in destination.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cp": copied, "cp_flush": time.monotonic() - began, "cp_cpu": cpu}


def measure(kind: str, source: Path, folder: Path, rounds: int) -> dict[str, float]:
    subprocess.run(f"cat {source}/* > /dev/null 2>&1", shell=True, check=False)
    target, found = folder / "out", []
    for _ in range(rounds):
        figures = {}
        for runner in (run_cp, lambda a, b: run_convert(kind, a, b)):
            os.sync()
            figures |= runner(source, target)
            shutil.rmtree(target)
        found.append(figures)
    best = {key: min(figures[key] for figures in found) for key in found[0]}
    return best | {"rss": max(figures["rss"] for figures in found)}


def show(label: str, nbytes: int, m: dict[str, float]) -> None:
    print(
        f"{label:<24}{nbytes / 1e9:6.2f} GB   cp {m['cp']:5.2f} s   cp+flush {m['cp_flush']:5.2f} s   "
        f"convert {m['ours']:5.2f} s ({nbytes / m['ours'] / 1e9:.2f} GB/s, process {m['process']:.2f} s)   "
        f"{m['ours'] / m['cp']:.2f} x cp, {m['ours'] / m['cp_flush']:.2f} x cp+flush   "
        f"CPU {m['cp_cpu']:.1f} s and {m['ours_cpu']:.1f} s   "
        f"peak RSS {m['rss'] / 1e9:.2f} GB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 32], help="sizes to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    args = parser.parse_args()
    for layers in args.layers:
        with tempfile.TemporaryDirectory(prefix="convert-", dir=args.folder) as name:
            folder = Path(name)
            make_model(folder / "hf", layers)
            nbytes = sum(f.stat().st_size for f in (folder / "hf").iterdir())
            show(
                f"hf-to-megatron, {layers} layers",
                nbytes,
                measure("hf_to_megatron", folder / "hf", folder, args.rounds),
            )
            run_convert("hf_to_megatron", folder / "hf", folder / "megatron")
            shutil.rmtree(folder / "hf")
            m = measure("megatron_to_hf", folder / "megatron", folder, args.rounds)
            show(f"megatron-to-hf, {layers} layers", nbytes, m)


if __name__ == "__main__":
    main()
