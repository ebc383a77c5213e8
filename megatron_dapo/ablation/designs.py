"""Which runs an ablation consists of: combinations of DAPO's changes, and the three designs that choose among them.

A combination is a set of changes that are on. Its settings name all of them, so it is the same run in every design, and
its name is the name of its folder. `overlong` is two settings, filter and penalty: the paper's order adds them one by
one, the other designs switch them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from megatron_dapo.config import Config

Design = Literal["order", "grid", "leave-one-out"]
CLIP, DYNAMIC, TOKEN, FILTER, PENALTY = (
    "clip_higher", "dynamic_sampling", "token_loss", "overlong_filter", "overlong_penalty",
)  # fmt: skip
SWITCHES: dict[str, tuple[str, ...]] = {
    CLIP: (CLIP,),
    DYNAMIC: (DYNAMIC,),
    TOKEN: (TOKEN,),
    "overlong": (FILTER, PENALTY),
}
SWITCH_LABELS = {
    CLIP: "clip-higher",
    DYNAMIC: "dynamic sampling",
    TOKEN: "token-level loss",
    "overlong": "overlong handling",
}
NONE = "none"


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the design: a combination, trained once per seed."""

    name: str  # for the reader
    settings: tuple[str, ...]
    changes: frozenset[str]
    paper: float | None = None  # AIME 2024 avg@32 of the published 32B run, for comparison

    @property
    def folder(self) -> str:
        return combination_name(self.changes)


@dataclass(frozen=True, slots=True)
class Effect:
    """What one change does: the mean difference of these (with, without) pairs of combinations."""

    label: str
    pairs: tuple[tuple[str, str], ...]


def combination_name(changes: frozenset[str]) -> str:
    """`none`, or the changes joined with `+`; filter and penalty together are `overlong`."""
    names = [name for name, parts in SWITCHES.items() if changes.issuperset(parts)]
    if "overlong" not in names:
        names += [part for part in (FILTER, PENALTY) if part in changes]
    return "+".join(names) or NONE


def settings_of(changes: frozenset[str], config: Config) -> tuple[str, ...]:
    """All five settings. Upper clip bound and kind of penalty are the configuration's."""
    algorithm = config.algorithm
    penalty = "soft" if algorithm.overlong.penalty == "none" else algorithm.overlong.penalty
    return (
        f"algorithm.clip_high={algorithm.clip_high if CLIP in changes else algorithm.clip_low}",
        f"algorithm.aggregation={'token-mean' if TOKEN in changes else 'seq-mean-token-mean'}",
        f"algorithm.overlong.filter={'true' if FILTER in changes else 'false'}",
        f"algorithm.overlong.penalty={penalty if PENALTY in changes else 'none'}",
        f"rollout.dynamic_sampling={'true' if DYNAMIC in changes else 'false'}",
    )


def variants(config: Config, design: Design = "order") -> list[Variant]:
    if design == "order":
        return _paper_order(config)
    switches = list(SWITCHES)
    if design == "grid":
        chosen = [names for size in range(len(switches) + 1) for names in combinations(switches, size)]
    else:
        chosen = [(), *(tuple(n for n in switches if n != left) for left in switches), tuple(switches)]
    sets = [(names, frozenset(part for name in names for part in SWITCHES[name])) for names in chosen]
    return [Variant(_readable(names), settings_of(changes, config), changes) for names, changes in sets]


def _readable(names: Sequence[str]) -> str:
    missing = [name for name in SWITCHES if name not in names]
    if not missing:
        return "full DAPO"
    if not names:
        return "naive GRPO"
    if len(missing) == 1:
        return f"without {SWITCH_LABELS[missing[0]]}"
    return " + ".join(SWITCH_LABELS[name] for name in names)


def _paper_order(config: Config) -> list[Variant]:
    """In the order of the paper's table: each variant adds one change."""
    steps = [
        ("naive GRPO", None, 30.0),
        ("+ overlong filtering", FILTER, 36.0),
        ("+ clip-higher", CLIP, 38.0),
        ("+ soft overlong punishment", PENALTY, 41.0),
        ("+ token-level loss", TOKEN, 42.0),
        ("+ dynamic sampling", DYNAMIC, 50.0),
    ]
    found: list[Variant] = []
    changes: frozenset[str] = frozenset()
    for name, change, paper in steps:
        changes |= {change} if change else set()
        found.append(Variant(name, settings_of(changes, config), changes, paper))
    return found


def effects(design: Design, config: Config) -> list[Effect]:
    """grid: each switch, over all settings of the others. leave-one-out: full minus without. order: each added step."""
    rows = variants(config, design)
    if design == "order":
        steps = zip(rows[1:], rows[:-1], strict=True)
        return [Effect(row.name.removeprefix("+ "), ((row.folder, before.folder),)) for row, before in steps]
    known = {row.folder for row in rows}
    found = []
    for name, label in SWITCH_LABELS.items():
        parts = frozenset(SWITCHES[name])
        pairs = [(row.folder, combination_name(row.changes - parts)) for row in rows if parts <= row.changes]
        found.append(Effect(label, tuple(pair for pair in pairs if pair[1] in known)))
    return found
