"""Brings one server in and keeps it working: checks it, restarts it when it fails, and lets it serve only with the
current weights.

A server fails when its process ends, when its HTTP server does not reply, when it generates no token, or when the
engine reports a failed control call. After a failed control call, a server that still replies is admitted again as it
is; otherwise, or if that fails, it is restarted. A budget limits the restarts; it refills while the server works.
A server that was given up is used again: one that cannot be restarted when it replies, another after a restart that is
tried every `restart_recovery` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.engine import SGLangEngine
from megatron_dapo.engines.sglang.http import ServerFailure, nobody_listens
from megatron_dapo.engines.sglang.server_process import ExternalServer, ServerProcess
from megatron_dapo.engines.sglang.server_state import Phase
from megatron_dapo.errors import EngineError

log = logging.getLogger(__name__)

MISSED_CHECKS = 3  # in a row; then the server has failed
POLL = 0.05
KILL_SECONDS = 2.0


class RestartBudget:
    """`limit` restarts; one more for each `recovery` seconds of service, up to the limit."""

    def __init__(self, limit: int, recovery: float) -> None:
        self._limit = limit
        self._recovery = recovery
        self.used = 0
        self._serving_since: float | None = None

    def serving(self) -> None:
        self._serving_since = time.monotonic()

    def spend(self) -> bool:
        """False when no restart is left."""
        if self._serving_since is not None:
            served, self._serving_since = time.monotonic() - self._serving_since, None
            self.used = max(0, self.used - int(served / self._recovery))
        if self.used >= self._limit:
            return False
        self.used += 1
        return True

    def regain(self) -> None:
        """One restart more, for a server that was given up."""
        self.used = max(0, self.used - 1)


class Supervisor:
    def __init__(self, process: ServerProcess | ExternalServer, server: SGLangClient, engine: SGLangEngine) -> None:
        self._process = process
        self._server = server
        self._state = server.state
        self._engine = engine
        self._config = config = server.config
        self.budget = RestartBudget(0 if config.share_base else config.restarts, config.restart_recovery)
        self.budget.serving()
        self.restarts = 0
        self.joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # it serves, or why it does not
        self._check_now = asyncio.Event()
        self._failure: BaseException | None = None  # reported by the engine
        self._missed = 0
        self._attempt: asyncio.Task[None] | None = None  # a restart in progress
        self._task = asyncio.ensure_future(self._run())

    # ---- what the engine reports ----

    def check(self, suspect: bool) -> None:
        """`suspect`: it gets no requests until it has been checked; else a dead server would use up their tries."""
        if not self._task.done():
            if suspect:
                self._state.suspected()
            self._check_now.set()

    def recover(self, cause: BaseException) -> None:
        if not self._task.done():  # else given up
            self._failure = cause
            self._state.recovering(str(cause))
            self._check_now.set()

    async def end_process(self) -> bool:
        """Ends the server and whatever is being done to restart it; False if it is not ours to end. The restart goes
        on when the engine has the GPUs."""
        if (attempt := self._attempt) is not None:
            attempt.cancel()
            await asyncio.wait([attempt])
        await self._process.end(KILL_SECONDS)
        return self._process.ours

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self.joined.cancel()

    # ---- the loop ----

    async def _join(self) -> None:
        """The server has been started, here or elsewhere, and gets the current weights."""
        self._state.recovering("it is starting")
        try:
            await self._process.wait_ready(self._server)
            await self._engine.admit(self._server)
            self.joined.set_result(None)
        except Exception as error:
            self.joined.set_exception(error)
            self.joined.exception()  # whoever waits for it raises it
            if not isinstance(error, EngineError):
                raise
            self._state.given_up(str(error))
            log.warning("server %s does not join: %s", self._server.name, error)
        finally:
            self._state.recovery_ended()

    async def _run(self) -> None:
        await self._join()
        if self._state.phase is Phase.GIVEN_UP:
            await self._wait_given_up()
        while True:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: it swallows a `stop` that comes together with a report.
                async with asyncio.timeout(self._config.heartbeat):
                    await self._check_now.wait()
            requested = self._check_now.is_set()
            self._check_now.clear()
            cause = await self._diagnose(requested)
            if cause is None:
                if self._state.cleared():
                    self._engine.wake_requests(self._server)
                continue
            self._missed = 0
            self._state.recovering(f"{cause}; {self._process.log_tail()}")
            log.warning("server %s has failed: %s", self._server.name, cause)
            # What was reported until now is this failure; what is reported while it recovers is the next one.
            reported, self._failure = self._failure is not None, None
            try:
                recovered = await self._recover(reported)
            finally:
                self._state.recovery_ended()
            if not recovered:
                await self._wait_given_up()

    async def _wait_given_up(self) -> None:
        """Until there is another chance that the server works."""
        if self._process.ours and not (self._config.share_base and self._process.alive()):
            await asyncio.sleep(self._config.restart_recovery)
            self.budget.regain()
        else:
            await asyncio.sleep(self._config.heartbeat)  # it may reply, and not be ours to use
            while self._process.alive() and not await self._replies():
                self._state.lost = self._process.lost
                await asyncio.sleep(self._config.heartbeat)
        self._failure = EngineError("it was given up")  # admitted as it is, if it replies
        self._check_now.set()

    async def _replies(self) -> bool:
        try:
            await self._server.answers()
        except Exception as error:
            self._log("cannot be checked", error, only_unexpected=True)
            return False
        return True

    async def _diagnose(self, requested: bool) -> str | None:
        """Why the server counts as failed, or None."""
        if not self._process.alive():
            return "its process ended"
        if self._failure is not None:
            return str(self._failure)
        try:
            await self._server.answers()
            if self._must_prove_generation():
                await self._generates()
            if self._state.phase is Phase.SERVING and self._engine.generating:
                await self._server.renew_lease()
            self._missed = 0
        except Exception as error:
            self._log("cannot be checked", error, only_unexpected=True)
            # A check between heartbeats must not make a slow server look like one that missed several.
            self._missed += MISSED_CHECKS if nobody_listens(error) else 0 if requested else 1
            if self._missed >= MISSED_CHECKS or not self._process.alive():
                return str(error)
        return None

    def _must_prove_generation(self) -> bool:
        serving = self._state.serves(self._engine.weight_version) and self._engine.generating
        return serving and time.monotonic() - self._state.last_completion > self._config.health_interval

    async def _generates(self) -> None:
        version = self._engine.weight_version
        try:
            await self._server.generates()
            self._state.completed_request()
        except ServerFailure:
            # A pause or an update that began meanwhile makes the check fail.
            if self._state.serves(version) and self._engine.generating:
                raise

    # ---- recovery ----

    async def _recover(self, reported: bool) -> bool:
        """False when the server is given up; its state then says why, and requests go to the other servers."""
        # A check that failed leaves no doubt, but a server whose memory the trainer uses cannot be restarted.
        may_work = reported or self._config.share_base
        if may_work and self._process.alive() and not self._engine.gpus_in_use and await self._admit_as_it_is():
            return True
        while self.budget.spend():
            self.restarts += 1
            try:
                await self._restart()
                log.warning("server %s is back (restart %d)", self._server.name, self.restarts)
                self.budget.serving()
                return True
            except Exception as error:
                self._log(f"restart {self.restarts}", error)
                self._state.recovering(str(error))
                with contextlib.suppress(Exception):  # the next restart ends it, too
                    await self._process.end(KILL_SECONDS)
                if not self._process.ours and not await self._replies():  # it has been waited for
                    break
        reason = f"given up after {self.budget.used} restarts (rollout.servers.restarts)"
        if self._config.share_base:
            reason = "the trainer computes with its memory (rollout.servers.share_base)"
        why = f"{self._state.why}; {reason}"
        self._state.given_up(why, lost=self._process.lost)
        log.error("server %s: %s", self._server.name, why)
        return False

    async def _admit_as_it_is(self) -> bool:
        """Whether the server replies and could be admitted without a restart."""
        try:
            await self._server.answers()
            await self._engine.admit(self._server)
        except Exception as error:
            self._log("cannot go on as it is", error)
            return False
        self.budget.serving()
        return True

    def _log(self, what: str, error: Exception, *, only_unexpected: bool = False) -> None:
        unexpected = not isinstance(error, EngineError)
        if unexpected or not only_unexpected:
            log.warning("server %s %s: %s", self._server.name, what, error, exc_info=unexpected)

    async def _restart(self) -> None:
        """One restart, started over when the trainer needs the GPUs meanwhile."""
        while True:
            self._attempt = asyncio.ensure_future(self._start_and_admit())
            try:
                await asyncio.wait([self._attempt])
                if not self._attempt.cancelled():
                    return self._attempt.result()
            finally:
                attempt, self._attempt = self._attempt, None
                attempt.cancel()

    async def _start_and_admit(self) -> None:
        await self._process.end(KILL_SECONDS)
        while self._engine.gpus_in_use:  # a new server would take memory that the trainer is using
            await asyncio.sleep(POLL)
        self._process.spawn()
        if self._process.ours:
            self._server.restarted()
        await self._process.wait_ready(self._server)
        await self._engine.admit(self._server)
