"""Random faults at random moments of random runs, judged against undisturbed runs.

    python benchmarks/chaos.py [--minutes 5] [--faults 300] [--seed 0]

Tiny runs of four steps (one process, two ranks, batches generated ahead, rare checkpoints, external servers) start with
a random fault that waits for a random arrival at a fault point: signals, kill −9 of each kind of process, a full disk,
failing graders and server replies, a clock that jumps. Between two starts the run directory may be damaged. After some
faults the run is left alone until it has finished. Every number must then be that of the undisturbed run, and no sample
may be lost. Metrics that count faults, and those of the wall clock, are not compared. Only the ledger is compared after
a grader that raises or returns NaN, and after a stop of a run that generates ahead: the batch ahead is completed with
newer weights then (docs/cluster.md). Prints the kinds of faults, how often each happened, and how many numbers differ
and samples were lost, which must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from fake_server import FakeServer, changed, response_of  # noqa: E402
from forked import fail_with, records, send_signal  # noqa: E402
from forked import run as run_forked  # noqa: E402
from kills import differing  # noqa: E402
from tiny_run import environment, evaluated_config  # noqa: E402

from megatron_dapo import fault_points  # noqa: E402
from megatron_dapo.config import check_config, parse_config  # noqa: E402
from megatron_dapo.data import arithmetic_tokenizer  # noqa: E402
from megatron_dapo.evaluation import Evaluation  # noqa: E402
from megatron_dapo.observe.metrics_file import AppendFile  # noqa: E402
from megatron_dapo.processes.fork_ranks import run_ranks  # noqa: E402
from megatron_dapo.trainer.loop import train  # noqa: E402

STEPS = 4
SERVERS = 2
FAULTS_PER_RUN = 16
FAULTS_PER_START = 5  # planted, besides one that ends the run and prevents the later ones
ENDS = {0, 1, 75, 130, -signal.SIGKILL}  # exit codes that a fault may cause; 2 and 76 (hung) are failures
ENDING = ("kill -9 at", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT")  # faults that end a run
COUNTERS = ("errors", "retries", "restarts", "attempts", "rejected_replies", "rejected_grades")
Action = Callable[[], Any]
NOTHING = "nothing happened"

# ---- configurations ----


def make_config(kind: str, folder: Path, run_dir: Path, ports: list[int]) -> dict[str, Any]:
    raw = evaluated_config(folder, run_dir, STEPS, trainer__heartbeat={"every": 1.0, "silent": 60, "stuck": 120},
                           rollout__sampler={"stall_timeout": 100})  # fmt: skip
    raw["reward"] |= {
        "grader": "python:chaos_reward.even_characters",
        "stuck_seconds": 3,
        "retries": 9,
        "environment": ["CHAOS"],
    }
    raw["observe"]["samples_every"] = 1
    if kind == "rare checkpoints":
        raw["trainer"]["checkpoint"]["every"] = 2
    elif kind == "ahead":
        raw["rollout"] |= {"max_staleness": 1, "weights": {"in_flight": False}}
    elif kind == "two ranks":
        raw["policy"]["tensor_parallel"] = raw["trainer"]["ranks"] = 2
    elif kind == "servers":
        raw["trainer"]["gate"] = {"enabled": False}
        raw["rollout"] |= {
            "engine": "sglang", "weights": {"transport": "disk", "directory": str(folder), "timeout": 30},
            "servers": {"urls": [f"http://127.0.0.1:{port}" for port in ports], "heartbeat": 1, "start_timeout": 60,
                        "sample_timeout": 2, "control_timeout": 10, "attempts": 20},
        }  # fmt: skip
    return raw


LEDGER_ONLY = "ungraded"  # a response without a grade changes all that follows
STOPPED = {"exit code 75", "exit code 130"}
KINDS = ("plain", "rare checkpoints", "ahead", "two ranks", "servers", LEDGER_ONLY)


def _rank(rendezvous: Any, raw: dict[str, Any], plant: Action, where: int) -> int:
    os.environ.update(environment())
    if rendezvous.rank == where:
        plant()
    config = parse_config(raw)
    return train(config, check_config(config, rendezvous.world_size), rendezvous)


def run(kind: str, raw: dict[str, Any], plant: Action, where: int = 0) -> int:
    """Exit code. `where`: the rank that has the fault."""
    if kind != "two ranks":
        return run_forked(raw, plant)

    def main() -> None:
        sys.exit(max(run_ranks(2, _rank, raw, plant, where)))

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    process.join(300)
    assert process.exitcode is not None, "the ranks did not end"
    return process.exitcode


# ---- faults of the trainer's process, each with the points at which it may happen ----


def stop_and_continue() -> None:
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_child(word: str) -> Action:
    def action() -> Any:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(word in part for part in child.cmdline()):
                    child.kill()
                    return None
        return NOTHING

    return action


def jump_clock(seconds: float) -> Action:
    def action() -> None:
        now = time.time
        time.time = lambda: now() + seconds

    return action


def no_room(write: str, times: int = 3) -> Action:
    """The next writes of this kind fail: a name of a file, or `evaluation`."""

    def action() -> None:
        left = [times]

        def failing(original: Any, is_meant: Callable[..., bool]) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                if left[0] and is_meant(*args):
                    left[0] -= 1
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return original(*args, **options)

            return call

        if write == "evaluation":
            Evaluation.write = failing(Evaluation.write, lambda *args: True)  # type: ignore[method-assign]
        else:
            meant = lambda self, block: write in str(self.path)  # noqa: E731
            AppendFile.write = failing(AppendFile.write, meant)  # type: ignore[method-assign]

    return action


def leave(folder: Path, name: str) -> Action:
    """For the servers and graders, which look here: the next of them that finds the file fails."""
    return lambda: (folder / name).write_text("x") and None


def log_probs(response: dict[str, Any]) -> list[Any]:
    found: list[Any] = response["meta_info"]["output_token_logprobs"]
    return found


ROLLOUT = ("rollouts/before_collect", "rollouts/sampling", "rollouts/before_grade")
LOOP = ("loop/before_log_probs", "loop/before_update", "loop/before_sync", "sync/before_bucket")
SAVE = ("checkpoint/before_stage", "checkpoint/before_write", "checkpoint/write_file", "checkpoint/after_write",
        "checkpoint/before_publish", "checkpoint/before_prune")  # fmt: skip
OFTEN = {"rollouts/sampling": 60, "rollouts/before_grade": 60, "checkpoint/write_file": 25, "rollouts/evaluating": 30}
GRADER = ("grader raises", "grader exits", "grader hangs", "grader returns NaN")
CALLS = ("pause_generation", "update_weights_from_disk", "update_weight_version", "continue_generation", "flush_cache")
DROPPED, KILLED = "broken connection: ", "kill -9 of a server"
UNGRADED = ("grader raises", "grader returns NaN")
LEDGER = ("rollout/samples_trained", "rollout/groups_kept", "train/updates")
REPLIES: dict[str, Any] = {
    "reply 500": lambda server, body: web.json_response({}, status=500),
    "reply 503": lambda server, body: web.json_response({}, status=503),
    "reply 429": lambda server, body: web.json_response({}, status=429, headers={"Retry-After": "1"}),
    "reply cut": lambda server, body: "truncate",
    "reply of no JSON": changed(lambda response: "<html>"),
    "reply that is empty": changed(lambda response: ""),
    "reply without log-probs": changed(lambda response: response["meta_info"].pop("output_token_logprobs") and None),
    "reply with NaN log-probs": changed(lambda r: log_probs(r)[0].__setitem__(0, float("nan"))),
    "reply with too few log-probs": changed(lambda r: log_probs(r).pop() and None),
    "reply of another version": changed(lambda r: r["meta_info"].update(weight_version="999")),
    "reply without a finish reason": changed(lambda r: r["meta_info"].pop("finish_reason") and None),
    "reply with a negative token": changed(lambda r: r["output_ids"].__setitem__(0, -5)),
    "slow reply": lambda server, body: asyncio.sleep(3),
}  # fmt: skip


def trainer_faults(folder: Path) -> dict[str, tuple[tuple[str, ...], Action]]:
    """By name: where it may happen, and what happens."""
    full = fail_with(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    found: dict[str, tuple[tuple[str, ...], Action]] = {
        f"kill -9 at {point}": ((point,), fault_points.kill) for point in fault_points.POINTS
    }
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
        found[signal.Signals(number).name] = ROLLOUT + LOOP + SAVE[:1], send_signal(number, 1.0)
    found |= {f"disk full at {point}": ((point,), full) for point in SAVE[1:5]}
    for name in ("metrics.jsonl", "trainer.log", "warnings.log", "evaluation"):
        found[f"disk full at {name}"] = (*ROLLOUT, *LOOP), no_room(name)
    found["SIGSTOP, SIGCONT"] = (*ROLLOUT, *LOOP, *SAVE), stop_and_continue
    found["kill -9 of a grading process"] = ROLLOUT, kill_child("reward.worker")
    found["kill -9 of a supervisor"] = ROLLOUT, kill_child("supervisor")
    found["kill -9 of a client process"] = ROLLOUT, kill_child("client_worker")
    found["clock a day ahead"] = (*ROLLOUT, *LOOP), jump_clock(86400)
    found["clock a day back"] = (*ROLLOUT, *LOOP), jump_clock(-86400)
    found |= {name: (ROLLOUT[:2], leave(folder, name)) for name in GRADER}
    return found


def server_faults(folder: Path) -> dict[str, tuple[tuple[str, ...], Action]]:
    found: dict[str, tuple[tuple[str, ...], Action]] = {name: (ROLLOUT[:2], leave(folder, name)) for name in REPLIES}
    found |= {DROPPED + path: (LOOP, leave(folder, DROPPED + path)) for path in CALLS}
    found[KILLED] = (*ROLLOUT, *LOOP), leave(folder, KILLED)
    return found


# ---- damage between two starts ----


def newest(run_dir: Path) -> Path | None:
    found = list((run_dir / "checkpoints").glob("step_*[0-9]"))
    return max(found, key=lambda path: path.stat().st_mtime) if len(found) > 1 else None  # one good one must be left


def change(file: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], bool]:
    def damage(run_dir: Path) -> bool:
        path = newest(run_dir)
        if path is None:
            return False
        (path / file).write_bytes(edit((path / file).read_bytes()))
        return True

    return damage


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def put(name: str, content: bytes, mode: str = "wb") -> Callable[[Path], bool]:
    def damage(run_dir: Path) -> bool:
        path = run_dir / name
        if path.is_dir():
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode) as file:
            file.write(content)
        return True

    return damage


def remove(path: Path) -> bool:
    path.unlink()
    return True


DAMAGE: dict[str, Callable[[Path], bool]] = {
    "newest checkpoint: a flipped bit": change("policy/__0_0.distcp", flip),
    "newest checkpoint: a cut file": change("policy/common.pt", lambda content: content[: len(content) // 2]),
    "newest checkpoint: no manifest": lambda d: (p := newest(d)) is not None and remove(p / "manifest.json"),
    "newest checkpoint: a state of garbage": change("trainer.json", lambda content: b"garbage"),
    "metrics.jsonl: a line of garbage": put("metrics.jsonl", b"garbage\n", "ab"),
    "metrics.jsonl: half a line": put("metrics.jsonl", b'{"step": 3, "ki', "ab"),
    "a file with the name of a checkpoint": put("checkpoints/step_99", b"x"),
    "a file with the name of an unfinished checkpoint": put("checkpoints/.step_4.tmp", b"x"),
    "resume.json is garbage": put("resume.json", b"{"),
    "scores.json is garbage": put("checkpoints/scores.json", b"{"),
}


# ---- servers, and a grader, that fail when they find a file ----


def take(folder: Path, name: str) -> bool:
    try:
        (folder / name).unlink()
        return True
    except FileNotFoundError:
        return False


class ChaosServer(FakeServer):
    """Its responses depend on the seed of the request alone."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        super().__init__(fault=self._fault)
        self.folder, self.vocabulary = folder, vocabulary

    def _fault(self, server: FakeServer, body: dict[str, Any]) -> Any:
        if take(self.folder, KILLED):
            os._exit(9)
        for name, fault in REPLIES.items():
            if take(self.folder, name):
                return fault(server, body)
        return None

    async def _reply(self, path: str, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if take(self.folder, DROPPED + path.strip("/")):
            return self._break(request)
        if path == "/server_info":
            info = {"version": "0.5.23", "tp_size": 1, "context_length": 4096, "enable_deterministic_inference": True}
            return web.json_response(info)
        return await super()._reply(path, request, body)

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        reply = await super()._generate(request, body)
        seed = body["sampling_params"].get("sampling_seed", 0)
        if not isinstance(reply, web.Response) or reply.status != 200 or not isinstance(reply.text, str):
            return reply
        content = json.loads(reply.text) if reply.text.startswith("{") else {}
        if content == response_of(8, "stop", self.label, seed):
            chance = random.Random(seed)
            tokens = [chance.randrange(3, self.vocabulary) for _ in range(8)]
            content["output_ids"] = tokens
            for entry, token in zip(log_probs(content), tokens, strict=True):
                entry[1] = token
            return web.json_response(content)
        return reply


def serve(folder: Path, port: int, vocabulary: int) -> None:
    """Starts the server again whenever it has ended."""

    async def main() -> None:
        await ChaosServer(folder, vocabulary).start(port)
        await asyncio.Event().wait()

    while True:
        process = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(main()), daemon=True)
        process.start()
        process.join()


