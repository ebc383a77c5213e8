"""How an objective is named, made and asked: built-in files, the user's classes, options, needs and metrics."""

import sys
import types

import pytest
import torch
from loss_cases import Sequence, pack

from megatron_dapo.algorithm import Needs, Objective, PolicyLoss, TokenMetrics, objectives
from megatron_dapo.algorithm.loss import load_objective
from megatron_dapo.algorithm.objectives.cispo import CISPO
from megatron_dapo.algorithm.objectives.dapo import DAPO
from megatron_dapo.algorithm.objectives.gspo import GSPO
from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.config import algorithm as algorithm_config
from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.errors import UserError

CASE = [Sequence([1.5, 0.5], 1.0), Sequence([1.0, 2.0, 0.9], -2.0), Sequence([3.0, 0.1], 5.0, [False, False])]


class Reinforce(Objective):
    """−Â·log π."""

    def token_losses(self, scores, batch, sums):
        return -batch.advantages * scores.logprobs


@pytest.fixture
def own(monkeypatch):
    """Installs a class as `own_objectives.f` and returns the configuration that names it."""
    module = types.ModuleType("own_objectives")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def install(thing, **settings):
        module.f = thing
        return AlgorithmConfig(objective="python:own_objectives.f", **settings)

    return install


def loss_of(config, **packing):
    inputs = pack(CASE, config, **packing)
    return PolicyLoss(config)(inputs.scores, inputs.batch), inputs


# ---- names ----


def test_built_in_names_are_the_files():
    assert algorithm_config.built_in_objectives() == ["cispo", "dapo", "gspo"]
    for name, kind in {"cispo": CISPO, "dapo": DAPO, "gspo": GSPO}.items():
        assert type(load_objective(AlgorithmConfig(objective=name))) is kind


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"algorithm\.objective.*expected cispo, dapo, gspo, or python:module\.name"):
        parse_config({"algorithm": {"objective": "dappo"}})


def test_a_new_file_is_a_new_objective(tmp_path, monkeypatch):
    """Nothing but the file is added: the configuration and the loss find it by its name."""
    (tmp_path / "reinforce.py").write_text(
        "from megatron_dapo.algorithm import Objective\n"
        "class Reinforce(Objective):\n"
        "    def token_losses(self, scores, batch, sums):\n"
        "        return -batch.advantages * scores.logprobs\n"
        "objective = Reinforce\n"
    )
    monkeypatch.setattr(algorithm_config, "OBJECTIVE_FILES", tmp_path)
    monkeypatch.setattr(objectives, "__path__", [*objectives.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "megatron_dapo.algorithm.objectives.reinforce", raising=False)
    outputs, inputs = loss_of(AlgorithmConfig(objective="reinforce"))
    outputs.loss_sum.backward()
    assert inputs.logprobs.grad.tolist() == [-1, -1, 2, 2, 2, 0, 0]


def test_a_class_of_the_user_is_an_objective(own):
    outputs, inputs = loss_of(own(Reinforce))
    outputs.loss_sum.backward()
    assert inputs.logprobs.grad.tolist() == [-1, -1, 2, 2, 2, 0, 0]
    # The metrics that every objective has without writing a line.
    assert {"ratio_mean", "approx_kl", "tokens", "nonfinite_tokens"} <= outputs.sums.keys()
    assert outputs.maxima["ratio_max"].item() == pytest.approx(2.0)


def test_what_is_not_an_objective_is_an_error(own):
    with pytest.raises(ConfigError, match=r"python:own_objectives\.f must be a class derived from .*made a float"):
        load_objective(own(lambda config: 0.5))
    with pytest.raises(UserError, match=r"python:own_objectives\.f raised TypeError: .*missing .* argument: 'batch'"):
        load_objective(own(lambda config, batch: 0.5))
    with pytest.raises(ConfigError, match="made a dict"):
        load_objective(own(dict))
    with pytest.raises(ConfigError, match=r"needs of python:own_objectives\.f must be a Needs, found \['entropy'\]"):
        load_objective(own(type("Needy", (Reinforce,), {"needs": ["entropy"]})))
    with pytest.raises(UserError, match=r"algorithm\.objective: cannot import 'no_such_module_here'"):
        load_objective(AlgorithmConfig(objective="python:no_such_module_here.f"))
    with pytest.raises(UserError, match=r"module 'own_objectives' has no"):
        own(Reinforce)
        load_objective(AlgorithmConfig(objective="python:own_objectives.g"))


def test_an_error_of_its_constructor_names_it_and_its_line_and_keeps_its_traceback(own):
    class WithAnError(Reinforce):
        def __init__(self, config):
            super().__init__(config)
            self.margin = config.clip_low + "0.1"

    config = own(WithAnError)
    expected = r"python:own_objectives\.f raised TypeError at test_objectives.py:\d+: unsupported operand"
    with pytest.raises(UserError, match=expected) as raised:
        load_objective(config)
    assert isinstance(raised.value.__cause__, TypeError)


# ---- options ----


class WithOptions(Reinforce):
    default_options = {"scale": 1.0, "centred": False, "mode": "soft"}  # noqa: RUF012


def test_options_have_defaults_and_are_set_by_name(own):
    objective = load_objective(own(WithOptions, objective_options={"scale": 2, "mode": "hard"}))
    assert objective.options == {"scale": 2, "centred": False, "mode": "hard"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skale": 2.0}, "has no option 'skale'; its options: scale, centred, mode"),
        ({"scale": "two"}, "objective_options.scale: expected a value like its default 1.0, found 'two'"),
        ({"scale": True}, "objective_options.scale: expected a value like its default 1.0, found True"),
        ({"centred": 1.5}, "objective_options.centred: expected a value like its default False, found 1.5"),
    ],
)
def test_wrong_options_are_errors(own, options, message):
    with pytest.raises(ConfigError, match=message):
        load_objective(own(WithOptions, objective_options=options))


