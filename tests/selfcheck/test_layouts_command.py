"""`megatron-dapo selfcheck layouts`: what it prints and returns, also when a layout is wrong, fails or cannot exist."""

import contextlib
import os
import random
import socket
import subprocess
import sys

import pytest
import torch

from megatron_dapo.cli import main
from megatron_dapo.errors import UserError
from megatron_dapo.policy import step
from megatron_dapo.policy.loss_func import OnePassLoss
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck import cases, layouts, trace
from megatron_dapo.selfcheck.cases import DEFAULT_LAYOUTS, SINGLE, Case, LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.layouts import run_layouts
from megatron_dapo.selfcheck.synthetic import MODELS, synthetic_shape
from megatron_dapo.selfcheck.trace import TOKEN_TERM, Trace, compare, trace_config, trace_updates

FEW = ("dense", "moe")  # the command's own behaviour does not depend on the model; a job in other processes has all


@pytest.fixture(autouse=True)
def few_models(monkeypatch):
    monkeypatch.setattr(cases, "MODELS", FEW)


def test_it_passes_and_says_what_it_compared(capsys):
    assert run_layouts(["tp2"], tolerance=1e-5, updates=1) == 0
    printed = capsys.readouterr().out
    assert "tp2" in printed and "ok" in printed and "FAIL" not in printed
    assert "token-mean" in printed and "…" not in printed  # nothing is cut, as in a file


def test_a_loss_is_compared_with_the_size_of_its_terms():
    """cispo with seq-mean-token-sum, in the layout tp2dp4ep4etp2spdo: the terms of the first update cancel."""
    shape = synthetic_shape("dense")
    configs = [selfcheck_config(SINGLE, aggregation=f"seq-mean-token-{kind}") for kind in ("sum", "mean")]
    sums, means = (run_ranks(1, trace_config, config, shape, 1)[0].loss_terms for config in configs)
    assert means == TOKEN_TERM and 10 * means < sums < 30 * means  # responses have 3 to 29 tokens

    def difference(loss, reference, terms):
        same = {"weights": {"a": torch.ones(1)}, "gradients": [{"a": torch.ones(1)}], "loss_terms": terms}
        return compare(Trace(losses=[loss], **same), Trace(losses=[reference], **same)).loss

    assert difference(-0.039527, -0.039525, sums) < 5e-6 and difference(-0.03960, -0.039525, sums) > 1e-5
    assert difference(-0.039527, -0.039525, means) > 1e-5


class Averaged(OnePassLoss):
    """The error that layouts exist to find: a mean per micro-batch."""

    def __call__(self, *args):
        return super().__call__(*args) / self.batch.counts.sum().clamp(min=1)

    def loss_func(self, output):
        loss, count, metrics = super().loss_func(output)
        return loss, torch.ones_like(count), metrics


def test_a_wrong_layout_fails(monkeypatch, capsys):
    monkeypatch.setattr(step, "OnePassLoss", Averaged)
    assert run_layouts(["dp2"], tolerance=1e-5, updates=1) == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_layout_that_fails_while_it_runs_does_not_end_the_others(monkeypatch, capsys):
    real = Policy.gradients

    def planted(self, batch):
        if self.config.policy.context_parallel > 1:
            raise RuntimeError("planted [in one layout]")
        return real(self, batch)

    monkeypatch.setattr(Policy, "gradients", planted)
    assert run_layouts(["cp2", "dp2"], tolerance=1e-5, updates=1) == 1
    lines = {
        line.split()[1]: line for line in capsys.readouterr().out.splitlines() if "ranks" not in line and "│" in line
    }
    assert "ERROR RuntimeError: planted [in one layout]" in lines["cp2"]
    assert "ok" in lines["dp2"]


