"""The same GRPO steps with megatron-dapo, TRL and verl on one GPU, in turns: trained tokens/s, and where the time goes.

    python benchmarks/head_to_head.py --model MODEL --data DIR --out OUT --peers trl verl --trl-path T --verl-path V
    python benchmarks/head_to_head.py --smoke --out OUT --peers trl --trl-python PYTHON     # a tiny model on the CPU

Each run is a process of its own; every round runs ours, then each peer. All train on the same 64 GSM8K prompts × 8
samples in each step, in the same order and with the same token ids (asserted), temperature 1, up to 768 new tokens,
bf16, AdamW, group-normalised advantages, clip 0.2 and 0.28, token mean, one grader (peers/grader.py); no KL term, no
dynamic sampling. With `--lr 0` (1e-30: the weights stay as they are) all have the same distribution of lengths: the
clean figure of speed. With others the accuracies on the prompts, which are new in each step, are a second table, with
the minutes it took. The configurations are in benchmarks/peers/. Arguments after `--` go to our SGLang server. Of a
peer that was not installed but unpacked, the folder must have site-packages in its name: datasets, which TRL uses,
pickles modules from elsewhere by value, and pyarrow cannot be. Unpack with unzip: Python's zipfile makes no file
executable, and Ray starts programs.

Times are taken from outside: a step ends when its line appears in the system's own log. Trained tokens/s are the
response tokens in the loss ÷ the time between the line of the last warm-up step and the last line. Memory is what
nvidia-smi shows, CPU seconds are those of all processes of the run. A run that fails is a row with its reason; OUT has
a folder for each (`seen` has its steps as they come), and one that has finished is not repeated.
OUT/head_to_head.json has all step lines.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import psutil
from ablation import split_arguments
from transformers import AutoTokenizer

from megatron_dapo.config import load_config
from megatron_dapo.data import load_prompts, save_arithmetic_tokenizer, write_arithmetic
from megatron_dapo.data.columns import Problem, messages_of, uses_chat
from megatron_dapo.data.run_data import PromptCursor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from systems import (  # noqa: E402
    PEERS,
    System,
    Work,
    our_command,
    our_config,
    our_step,
    trl_command,
    trl_step,
    verl_command,
    verl_prompts,
    verl_step,
)

FROZEN = 1e-30  # stands for learning rate 0: no weight changes
PEER_SYSTEMS = ("trl", "verl")
PHASES = ("generate", "log_probs", "update", "sync")
MARK = "HEAD_TO_HEAD_RUN"
CELL = 3  # steps
ENDING = 15  # seconds in which a run that is done may end by itself
# What megatron-dapo can do beyond the common work, measured apart.
VARIANTS = {
    "ours": [],
    "ours+dynamic": ["rollout.dynamic_sampling=true", "rollout.sampler={}"],
    "ours+ahead": [
        "rollout.servers.share_gpus=false", "rollout.servers.count=2", "rollout.max_staleness=1", "rollout.sampler={}",
        "rollout.servers.max_running=256", "policy.micro_batch_tokens=8192",
    ],
}  # fmt: skip
COLUMNS = {
    "trained": "trained tokens/s", "step": "s a step", "generate": "generate", "log_probs": "log-probs",
    "update": "update", "sync": "sync", "other": "other", "generated": "generated tokens/s", "peak": "peak GiB",
    "cpu": "CPU s a step", "first": "s to the first update", "length": "response tokens", "accuracy": "accuracy",
}  # fmt: skip


def write_prompts(work: Work, data: Path) -> None:
    """The prompts of all steps in our order. verl applies the chat template itself: it must make the same tokens."""
    config = load_config(our_config(work.gpu), [f"policy.model={work.model}", f"data.path={data}"])
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    prompts = PromptCursor(load_prompts(config.data, tokenizer, work.max_prompt_tokens).prompts, work.seed)
    lines, of_verl = [], []
    for prompt in prompts.take(work.steps * work.prompts_per_step):
        question, ids = prompt.question, prompt.tokens.tolist()
        messages = messages_of(Problem(question, prompt.answer), config.data)
        if uses_chat(config.data.template):
            own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
            assert list(own["input_ids"]) == ids, f"verl would make other tokens of {question[:60]!r}"
        row = {"question": question, "answer": prompt.answer, "text": prompt.text, "ids": ids}
        verl = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": prompt.answer}}
        lines.append(json.dumps(row) + "\n")
        of_verl.append(json.dumps({"prompt": messages, **verl}) + "\n")
    Path(work.prompts).write_text("".join(lines))
    verl_prompts(work).write_text("".join(of_verl))


def run_one(system: System, work: Work, folder: Path, limit: float) -> dict[str, Any]:
    """Starts a run, watches its log, its memory and its CPU time, and ends all of its processes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    marked = {MARK: uuid.uuid4().hex}
    environment = os.environ | marked | {
        "PYTHONPATH": os.pathsep.join([str(PEERS), system.path]), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "VERL_FILE_LOGGER_PATH": str(folder / "steps.jsonl"), "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
        "RAY_memory_monitor_refresh_ms": "0",  # it would end workers where memory is added to a machine as it is used
    }  # fmt: skip
    environment.pop("TORCHDYNAMO_DISABLE", None)  # would take fused kernels away: vLLM's, and SwiGLU in our layers
    command, cpu = system.command(work, folder), CpuTime(marked[MARK])
    steps: list[Any] = []
    with ExitStack() as stack:
        log, memory, seen = (stack.enter_context((folder / name).open("w")) for name in ("log", "memory", "seen"))
        poll = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=250"]
        smi = subprocess.Popen(poll, stdout=memory) if shutil.which("nvidia-smi") else None
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True)
        try:
            lines, ended, late = new_lines(folder / system.log), False, False
            while len(steps) < work.steps and not ended and not late:
                time.sleep(0.02)
                ended, late = process.poll() is not None, time.monotonic() - began > limit
                for step in filter(None, map(system.parse, lines())):
                    steps.append({**step, "at": time.monotonic() - began, "cpu": cpu.total()})
                    print(json.dumps(steps[-1]), file=seen, flush=True)
            if not late:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(ENDING)
        finally:
            end(cpu.processes())  # also those that have left the process group, as Ray's do
            process.wait()
            if smi is not None:
                smi.kill()
                smi.wait()
    reason = ""
    if len(steps) < work.steps:
        reason = f"stopped after {limit:.0f} s" if late else last_error((folder / "log").read_text())
    peak = max((float(used) for used in (folder / "memory").read_text().split()), default=0.0) / 1024
    return {"reason": reason, "command": command, "peak": peak, "steps": steps}


