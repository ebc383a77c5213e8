"""Inputs of on_gpu.py. Those of its group `families`, made from one model and from GSM8K:

    python benchmarks/variants.py yarn MODEL OUT      # the same weights and context length, by YaRN with factor 4
    python benchmarks/variants.py noisy MODEL OUT     # a student for distillation: noise on the weights of all MLPs
    python benchmarks/variants.py tools ROWS OUT      # questions that ask for calculations between << and >>

And that of its measurement `maths`, from the parquet file of DAPO-Math-17k (needs pyarrow):

    python benchmarks/variants.py maths PARQUET DATA  # dapo_math_train.jsonl, and dapo_math_held_out.jsonl with 400

An OUT that exists is replaced.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

HELD_OUT = 400  # problems
NOISE = 0.2  # of a tensor's standard deviation
ASKED = " Write each calculation between << and >>, for example <<48 / 2>>. Its result is then inserted for you."


def yarn(model: Path, out: Path) -> None:
    shutil.copytree(model, out, copy_function=lambda source, target: Path(target).symlink_to(source))
    config = json.loads((model / "config.json").read_text())
    length = config["max_position_embeddings"]
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": length // 4}
    if "rope_parameters" in config:  # how transformers 5 writes it
        config["rope_parameters"] |= scaling
    else:
        config["rope_scaling"] = scaling
    (out / "config.json").unlink()
    (out / "config.json").write_text(json.dumps(config, indent=2))


def noisy(model: Path, out: Path) -> None:
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors"))
    generator = torch.Generator().manual_seed(0)
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, tensor in tensors.items():
            if ".mlp." in name:
                noise = torch.randn(tensor.shape, generator=generator) * (NOISE * float(tensor.float().std()))
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(tensors, out / path.name, metadata={"format": "pt"})


def tools(rows: Path, out: Path) -> None:
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    out.write_text("".join(json.dumps({**row, "question": row["question"] + ASKED}) + "\n" for row in found))


def maths(rows: Path, out: Path) -> None:
    import pyarrow.parquet

    found = {}
    for row in pyarrow.parquet.read_table(rows).to_pylist():
        question, answer = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        found[" ".join(question.split()).casefold()] = {"question": question, "answer": answer}
    lines = [json.dumps(row) + "\n" for row in found.values()]
    random.Random(0).shuffle(lines)
    out.mkdir(parents=True)
    (out / "dapo_math_held_out.jsonl").write_text("".join(lines[:HELD_OUT]))
    (out / "dapo_math_train.jsonl").write_text("".join(lines[HELD_OUT:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["yarn", "noisy", "tools", "maths"])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.out.is_dir():
        if args.out.resolve() == args.source.resolve():
            parser.error("OUT is the source")
        shutil.rmtree(args.out)
    {"yarn": yarn, "noisy": noisy, "tools": tools, "maths": maths}[args.kind](args.source.resolve(), args.out)


if __name__ == "__main__":
    main()
