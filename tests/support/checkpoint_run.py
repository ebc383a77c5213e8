"""A policy of two layers with its checkpoints, in forked ranks: what it saved, and what a new start finds."""

import shutil

import torch

from megatron_dapo.checkpoints import checkpoints
from megatron_dapo.checkpoints.checkpoints import Checkpoints
from megatron_dapo.checkpoints.folder import checkpoint_name
from megatron_dapo.config.trainer import CheckpointConfig
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape
from megatron_dapo.selfcheck.trace import gather_full

SHAPE = synthetic_shape("dense")


class Run:
    """One rank of a run with its policy and checkpoints; collects what they report."""

    def __init__(self, rendezvous, run_dir, layout="do", **options):
        config = selfcheck_config(LayoutSpec.parse(layout))
        self.policy = Policy(config, SHAPE, initialize(config.policy, rendezvous=rendezvous))
        self.rank = rendezvous.rank
        self.reports, self.warnings = [], []
        self.checkpoints = Checkpoints(
            run_dir, CheckpointConfig(**options), self.policy.runtime, warn=self.warnings.append
        )
        checkpoints.available_host_memory = lambda: 1 << 40  # whatever else runs on this machine

    def start(self):
        self.policy.load_hf(random_hf_weights(SHAPE))
        return self

    def update(self, seed):
        return self.policy.update(awkward_batch(SHAPE, seed))["loss"]

    def save(self, step, *, wait=False, updates=None, score=None, **state):
        state = {"rollouts": {"step": step}, **state}
        self.reports += self.checkpoints.save(self.policy, step, updates, state, score, wait=wait)
        return self.checkpoints.folder / checkpoint_name(step, updates)

    def finish(self):
        self.reports += self.checkpoints.finish()

    def weights(self):
        return gather_full(self.policy, self.policy.runtime, gradient=False)

    def errors(self):
        return [report.error for report in self.reports]


def run(function, run_dir, *args, ranks=1):
    return run_ranks(ranks, function, run_dir, *args)[0]


def names(run_dir):
    """What is in the folder besides the links and the tracker file for Megatron-LM."""
    found = (p.name for p in (run_dir / "checkpoints").iterdir())
    return sorted(name for name in found if not name.startswith(("iter_", "latest_checkpointed_iteration")))


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def saved_steps(rendezvous, run_dir, steps, layout="do", **options):
    """A run that saves after each of `steps`; returns the weights at each."""
    this = Run(rendezvous, run_dir, layout, **options).start()
    weights = {}
    for step in steps:
        this.update(step)
        this.save(step, wait=True)
        weights[step] = this.weights()
    assert this.errors() == [None] * len(steps)
    return weights


def resumed(rendezvous, run_dir, layout="do"):
    """What a new start finds: name, state, weights, warnings."""
    this = Run(rendezvous, run_dir, layout)
    path = this.checkpoints.newest()
    if path is None:
        return None, None, None, this.warnings
    path, state = this.checkpoints.load(this.policy, path)
    return path.name, state, this.weights(), this.warnings


class Checks:
    """`newest` in a process group of one, without a policy."""

    def __init__(self, run_dir):
        self.run_dir, self.warnings = run_dir, []

    def newest(self):
        name, self.warnings = run(only_newest, self.run_dir)
        return name


def only_newest(rendezvous, run_dir):
    config = selfcheck_config(LayoutSpec.parse("single"))
    warnings = []
    runtime = initialize(config.policy, rendezvous=rendezvous)
    path = Checkpoints(run_dir, CheckpointConfig(), runtime, warn=warnings.append).newest()
    return path and path.name, warnings


def copy_of(three, tmp_path):
    """A copy of the fixture `three`: a run directory with three checkpoints, and the weights of each."""
    shutil.copytree(three[0], tmp_path / "run", symlinks=True)
    return tmp_path / "run", three[1]
