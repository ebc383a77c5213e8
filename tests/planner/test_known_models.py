"""`plan` knows the published Qwens by name: no directory and no download is needed."""

import json

import pytest
from long_lists import some
from published_models import PUBLISHED

from megatron_dapo.cli import main
from megatron_dapo.config import ModelShape
from megatron_dapo.planner.models import known_shape


def test_known_shapes_are_those_of_the_published_models():
    for name, model in PUBLISHED.items():
        assert known_shape(name) == ModelShape.from_hf(model.config, name)
    for name, positions, theta in (
        ("Qwen1.5-7B", 32768, 1e6), ("Qwen2.5-7B", 131072, 1e6), ("Qwen2.5-Math-7B", 4096, 1e4),
        ("DeepSeek-R1-Distill-Qwen-7B", 131072, 1e4), ("QwQ-32B", 40960, 1e6), ("Qwen3-8B", 40960, 1e6),
        ("Qwen3-4B-Instruct-2507", 262144, 5e6), ("Qwen3-30B-A3B-Instruct-2507", 262144, 1e7),
    ):  # fmt: skip
        assert (known_shape(name).max_positions, known_shape(name).rope_theta) == (positions, theta), name
    assert known_shape("Qwen/Qwen2.5-32B-Instruct@main") == known_shape("models/Qwen2.5-32B") is not None
    assert known_shape("Qwen3-30B-A3B-Base") == known_shape("Qwen3-30B-A3B")
    assert known_shape("Qwen9-1T") is None and known_shape("Qwen2.5-32B-mine") is None


QUICK = ["trainer.prompts_per_step=32"]  # simulating the generation of 512 prompts takes seconds


@pytest.mark.parametrize(
    "name", some([f"{at}Qwen2.5-32B" for at in ("", "Qwen/", "models/", "/data/")], "Qwen/Qwen2.5-32B")
)
def test_plan_needs_no_directory(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert main(["plan", "--model", name, "--gpus", "128", "--json", *QUICK]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["parameters"]["total"] == 32_763_876_352
    assert f"{name} is not here: the published config.json of that model is used" in said.err


def test_a_directory_of_that_name_is_read(tmp_path, monkeypatch, capsys):
    small = PUBLISHED["Qwen2.5-0.5B"].config
    (tmp_path / "Qwen2.5-32B").mkdir()
    (tmp_path / "Qwen2.5-32B" / "config.json").write_text(json.dumps(small))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model", "Qwen2.5-32B", "--gpus", "8", "--json", *QUICK]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["parameters"]["total"] == 494_032_768 and not said.err