def test_built_in_objectives_have_no_options():
    with pytest.raises(ConfigError, match="dapo has no option 'scale'; its options: none"):
        load_objective(AlgorithmConfig(objective_options={"scale": 1.0}))


# ---- needs ----


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, Needs()),
        ({"objective": "cispo"}, Needs()),
        ({"objective": "gspo"}, Needs(whole_sequences=True)),
        ({"kl": {"coefficient": 0.1}}, Needs(reference=True)),
        ({"entropy_coefficient": 0.1}, Needs(entropy=True)),
        ({"off_policy": {"importance_weight": "token"}}, Needs(engine=True)),
        ({"off_policy": {"importance_weight": "sequence"}}, Needs(engine=True, whole_sequences=True)),
    ],
)
def test_the_loss_needs_what_its_objective_and_its_terms_need(settings, needs):
    assert PolicyLoss(AlgorithmConfig(**settings)).needs == needs


class Distilled(Objective):
    """Reads what built-in objectives do not: reference, engine and entropy. Its clamps hide infinities."""

    needs = Needs(entropy=True, reference=True, engine=True)

    def token_losses(self, scores, batch, sums):
        gap = scores.logprobs - batch.ref_logprobs.clamp(-9, 9)
        return scores.entropy.clamp(max=9) * gap * batch.engine_logprobs.clamp(-9, 9)


@pytest.mark.parametrize("missing", ["entropy", "ref_logprobs", "engine_logprobs"])
def test_what_an_objective_reads_must_be_there(own, missing):
    config = own(Distilled)
    assert PolicyLoss(config).needs == Distilled.needs
    assert loss_of(config)[0].sums["nonfinite_tokens"] == 0
    given = tuple({"entropy", "ref_logprobs", "engine_logprobs"} - {missing})
    why = r"algorithm\.objective python:own_objectives\.f reads it"
    with pytest.raises(ValueError, match=f"{missing}: expected a tensor because {why}, found None"):
        loss_of(config, extras=given)


@pytest.mark.parametrize("name", ["entropy", "ref_logprobs", "engine_logprobs"])
def test_what_an_objective_reads_must_be_finite(own, name):
    config = own(Distilled)
    inputs = pack(CASE, config)
    broken = inputs.get(name).detach().clone()
    broken[1] = torch.inf
    inputs.put(name, broken)
    assert PolicyLoss(config)(inputs.scores, inputs.batch).sums["nonfinite_tokens"] == 1


class Undeclared(Reinforce):
    def sequence_values(self, scores, batch):
        raise AssertionError("asked for sums over sequences that it does not declare")


def test_sums_over_sequences_must_be_declared(own):
    """In one pass the head sees a slice of a sequence: such a sum would be wrong without a word."""
    assert loss_of(own(Undeclared))[0].loss_sum.isfinite()


class SequenceMean(Objective):
    """The loss of each token is the mean log-prob of its sequence; the importance weights sum at the same time."""

    needs = Needs(whole_sequences=True)

    def sequence_values(self, scores, batch):
        return {"length": batch.mask, "total": scores.logprobs}

    def token_losses(self, scores, batch, sums):
        assert sums.keys() == {"length", "total"}
        return sums["total"] / sums["length"].clamp_min(1) + 0 * scores.logprobs