GRADER_CODE = """
import os, time
from pathlib import Path
from tiny_reward import even_characters as good

def even_characters(prompt, response):
    for name in ("grader raises", "grader exits", "grader hangs", "grader returns NaN"):
        try:
            (Path(os.environ["CHAOS"]) / name).unlink()
        except FileNotFoundError:
            continue
        if name == "grader raises":
            raise RuntimeError("planted")
        if name == "grader exits":
            os._exit(3)
        if name == "grader hangs":
            time.sleep(60)
        return float("nan")
    return good(prompt, response)
"""


# ---- the benchmark ----


def numbers(run_dir: Path) -> dict[tuple[int, str, str], Any]:
    found = records(run_dir)
    return {
        (step, kind, name): value
        for step, kind, metrics in found
        for name, value in metrics.items()
        if not name.endswith(COUNTERS) and not name.startswith("reward/ungraded")
    }


def lost_samples(found: dict[tuple[int, str, str], Any]) -> int:
    """Samples that entered a step and did not leave it, or left it twice."""
    signs = {"submitted": 1, "carried_in": 1, "trained": -1, "dropped": -1, "failed": -1, "carried_over": -1}
    return sum(
        abs(int(sum(sign * found[step, "step", f"rollout/samples_{name}"] for name, sign in signs.items())))
        for step in range(1, STEPS + 1)
    )


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [found.getsockname()[1] for found in sockets]


