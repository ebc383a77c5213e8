"""What may happen to a fleet: servers that are slow, of another GPU type, die or join; tools; a drifting yield.

Times are seconds since the start of the simulated run. A dead server's requests start again on another one, and what
they generated is lost. A joiner is like the configured servers.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from megatron_dapo.arguments import at_least
from megatron_dapo.errors import UserError
from megatron_dapo.planner.generation import Fleet, ServerKind
from megatron_dapo.planner.server_model import DecodeModel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tools:
    """`calls` of a tool in every response, at equal distances; each takes `seconds` on average (exponential)."""

    seconds: float = 0.0
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Incidents:
    slow: tuple[tuple[int, float], ...] = ()  # (servers, speed relative to the others)
    mixed: tuple[tuple[int, str], ...] = ()  # (servers, their GPU)
    changes: tuple[tuple[float, int], ...] = ()  # (seconds, servers that join; negative: die), in order
    tools: Tools = field(default_factory=Tools)
    kept_end: float | None = None  # the share of kept groups in the last step, which changes linearly

    def __post_init__(self) -> None:
        for count, speed in self.slow:
            if speed <= 0:
                raise UserError(f"--slow {count}:{speed:g}: the speed must be above 0")
        if self.kept_end is not None and not 0 < self.kept_end <= 1:
            raise UserError(f"--kept-end is {self.kept_end:g}: expected a share above 0 and at most 1")

    @classmethod
    def of(
        cls,
        slow: list[str],
        mixed: list[str],
        dies: list[str],
        joins: list[str],
        tool_seconds: float,
        tool_calls: int,
        kept_end: float | None,
    ) -> Incidents:
        changes = [(seconds, -count) for count, seconds in _pairs("--dies", dies, "@", at_least(0, float))]
        changes += [(seconds, count) for count, seconds in _pairs("--joins", joins, "@", at_least(0, float))]
        return cls(
            slow=_pairs("--slow", slow, ":", at_least(0, float)),
            mixed=_pairs("--mixed", mixed, ":", str),
            changes=tuple(sorted(changes, key=lambda change: (change[0], -change[1]))),  # who joins comes first
            tools=Tools(tool_seconds, tool_calls),
            kept_end=kept_end,
        )

    def describe(self) -> str:
        parts = [f"{count} servers at {speed:g} × speed" for count, speed in self.slow]
        parts += [f"{count} servers on {name}" for count, name in self.mixed]
        parts += [f"{abs(n)} {'join' if n > 0 else 'die'} after {seconds:g} s" for seconds, n in self.changes]
        if self.tools.seconds:
            parts.append(f"{self.tools.calls} tool calls of {self.tools.seconds:g} s in a response")
        if self.kept_end is not None:
            parts.append(f"{self.kept_end:.0%} kept in the last step")
        return ", ".join(parts)

    def apply(self, fleet: Fleet, of_gpu: Callable[[str], ServerKind]) -> Fleet:
        """The fleet with slow servers and those of other GPUs. `of_gpu`: a server on another GPU."""
        kinds = [
            ServerKind(count, slower(fleet.decode, speed), fleet.kv_tokens) for count, speed in self.slow
        ] + [replace(of_gpu(name), servers=count) for count, name in self.mixed]  # fmt: skip
        if sum(kind.servers for kind in kinds) > fleet.servers:
            raise UserError(f"--slow and --mixed name more servers than the fleet has: {fleet.servers}")
        left = fleet.servers
        for seconds, count in self.changes:
            left += count
            if left < 1:
                raise UserError(f"--dies: of {fleet.servers} servers, none is left after {seconds:g} s; one must stay")
        return replace(fleet, others=tuple(kinds))


def slower(decode: DecodeModel, speed: float) -> DecodeModel:
    """At `speed` relative to `decode`."""
    times = {item.name for item in fields(decode)} - {"idle_share", "experts_per_token", "expert_count"}
    return replace(decode, **{name: getattr(decode, name) / speed for name in times})


def _pairs(flag: str, texts: list[str], separator: str, kind: Callable[[str], T]) -> tuple[tuple[int, T], ...]:
    found = []
    for text in texts:
        try:
            count, value = text.split(separator, 1)
            found.append((at_least(1)(count), kind(value)))
        except (ValueError, ArgumentTypeError):
            example = {"--slow": "1:0.3", "--mixed": "4:a100"}.get(flag, "2@600")
            raise UserError(f"{flag} {text}: expected SERVERS{separator}VALUE, for example {flag} {example}") from None
    return tuple(found)
