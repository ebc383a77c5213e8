"""What servers on the trainer's GPUs would save if they generated while it waits for a batch. No run does this.

    python benchmarks/idle_trainer.py [CONFIG] [--mean-response 2700] [--free]

Simulates every server of a run with servers of its own on the virtual clock of `megatron-dapo simulate`, without and
with helpers: when the trainer waits, its state goes to host memory, and the servers there load the weights and serve;
when the batch is complete they leave, their unfinished samples continue elsewhere, and the trainer takes its GPUs back.
The hand-over and the weights take the seconds that `plan` has for a colocated run; `--free`: they take none.

Printed beside them: how busy the servers are while the trainer works and while it waits, and the least that a step
could take if all GPUs always had work.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from megatron_dapo.config import load_config
from megatron_dapo.observe.timeline import Span
from megatron_dapo.planner.assumptions import DEFAULT_MFU
from megatron_dapo.planner.engine import plan_engine
from megatron_dapo.planner.hardware import Cluster, cluster_of
from megatron_dapo.planner.plan import step_phases, task_of
from megatron_dapo.planner.search import judge
from megatron_dapo.planner.server_model import FleetModel, Sequence, ServerModel
from megatron_dapo.planner.simulation.run import Inputs, Setting, Simulation, _Run, make_setting, run_virtually

T = TypeVar("T")
RECIPE = Path(__file__).resolve().parents[1] / "examples" / "qwen2.5_32b_fast" / "dapo.yaml"
GOAL = 0.08  # of a step, from which it is worth building
# Of an engine that takes its memory again, beside the transfer: 1.6 s for a colocated weight update of 1.5B on an H200,
# less 26 GiB of training state to host memory and the weights (RESULTS.md, examples/gsm8k_1gpu with random weights).
WAKE_SECONDS = 0.8
POLL = 0.05


@dataclass(frozen=True, slots=True)
class Helpers:
    servers: int
    kv_tokens: int
    to_engines: float = 0.0  # seconds: training state to host memory, weights into the engines, engines awake
    to_trainer: float = 0.0


def leave(model: FleetModel, index: int) -> list[Sequence]:
    """The server leaves; its sequences continue elsewhere."""
    moved = model.take_away(index)
    model._dispatch()
    return moved


def come_back(model: FleetModel, index: int) -> None:
    model._dead.remove(index)
    model.servers[index].now = model.now
    model._changed(index)
    model._dispatch()


class HelpedRun(_Run):
    def __init__(self, setting: Setting, steps: int, seed: int, helpers: Helpers | None) -> None:
        super().__init__(setting, steps, seed)
        self.helpers = helpers
        self.indices: list[int] = []

    async def _timed(self, phase: str, work: Coroutine[Any, Any, T]) -> T:
        return await super()._timed(phase, self._helped(work) if phase == "wait" else work)

    async def _helped(self, wait: Coroutine[Any, Any, T]) -> T:
        if self.helpers is not None:
            await self._help(self.helpers)
        while self.batches.empty():
            await asyncio.sleep(POLL)
        return await wait

    async def _help(self, helpers: Helpers) -> None:
        """Until the batch is complete; a hand-over that has begun is finished."""
        engine = self.engine
        if not self.indices:
            self.indices = list(range(len(engine.model.servers), len(engine.model.servers) + helpers.servers))
            for index in self.indices:
                engine.trace.append([(self.clock(), 0)])
                engine.model.join(ServerModel(engine.fleet.decode, helpers.kv_tokens, engine.fleet.max_running))
                leave(engine.model, index)
        await asyncio.sleep(0)
        if not self.batches.empty():
            return
        await asyncio.sleep(helpers.to_engines)
        if self.batches.empty():
            self._change(come_back)
            while self.batches.empty():
                await asyncio.sleep(POLL)
            self._change(leave)
        await asyncio.sleep(helpers.to_trainer)

    def _change(self, change) -> None:  # type: ignore[no-untyped-def]
        self.engine._advance()
        for index in self.indices:
            change(self.engine.model, index)
        self.engine._set_timer()


def simulate(setting: Setting, steps: int, helpers: Helpers | None = None) -> Simulation:
    return run_virtually(HelpedRun(setting, steps, 0, helpers).run())


def make_helpers(inputs: Inputs, whole: Cluster, free: bool) -> Helpers:
    """The trainer's GPUs as those of a colocated run, whose hand-overs and weight updates the planner knows."""
    settings = [*inputs.set, "rollout.max_staleness=0", "rollout.servers.share_gpus=true"]
    config = load_config(inputs.config, [*settings, "rollout.weights.transport=tensor"])
    cluster = replace(whole, gpus=whole.trainer_gpus, engine_gpus=0)
    work = make_setting(inputs, load_config(inputs.config, inputs.set), whole)[0].work
    task = task_of(config, inputs.shape_of(config.policy.model), cluster, work, inputs.mfu)
    engine = plan_engine(task.shape, config.rollout, cluster, work, task.kept)
    phases = step_phases(task, config.rollout, judge(task, config.policy), engine, None)
    seconds = {phase.name: phase.seconds for phase in phases}
    way = seconds["hand-over"] / 2
    if free:
        return Helpers(engine.servers, engine.kv_tokens)
    return Helpers(engine.servers, engine.kv_tokens, way + seconds["weight sync"] + WAKE_SECONDS, way)


