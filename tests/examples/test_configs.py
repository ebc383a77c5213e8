"""Every YAML file in examples/ is a run that could start: `train --dry-run` and `plan` accept it with the paths that it
names, on as many GPUs as its README says. The keys and values in the READMEs are those of the files."""

import json
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from sparse_model import write_sparse_model

from megatron_dapo.cli import main
from megatron_dapo.config import load_config
from megatron_dapo.config.load import known_keys
from megatron_dapo.launch.ablate import variants

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted(str(path.relative_to(ROOT)) for path in EXAMPLES.rglob("*.yaml"))


def shape(architecture, hidden, ffn, layers, heads, kv, vocab, tied, **more):
    return {
        "architectures": [architecture], "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab, "tie_word_embeddings": tied,
        "max_position_embeddings": 32768, "rope_theta": 1e6, **more,
    }  # fmt: skip


EXPERTS = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS = {  # by the directory that a configuration names; the sizes of the published config.json files
    "models/Qwen2.5-32B": shape("Qwen2ForCausalLM", 5120, 27648, 64, 40, 8, 152064, False),
    "models/Qwen2.5-1.5B": shape("Qwen2ForCausalLM", 1536, 8960, 28, 12, 2, 151936, True),
    "models/Qwen3-30B-A3B-Base": shape("Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, 151936, False, **EXPERTS),
    "runs/quickstart/start": shape("Qwen2ForCausalLM", 96, 256, 3, 4, 2, 300, True),
}
GPUS = {  # of the trainer, and of engines that have their own; a new file without an entry fails
    "examples/quickstart/config.yaml": (1, 0),
    "examples/ablations/arithmetic.yaml": (1, 0),
    "examples/gsm8k_1gpu/gsm8k.yaml": (1, 0),
    "examples/qwen3_30b_a3b/dapo.yaml": (8, 24),
    "examples/qwen2.5_32b_fast/dapo.yaml": (48, 80),
    "examples/qwen2.5_32b_dapo/dapo.yaml": (64, 64),
}
# quickstart.py makes these and fills them in; every other file names its own.
FILLED_IN = {
    "examples/quickstart/config.yaml": [
        "policy.model=runs/quickstart/start", "data.path=runs/quickstart/prompts.jsonl",
        "evaluate.data.path=runs/quickstart/held_out.jsonl",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
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
def workplace(tmp_path, monkeypatch, models):
    """A directory with examples/ and every model and data file that they name, seen by a machine without GPUs."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for name in MODELS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(models / name)
    for file in FILES:
        config = load_config(ROOT / file, FILLED_IN.get(file, []))
        for path in (config.data.path, config.evaluate.data.path):
            assert path and not Path(path).is_absolute(), f"{file} names {path!r}: expected a relative path"
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            write_problems(tmp_path / path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def settings(file):
    return [word for item in FILLED_IN.get(file, []) for word in ("--set", item)]


def test_every_file_is_known_here():
    assert set(FILES) == set(GPUS)


@pytest.mark.parametrize("file", FILES)
def test_dry_run_on_all_ranks(file, workplace, monkeypatch, capsys):
    ranks, _ = GPUS[file]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert main(["train", file, "--dry-run", *settings(file)]) == 0
    said = capsys.readouterr()
    assert "valid" in said.out
    assert f"{ranks} ranks" in said.err
    # Nothing beside the run directory is written.
    run_dir = load_config(file, FILLED_IN.get(file, [])).trainer.run_dir
    assert (workplace / run_dir / "config.yaml").exists()


@pytest.mark.parametrize("file", FILES)
def test_dry_run_on_a_machine_without_gpus(file, workplace):
    assert main(["train", file, "--dry-run", *settings(file)]) == 0


@pytest.mark.parametrize("file", FILES)
def test_it_fits_the_gpus(file, workplace, capsys):
    trainer, engines = GPUS[file]
    words = ["--gpu", "h100", "--gpus", str(trainer + engines)]
    assert main(["plan", file, *words, *settings(file)]) == 0
    said = capsys.readouterr().out
    assert f"\nFITS on {trainer + engines} × h100" in said
    assert (f"{engines} GPUs only serve, {trainer} only train" in said) == bool(engines)


@pytest.mark.parametrize("file", [file for file, (trainer, engines) in GPUS.items() if engines])
def test_the_job_has_these_gpus(file, workplace, monkeypatch, capsys):
    """`slurm --dry-run`, on a machine without Slurm, writes a job of that size."""
    monkeypatch.setenv("PATH", str(workplace))
    assert main(["slurm", file, "--dry-run"]) == 0
    trainer, engines = GPUS[file]
    config = load_config(file)
    servers = engines // config.rollout.servers.tensor_parallel
    said = capsys.readouterr().out
    assert f"{trainer} ranks on {config.slurm.nodes - config.slurm.engine_nodes} nodes" in said
    assert f"{servers} SGLang servers" in said


def readme_plans():
    """(README, its `megatron-dapo plan` command) of every README in examples/."""
    found = []
    for readme in sorted(EXAMPLES.rglob("README.md")):
        lines = [line for line in readme.read_text().splitlines() if line.startswith("megatron-dapo plan examples/")]
        found += [(str(readme.relative_to(ROOT)), line) for line in lines]
    return found


@pytest.mark.parametrize(("readme", "command"), readme_plans())
def test_plan_as_the_readme_says(readme, command, workplace, capsys):
    """The plan fits, and the README's table has exactly its figures."""
    assert main([*shlex.split(command)[1:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    used, limit = plan["trainer_bytes"]["total"] / 2**30, plan["limit_bytes"] / 2**30
    phases = [plan["phases"].get(name) for name in ("generation", "log-probs", "training", "weight sync", "hand-over")]
    seconds = ["" if value is None else f"{value:,.1f} s" for value in [*phases, plan["step_seconds"]]]
    row = f"| {plan['layout']} | {used:.1f} of {limit:.1f} GiB | {' | '.join(seconds)} |".replace("|  |", "| |")
    assert row in (ROOT / readme).read_text().splitlines(), f"{readme}: {command} calculates\n{row}"


def test_a_cluster_needs_its_layout(workplace):
    """The plan is a real check: the 32B model without parallelism is refused, and the dry run on 100 ranks, too."""
    file = "examples/qwen2.5_32b_dapo/dapo.yaml"
    alone = [f"policy.{name}_parallel=1" for name in ("tensor", "pipeline", "context")]
    words = [word for item in alone for word in ("--set", item)]
    assert main(["plan", file, "--gpu", "h100", "--gpus", "128", *words]) == 1
    assert main(["train", file, "--dry-run", "--set", "trainer.ranks=100"]) == 2


def table_rows(readme):
    """(key, value) of the rows of a README's tables that have a dotted key and a value, both in backticks."""
    keys = set(known_keys())
    cells = [re.findall(r"\| `([\w.]+)` \| `([^`]+)` \|", line) for line in readme.read_text().splitlines()]
    return [(key, value) for row in cells for key, value in row if key in keys]


@pytest.mark.parametrize("file", [file for file in FILES if (ROOT / file).with_name("README.md").exists()])
def test_readme_tables_say_what_the_file_holds(file):
    config = load_config(ROOT / file).model_dump()
    found = table_rows((ROOT / file).with_name("README.md"))
    assert found or "ablations" in file
    for key, value in found:
        node = config
        for part in key.split("."):
            node = node[part]
        assert node == yaml.safe_load(value), f"{file}: {key} is {node!r}, its README says {value}"


def test_every_published_value_is_written_in_the_file():
    """The table's keys are in the YAML itself: a changed default must not change the published recipe."""
    file = EXAMPLES / "qwen2.5_32b_dapo" / "dapo.yaml"
    raw = yaml.safe_load(file.read_text())
    rows_ = table_rows(file.with_name("README.md"))
    assert len(rows_) >= 40
    for key, _ in rows_:
        node = raw
        for part in key.split("."):
            assert part in node, f"{key} is not in {file.name}"
            node = node[part]


def flat(node, prefix=""):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_the_fast_variant_differs_only_as_its_readme_says():
    """Every other setting of the two files is equal, apart from directories and the limit on sampled prompts."""
    slow, fast = (EXAMPLES / name / "dapo.yaml" for name in ("qwen2.5_32b_dapo", "qwen2.5_32b_fast"))
    mine, theirs = (dict(flat(load_config(file).model_dump())) for file in (fast, slow))
    differing = {key for key in mine if mine[key] != theirs[key]}
    listed = {key for key, _ in table_rows(fast.with_name("README.md"))}
    follows = {"trainer.run_dir", "rollout.weights.directory", "rollout.sampler.max_generation_batches"}
    assert differing - follows == listed


def test_ablation_table_is_what_ablate_runs():
    lines = [line for line in (EXAMPLES / "ablations/README.md").read_text().splitlines() if line.startswith("| ")]
    written = []
    for line in lines[1:]:
        name, added, paper = (cell.strip() for cell in line.strip("|").split("|"))
        written.append((name, tuple(re.findall(r"`([^`]+)`", added)), float(paper)))
    found = variants(load_config(EXAMPLES / "qwen2.5_32b_dapo/dapo.yaml"))
    total = ()
    for (name, added, paper), variant in zip(written, found, strict=True):
        total += added
        assert (name, total, paper) == (variant.name, variant.settings, variant.paper)