def end(processes: list[psutil.Process]) -> None:
    """Kills them and waits until they are gone: the next run needs their memory."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    until = time.monotonic() + 30
    for process in processes:
        with suppress(psutil.Error):
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
                time.sleep(0.05)


def new_lines(file: Path) -> Callable[[], Iterator[dict[str, Any]]]:
    """A function that returns the complete JSON lines that were added to the file since its last call."""
    done = 0

    def read() -> Iterator[dict[str, Any]]:
        nonlocal done
        if file.exists() and file.stat().st_size > done:
            text = file.read_bytes()
            added, done = text[done : text.rfind(b"\n") + 1], text.rfind(b"\n") + 1
            yield from map(json.loads, added.splitlines())

    return read


class CpuTime:
    """CPU seconds of all processes that have the mark of a run in their environment, or a parent that has."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._seconds: dict[tuple[int, float], float] = {}

    def processes(self) -> list[psutil.Process]:
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.ppid() in found or process.environ().get(MARK) == self._mark:
                    found[process.pid] = process
        return list(found.values())

    def total(self) -> float:
        for process in self.processes():
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._seconds[process.pid, process.create_time()] = times.user + times.system
        return sum(self._seconds.values())


def last_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["no output"]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])[:200]


def figures(run: dict[str, Any]) -> dict[str, float] | None:
    """Means of the measured steps; None if there is none."""
    steps, warmup = run["steps"], run["warmup"]
    if len(steps) <= warmup:
        return None
    before, measured = steps[warmup - 1], steps[warmup:]
    wall, count = measured[-1]["at"] - before["at"], len(measured)
    phases = {phase: fmean(step["phases"].get(phase, 0.0) for step in measured) for phase in PHASES}
    tokens, samples = (sum(step[key] for step in measured) for key in ("tokens", "samples"))
    return {
        "steps": count, "step": wall / count, "trained": tokens / wall, **phases,
        "other": wall / count - sum(phases.values()),
        "generated": fmean(step["generated"] for step in measured) / phases["generate"], "peak": run["peak"],
        "cpu": (measured[-1]["cpu"] - before["cpu"]) / count, "first": steps[0]["at"], "length": tokens / samples,
        "accuracy": fmean(step["accuracy"] for step in measured),
    }  # fmt: skip