def disturbed(
    kind: str, raw: dict[str, Any], folder: Path, chance: random.Random, done: Counter[str], tried: Counter[str]
) -> tuple[bool, list[str]]:
    """One run with faults, to its end. Whether it finished, and what happened."""
    run_dir, signs = Path(raw["trainer"]["run_dir"]), folder / "signs"
    faults = trainer_faults(signs) | (server_faults(signs) if kind == "servers" else {})
    if kind != LEDGER_ONLY:
        faults = {name: fault for name, fault in faults.items() if name not in UNGRADED}
    history: list[str] = []
    while len(history) < FAULTS_PER_RUN:
        planned = {}
        for name in rarest(faults, tried, chance):
            points, action = faults[name]
            point = chance.choice(points)
            planned[name] = point, chance.randrange(1, OFTEN.get(point, STEPS + 1)), action
        where = 0 if any(point in ROLLOUT for point, _, _ in planned.values()) else chance.randrange(2)
        code = run(kind, raw, partial(plant, planned, folder / "fired"), where)
        unseen = {sign.name for sign in signs.iterdir()}
        for fired in sorted((folder / "fired").iterdir()):
            name = fired.read_text()
            fired.unlink()
            if name not in unseen:
                done[name] += 1
                history.append("{} at {}, arrival {}".format(name, *planned[name][:2]))
        for sign in signs.iterdir():
            sign.unlink()
        history.append(f"exit code {code}")
        if code not in ENDS or code == 0:
            return code == 0, history
        if chance.random() < 0.4:
            damage = min(chance.sample(list(DAMAGE), 3), key=done.__getitem__)
            if DAMAGE[damage](run_dir):
                done[damage] += 1
                history.append(damage)
    code = run(kind, raw, lambda: None)
    return code == 0, [*history, f"left alone: exit code {code}"]


