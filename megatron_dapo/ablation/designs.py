"""Which runs an ablation consists of: combinations of a recipe's changes, and the three designs that choose among them.

A combination is a set of changes that are on. Its settings name all of them, so it is the same run in every design, and
its name is the name of its folder. The recipe is VAPO where the configuration has a critic, else DAPO. DAPO's
`overlong` is two settings, filter and penalty: the paper's order adds them one by one, the other designs switch them
together. VAPO's paper removes its parts one at a time and compares with DAPO, so its order is leave-one-out and DAPO.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from megatron_dapo.config import Config

Design = Literal["order", "grid", "leave-one-out"]
CLIP, DYNAMIC, TOKEN, FILTER, PENALTY = (
    "clip_higher", "dynamic_sampling", "token_loss", "overlong_filter", "overlong_penalty",
)  # fmt: skip
PRETRAINING, DECOUPLED, ADAPTIVE, POSITIVE, GROUPS = (
    "value_pretraining", "decoupled_gae", "adaptive_lambda", "positive_loss", "group_sampling",
)  # fmt: skip
PLAIN_LAMBDA = 0.95  # of PPO, for critic and policy
DAPO_GROUP = 8  # samples of a prompt, at least
NONE = "none"
OTHER_METHOD = frozenset({"dapo"})  # a row of VAPO's table that is no combination of its parts


@dataclass(frozen=True, slots=True)
class Recipe:
    full: str  # its name with all changes
    none: str  # and without any
    labels: Mapping[str, str]  # of the switches
    settings: Callable[[frozenset[str], Config], tuple[str, ...]]
    parts: Mapping[str, tuple[str, ...]]  # the changes of a switch that consists of several
    # The paper's table: what a row adds (`removes`: what it leaves out; None: everything), and its AIME 2024 avg@32.
    paper: tuple[tuple[str | None, float], ...]
    removes: bool = False

    @property
    def switches(self) -> dict[str, tuple[str, ...]]:
        return {name: self.parts.get(name, (name,)) for name in self.labels}


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
    if changes == OTHER_METHOD:
        return "dapo"
    names = [name for name in (*SWITCHES, *VAPO.switches) if changes.issuperset(SWITCHES.get(name, (name,)))]
    if "overlong" not in names:
        names += [part for part in (FILTER, PENALTY) if part in changes]
    return "+".join(dict.fromkeys(names)) or NONE


def _of_both(changes: frozenset[str], config: Config) -> tuple[str, ...]:
    """The upper clip bound is the configuration's."""
    algorithm = config.algorithm
    return (
        f"algorithm.clip_high={algorithm.clip_high if CLIP in changes else algorithm.clip_low}",
        f"algorithm.aggregation={'token-mean' if TOKEN in changes else 'seq-mean-token-mean'}",
    )


def _of_dapo(changes: frozenset[str], config: Config) -> tuple[str, ...]:
    """All five settings. The kind of penalty is the configuration's."""
    found = config.algorithm.overlong.penalty
    penalty = "soft" if found == "none" else found
    return (
        *_of_both(changes, config),
        f"algorithm.overlong.filter={'true' if FILTER in changes else 'false'}",
        f"algorithm.overlong.penalty={penalty if PENALTY in changes else 'none'}",
        f"rollout.dynamic_sampling={'true' if DYNAMIC in changes else 'false'}",
    )


def _of_vapo(changes: frozenset[str], config: Config) -> tuple[str, ...]:
    """All seven. Without groups a step has as many prompts as it had samples, each sampled once."""
    algorithm = config.algorithm
    groups = _in_groups(config.rollout.samples_per_prompt if GROUPS in changes else 1, config)
    found = {
        "critic.pretraining.steps": config.critic.pretraining.steps if PRETRAINING in changes else 0,
        "algorithm.gae.lambda_critic": 1.0 if DECOUPLED in changes else PLAIN_LAMBDA,
        "algorithm.gae.lambda_policy": "adaptive" if ADAPTIVE in changes else PLAIN_LAMBDA,
        "algorithm.positive_coefficient": (algorithm.positive_coefficient or 0.1) if POSITIVE in changes else 0.0,
    }
    if PRETRAINING not in changes:
        found["critic.pretraining.explained_variance"] = "null"
    return (*_of_both(changes, config), *groups, *(f"{key}={value}" for key, value in found.items()))


