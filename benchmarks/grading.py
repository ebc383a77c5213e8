"""Speed of grading, grades on an overloaded machine, and the cost of hostile responses.

    python benchmarks/grading.py                 # all three, about five minutes on two cores
    python benchmarks/grading.py --only integers

Each figure is printed beside its goal: 10 000 integer answers a second; 500 symbolic answers whose grades are the same
on an idle and on an overloaded machine; hostile responses that take bounded time and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from fractions import Fraction

import psutil

from megatron_dapo.config.data import RewardConfig
from megatron_dapo.reward.pool import RewardPool
from megatron_dapo.types import FinishReason, Grade, Prompt, Sample, as_logprobs, as_tokens

GOAL_PER_SECOND = 10_000
REASONING = "We compare the two sides, cancel the common factor and find that the value is as stated. " * 20


def pair(reference: str, response: str) -> tuple[Prompt, Sample]:
    prompt = Prompt("p", "", as_tokens([]), reference)
    return prompt, Sample("p", 0, as_tokens([]), as_tokens([]), as_logprobs([]), FinishReason.STOP, text=response)


async def grade(pool: RewardPool, pairs: list[tuple[Prompt, Sample]]) -> list[Grade]:
    return await asyncio.gather(*(pool.grade(prompt, sample) for prompt, sample in pairs))


async def integers(count: int) -> None:
    forms = ("Answer: {}", r"Therefore $\boxed{{{}}}$.", "**Answer:** {}.0", "Answer: x = {}")
    pairs = [pair(str(i), REASONING + "\n" + forms[i % 4].format(i + i % 3 // 2)) for i in range(count)]
    async with RewardPool(RewardConfig(workers=2)) as pool:
        started, used = time.perf_counter(), time.process_time()
        grades = await grade(pool, pairs)
        seconds, used = time.perf_counter() - started, time.process_time() - used
    assert [g.correct for g in grades] == [i % 3 != 2 for i in range(count)]
    print(
        f"integer answers: {count / seconds:.0f} a second, goal {GOAL_PER_SECOND}; {count / used:.0f} per CPU second, "
        f"on one core ({count} of {len(REASONING)} characters each, load average {os.getloadavg()[0]:.1f})"
    )


def symbolic(count: int) -> tuple[list[tuple[Prompt, Sample]], list[bool]]:
    """Correct and wrong answers alternate, of eight kinds; every grade is known from how the pair is made."""
    pairs, right = [], []
    for i in range(count):
        n, off = 2 + i // 16, i % 2
        half = Fraction(n, 2 * n + 1)
        reference, answer = [
            (rf"{n}\sqrt{{3}}", rf"\sqrt{{{3 * n * n + off}}}"),
            (rf"(x+{n})^2", rf"x^2+{2 * n}x+{n * n + off}"),
            (rf"\frac{{{half.numerator}}}{{{half.denominator}}}\pi", rf"\frac{{{3 * n + off}\pi}}{{{6 * n + 3}}}"),
            (rf"\{{1,{n},{2 * n}\}}", rf"\{{{2 * n},1,{n + 3 * n * off}\}}"),
            (rf"2^{{{n}}}+1", f"1+{2**n + off}"),
            (rf"\log_2 {2**n}", rf"\frac{{\ln {4 ** (n + off)}}}{{2\ln 2}}"),
            (rf"\frac{{1}}{{\sqrt{{{n}}}+1}}", rf"\frac{{\sqrt{{{n}}}-1}}{{{n - 1 + off}}}"),
            (rf"\sin^2 x+{n}", rf"{n + 1 + off}-\cos^2 x"),
        ][i // 2 % 8]
        pairs.append(pair(reference, f"Answer: ${answer}$"))
        right.append(not off)
    return pairs, right


async def overloaded(count: int, load: int) -> None:
    pairs, right = symbolic(count)

    async def run(note: str) -> list[bool | None]:
        async with RewardPool(RewardConfig(workers=2)) as pool:
            started = time.perf_counter()
            grades = [g.correct for g in await grade(pool, pairs)]
            metrics = pool.metrics()
        wrong = sum(a != b for a, b in zip(grades, right, strict=True))
        print(
            f"symbolic answers, {note}: {count / (time.perf_counter() - started):6.1f} a second, {wrong} of {count} "
            f"grades differ from the known ones, goal 0; {metrics['reward/ungraded']:.0f} ungraded, "
            f"{metrics['reward/retries']:.0f} retries, load average {os.getloadavg()[0]:.1f}"
        )
        return grades

    idle = await run("as the machine is")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    try:
        loaded = await run(f"beside {load} busy processes on {os.cpu_count()} cores")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"grades that the load changed: {sum(a != b for a, b in zip(idle, loaded, strict=True))} of {count}, goal 0")


HOSTILE = {
    "9999999999^{9999999999}": r"\boxed{9999999999^{9999999999}}",
    "nested braces, 60 000": "Answer: " + "{" * 30_000 + "1" + "}" * 30_000,
    "nested brackets, 19 deep": "Answer: " + "(" * 19 + "1" + ")" * 19,
    "100 k digits": "Answer: " + "9" * 100_000,
    "100 k characters of text": "word " * 20_000,
    "100 k spaces": "answer" + " " * 100_000,
    "20 k open boxes": r"\boxed{" * 20_000,
    "control characters": "\x00\x01Answer:\x02 \x1b[31m42\x07\ud800",
    "\\frac, 200 deep": "Answer: " + r"\frac{" * 200 + "1" + "}{2}" * 200,
    "\\frac, 19 deep": "Answer: " + r"\frac{1}{" * 19 + "1" + "}" * 19,
    "a factorial": "Answer: 99999999!",
    "a power tower": "Answer: 2^{2^{2^{2^{2^{2}}}}}",
    "a binomial": r"Answer: \binom{10^{10}}{10^9}",
    "a product": r"Answer: \prod_{k=1}^{1000000000} k",
    "an integral": r"Answer: \int_0^1 e^{x^{x^x}} dx",
    "an expansion": "Answer: (x+y+z+w)^{400}",
}


async def hostile(cpu_seconds: float, memory_mb: int) -> None:
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            for process in psutil.Process().children(recursive=True):
                try:
                    most = max(most, process.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue
            await asyncio.sleep(0.05)

    bound = cpu_seconds * 3
    print(f"hostile responses: at most {cpu_seconds:g} + {2 * cpu_seconds:g} s of CPU time and {memory_mb} MB each")
    async with RewardPool(RewardConfig(workers=2, cpu_seconds=cpu_seconds, memory_mb=memory_mb)) as pool:
        watcher = asyncio.create_task(watch())
        for name, text in HOSTILE.items():
            started = time.perf_counter()
            (verdict,) = await grade(pool, [pair("42", text)])
            seconds = time.perf_counter() - started
            word = {True: "right", False: "wrong", None: "ungraded"}[verdict.correct]
            print(f"  {name:28} {seconds:6.2f} s (CPU bound {bound:g} s)  {word}: {verdict.reason}")
        fine = await grade(pool, symbolic(16)[0])
        watcher.cancel()
    print(f"  afterwards: {sum(bool(g.correct) for g in fine)} of 8 correct answers graded as correct, goal 8")
    print(f"  largest grading process {most / 2**20:.0f} MB, limit {memory_mb} MB; this process "
          f"{psutil.Process().memory_info().rss / 2**20:.0f} MB")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["integers", "symbolic", "hostile"])
    parser.add_argument("--integers", type=int, default=50_000)
    parser.add_argument("--symbolic", type=int, default=500)
    parser.add_argument("--load", type=int, default=4 * (os.cpu_count() or 2), help="busy processes")
    parser.add_argument("--cpu-seconds", type=float, default=2.0, help="for the hostile responses")
    args = parser.parse_args()
    if args.only in (None, "integers"):
        asyncio.run(integers(args.integers))
    if args.only in (None, "symbolic"):
        asyncio.run(overloaded(args.symbolic, args.load))
    if args.only in (None, "hostile"):
        asyncio.run(hostile(args.cpu_seconds, 512))


if __name__ == "__main__":
    main()
