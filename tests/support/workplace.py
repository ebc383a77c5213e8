"""A directory in which the commands of the documentation can be given: examples/, and every model and data file that
the example configurations name. Models are sparse files of the published sizes."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sparse_model import write_sparse_model

from megatron_dapo.config import load_config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted(str(path.relative_to(ROOT)) for path in EXAMPLES.rglob("*.yaml") if path.stem != "jobset")


def shape(architecture, hidden, ffn, layers, heads, kv, vocab, tied, **more):
    return {
        "architectures": [architecture], "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab, "tie_word_embeddings": tied,
        "max_position_embeddings": 32768, "rope_theta": 1e6, **more,
    }  # fmt: skip


EXPERTS = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS = {  # by the directory that a configuration names; the sizes of the published config.json files
    "models/Qwen2.5-32B": shape("Qwen2ForCausalLM", 5120, 27648, 64, 40, 8, 152064, False),
    "models/Qwen2.5-Coder-1.5B-Instruct": shape("Qwen2ForCausalLM", 1536, 8960, 28, 12, 2, 151936, True),
    "models/Qwen2.5-1.5B": shape("Qwen2ForCausalLM", 1536, 8960, 28, 12, 2, 151936, True),
    "models/Qwen3-30B-A3B-Base": shape("Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, 151936, False, **EXPERTS),
    **{
        f"runs/{name}": shape("Qwen2ForCausalLM", 96, 256, 3, 4, 2, 300, True)
        for name in (
            "calculator/start",
            "guessing_game/start",
            "quickstart/start",
            "ablation_tasks/sums",
            "ablation_tasks/counting",
            "ablation_tasks/letters",
            "ablation_tasks/steady",
        )
    },
}
# quickstart.py makes these and fills them in; every other file names its own.
FILLED_IN = {
    "examples/quickstart/config.yaml": [
        "policy.model=runs/quickstart/start", "data.path=runs/quickstart/prompts.jsonl",
        "evaluate.data.path=runs/quickstart/held_out.jsonl",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def sparse_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        write_sparse_model(folder / name, config)
    return folder


def write_problems(path):
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(512)]  # the largest step
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def workplace(tmp_path, monkeypatch, sparse_models):
    """The current directory, on a machine without GPUs."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for name in MODELS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(sparse_models / name)
    for file in FILES:
        config = load_config(ROOT / file, FILLED_IN.get(file, []))
        for path in (config.data.path, config.evaluate.data.path):
            assert path and not Path(path).is_absolute(), f"{file} names {path!r}: expected a relative path"
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            write_problems(tmp_path / path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path