def running(found: Simulation, phase: str, servers: range) -> float:
    """Mean running sequences of a server in this phase of the counted steps; 0 if there was none."""
    first = found.steps[-len(found.counted) - 1].ended
    spans = [span for span in found.phases if span.name == phase and span.start >= first]
    return fmean(_mean(found.trace[i], span) for span in spans for i in servers) if spans and servers else 0.0


def _mean(points: list[tuple[float, int]], span: Span) -> float:
    total, last, count = 0.0, span.start, 0
    for seconds, after in points:
        at = min(max(seconds, span.start), span.end)
        total, last, count = total + count * (at - last), at, after
    return (total + count * (span.end - last)) / (span.end - span.start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=str(RECIPE))
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--mean-response", type=int)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--free", action="store_true", help="hand-overs take no time")
    args = parser.parse_args()
    config = load_config(args.config)
    estimates = {} if args.mean_response is None else {"mean_response": args.mean_response}
    cluster = cluster_of(config.slurm, args.gpu)
    inputs = Inputs(args.config, [], {"gpu": args.gpu}, DEFAULT_MFU, estimates, whole=True)
    setting, helpers = make_setting(inputs, config, cluster)[0], make_helpers(inputs, cluster, args.free)
    busy = setting.training_seconds + setting.sync_seconds
    alone, helped = simulate(setting, args.steps), simulate(setting, args.steps, helpers)
    step, servers = alone.step_seconds, setting.fleet.servers
    print(
        f"{servers} servers on {cluster.engine_gpus} GPUs; {helpers.servers} helpers on the trainer's "
        f"{cluster.trainer_gpus}: {helpers.to_engines:.1f} s until they serve, {helpers.to_trainer:.1f} s back"
    )
    while_training, waiting = (running(alone, phase, range(servers)) for phase in ("train", "wait"))
    print(
        f"without      {step:6.0f} s a step: the trainer works {busy:.0f} s and waits {step - busy:.0f} s; on a server "
        f"{while_training:.0f} of {setting.fleet.max_running} requests run meanwhile, and {waiting:.0f} while it waits"
    )
    gain = 1 - helped.step_seconds / step
    on_helper = running(helped, "wait", range(servers, servers + helpers.servers))
    seconds = helped.step_seconds
    print(
        f"with         {seconds:6.0f} s a step: {gain:.1%} less (goal: {GOAL:.0%}); {on_helper:.0f} requests "
        "run on a helper while the trainer waits"
    )
    least = (cluster.engine_gpus * step + cluster.trainer_gpus * busy) / cluster.gpus
    print(f"upper bound  {least:6.0f} s a step: {1 - least / step:.1%} less, if all GPUs always had work")


if __name__ == "__main__":
    main()