def _in_groups(size: int, config: Config) -> tuple[str, ...]:
    """`size` samples of each prompt; a step and an update have the configuration's number of samples, rounded up."""
    trainer, samples = config.trainer, config.rollout.samples_per_prompt
    prompts = -(-trainer.mini_batch_prompts * samples // size)
    prompts_per_step = trainer.prompts_per_step // trainer.mini_batch_prompts * prompts
    sizes = (f"trainer.prompts_per_step={prompts_per_step}", f"trainer.mini_batch_prompts={prompts}")
    return (f"rollout.samples_per_prompt={size}", *sizes)


DAPO = Recipe(
    "full DAPO", "naive GRPO",
    {CLIP: "clip-higher", DYNAMIC: "dynamic sampling", TOKEN: "token-level loss", "overlong": "overlong handling"},
    _of_dapo, {"overlong": (FILTER, PENALTY)},
    ((None, 30.0), (FILTER, 36.0), (CLIP, 38.0), (PENALTY, 41.0), (TOKEN, 42.0), (DYNAMIC, 50.0)),
)  # fmt: skip
VAPO = Recipe(
    "full VAPO", "plain PPO",
    {PRETRAINING: "value pre-training", DECOUPLED: "decoupled GAE", ADAPTIVE: "length-adaptive λ", CLIP: "clip-higher",
     TOKEN: "token-level loss", POSITIVE: "positive-example loss", GROUPS: "group sampling"},
    _of_vapo, {},
    ((None, 5.0), (PRETRAINING, 11.0), (DECOUPLED, 33.0), (ADAPTIVE, 45.0), (CLIP, 46.0), (TOKEN, 53.0),
     (POSITIVE, 54.0), (GROUPS, 55.0), ("", 60.0)),
    removes=True,
)  # fmt: skip
SWITCHES, SWITCH_LABELS = DAPO.switches, DAPO.labels
ADDED = {FILTER: "overlong filtering", PENALTY: "soft overlong punishment"}  # in the paper's order


def recipe_of(config: Config) -> Recipe:
    return VAPO if config.uses_critic else DAPO


def variants(config: Config, design: Design = "order") -> list[Variant]:
    recipe = recipe_of(config)
    if design == "order" and not recipe.removes:
        return _paper_order(config)
    switches = list(recipe.labels)
    if design == "grid":
        chosen = [names for size in range(len(switches) + 1) for names in combinations(switches, size)]
    else:
        chosen = [(), *(tuple(n for n in switches if n != left) for left in switches), tuple(switches)]
    scores = dict(recipe.paper) if recipe.removes and design != "grid" else {}
    found = []
    for names in chosen:
        changes = frozenset(part for name in names for part in recipe.switches[name])
        missing = [name for name in switches if name not in names]
        left_out = None if not names else "" if not missing else missing[0]
        found.append(Variant(_readable(names, recipe), recipe.settings(changes, config), changes, scores.get(left_out)))
    return [_dapo_beside_vapo(config), *found] if design == "order" else found


def _dapo_beside_vapo(config: Config) -> Variant:
    """No critic. It has VAPO's number of samples: the steps of value pre-training train the policy."""
    settings = (
        "algorithm.advantage=group-std", "algorithm.dual_clip=10.0", "algorithm.positive_coefficient=0.0",
        "rollout.dynamic_sampling=true", *_in_groups(max(DAPO_GROUP, config.rollout.samples_per_prompt), config),
    )  # fmt: skip
    both = _of_both(frozenset({CLIP, TOKEN}), config)
    return Variant("DAPO", (*both, *settings), OTHER_METHOD, DAPO.paper[-1][1])


def _readable(names: Sequence[str], recipe: Recipe) -> str:
    missing = [name for name in recipe.labels if name not in names]
    if not missing:
        return recipe.full
    if not names:
        return recipe.none
    if len(missing) == 1:
        return f"without {recipe.labels[missing[0]]}"
    return " + ".join(recipe.labels[name] for name in names)


def _paper_order(config: Config) -> list[Variant]:
    """In the order of the paper's table: each variant adds one change."""
    found: list[Variant] = []
    changes: frozenset[str] = frozenset()
    for change, paper in DAPO.paper:
        changes |= {change} if change else set()
        name = f"+ {ADDED.get(change) or DAPO.labels[change]}" if change else DAPO.none
        found.append(Variant(name, DAPO.settings(changes, config), changes, paper))
    return found


def effects(design: Design, config: Config) -> list[Effect]:
    """grid: each switch, over all settings of the others. leave-one-out: full minus without. order: each added step."""
    rows, recipe = variants(config, design), recipe_of(config)
    if design == "order" and not recipe.removes:
        steps = zip(rows[1:], rows[:-1], strict=True)
        return [Effect(row.name.removeprefix("+ "), ((row.folder, before.folder),)) for row, before in steps]
    known = {row.folder for row in rows}
    found = []
    for name, label in recipe.labels.items():
        parts = frozenset(recipe.switches[name])
        pairs = [(row.folder, combination_name(row.changes - parts)) for row in rows if parts <= row.changes]
        found.append(Effect(label, tuple(pair for pair in pairs if pair[1] in known)))
    if combination_name(OTHER_METHOD) in known:
        found.append(Effect("VAPO instead of DAPO", ((rows[-1].folder, rows[0].folder),)))
    return found