def test_a_reference_that_fails_is_an_error_of_each_layout(monkeypatch, capsys):
    real = layouts.trace_updates

    def planted(rendezvous, case, updates):
        if case.layout.name == "single":
            raise RuntimeError("no reference")
        return real(rendezvous, case, updates)

    monkeypatch.setattr(layouts, "trace_updates", planted)
    assert run_layouts(["dp2", "cp2"], tolerance=1e-5, updates=1) == 1
    assert capsys.readouterr().out.count("ERROR RuntimeError: no reference") == 2 * len(FEW)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "expected parts such as tp2"),
        ("xp2", "expected parts such as tp2"),
        ("tp", "expected parts such as tp2"),
        ("2tp", "expected parts such as tp2"),
        ("tp0", "expected parts such as tp2"),
        ("tp2tp4", "each at most once"),
        ("singletp2", "expected parts such as tp2"),
        ("tp64", "at most 16 are forked"),
        ("pp32", "at most 16 are forked"),
        ("tp2ep2", "the model has experts and policy.tensor_parallel is 2"),
        ("vpp2", "virtual_pipeline is 2 but pipeline_parallel is 1"),
        ("dp3ep2", "policy.expert_parallel is 2, but a pipeline stage has 3 ranks"),
        ("dp99", "at most 16 are forked"),
    ],
)
def test_a_layout_that_cannot_exist_is_one_line_and_exit_code_2(name, message, capsys, monkeypatch):
    def unexpected(*_):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(layouts, "run_ranks", unexpected)
    assert main(["selfcheck", "layouts", "--layouts", f"dp2,{name}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"megatron-dapo: layout '{name}': ") and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("name", ["xp2", "tp", "2tp", ""])
def test_unknown_layout_names_are_refused(name):
    with pytest.raises(Exception, match="expected parts such as"):
        LayoutSpec.parse(name)


def test_the_parts_of_a_name():
    spec = LayoutSpec.parse("tp2pp2vpp4spdo")
    assert spec.sizes == {"tp": 2, "pp": 2, "vpp": 4}
    assert spec.sequence_parallel and spec.distributed_optimizer and spec.world_size == 4
    assert LayoutSpec.parse("ep4tp2").world_size == 4
    assert LayoutSpec.parse("single").sizes == {}


def test_default_layouts_that_do_not_fit_the_gpus_are_left_out_by_name(monkeypatch, capsys):
    monkeypatch.setattr(layouts, "gpu_count", lambda: 2)
    chosen = layouts._chosen(None, None, layouts.Console())
    names = list(dict.fromkeys(case.layout.name for case in chosen))
    assert names == [n for n in DEFAULT_LAYOUTS if LayoutSpec.parse(n).world_size == 2]
    assert "layout tp2pp2 is left out: it needs 4 GPUs, but this machine has 2" in capsys.readouterr().out


def test_a_named_layout_that_does_not_fit_the_gpus_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(layouts, "gpu_count", lambda: 1)
    assert main(["selfcheck", "layouts", "--layouts", "tp2"]) == 2
    assert "it needs 2 GPUs, but this machine has 1" in capsys.readouterr().err
    assert main(["selfcheck", "layouts"]) == 2  # nothing is left of the default ones


def test_a_diverged_replica_is_an_error():
    shard = torch.ones(3)
    held = [{"w": (0, shard)}, {"w": (0, shard + 1e-7)}]
    with pytest.raises(Exception, match="rank 1 holds other values of w"):
        trace._one_of_each("w", held)


# ---- in a job ----


def test_it_joins_a_job(monkeypatch):
    """Under torchrun the layouts run in the job's own ranks, one after the other."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check = ["-m", "megatron_dapo.cli", "selfcheck", "layouts", "--layouts", "tp2,ep2", "--updates", "1"]
    done = subprocess.run([*torchrun, *check], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(cases, "MODELS", MODELS)  # as in the job
    expected = [case for name in ("tp2", "ep2") for case in cases.cases_of(LayoutSpec.parse(name))]
    assert done.stdout.count(" ok ") == len(expected) and "FAIL" not in done.stdout


def as_a_job(rendezvous, port, references, names):
    """The command in ranks that torchrun or srun could have started."""
    os.environ |= {
        "RANK": str(rendezvous.rank), "WORLD_SIZE": str(rendezvous.world_size), "LOCAL_RANK": str(rendezvous.rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    real = Policy.gradients

    def planted(self, batch):
        if self.config.policy.context_parallel > 1 and rendezvous.rank == 1:
            raise RuntimeError("planted")
        if self.config.policy.context_parallel > 1:
            raise UserError("the other rank failed")
        return real(self, batch)

    Policy.gradients = planted
    layouts._references_of_child = lambda updates, cases: {key: references[case.model] for key, case in cases.items()}
    code = run_layouts(names, tolerance=1e-5, updates=1)
    sys.stdout.flush()
    return code


def run_as_a_job(references, names):
    return run_ranks(2, as_a_job, unused_port(), references, names)


def unused_port():
    """Below the ports that the kernel gives to connections: one of them could be taken before the job uses it."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port


def single_traces(rendezvous):
    return {model: trace_updates(rendezvous, Case(SINGLE, model), 1) for model in FEW}


def test_a_layout_that_fails_in_a_job_does_not_end_the_others(capfd):
    references = run_ranks(1, single_traces)[0]
    assert run_as_a_job(references, ["cp2", "dp2"]) == [1, 0]  # rank 0 reports
    lines = capfd.readouterr().out.splitlines()
    failed = [line for line in lines if "cp2" in line and "ERROR rank 0: the other rank failed" in line]
    assert len(failed) == len(FEW)
    assert len([line for line in lines if "dp2" in line and " ok " in line]) == len(FEW)


def test_a_job_without_a_reference_reports_why(capfd, monkeypatch):
    monkeypatch.setattr(layouts.sys, "executable", "/bin/false")
    case = Case(SINGLE)
    reference = layouts._references_of_child(1, {case.key: case})[case.key]
    assert "returned non-zero exit status 1" in reference
    assert run_as_a_job(dict.fromkeys(FEW, reference), ["dp2"]) == [1, 0]
    assert "ERROR rank 0: the single-process reference failed: " in capfd.readouterr().out


def test_a_layout_that_does_not_divide_the_job_is_an_error(monkeypatch):
    with pytest.raises(UserError, match=r"layout 'tp2pp2': 2 ranks cannot hold"):
        layouts._chosen(["dp2", "tp2pp2"], 2, layouts.Console())