def table(runs: list[dict[str, Any]]) -> str:
    """One row for each run, then ours ÷ each peer."""
    lines = [f"| system | lr | round | steps | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 4) + "|"]
    speeds: dict[tuple[float, str], dict[int, float]] = {}
    for run in runs:
        cells, reason = [run["system"], f"{run['lr']:g}", str(run["round"])], run["reason"].replace("|", "/")
        if (found := figures(run)) is None:
            lines.append(f"| {' | '.join(cells)} | failed: {reason} |" + " |" * len(COLUMNS))
            continue
        speeds.setdefault((run["lr"], run["system"]), {})[run["round"]] = found["trained"]
        cells.append(f"{found['steps']:.0f}" + (f" ({reason})" if reason else ""))
        lines.append(f"| {' | '.join([*cells, *(number(key, found[key]) for key in COLUMNS)])} |")
    lines += ["", "Means without the warm-up steps. Trained tokens/s, ours ÷ peer:", ""]
    for (lr, system), peer in speeds.items():
        if not system.startswith("ours") and (ours := speeds.get((lr, "ours"))):
            pairs = ", ".join(f"{ours[turn] / peer[turn]:.2f}" for turn in sorted(ours.keys() & peer.keys()))
            ratio = fmean(ours.values()) / fmean(peer.values())
            lines.append(f"- {system}, lr {lr:g}: **{ratio:.2f} ×** (by round: {pairs})")
    return "\n".join(lines) + "\n"


def learning(runs: list[dict[str, Any]]) -> str:
    """Accuracy on prompts that no run has seen before, with the minutes since the start, then ours − peer, step by step
    on the same prompts. A cell is the mean of the last CELL steps, those of the warm-up included: they differ in
    difficulty, so the same minute of two runs, which have other prompts then, is no comparison."""
    runs = [run for run in runs if run["lr"] and len(run["steps"]) >= CELL]
    if not runs:
        return ""
    counts = range(CELL, max(len(run["steps"]) for run in runs) + 1, CELL)
    titles = ["system", "round", *(f"step {count}" for count in counts)]
    lines = ["", f"Accuracy, means of {CELL} steps:", "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for run in runs:
        groups = [run["steps"][n - CELL : n] for n in counts if n <= len(run["steps"])]
        cells = [f"{fmean(s['accuracy'] for s in group):.1%} ({group[-1]['at'] / 60:.1f} min)" for group in groups]
        cells += [""] * (len(counts) - len(cells))
        lines.append(f"| {' | '.join([run['system'], str(run['round']), *cells])} |")
    ours = {(run["lr"], run["round"]): run["steps"] for run in runs if run["system"] == "ours"}
    lines += ["", "Ours − peer, percentage points, mean of the steps ± its standard error:", ""]
    for run in runs:
        steps = ours.get((run["lr"], run["round"]), [])
        if run["system"] in PEER_SYSTEMS and steps:
            gaps = [100 * (a["accuracy"] - b["accuracy"]) for a, b in zip(steps, run["steps"], strict=False)]
            error = stdev(gaps) / len(gaps) ** 0.5
            lines.append(f"- {run['system']}, round {run['round']}: {fmean(gaps):.1f} ± {error:.1f}, {len(gaps)} steps")
    return "\n".join(lines) + "\n"


def number(key: str, value: float) -> str:
    if key in ("trained", "generated"):
        return f"{value:,.0f}"
    return f"{value:.1%}" if key == "accuracy" else f"{value:.2f}" if key in PHASES else f"{value:.1f}"


def smoke_work(out: Path) -> tuple[Work, Path]:
    """The quickstart's model without its pre-training, and its problems."""
    quickstart = runpy.run_path(str(HERE.parent / "examples/quickstart/quickstart.py"))
    quickstart["new_model"](0).save_pretrained(out / "model")
    save_arithmetic_tokenizer(out / "model")
    write_arithmetic(out / "problems.jsonl", quickstart["arithmetic_problems"](quickstart["LEVEL"], 700, seed=0))
    work = Work(
        str(out / "model"), prompts_per_step=8, samples=4, max_prompt_tokens=16, max_response_tokens=8, gpu=False
    )
    return work, out / "problems.jsonl"


def make_systems(args: argparse.Namespace, samples: int) -> dict[str, System]:
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    systems = {
        name: System(
            lambda w, f, more=more: our_command(w, f, [*args.settings, *more]), "run/metrics.jsonl", our_step, path
        )
        for name, more in VARIANTS.items()
    }
    return systems | {
        "trl": System(lambda _, f: trl_command(f, args.trl_python), "steps.jsonl", trl_step, args.trl_path),
        "verl": System(
            lambda w, f: verl_command(w, f, args.verl_python), "steps.jsonl", lambda x: verl_step(x, samples),
            args.verl_path,
        ),
    }  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    own, server = split_arguments()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="HF directory with its tokenizer")
    parser.add_argument("--data", type=Path, help="folder with gsm8k_train.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", nargs="*", choices=PEER_SYSTEMS, default=["trl"])
    parser.add_argument(
        "--apart", nargs="*", choices=list(VARIANTS)[1:], default=[], help="these too, once, at the end"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a run")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them, at least 1")
    parser.add_argument("--updates", type=int, default=1, help="optimizer updates a step")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.0, 2e-6], help="one after the other")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a run")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after MINUTES")
    for peer in PEER_SYSTEMS:
        parser.add_argument(f"--{peer}-python", default=sys.executable, help=f"a Python that has {peer}")
        parser.add_argument(f"--{peer}-path", default="", help=f"PYTHONPATH with {peer}")
        parser.add_argument(f"--{peer}-set", nargs="+", default=[], metavar="KEY=JSON", help=f"options of {peer}")
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", dest="settings", help="options of ours")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args(own)
    args.settings += [f"rollout.servers.arguments={json.dumps(server)}"] if server else []
    return args


