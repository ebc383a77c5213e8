"""Checkpoints of a run: written in the background, complete or absent, checked before they are used.

    checkpoints/step_N/
        policy/          weights and optimizer (Megatron torch_dist, any layout), policy/hf: config and tokenizer
        critic/          the same of the critic, if there is one
        trainer.json     step, data cursor, unfinished and surplus groups, the batch being trained, observers, layout
        trainer.arrays   the numpy arrays of trainer.json
        rng/rank_N.json  random states
        manifest.json    size and CRC-32 of every file

`save` copies the state to host memory and returns; a thread of each rank writes and syncs this rank's files. The
threads use no collectives: a rank hands in its file list as a file of the unfinished checkpoint, and rank 0's thread
publishes when all lists are there. `poll`, at every step, tells all ranks how far the save is. One save runs at a
time: the next one waits for it, and `finish` waits at the end of the run. A killed run leaves an unfinished folder,
which the next start removes. A failed save (a full disk) is reported and leaves the checkpoints before it.

Host memory: each rank keeps a copy of what it writes, about 14 bytes per parameter of a bf16 model divided by TP, PP
and, for 12 of them, DP: 22 GB for 1.5B parameters on one GPU. On a node it is the sum over its ranks.
Colocated training holds another such copy while the engines generate. Where a node has too little memory, all ranks
write from the device instead and the loop waits for the disk; a warning says so.
"""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist

from megatron_dapo import fault_points
from megatron_dapo.checkpoints.files import (
    Cancelled,
    CheckpointFile,
    FileRecord,
    HostBuffers,
    available_host_memory,
    damaged_files,
    write_files,
)
from megatron_dapo.checkpoints.folder import CRITIC, POLICY, CheckpointFolder, checkpoint_name, read_state, state_files
from megatron_dapo.checkpoints.policy_state import DoesNotFit, host_sizes, is_finite, load_policy, policy_files
from megatron_dapo.config import ConfigError
from megatron_dapo.config.trainer import CheckpointConfig
from megatron_dapo.errors import CheckpointError
from megatron_dapo.files import collect, hand_in, is_full
from megatron_dapo.policy.critic import Critic
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.policy.policy import Policy


def random_state() -> dict[str, str]:
    """torch's random states of this rank, as JSON values."""
    state = {"torch": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: dict[str, str]) -> None:
    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    torch.set_rng_state(tensor(state["torch"]))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(tensor(state["cuda"]))


