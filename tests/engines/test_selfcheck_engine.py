"""`megatron-dapo selfcheck engine`: engine and trainer agree, and what was planted is named: one layer's rope, a stale
tensor, other prompt tokens; with the embedded engine and with a real server."""

import functools

import numpy as np
import pytest
import torch
from installed_sglang import API_KEY_VARIABLE
from tiny_model import tiny_model, write_model
from tiny_run import raw_config, write_config

from megatron_dapo.cli import main
from megatron_dapo.engines.embedded.batch_invariant_model import BatchInvariantModel, WeightLoader
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.in_server import megatron_dapo_layers
from megatron_dapo.policy.model import local_spec
from megatron_dapo.selfcheck.engine import first_to_stand_out, layer_differences
from megatron_dapo.types import as_tokens

STALE = "model.layers.1.mlp.up_proj.weight"


def check(capsys, config, tokens=100):
    code = main(["selfcheck", "engine", str(config), "--tokens", str(tokens)])
    lines = capsys.readouterr().out.splitlines()
    return code, dict(line.split(": ", 1) for line in lines if ": " in line and not line.startswith(" "))


def rope(patch):
    """Layer 1 turns by half of the angle."""
    own = BatchInvariantModel._heads

    def heads(self, attention, hidden, cos, sin):
        if attention is self.model.model.layers[1].self_attn:
            angle = torch.atan2(sin, cos) / 2
            cos, sin = angle.cos(), angle.sin()
        return own(self, attention, hidden, cos, sin)

    patch(BatchInvariantModel, "_heads", heads)


def stale(patch):
    own = WeightLoader.load

    def load(self, bucket):
        kept = self._targets[STALE] * 0.5
        result = own(self, bucket)
        self._targets[STALE].copy_(kept)
        return result

    patch(WeightLoader, "load", load)


def other_tokens(patch, owner=EmbeddedEngine, method="generate", place=1):
    """The first token twice, as with a BOS that a template also has."""
    own = getattr(owner, method)

    def call(self, *args):
        doubled = [*args[place][:1], *args[place]]
        sent = as_tokens(doubled) if isinstance(args[place], np.ndarray) else doubled
        return own(self, *args[:place], sent, *args[place + 1 :])

    patch(owner, method, call)


@pytest.mark.parametrize(
    ("plant", "code", "expected"),
    [
        (lambda patch: None, 0, {"weights": "the engine holds 25 of 25", "layers": "none stands out",
                                 "prompt tokens": "those that were sent"}),
        (rope, 1, {"weights": "the engine holds 25 of 25", "layers": "DIFFERENT from layer 1 on",
                   "prompt tokens": "those that were sent"}),
        (stale, 1, {"weights": f"DIFFERENT: 1 of 25 tensors: {STALE}: other values",
                    "layers": "DIFFERENT from layer 1 on"}),
        (other_tokens, 1, {"weights": "the engine holds 25 of 25", "layers": "not compared: the tokens differ",
                           "prompt tokens": "DIFFERENT: "}),
    ],
    ids=["nothing", "rope", "stale", "tokens"],
)  # fmt: skip
def test_the_embedded_engine(plant, code, expected, tmp_path, monkeypatch, capsys):
    config = write_config(raw_config(write_model(tmp_path / "model"), tmp_path / "run"), tmp_path / "run.yaml")
    plant(monkeypatch.setattr)
    found, lines = check(capsys, config)
    assert found == code, lines
    assert all(lines[name].startswith(text) for name, text in expected.items()), lines
    assert int(lines["compared"].split()[0]) >= 100 and "first token" in lines["largest by position in the response"]
    assert not (tmp_path / "run" / "config.yaml").exists()


def trainer_rope(patch):
    """As `rope`, on the other side: a server's cannot be changed from here."""
    own_init, own = local_spec.CoreAttention.__init__, local_spec.CoreAttention._rotary_table

    def init(self, config, layer_number, *args, **kwargs):
        own_init(self, config, layer_number, *args, **kwargs)
        self.number = layer_number

    def table(self, *args):
        found = own(self, *args)
        angle = torch.atan2(found.sin, found.cos) / 2
        return local_spec.RotaryTable(angle.cos(), angle.sin()) if self.number == 2 else found

    patch(local_spec.CoreAttention, "__init__", init)
    patch(local_spec.CoreAttention, "_rotary_table", table)


@pytest.mark.parametrize(
    ("version", "plant", "code", "layers", "tokens"),
    [
        ("0.5.23", lambda patch: None, 0, "none stands out", "those that were sent"),
        ("0.5.23", trainer_rope, 1, "DIFFERENT from layer 1 on", "those that were sent"),
        (
            "0.5.23",
            functools.partial(other_tokens, owner=SGLangClient, method="score", place=0),
            0,
            "not compared",
            "DIFFERENT: ",
        ),
    ],
    ids=["nothing", "rope", "tokens"],
)
def test_a_real_server(version, plant, code, layers, tokens, server_of_version, tmp_path, monkeypatch, capsys):
    server = server_of_version(version)
    raw = raw_config(
        server.directory, tmp_path / "run", rollout__engine="sglang", data__template="plain",
        rollout__servers={"urls": [server.process.url], "api_key_env": API_KEY_VARIABLE},
        rollout__weights={"transport": "disk", "directory": str(tmp_path / "weights")},
    )  # fmt: skip
    plant(monkeypatch.setattr)
    try:
        found, lines = check(capsys, write_config(raw, tmp_path / "run.yaml"))
    finally:  # it has the first weights again
        server.version = 0
        server.model.load_state_dict(tiny_model().state_dict())
    assert found == code, lines
    assert lines["weights"].startswith("the engine holds 25 of 25"), lines
    assert lines["layers"].startswith(layers) and lines["prompt tokens"].startswith(tokens), lines
    if "those" in tokens:
        itself = lines["engine against itself"]
        assert float(itself.partition("at most ")[2] or "nan") < 1e-4, itself


def test_a_sketch_measures_the_relative_difference_and_small_growth_is_noise():
    torch.manual_seed(0)
    hidden = torch.randn(200, 64)
    changed = hidden + 0.1 * torch.randn(200, 64)
    ours, theirs = ({str(i): megatron_dapo_layers.sketch(h) for i in (0, 1)} for h in (hidden, changed))
    found = layer_differences(ours, theirs)
    assert [*found] == ["embedding", "layer 0"] and found["layer 0"] == pytest.approx(0.1, rel=0.1)
    assert first_to_stand_out([0.0, 0.01, 0.02, 0.04, 0.05], 0.03) is None
    assert first_to_stand_out([0.0, 0.01, 0.011, 0.2, 0.3], 0.03) == 3
    assert first_to_stand_out([0.0, float("nan")], 0.03) == 1