def test_sums_over_sequences_are_the_objectives_own(own):
    config = own(SequenceMean, off_policy={"importance_weight": "sequence"})
    calls = []
    inputs = pack(CASE, config)
    outputs = PolicyLoss(config)(inputs.scores, inputs.batch, lambda t: calls.append(t.shape) or t)
    assert calls == [(3, 3)]  # one call for length, total and the importance weights, [values, sequences]
    logprobs = inputs.logprobs.detach()
    assert outputs.loss_sum.item() == pytest.approx((logprobs[:2].sum() + logprobs[2:5].sum()).item())


class SequenceEntropy(SequenceMean):
    needs = Needs(whole_sequences=True, entropy=True)

    def sequence_values(self, scores, batch):
        return {"total": scores.entropy}


def test_what_is_included_is_known_without_a_model(own):
    """Counts over a whole mini-batch are made before there are entropies."""
    config = own(SequenceEntropy, off_policy={"geometric_mask": [0.5, 2.0]})
    batch = pack([Sequence([1.0, 1.0], 1.0, engine_ratios=[5.0, 5.0]), *CASE[1:]], config).batch
    assert torch.equal(PolicyLoss(config).included(batch), batch.mask & (batch.sequence_ids != 0))


# ---- what an objective returns is checked ----


def test_one_loss_per_token(own):
    class Summed(Reinforce):
        def token_losses(self, scores, batch, sums):
            return super().token_losses(scores, batch, sums).sum()

    with pytest.raises(ValueError, match=r"own_objectives\.f: expected one loss per token \(7,\), found \(\)"):
        loss_of(own(Summed))


@pytest.mark.parametrize(
    ("means", "maxima"), [(["gate_max"], []), ([], ["gate"]), (["approx_kl"], []), ([], ["mismatch_max"])]
)
def test_metric_names_say_how_they_combine(own, means, maxima):
    class Measured(Reinforce):
        def metrics(self, scores, batch, sums):
            return TokenMetrics(dict.fromkeys(means, scores.logprobs), dict.fromkeys(maxima, scores.logprobs))

    with pytest.raises(ValueError, match=f"metrics {(means + maxima)[0]}: expected names in _max for maxima"):
        loss_of(own(Measured))


# ---- what an objective holds at masked positions ----


class UndefinedAtZero(Objective):
    """log of |log π|: infinite at the zeros of masked positions, with an infinite gradient."""

    needs = Needs(whole_sequences=True)

    def sequence_values(self, scores, batch):
        return {"total": 1 / scores.logprobs}

    def token_losses(self, scores, batch, sums):
        return scores.logprobs.abs().log() * sums["total"].detach()


@pytest.mark.parametrize("off_policy", [{}, {"token_mask": [0.5, 2.0]}], ids=["plain", "token-mask"])
def test_an_objective_that_is_infinite_at_masked_positions_does_no_harm(own, off_policy):
    config = own(UndefinedAtZero, off_policy=off_policy)
    inputs = pack([Sequence([1.5, 0.5, 0.8], 1.0, [True, False, True]), *CASE[1:]], config)
    outputs = PolicyLoss(config)(inputs.scores, inputs.batch)
    outputs.loss_sum.backward()
    x = inputs.logprobs.detach().where(inputs.mask, 1.0)
    ids = inputs.batch.sequence_ids
    total = torch.zeros(3, dtype=x.dtype).index_add_(0, ids, (1 / x).where(inputs.mask, 0.0))[ids]
    assert outputs.loss_sum.item() == pytest.approx((x.abs().log() * total).where(inputs.mask, 0).sum().item())
    torch.testing.assert_close(inputs.logprobs.grad, (total / x).where(inputs.mask, 0.0))
    assert outputs.sums["nonfinite_tokens"] == 0


def test_an_infinite_loss_of_a_removed_token_is_counted(own):
    """Its gradient is 0·∞: the update must not be made."""

    class Infinite(Reinforce):
        def token_losses(self, scores, batch, sums):
            return super().token_losses(scores, batch, sums) + torch.where(batch.sequence_ids == 0, torch.inf, 0.0)

    config = own(Infinite, off_policy={"token_mask": [0.9, 1.1]})
    inputs = pack([Sequence([1.0, 1.0], 1.0, engine_ratios=[5.0, 5.0]), *CASE[1:]], config)
    outputs = PolicyLoss(config)(inputs.scores, inputs.batch)
    assert outputs.loss_sum.isfinite()
    assert outputs.sums["nonfinite_tokens"] == 2
