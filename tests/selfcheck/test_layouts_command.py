"""`megatron-dapo selfcheck layouts`: what it prints and returns, also when a layout is wrong, fails or cannot exist."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from installed_megatron import is_megatron_since
from long_lists import ALL_CASES, some
from planted_errors import mean_of_each_micro_batch

from megatron_dapo.cli import main
from megatron_dapo.errors import UserError
from megatron_dapo.policy import policy as policy_module
from megatron_dapo.policy.megatron import options
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.step import UpdateStep
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck import cases, layouts, trace
from megatron_dapo.selfcheck.cases import DEFAULT_LAYOUTS, SINGLE, Case, LayoutSpec, Variants, selfcheck_config
from megatron_dapo.selfcheck.layouts import Settings, run_layouts
from megatron_dapo.selfcheck.synthetic import synthetic_shape
from megatron_dapo.selfcheck.trace import TOKEN_TERM, Trace, compare, trace_config, trace_updates

ONE_UPDATE = Settings(updates=1)
DENSE = Variants(["dense"])
FEW = ("dense", "moe")  # the command's own behaviour does not depend on the model


@pytest.fixture(autouse=True)
def few_models(monkeypatch):
    monkeypatch.setattr(cases, "MODELS", FEW)


def test_it_passes_and_says_what_it_compared(capsys):
    assert run_layouts(["tp2"], ONE_UPDATE) == 0
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


def test_a_wrong_layout_fails(monkeypatch, capsys):
    mean_of_each_micro_batch(monkeypatch)
    assert run_layouts(["dp2"], ONE_UPDATE, DENSE) == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_layout_that_fails_while_it_runs_does_not_end_the_others(monkeypatch, capsys):
    real = Policy.gradients

    def planted(self, batch):
        if self.config.policy.context_parallel > 1:
            raise RuntimeError("planted [in one layout]")
        return real(self, batch)

    monkeypatch.setattr(Policy, "gradients", planted)
    assert run_layouts(["cp2", "dp2"], ONE_UPDATE, DENSE) == 1
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
    assert run_layouts(["dp2", "cp2"], ONE_UPDATE, DENSE) == 1
    assert capsys.readouterr().out.count("reference failed: RuntimeError: no reference") == 2


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


def test_the_parts_of_a_name():
    spec = LayoutSpec.parse("tp2pp2vpp4spdo")
    assert spec.sizes == {"tp": 2, "pp": 2, "vpp": 4}
    assert spec.sequence_parallel and spec.distributed_optimizer and spec.world_size == 4
    assert LayoutSpec.parse("ep4tp2").world_size == 4
    assert LayoutSpec.parse("single").sizes == {}


def test_default_layouts_that_do_not_fit_the_gpus_are_left_out_by_name(monkeypatch, capsys):
    monkeypatch.setattr(layouts, "gpu_count", lambda: 2)
    chosen = layouts._chosen(None, None, layouts.Console())
    names = list(dict.fromkeys(case.name for case in chosen))
    without_te = [name for name in DEFAULT_LAYOUTS if not name.startswith("cp2+")]
    assert names == [name for name in without_te if LayoutSpec.parse(name.split("+")[0]).world_size == 2]
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


# ---- precision and options ----


def exact(rendezvous, case):
    """The gradients in fp64: what the model computes in fp32 is computed in fp64 here."""
    weights = {name: weight.bfloat16().double() for name, weight in trace.random_hf_weights(case.shape).items()}
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    options.DTYPES["fp32"] = torch.float64
    trace.random_hf_weights = lambda shape, scale: weights
    real = policy_module.ddp_config
    policy_module.ddp_config = lambda *args, **kwargs: replace(real(*args, **kwargs), grad_reduce_in_fp32=False)
    UpdateStep.step_optimizer = lambda self: {"grad_norm": 1.0}  # Megatron's takes fp32 only
    return trace_updates(rendezvous, case, 1)


@pytest.mark.parametrize("model", some(["moe", "hybrid"], "hybrid"))
def test_the_models_do_not_amplify_rounding(model):
    """Layouts could not be compared with a model that does: hybrid differed by 7e-6 in one process, moe by 1e-6."""
    found, truth = (run_ranks(1, function, Case(SINGLE, model), *more)[0].gradients[0]
                    for function, more in ((trace_updates, [1]), (exact, [])))  # fmt: skip
    assert truth["lm_head.weight"].dtype == torch.float64
    assert max(trace._relative(found, truth).values()) < (6e-6 if is_megatron_since("0.19") else 4e-6)


def test_the_limit_of_a_tensor_is_a_multiple_of_its_noise():
    def traced(*gradient):
        names = {name: torch.tensor([x]) for name, x in zip("abc", gradient, strict=True)}
        return Trace(losses=[1.0], grad_norms=[1.0], gradients=[names], weights={"a": torch.ones(1)})

    reference, other = traced(1.0, 1.0, 1.0), traced(1.01, 1.02, 1.0)
    noise = [trace.measure(other, reference)]
    assert compare(traced(1.029, 1.059, 1.029), reference, noise=noise).ok  # c: the median, 0.01
    found = compare(traced(1.031, 1.0, 1.0), reference, noise=noise)
    assert not found.ok and found.worst == "gradients of a" and found.worst_limit == pytest.approx(0.03, rel=1e-3)
    assert not compare(traced(1.0, float("nan"), 1.0), reference, noise=noise).ok
    large = [trace.measure(traced(9.0, 9.0, 9.0), reference)]
    assert not compare(traced(2.0, 2.0, 2.0), reference, noise=large).ok  # a factor of two is always found


def test_bf16_is_compared_with_its_own_rounding(capsys, tmp_path):
    table = tmp_path / "table.json"
    variants = Variants.parse("dense", "bf16", "", "torch")
    assert run_layouts(["tp2sp+full"], Settings(updates=1, json=table), variants) == 0
    printed = capsys.readouterr().out
    assert "kernels of tp2sp+full dense bf16 torch: " in printed and "head: torch" in printed
    (row,) = json.loads(table.read_text())
    assert row["status"] == "ok" and 1e-3 < row["noise"] < 0.2 and row["gradients"] > 1e-4


def test_a_case_that_takes_too_long_is_no_failed_comparison(monkeypatch, capsys):
    real = Policy.gradients

    def slow(self, batch):
        if self.config.policy.context_parallel > 1:
            time.sleep(600)
        return real(self, batch)

    monkeypatch.setattr(Policy, "gradients", slow)
    outcomes = layouts.check([Case(SINGLE)], ONE_UPDATE)
    (late,) = layouts._run_in_ranks(2, [Case(LayoutSpec.parse("cp2"))], Settings(updates=1, timeout=2))
    result = layouts._result(Case(LayoutSpec.parse("cp2")), outcomes | {Case(LayoutSpec.parse("cp2")).key: late}, 1e-5)
    assert result.status == "TIMEOUT" and "did not finish within 2 s" in result.error
    layouts.print_results(layouts.Console(width=220), [result], 1e-5, 1)
    assert "1 cases, 0 failed, 1 timed out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "cp2+a3a"], "no option a3a; there are p2p, all_gather"),
        (["--layouts", "cp2+a2a"], "policy.cp_comm_type: a2a needs --layers te"),
        (["--layouts", "tp2", "--layers", "te"], "--layers te needs Transformer Engine and an NVIDIA GPU"),
        (["--layouts", "tp2", "--dtype", "fp16"], "--dtype: unknown fp16; choose from fp32, bf16"),
        (["--layouts", "tp2sp", "--fp8", "blockwise"], "policy.fp8.recipe: blockwise needs --layers te"),
        (["--layouts", "dp2+replay", "--models", "dense"], "none of the chosen models fits it"),
        (["--random", "1", "--dtype", "bf16"], "--random draws models, in fp32 on torch layers"),
        (["--layouts", "single", "--models", "dense", "--json", "nowhere/table.json"], "there is no directory nowhere"),
    ],
)
def test_a_variant_that_cannot_exist_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(["selfcheck", "layouts", *arguments]) == 2
    assert message in capsys.readouterr().err


# ---- in a job ----


@pytest.mark.skipif(not ALL_CASES, reason="ALL_CASES=1: four processes import torch; the next test joins a job, too")
def test_it_joins_a_job_of_torchrun():
    """The layouts run in the job's own ranks, one after the other."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check = "-m megatron_dapo.cli selfcheck layouts --layouts tp2,ep2 --updates 1 --models tied,moe"
    done = subprocess.run([*torchrun, *check.split()], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(" ok ") == 2 and "FAIL" not in done.stdout


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
    if references:
        layouts._references_of_child = lambda _, cases: {key: references[case.model] for key, case in cases.items()}
    code = run_layouts(names, ONE_UPDATE, DENSE)
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


def test_a_layout_that_fails_in_a_job_does_not_end_the_others(capfd):
    """The reference comes from a process outside of the job."""
    assert run_as_a_job(None, ["cp2", "dp2"]) == [1, 0]  # rank 0 reports
    lines = capfd.readouterr().out.splitlines()
    failed = [line for line in lines if "cp2" in line and "ERROR rank 0: the other rank failed" in line]
    assert len(failed) == 1
    assert len([line for line in lines if "dp2" in line and " ok " in line]) == 1


def test_a_job_without_a_reference_reports_why(capfd, monkeypatch):
    monkeypatch.setattr(layouts.sys, "executable", "/bin/false")
    case = Case(SINGLE)
    reference = layouts._references_of_child(ONE_UPDATE, {case.key: case})[case.key]
    assert "returned non-zero exit status 1" in reference.error
    assert run_as_a_job({"dense": reference}, ["dp2"]) == [1, 0]
    assert "ERROR the single-process reference failed: " in capfd.readouterr().out


def test_a_layout_that_does_not_divide_the_job_is_an_error(monkeypatch):
    with pytest.raises(UserError, match=r"layout 'tp2pp2': 2 ranks cannot hold"):
        layouts._chosen(["dp2", "tp2pp2"], 2, layouts.Console())
