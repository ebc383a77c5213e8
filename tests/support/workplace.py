"""A directory in which the commands of the documentation can be given: examples/, and every model and data file that
the example configurations name. Models are sparse files of the published sizes."""

import functools
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from published_models import CONFIGS
from sparse_model import write_sparse_model

from megatron_dapo.config import load_config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted(str(path.relative_to(ROOT)) for path in EXAMPLES.rglob("*.yaml") if path.parent.name != "kubernetes")


TINY = CONFIGS["Qwen2.5-0.5B"] | {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300,
}  # fmt: skip
STARTS = (
    "calculator/start", "guessing_game/start", "quickstart/start", "quickstart_lora/start", "ablation_tasks/sums",
    "ablation_tasks/counting", "ablation_tasks/letters", "ablation_tasks/steady",
)  # fmt: skip
MODELS = {  # by the directory that a configuration names
    "models/Qwen2.5-32B": CONFIGS["Qwen2.5-32B"],
    "models/Qwen2.5-Coder-1.5B-Instruct": CONFIGS["Qwen2.5-1.5B"],
    "models/Qwen2.5-1.5B": CONFIGS["Qwen2.5-1.5B"],
    "models/Qwen2.5-1.5B-Instruct": CONFIGS["Qwen2.5-1.5B"],
    "models/Qwen3-30B-A3B-Base": CONFIGS["Qwen3-30B-A3B"],
    **{f"runs/{name}": TINY for name in STARTS},
}
# quickstart.py makes these and fills them in; every other file names its own.
FILLED_IN = {
    "examples/quickstart/config.yaml": [
        "policy.model=runs/quickstart/start", "data.path=runs/quickstart/prompts.jsonl",
        "evaluate.data.path=runs/quickstart/held_out.jsonl",
    ],
}  # fmt: skip


def write_problems(path):
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(512)]  # the largest step
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@functools.cache
def data_paths():
    """Every data file that a configuration names."""
    found = set()
    for file in FILES:
        config = load_config(ROOT / file, FILLED_IN.get(file, []))
        for path in (config.data.path, config.evaluate.data.path):
            assert path and not Path(path).is_absolute(), f"{file} names {path!r}: expected a relative path"
            found.add(path)
    return found


@pytest.fixture(scope="session")
def sparse_models(tmp_path_factory):
    """The models, and beside them the data."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        write_sparse_model(folder / name, config)
    for path in data_paths():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_problems(folder / path)
    return folder


@pytest.fixture
def workplace(tmp_path, monkeypatch, sparse_models):
    """The current directory, on a machine without GPUs."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for name in (*MODELS, *data_paths()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(sparse_models / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("megatron_dapo.trainer.rehearsal.CHECKED_BYTES", 1 << 24)  # all of them are zero
    return tmp_path
