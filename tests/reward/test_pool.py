"""The reward pool: limits, retries, restarts, errors that stop the run, and grades that do not depend on the load."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_dapo.config.data import RewardConfig
from megatron_dapo.plugins import MOST_LOGGED
from megatron_dapo.processes.supervised import WorkerProcess
from megatron_dapo.reward.grader import GraderError
from megatron_dapo.reward.pool import RewardPool
from megatron_dapo.types import FinishReason, Grade, Prompt, Sample, as_logprobs, as_tokens

HOSTILE = "python:hostile_graders."


def prompt(answer: str, **fields) -> Prompt:
    return Prompt("p", "question", as_tokens([1, 2]), answer, **fields)


def sample(text: str) -> Sample:
    return Sample("p", 0, as_tokens([1, 2]), as_tokens([]), as_logprobs([]), FinishReason.STOP, text=text)


async def grade_all(pool: RewardPool, pairs: list[tuple[str, str]]) -> list[Grade]:
    return await asyncio.gather(*(pool.grade(prompt(answer), sample(text)) for answer, text in pairs))


def run(config: RewardConfig, pairs: list[tuple[str, str]]) -> tuple[list[Grade], dict[str, float]]:
    async def main() -> tuple[list[Grade], dict[str, float]]:
        async with RewardPool(config) as pool:
            grades = await grade_all(pool, pairs)
            return grades, pool.metrics()

    return asyncio.run(main())


def grading_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if process.cmdline()[1:3] == ["-m", "megatron_dapo.reward.worker"]:
                found.append(process)
    return found


def symbolic(count: int) -> list[tuple[str, str]]:
    """Right answers that take mathematics: (i/7)·√3 written as √(3 i²)/7."""
    return [
        (rf"\frac{{{i}}}{{7}}\sqrt{{3}}", rf"Answer: \frac{{\sqrt{{{3 * i * i}}}}}{{7}}") for i in range(2, count + 2)
    ]


def test_thousands_of_integers_need_no_process():
    pairs = [(str(i), f"Answer: {i + i % 2}") for i in range(5000)]
    grades, metrics = run(RewardConfig(workers=1), pairs)
    assert [g.correct for g in grades] == [i % 2 == 0 for i in range(5000)]
    assert (metrics["reward/graded"], metrics["reward/correct"], metrics["reward/quick"]) == (5000, 2500, 5000)
    assert metrics["reward/seconds"] > 0


async def test_grades_of_symbolic_answers_do_not_depend_on_the_load():
    """As on an overloaded machine: while they grade, the processes get no CPU for longer than their limit, twice. Wall
    time does not count."""
    limit = 1.0
    pairs = symbolic(30) + [(reference, text.replace("{7}", "{6}")) for reference, text in symbolic(10)]
    async with RewardPool(RewardConfig(workers=2, cpu_seconds=limit)) as pool:
        await grade_all(pool, symbolic(4))  # both have started
        grading = asyncio.ensure_future(grade_all(pool, pairs))
        for _ in range(2):
            await asyncio.sleep(0.05)
            for process in (processes := grading_processes()):
                process.suspend()
            assert len(processes) == 2
            await asyncio.sleep(1.5 * limit)
            assert not grading.done()
            for process in processes:
                process.resume()
        grades, metrics = await grading, pool.metrics()
    assert [g.correct for g in grades] == [True] * 30 + [False] * 10
    assert metrics["reward/ungraded"] == 0 and metrics["reward/retries"] == 0


LIMITS = {
    "spin": "cpu-time", "allocate slowly": "memory", "allocate at once": "memory", "map at once": "memory",
    "sleep": "stuck", "die": "crashed",
}  # fmt: skip


def test_a_response_that_hits_a_limit_is_ungraded_and_the_others_are_graded():
    config = RewardConfig(
        grader=HOSTILE + "by_response", workers=2, cpu_seconds=0.4, memory_mb=256, stuck_seconds=1.0, retries=1
    )
    pairs = [
        pair
        for response in LIMITS
        for pair in (("yes", "yes"), ("yes", "no"), ("yes", response), *[("yes", "yes")] * 5)
    ]
    grades, metrics = run(config, pairs)
    assert [g.correct for g in grades] == [True, False, None, *[True] * 5] * len(LIMITS)
    for reason, grade in zip(LIMITS.values(), grades[2::8], strict=True):
        assert (grade.score, grade.reason) == (0.0, f"{reason} (2 tries)")
    assert metrics["reward/ungraded/memory"] == 3
    assert {metrics[f"reward/ungraded/{reason}"] for reason in ("cpu-time", "stuck", "crashed")} == {1}
    assert metrics["reward/ungraded"] == metrics["reward/retries"] == 6
    assert metrics["reward/graded"] == 42


def test_a_response_whose_first_try_crashes_is_graded_at_the_second(tmp_path):
    grades, metrics = run(RewardConfig(grader=HOSTILE + "die_once", workers=1), [("", str(tmp_path / "tried"))])
    assert grades == [Grade(True, 1.0)]
    assert (metrics["reward/restarts"], metrics["reward/retries"], metrics["reward/ungraded"]) == (1, 1, 0)


HOSTILE_MATH = {
    "a power tower": r"\boxed{9999999999^{9999999999}}",
    "nested braces": "Answer: " + "{" * 30_000 + "1" + "}" * 30_000,
    "nested braces in a box": r"\boxed{" + "{" * 400 + "1" + "}" * 400 + "}",
    "100 k characters": "Answer: " + "9" * 100_000,
    "100 k characters of text": "word " * 20_000,
    "control characters": "\x00\x01Answer:\x02 \x1b[31m4\x072\x7f\ud800",
    "a billion laughs of \\frac": "Answer: " + r"\frac{" * 200 + "1" + "}{2}" * 200,
    "a few laughs of \\frac": "Answer: " + r"\frac{1}{" * 19 + "1" + "}" * 19,
}


async def test_hostile_responses_take_bounded_time_and_memory_and_grading_continues():
    config = RewardConfig(workers=2, cpu_seconds=1.0, memory_mb=512)
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            for process in grading_processes():
                try:
                    most = max(most, process.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue
            await asyncio.sleep(0.05)

    async with RewardPool(config) as pool:
        watcher = asyncio.create_task(watch())
        used = time.process_time()
        hostile = await grade_all(pool, [("42", text) for text in HOSTILE_MATH.values()])
        assert time.process_time() - used < 10  # of this process; the others are limited by the kernel
        after = await grade_all(pool, symbolic(5))
        watcher.cancel()
    verdicts = dict(zip(HOSTILE_MATH, hostile, strict=True))
    assert verdicts["a power tower"].reason == "cpu-time (2 tries)"
    assert verdicts["control characters"].correct
    assert not any(grade.correct for name, grade in verdicts.items() if name != "control characters")
    assert all(grade.correct for grade in after)
    assert most < 700 * 2**20


async def test_a_grader_that_raises_stops_the_run_with_its_traceback():
    config = RewardConfig(grader=HOSTILE + "by_response", workers=1, max_errors=3)
    async with RewardPool(config) as pool:
        for _ in range(2):
            grade = await pool.grade(prompt("yes"), sample("raise"))
            assert grade.correct is None and grade.reason.endswith(": what a strange response")
        await pool.grade(prompt("yes"), sample("exit"))
        assert pool.metrics()["reward/errors"] == 3
        with pytest.raises(GraderError, match="raised 3 times") as caught:
            await pool.grade(prompt("yes"), sample("yes"))
        assert "hostile_graders.py" in str(caught.value) and "SystemExit" in str(caught.value).splitlines()[-1]
        assert str(caught.value) == str(caught.value).strip(), "what is added to the message follows on its last line"


async def test_each_distinct_error_of_the_grader_is_logged_once_with_its_traceback(caplog):
    config = RewardConfig(grader=HOSTILE + "by_response", workers=1, max_errors=99)
    bad = [f"json {i % 2 * 'x'}[" for i in range(20)]  # in one the error is at the second character
    async with RewardPool(config) as pool:
        grades = await grade_all(pool, [("yes", text) for text in (*bad, "raise", "raise")])
        assert pool.last_error == grades[-1].reason.removeprefix("the grader raised ")
    # The line of the grader's file, not that of the library that it called.
    assert re.fullmatch(r"the grader raised JSONDecodeError at hostile_graders.py:\d+: Expecting .*", grades[0].reason)
    assert re.fullmatch(r"ValueError at hostile_graders.py:\d+: what a strange response", pool.last_error)
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(logged) == 3 and all("Traceback" in text and "hostile_graders.py" in text for text in logged), logged
    async with RewardPool(config) as pool:
        await grade_all(pool, [("yes", f"json {i * ' '}[") for i in range(60)])
    assert len(caplog.records) == 3 + MOST_LOGGED, "errors that name a place in the response"


async def test_errors_of_the_grader_are_forgotten_after_a_while():
    config = RewardConfig(grader=HOSTILE + "by_response", workers=1, max_errors=2, error_window_seconds=100)
    now = 0.0
    async with RewardPool(config) as pool:
        pool._clock = lambda: now
        for seconds in (0.0, 101.0, 202.0):  # never two within 100 s
            now = seconds
            assert (await pool.grade(prompt("yes"), sample("raise"))).ungraded
            assert (await pool.grade(prompt("yes"), sample("yes"))).correct
        now = 290.0
        await pool.grade(prompt("yes"), sample("raise"))
        with pytest.raises(GraderError, match="raised 2 times within 100 s"):
            await pool.grade(prompt("yes"), sample("yes"))
        assert pool.metrics()["reward/errors"] == 4


async def test_waiting_calls_raise_when_the_grader_counts_as_broken():
    config = RewardConfig(grader=HOSTILE + "by_response", workers=1, max_errors=1)
    async with RewardPool(config) as pool:
        calls = (pool.grade(prompt("yes"), sample(text)) for text in ["raise", *["yes"] * 50])
        first, *rest = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    assert isinstance(first, Grade) and first.ungraded
    assert all(isinstance(r, GraderError) or (isinstance(r, Grade) and r.correct) for r in rest)
    assert any(isinstance(r, GraderError) for r in rest)


def test_processes_that_always_crash_stop_the_run():
    config = RewardConfig(grader=HOSTILE + "by_response", workers=1, max_errors=2)
    with pytest.raises(GraderError, match="crashed 2 times in a row"):
        run(config, [("yes", "die")] * 3)


def test_a_process_that_cannot_start_says_why(monkeypatch):
    async def main() -> None:
        async with RewardPool(RewardConfig(grader=HOSTILE + "by_response", workers=1)) as pool:
            monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith("tests/reward")])
            await pool.grade(prompt("yes"), sample("yes"))

    with pytest.raises(GraderError, match="cannot import 'hostile_graders'"):  # the trainer catches it, and saves
        asyncio.run(main())


@pytest.mark.parametrize("killed", [2, 99])
def test_a_process_that_is_killed_while_it_starts_is_replaced(killed, monkeypatch):
    """The supervisor, or the process itself, as the kernel does it when memory runs out."""
    start, started = WorkerProcess.start.__func__, []

    async def start_and_kill(cls, *args):
        worker = await start(cls, *args)
        started.append(worker)
        if len(started) <= killed:
            worker._process._process.kill()
        return worker

    monkeypatch.setattr(WorkerProcess, "start", classmethod(start_and_kill))
    config = RewardConfig(grader=HOSTILE + "by_response", workers=1, max_errors=3)
    if killed > 2:
        with pytest.raises(GraderError, match="crashed 3 times in a row"):
            run(config, [("yes", "yes")])
    else:
        grades, metrics = run(config, [("yes", "yes")])
        assert grades[0].correct and metrics["reward/restarts"] == 2
    assert len(started) == 3


def test_a_machine_that_cannot_start_processes_is_an_error(monkeypatch):
    def refuse(*args, **kwargs):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("megatron_dapo.processes.supervised.subprocess.Popen", refuse)
    with pytest.raises(GraderError, match=r"(?s)grading cannot go on.*Resource temporarily unavailable"):
        run(RewardConfig(grader=HOSTILE + "by_response", workers=1), [("yes", "yes")])


def test_a_grader_may_leave_a_response_ungraded():
    grades, metrics = run(RewardConfig(grader=HOSTILE + "by_response", workers=1), [("yes", "shrug"), ("yes", "numpy")])
    assert grades == [Grade(None, 0.0, None, "cannot say"), Grade(True, 0.5)] and metrics["reward/restarts"] == 0
    assert metrics["reward/ungraded/by-grader"] == 1


async def test_grading_processes_import_no_torch_and_get_the_whole_prompt():
    async with RewardPool(RewardConfig(grader=HOSTILE + "report", workers=1)) as pool:
        grade = await pool.grade(prompt("42", meta={"level": 3}), sample("lone surrogate \ud800"))
    assert grade.extracted == ""  # no torch, no transformers, no megatron
    assert grade.reason == r"[1, 2] {'level': 3} 'lone surrogate \ud800'"


def test_async_graders_run_concurrently_and_one_that_never_returns_affects_no_other():
    config = RewardConfig(grader=HOSTILE + "wait_a_little", workers=1, concurrency=16, stuck_seconds=1.0, retries=0)
    grades, metrics = run(config, [("", f"{i}") for i in range(8)] + [("", "sleep")])
    assert [g.correct for g in grades] == [True] * 8 + [None]
    assert max(int(g.extracted or 0) for g in grades) == 8
    assert metrics["reward/ungraded/stuck"] == 1


def test_closing_the_pool_ends_its_processes_also_busy_ones():
    async def main() -> None:
        async with RewardPool(RewardConfig(grader=HOSTILE + "by_response", workers=2, cpu_seconds=60)) as pool:
            calls = [asyncio.create_task(pool.grade(prompt("yes"), sample(text))) for text in ("spin", "sleep", "yes")]
            while len(grading_processes()) < 2 or not any(p.cpu_times().user > 0.5 for p in grading_processes()):
                await asyncio.sleep(0.1)
        assert all(call.cancelled() for call in calls[:2])
        with pytest.raises(RuntimeError, match="outside of"):
            await pool.grade(prompt("yes"), sample("yes"))

    started = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - started < 30
    assert grading_processes() == []


def test_processes_end_when_their_parent_is_killed(tmp_path):
    here = Path(__file__).resolve()
    script = (
        f"import sys, asyncio; sys.path[:0] = [{str(here.parent)!r}]\n"
        "from test_pool import *\n"
        "async def main():\n"
        "    async with RewardPool(RewardConfig(grader=HOSTILE + 'by_response', workers=1)) as pool:\n"
        "        task = asyncio.create_task(pool.grade(prompt('yes'), sample('sleep')))\n"
        "        while not grading_processes(): await asyncio.sleep(0.05)\n"
        "        await asyncio.sleep(1.0); print(grading_processes()[0].pid, flush=True); await task\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert psutil.Process(worker.ppid()).ppid() == parent.pid != os.getpid()
        parent.kill()
    gone, alive = psutil.wait_procs([worker], timeout=20)
    assert gone and not alive


def test_a_grader_gets_only_the_variables_that_are_named(monkeypatch):
    for name in ("TRAINER_API_KEY", "AWS_SESSION", "HF_TOKEN", "SLURM_JWT", "GRADER_KEY"):
        monkeypatch.setenv(name, f"s3cr3t-{name}")
    config = RewardConfig(grader="python:hostile_graders.show_environment", workers=1, environment=["GRADER_KEY"])
    (grade,), _ = run(config, [("1", "1")])
    assert set(re.findall(r"s3cr3t-\w+", grade.extracted)) == {"s3cr3t-GRADER_KEY"} and "HOME" in grade.extracted
