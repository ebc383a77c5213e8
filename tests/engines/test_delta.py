"""Updates with only what changed: a model that gets 50 of them has bitwise the weights of a full update."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_dapo.engines.sglang.server_process import IN_SERVER
from megatron_dapo.engines.sglang.weights.delta import DeltaEncoder
from megatron_dapo.sync.bucket import flatten

sys.path.insert(0, str(Path(IN_SERVER)))
import megatron_dapo_delta

HIDDEN = 48
NAMES = {"q": 0, "k": HIDDEN, "v": 2 * HIDDEN}  # first row in the fused parameter
SERVER = ("server", 0)


class Engine(nn.Module):
    """Loads as SGLang does: three tensors are fused into one parameter, and a norm has one of its own."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(3 * HIDDEN, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights):
        for name, loaded in weights:
            if name == "norm":
                self.norm.data.copy_(loaded)
            else:
                self.qkv.data.narrow(0, NAMES[name], HIDDEN).copy_(loaded)


@pytest.fixture
def engine():
    torch.manual_seed(0)
    made = Engine()
    megatron_dapo_delta.install(made, [])
    return made


def step(master):
    """Adam with a learning rate of 1e-6: most bf16 weights stay as they are."""
    for weight in master.values():
        weight.add_(torch.randn_like(weight).sign() * 1e-6)
    return [(name, weight.bfloat16()) for name, weight in master.items()]


def first_weights():
    return {name: torch.randn(HIDDEN, HIDDEN) * 0.02 for name in NAMES} | {"norm": torch.ones(HIDDEN)}


def test_50_deltas_are_bitwise_a_full_update(engine, capsys):
    encoder, master, shares = DeltaEncoder(), first_weights(), []
    for version in range(51):
        pairs = step(master)
        assert encoder.begin({SERVER: version - 1}) == (version > 0)
        bucket = flatten(pairs)
        sent = encoder.encode(bucket)
        engine.load_weights(list(sent))
        encoder.acknowledge(version, [SERVER])
        shares.append(encoder.sent_bytes / bucket.flat.nbytes)
    full = Engine()
    full.load_weights(pairs)
    for ours, theirs in zip(engine.parameters(), full.parameters(), strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    assert shares[0] == 1 and 0 < sum(shares[1:]) / 50 < 0.15
    with capsys.disabled():
        print(f" [{sum(shares[1:]) / 50:.1%} of the bytes sent]", end="")


def test_weights_that_are_not_those_of_the_sender_are_an_error(engine):
    encoder, master = DeltaEncoder(), first_weights()
    encoder.begin({SERVER: 0})
    engine.load_weights(list(encoder.encode(flatten(step(master)))))
    encoder.acknowledge(1, [SERVER])
    engine.qkv[3, 5] += 1
    assert encoder.begin({SERVER: 1})
    with pytest.raises(RuntimeError, match="but the sender had"):
        engine.load_weights(list(encoder.encode(flatten(step(master)))))


@pytest.mark.parametrize(
    "now",
    [{SERVER: None}, {SERVER: 0}, {("server", 1): 1}, {SERVER: 1, ("another", 0): 1}, {}],
    ids=["it failed", "an older version", "it restarted", "another server joined", "no server"],
)
def test_everything_is_sent_unless_all_servers_acknowledged_the_last_version(now):
    encoder, master = DeltaEncoder(), first_weights()
    encoder.begin({SERVER: 0})
    bucket = flatten(step(master))
    assert encoder.encode(bucket) is bucket
    encoder.acknowledge(1, [SERVER])
    assert not encoder.begin(now)
    again = flatten(step(master))
    assert encoder.encode(again) is again
    assert not encoder.begin({SERVER: 1})  # that update was not acknowledged


def test_a_delta_that_is_larger_than_the_bucket_is_not_sent():
    encoder = DeltaEncoder()
    encoder.begin({})
    encoder.encode(flatten([("q", torch.zeros(64))]))
    encoder.acknowledge(1, [SERVER])
    assert encoder.begin({SERVER: 1})
    bucket = flatten([("q", torch.ones(64))])
    assert encoder.encode(bucket) is bucket
    encoder.acknowledge(2, [SERVER])
    encoder.begin({SERVER: 2})
    assert not encoder.encode(flatten([("q", torch.ones(64))])).specs  # nothing has changed