RNG, HANDED_IN = "rng", "written"
Check = Callable[[dict[str, Any]], None]
# Keys of the state that only rank 0 needs.
DRIVER_ONLY = frozenset({"rollouts", "observer", "batches", "next_batch", "batch"})
MEMORY_TO_SPARE = 4 << 30  # on each node, for everything else


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How one save ended; the same on every rank. `error` is None when the checkpoint is published."""

    path: Path
    error: str | None
    waited_seconds: float  # for which the loop stood still in `save`
    seconds: float  # from the call of `save` until the checkpoint was published, or the save was given up
    bytes: int = 0  # of all ranks
    no_room: bool = False  # why it failed


@dataclass(slots=True)
class _Save:
    """A running save on this rank. Its thread sets `error`, `seconds` and `problems`, then `ended`."""

    path: Path
    bytes: int
    began: float
    waited: float = 0.0
    seconds: float = 0.0
    cancel: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    no_room: bool = False
    problems: list[str] = field(default_factory=list)  # that do not concern the new checkpoint


class Checkpoints:
    """The checkpoints of one run. All methods but `set_score` are collective."""

    def __init__(
        self,
        run_dir: str | Path,
        config: CheckpointConfig,
        runtime: Runtime,
        *,
        warn: Callable[[str], None] = lambda line: None,
        mark: Callable[[str], None] = lambda doing: None,
        guard: Callable[[], None] = lambda: None,
        critic: Critic | None = None,
    ) -> None:
        """`warn` is called on rank 0 with what a user should know. `mark` is called while a method waits. `guard` is
        called on rank 0 before a checkpoint is published, which it prevents by raising. `critic` is saved and loaded
        with the policy."""
        self.runtime = runtime
        self._critic = critic
        self._folder = CheckpointFolder(run_dir, config)
        self._warn = warn
        self._mark = mark
        self._guard = guard
        self._buffers = HostBuffers(runtime.device)
        self._critic_buffers = HostBuffers(runtime.device)
        self._running: _Save | None = None
        self._rejected: dict[Path, str] = {}  # checkpoints that cannot be used, and why; the same on every rank
        self._verified: Path | None = None  # its files were read last, and are as they were written
        self._state: dict[str, Any] = {}  # rank 0: of the checkpoint that `newest` returned, until it is loaded

    @property
    def folder(self) -> Path:
        return self._folder.path

    # ---- saving ----

    def save(
        self,
        policy: Policy,
        step: int,
        updates: int | None,
        state: dict[str, Any],
        score: float | None,
        *,
        wait: bool = False,
    ) -> list[SaveReport]:
        """Starts a save; `step` steps are done, and `updates` of the next one (None: the step is complete). Rank 0's
        `state` is saved: JSON values and numpy arrays. A save that is still running is finished first.

        Returns the saves that have ended meanwhile. With `wait` this save is the last of them; otherwise `poll` or
        `finish` returns it later."""
        began = time.monotonic()
        reports = self.finish()
        fault_points.reach("checkpoint/before_stage")
        name = checkpoint_name(step, updates)
        in_background = not wait and self._has_room(policy)
        state = {**state, "step": step, "score": score, "layout": _layout(policy)}
        files = self._files(policy, step, state, self._buffers if in_background else None)
        size, error, no_room = self._prepare(name, sum(file.size for file in files))
        self._running = save = _Save(self.folder / name, size, began, error=error, no_room=no_room)
        if error is None:
            facts = {"version": 1, "step": step, "score": score, "world_size": self.runtime.world_size}
            thread = threading.Thread(target=self._write, args=(save, files, facts), name=f"save {name}", daemon=True)
            thread.start()
        else:
            save.ended.set()
        if not in_background:
            self._await_end(save)
        save.waited = time.monotonic() - began
        return reports if in_background and error is None else [*reports, *self.poll()]

    def poll(self) -> list[SaveReport]:
        """The running save, if it has ended. Does not wait for it; call it at every step."""
        save = self._running
        return [self._conclude(save)] if save is not None and self._has_ended(save) else []

    def finish(self) -> list[SaveReport]:
        """Waits for the running save, if there is one, and returns it."""
        if (save := self._running) is None:
            return []
        self._await_end(save)
        return [self._conclude(save)]

    def _conclude(self, save: _Save) -> SaveReport:
        self._running = self._verified = None
        results = self.runtime.gather((save.error, save.seconds, save.no_room))
        failed = [(rank, error) for rank, (error, *_) in enumerate(results) if error]
        no_room = any(result[2] for result in results)
        error = None
        if failed:
            error = failed[0][1] if self.runtime.world_size == 1 else f"rank {failed[0][0]}: {failed[0][1]}"
        if self.runtime.rank == 0:
            for line in save.problems:
                self._warn(line)
            if failed:
                self._folder.discard(save.path.name)
        return SaveReport(save.path, error, save.waited, results[0][1], save.bytes, no_room)

    def set_score(self, step: int, score: float) -> None:
        """Rank 0 only. The score of the checkpoint of `step`, known only after the evaluation that follows its save.
        The checkpoint may not be published yet."""
        for problem in self._folder.set_score(checkpoint_name(step, None), score):
            self._warn(problem)

    def _await_end(self, save: _Save) -> None:
        """Short collectives, however long the writing takes: a rank that is gone is found within their timeout."""
        pause = 0.01
        while not self._has_ended(save):
            self._mark(f"writing {save.path.name}")
            save.ended.wait(pause)
            pause = min(1.0, 2 * pause)

    def _has_ended(self, save: _Save) -> bool:
        """Collective. Whether the threads of all ranks have ended; rank 0's ends last. One failure cancels the rest."""
        flags = torch.tensor([save.error is not None, not save.ended.is_set()], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.runtime.control)
        any_failed, any_running = flags.tolist()
        if any_failed:
            save.cancel.set()
        return not any_running

    def _has_room(self, policy: Policy) -> bool:
        """Whether every node has memory for the copies of its ranks. The same on every rank."""
        missing = self._buffers.missing(host_sizes(policy))
        if self._critic is not None:
            missing += self._critic_buffers.missing(host_sizes(self._critic))
        ranks = self.runtime.gather((socket.gethostname(), missing, available_host_memory()))
        for node in sorted({host for host, _, _ in ranks}):
            needed = sum(missing for host, missing, _ in ranks if host == node)
            free = min(free for host, _, free in ranks if host == node)
            if needed and needed + MEMORY_TO_SPARE > free:
                if self.runtime.rank == 0:
                    self._warn(
                        f"checkpoints are not written in the background: {node} has {free / 1e9:.1f} GB of memory "
                        f"free, the copies need {needed / 1e9:.1f} GB and {MEMORY_TO_SPARE / 1e9:.1f} GB to spare"
                    )
                return False
        return True

    def _files(
        self, policy: Policy, step: int, state: dict[str, Any], buffers: HostBuffers | None
    ) -> list[CheckpointFile]:
        files = policy_files(policy, buffers, step)
        for file in files:
            file.name = f"{POLICY}/{file.name}"
        if self._critic is not None:
            copied = buffers is not None or self._critic.takes_turns  # its memory on the device is given up again
            with self._critic.turn():
                found = policy_files(self._critic, self._critic_buffers if copied else None, step)
            for file in found:
                file.name = f"{CRITIC}/{file.name}"
            files += found
        files.append(CheckpointFile(f"{RNG}/rank_{self.runtime.rank}.json", [orjson.dumps(random_state())]))
        return [*files, *state_files(state)] if self.runtime.rank == 0 else files

    def _prepare(self, name: str, size: int) -> tuple[int, str | None, bool]:
        """Bytes of all ranks; and why the checkpoint cannot be written, if it cannot, and whether room is missing."""
        total = torch.tensor([size], dtype=torch.int64)
        dist.all_reduce(total, group=self.runtime.control)
        error: list[Any] = [None, False]
        if self.runtime.rank == 0:
            try:
                self._folder.prepare(name, int(total.item()))
            except (OSError, CheckpointError) as found:
                error = [str(found), is_full(found)]
        dist.broadcast_object_list(error, src=0, group=self.runtime.control)
        return int(total.item()), error[0], error[1]

    # ---- in the thread of a save ----

    def _write(self, save: _Save, files: Sequence[CheckpointFile], facts: dict[str, Any]) -> None:
        building = self._folder.building(save.path.name)
        try:
            fault_points.reach("checkpoint/before_write")
            written = write_files(building, files, cancelled=save.cancel.is_set)
            fault_points.reach("checkpoint/after_write")
            if self.runtime.rank != 0:
                self._hand_in(building, written)
            elif self._collect(building, written, save.cancel):
                self._guard()
                self._folder.publish(save.path.name, written, facts)
                save.problems = self._folder.prune()
        except Cancelled:
            pass
        except Exception as error:
            save.error = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            save.no_room = is_full(error)
        finally:
            save.seconds = time.monotonic() - save.began
            save.ended.set()

    def _hand_in(self, building: Path, written: dict[str, FileRecord]) -> None:
        folder = building / HANDED_IN
        folder.mkdir(exist_ok=True)
        hand_in(folder, self.runtime.rank, {name: record.to_json() for name, record in written.items()})

    def _collect(self, building: Path, written: dict[str, FileRecord], cancel: threading.Event) -> bool:
        """Adds the other ranks' files to `written` as soon as they are handed in. False if the save is given up."""
        missing = self.runtime.world_size - 1
        for _, records in collect(building / HANDED_IN, self.runtime.world_size, cancel.wait):
            written |= {name: FileRecord.from_json(record) for name, record in records.items()}
            missing -= 1
        shutil.rmtree(building / HANDED_IN, ignore_errors=True)
        return not missing

    # ---- loading ----

    def newest(self, check: Check = lambda state: None) -> Path | None:
        """The newest checkpoint whose files are as they were written and whose state passes `check`; the same on every
        rank, and each rank reads a part of the files. `check`, on rank 0, raises where a run could not be resumed with
        the state. Newer checkpoints that cannot be used are named and renamed. If none can be used, nothing is
        renamed, and it is a ConfigError: the next start would begin from nothing."""
        if self.runtime.rank == 0:
            self._folder.clean_up()
        while (path := self._first_candidate()) is not None:
            problems = self._problems(path) or self._check_state(path, check)
            if not problems:
                self._set_rejected_aside()
                return path
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            self._rejected[path] = f"{path} is damaged: {problems[0]}{more}"
        if self._rejected:
            raise ConfigError(
                f"no checkpoint in {self.folder} can be used: {'; '.join(self._rejected.values())}. Restore one, or "
                "choose another trainer.run_dir"
            )
        return None

    def _first_candidate(self) -> Path | None:
        found: list[Any] = [None, None]
        if self.runtime.rank == 0:
            try:
                left = [path for path in self._folder.complete() if path not in self._rejected]
                found[0] = left[-1] if left else None
            except CheckpointError as error:
                found[1] = str(error)
        dist.broadcast_object_list(found, src=0, group=self.runtime.control)
        if found[1] is not None:
            raise ConfigError(found[1])
        return found[0]

    def _set_rejected_aside(self) -> None:
        error: Exception | None = None
        for path, line in self._rejected.items() if self.runtime.rank == 0 else ():
            try:
                now = self._folder.set_aside(path)
                self._warn(f"{line}. It is now {now.name}; the checkpoint before it is used")
            except OSError as found:
                error = CheckpointError(f"{line}. It cannot be renamed ({found.strerror}); remove it")
        self._rejected.clear()
        self.runtime.raise_together(error, "looking for a checkpoint")

    def _problems(self, path: Path) -> list[str]:
        """What is wrong with the files of a checkpoint; nothing if they were verified before."""
        if path == self._verified:
            return []
        found: list[Any] = [{}, []]
        if self.runtime.rank == 0:
            try:
                found[0] = self._folder.files_of(path)
            except CheckpointError as error:
                found[1] = [str(error)]
        dist.broadcast_object_list(found, src=0, group=self.runtime.control)
        files, problems = found
        if problems:
            return problems
        largest_first = sorted(files, key=lambda name: (-files[name].bytes, name))
        mine = largest_first[self.runtime.rank :: self.runtime.world_size]
        damaged = damaged_files(path, {name: files[name] for name in mine})
        problems = [line for part in self.runtime.gather(damaged) for line in part]
        self._verified = self._verified if problems else path
        return problems

    def is_good(self, path: Path) -> bool:
        """Whether all files of a checkpoint are on disk as they were written."""
        return not self._problems(path)

    def _check_state(self, path: Path, check: Check) -> list[str]:
        """A state that cannot be restored would end every start of the run."""
        found: list[Any] = [[], None]
        if self.runtime.rank == 0:
            try:
                self._state = read_state(path)
                check(self._state)
                if self._critic is not None and not (path / CRITIC).is_dir():
                    raise ConfigError(
                        f"{path} has no critic, which algorithm.advantage needs: use another trainer.run_dir"
                    )
            except ConfigError as error:
                found[1] = str(error)
            except Exception as error:
                found[0] = [f"its state cannot be restored: {type(error).__name__}: {error}"]
        dist.broadcast_object_list(found, src=0, group=self.runtime.control)
        if found[1] is not None:
            raise ConfigError(found[1])
        return found[0]

    def load(self, policy: Policy, path: Path, check: Check = lambda state: None) -> tuple[Path, dict[str, Any]]:
        """Restores policy and random states from `path`, which `newest` has returned, or if its weights cannot be used
        from one before it. Returns which it was, and the rest of the state. Only rank 0 reads it and has all of it; on
        the other ranks the values of `DRIVER_ONLY`, the bulk, are None."""
        while True:
            state, problem = self._load(policy, path)
            if problem is None:
                self._set_rejected_aside()
                return path, state
            self._rejected[path] = f"{path} is damaged: {problem}"
            before = self.newest(check)
            assert before is not None, "newest raises when it has rejected all"
            path = before

    def _load(self, policy: Policy, path: Path) -> tuple[dict[str, Any], str | None]:
        """The state, and why the weights cannot be used, the same on every rank."""
        state, self._state = self._state, {}
        shared = [_without_driver_only(state)]
        dist.broadcast_object_list(shared, src=0, group=self.runtime.control)
        if self.runtime.rank != 0:
            state = shared[0]
        _check_layout(state["layout"], _layout(policy), path)
        problem: str | None = None
        fits = True
        try:
            load_policy(policy, path / POLICY)
            if self._critic is not None:
                with self._critic.turn():
                    load_policy(self._critic, path / CRITIC)
                    if not is_finite(self._critic):
                        problem = "the critic's weights or its optimizer state are not finite"
            mine = path / RNG / f"rank_{self.runtime.rank}.json"
            if state["layout"]["world_size"] == self.runtime.world_size and mine.exists():
                set_random_state(orjson.loads(mine.read_bytes()))
            if not is_finite(policy):
                problem = "its weights or its optimizer state are not finite"
        except Exception as error:
            fits = not isinstance(error, DoesNotFit)
            problem = (f"{type(error).__name__}: {error}" if fits else str(error)).splitlines()[0]
        found = self.runtime.gather((fits, problem))
        fits, problem = min(((fits, line) for fits, line in found if line), default=(True, None))
        if not fits:  # nor would an earlier one
            raise ConfigError(f"cannot resume: {problem}. Use the saved settings, or another trainer.run_dir")
        return state, problem


def _without_driver_only(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {key: None if key in DRIVER_ONLY else _without_driver_only(value) for key, value in state.items()}


def _layout(policy: Policy) -> dict[str, Any]:
    options = policy.config.policy
    return {"world_size": policy.runtime.world_size, "distributed_optimizer": options.distributed_optimizer}


def _check_layout(saved: dict[str, Any], ours: dict[str, Any], path: Path) -> None:
    """TP, PP, CP, DP and EP may change between save and load; this decides how the optimizer is written."""
    if saved["distributed_optimizer"] != ours["distributed_optimizer"]:
        raise ConfigError(
            f"{path} was saved with policy.distributed_optimizer {saved['distributed_optimizer']}, this run has "
            f"{ours['distributed_optimizer']}. The optimizer state cannot be converted; use the saved setting"
        )
