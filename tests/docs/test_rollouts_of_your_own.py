"""The file in docs/rollouts_of_your_own.md is the example's, has at most 62 lines, and trains."""

import importlib
import multiprocessing
import re
import sys
from pathlib import Path

import pytest
from forked import records

from megatron_dapo.data import arithmetic_tokenizer

TOKENIZER = arithmetic_tokenizer()
ROOT = Path(__file__).resolve().parents[2]
FAST = ["trainer.steps=1", "trainer.prompts_per_step=8", "evaluate.samples=1", "observe.console=off"]


def code_in_the_docs():
    page = (ROOT / "docs" / "rollouts_of_your_own.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "__main__" in block]
    return code


def test_the_file_in_the_docs_is_the_example():
    code = code_in_the_docs()
    assert len(code.splitlines()) <= 62
    assert code == (ROOT / "examples" / "guessing_game" / "game.py").read_text()


def test_the_model_is_pretrained_on_guesses_only(tmp_path, monkeypatch):
    """On what it writes itself. A start model that has not learned to use the replies does not improve."""
    monkeypatch.syspath_prepend(str(ROOT))
    game, batches = importlib.import_module("examples.guessing_game.game"), []

    def one_batch(model, batch, updates):
        batches.append(batch())
        yield 1, 0.0

    monkeypatch.setattr(game, "pretrain", one_batch)
    game.make_model(tmp_path, seed=0)
    ((games, labels),) = batches
    for tokens, wanted in zip(games, labels, strict=True):
        guesses, others = (TOKENIZER.decode(tokens[part]) for part in (wanted != -100, wanted == -100))
        assert re.fullmatch(r"([1-7]\n){3}", guesses) and re.fullmatch(r"\d{4}:([<>]\n){3}", others)
    first = [TOKENIZER.decode(tokens)[5] for tokens in games]
    assert 15 < first.count("4") < 45, "a third of 64 players, and one in seven of the others"


def train():
    sys.modules.pop("examples.guessing_game.game", None)  # of the other test, whose sys.path is gone
    game = importlib.import_module("examples.guessing_game.game")
    whole = game.make_model
    game.make_model = lambda folder, seed: whole(folder, seed, updates=20)
    raise SystemExit(game.main("3", *FAST))


@pytest.fixture
def from_a_checkout(tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return tmp_path


def test_it_trains(from_a_checkout):
    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join(300)
    assert process.exitcode == 0
    found = records(from_a_checkout / "runs" / "guessing_game")
    (metrics,) = [metrics for _, kind, metrics in found if kind == "step"]
    assert metrics["rollout/turns_max"] <= 3 and metrics["train/tokens"] > 0
    assert [kind for _, kind, _ in found].count("eval") == 2