def main() -> int:
    args, began = parse_arguments(), time.monotonic()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    work, data = smoke_work(out) if args.smoke else (Work(str(args.model.resolve())), args.data / "gsm8k_train.jsonl")
    work = replace(work, steps=args.steps + args.warmup, updates=args.updates, prompts=str(out / "prompts.jsonl"))
    write_prompts(work, data)
    systems = make_systems(args, work.prompts_per_step * work.samples)
    options = {peer: dict(pair.split("=", 1) for pair in vars(args)[f"{peer}_set"]) for peer in PEER_SYSTEMS}
    plan = [(lr, turn, name) for lr in args.lr for turn in range(args.rounds) for name in ["ours", *args.peers]]
    for lr, turn, name in [*plan, *((args.lr[-1], 0, name) for name in args.apart)]:
        file = out / f"{name}_lr{lr:g}_{turn}" / "run.json"
        done = file.exists() and not json.loads(file.read_text())["reason"]
        if done or time.monotonic() - began > 60 * args.minutes:
            continue
        own = {key: json.loads(value) for key, value in options.get(name, {}).items()}
        found = run_one(systems[name], replace(work, lr=lr or FROZEN, options=own), file.parent, args.limit)
        run = {"system": name, "lr": lr, "round": turn, "warmup": args.warmup, **found}
        file.write_text(json.dumps(run))
        print(table([run]).splitlines()[2], flush=True)
        write_results(out)
    print(write_results(out))
    return 0


def write_results(out: Path) -> str:
    """Of all runs in the folder, also those of earlier commands."""
    runs = [json.loads(file.read_text()) for file in out.glob("*/run.json")]
    runs.sort(key=lambda run: (run["lr"], run["round"], not run["system"].startswith("ours"), run["system"]))
    (out / "head_to_head.json").write_text(json.dumps(runs, indent=1))
    text = table(runs) + learning(runs)
    (out / "head_to_head.md").write_text(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