def rarest(faults: dict[str, Any], tried: Counter[str], chance: random.Random) -> list[str]:
    """A few of those that were planted least, so that all of them happen; one of them ends the run."""
    mixed = sorted(chance.sample(list(faults), len(faults)), key=lambda name: tried[name])
    ending = [name for name in mixed if name.startswith(ENDING)]
    chosen = [*ending[:1], *[name for name in mixed if name not in ending][:FAULTS_PER_START]]
    tried.update(chosen)
    return chosen


def plant(planned: dict[str, tuple[str, int, Action]], fired: Path) -> None:
    for index, (name, (point, count, action)) in enumerate(planned.items()):

        def fire(action: Action = action, name: str = name, index: int = index) -> None:
            (fired / str(index)).write_text(name)
            if action() is NOTHING:
                (fired / str(index)).unlink()

        fault_points.on(point, fire, count=count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--faults", type=int, default=10**6, help="stop after this many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="configurations, separated by commas")
    args = parser.parse_args()
    chance, done, wrong, failures, runs = random.Random(args.seed), Counter[str](), 0, [], Counter[str]()
    compared = lost = by_ledger = 0
    tried: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = Path(temporary)
        (folder / "signs").mkdir()
        (folder / "fired").mkdir()
        (folder / "chaos_reward.py").write_text(GRADER_CODE)
        os.environ |= {"CHAOS": str(folder / "signs"), "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
        sys.path.insert(0, str(folder))
        ports, vocabulary = free_ports(SERVERS), len(arithmetic_tokenizer())
        keepers = [
            multiprocessing.get_context("fork").Process(target=serve, args=(folder / "signs", port, vocabulary))
            for port in ports
        ]
        for keeper in keepers:
            keeper.start()
        log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            expected: dict[str, Any] = {}
            make = partial(make_config, folder=folder / "model", ports=ports)
            while time.monotonic() - began < 60 * args.minutes and done.total() < args.faults:
                kind = chance.choice(args.kinds.split(","))
                with output_to(log):
                    if kind not in expected:
                        straight = folder / f"straight {kind}"
                        if run(kind, make(kind, run_dir=straight), lambda: None) != 0:
                            raise SystemExit(f"the undisturbed run failed: {(folder / 'log').read_text()[-3000:]}")
                        expected[kind] = numbers(straight)
                    runs[kind] += 1
                    run_dir = folder / f"{kind} {runs[kind]}"
                    finished, history = disturbed(kind, make(kind, run_dir=run_dir), folder, chance, done, tried)
                if not finished:
                    failures.append(f"{kind} {runs[kind]}: {'; '.join(history)}")
                    print(failures[-1], (folder / "log").read_text(errors="replace")[-3000:], sep="\n", flush=True)
                    continue
                found, wanted = numbers(run_dir), expected[kind]
                lost += lost_samples(found)
                if kind == LEDGER_ONLY or (kind == "ahead" and STOPPED & set(history)):
                    by_ledger += 1
                    found, wanted = ({key: x for key, x in one.items() if key[2] in LEDGER} for one in (found, wanted))
                differ = differing(found, wanted)
                wrong += len(differ)
                if differ:
                    print(f"{kind} {runs[kind]}: {'; '.join(history)}: {differ}")
                compared += len(wanted)
                print(f"{kind} {runs[kind]}: {sum(done.values())} faults of {len(done)} kinds so far, "
                      f"{len(differ)} differing numbers", flush=True)  # fmt: skip
                shutil.rmtree(run_dir, ignore_errors=True)
        finally:
            for keeper in keepers:
                for process in psutil.Process(keeper.pid).children(recursive=True):
                    process.kill()
                keeper.kill()
    for name, count in sorted(done.items()):
        print(f"{count:4} {name}")
    minutes = (time.monotonic() - began) / 60
    ended = sum(count for name, count in done.items() if name.startswith(ENDING))
    print(f"{ended} of the faults ended a run; {by_ledger} runs were compared by their ledger only")
    print(f"{sum(done.values())} faults of {len(done)} kinds in {sum(runs.values())} runs and {minutes:.1f} minutes: "
          f"{wrong} of {compared} numbers differ, {lost} samples were lost, {len(failures)} runs failed "
          f"(load average {os.getloadavg()[2]:.1f})")  # fmt: skip
    return int(bool(wrong or lost or failures))


@contextlib.contextmanager
def output_to(file: int) -> Any:
    """What the runs print."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        yield
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)


if __name__ == "__main__":
    sys.exit(main())
