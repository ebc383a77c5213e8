"""Every YAML file in examples/ is a run that could start: `train --dry-run` and `plan` accept it with the paths that it
names, on as many GPUs as its README says. The keys and values in the READMEs are those of the files."""

import json
import re
import shlex

import pytest
import yaml
from long_lists import some
from workplace import EXAMPLES, FILES, FILLED_IN, ROOT

from megatron_dapo.ablation.designs import variants
from megatron_dapo.cli import main
from megatron_dapo.config import load_config
from megatron_dapo.config.load import known_keys

GPUS = {  # of the trainer, and of engines that have their own; a new file without an entry fails
    "examples/quickstart/config.yaml": (1, 0),
    "examples/guessing_game/config.yaml": (1, 0),
    "examples/calculator/config.yaml": (1, 0),
    "examples/ablations/arithmetic.yaml": (1, 0),
    **{f"examples/ablations/{task}.yaml": (1, 0) for task in ("entropy", "signal", "long_wrong", "truncated")},
    "examples/ablations/gsm8k.yaml": (1, 0),  # the server is external, on the same GPU
    "examples/gsm8k_1gpu/gsm8k.yaml": (1, 0),
    "examples/gsm8k_lora/gsm8k.yaml": (1, 0),
    "examples/quickstart/lora.yaml": (1, 0),
    "examples/qwen2.5_32b_lora_1gpu/dapo.yaml": (1, 0),
    "examples/qwen3_30b_a3b/dapo.yaml": (8, 24),
    "examples/qwen2.5_32b_fast/dapo.yaml": (48, 80),
    "examples/qwen2.5_32b_dapo/dapo.yaml": (64, 64),
    "examples/qwen2.5_32b_vapo/vapo.yaml": (64, 64),
    "examples/vapo/vapo.yaml": (1, 0),
    "examples/vapo/mixed.yaml": (1, 0),
}
KIND = {"examples/qwen2.5_32b_lora_1gpu/dapo.yaml": "h200"}  # the others need no more than an H100


def settings(file):
    return [word for item in FILLED_IN.get(file, []) for word in ("--set", item)]


def test_every_file_is_known_here():
    assert set(FILES) == set(GPUS)


@pytest.mark.parametrize("file", FILES)
def test_dry_run_on_a_machine_without_gpus(file, workplace, capsys):
    """It shows the layout of the job, not that of this machine."""
    assert main(["train", file, "--dry-run", *settings(file)]) == 0
    ranks, _ = GPUS[file]
    config = load_config(file, FILLED_IN.get(file, []))
    said = capsys.readouterr()
    assert "valid" in said.out
    layout = " ".join(said.err.split())
    assert f"{ranks} rank{'s' * (ranks > 1)} = TP {config.policy.tensor_parallel} " in layout
    assert f"× DP {ranks // config.policy.model_ranks}" in layout
    # Nothing beside the run directory is written.
    assert (workplace / config.trainer.run_dir / "config.yaml").exists()


# The layout above is that of so many ranks; this asks the ranks of a job.
@pytest.mark.parametrize("file", some(FILES, "examples/quickstart/config.yaml", "examples/qwen2.5_32b_fast/dapo.yaml"))
def test_dry_run_on_all_ranks(file, workplace, monkeypatch, capsys):
    ranks, _ = GPUS[file]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert main(["train", file, "--dry-run", *settings(file)]) == 0
    assert f"{ranks} rank{'s' * (ranks > 1)} =" in capsys.readouterr().err


def readme_plans():
    """(README, its `megatron-dapo plan` command) of every README in examples/."""
    found = []
    for readme in sorted(EXAMPLES.rglob("README.md")):
        lines = [line for line in readme.read_text().splitlines() if line.startswith("megatron-dapo plan examples/")]
        found += [(str(readme.relative_to(ROOT)), line) for line in lines]
    return found


PLANNED = {shlex.split(command)[2] for _, command in readme_plans()}


@pytest.mark.parametrize("file", some(FILES, *(file for file in FILES if file not in PLANNED)))
def test_it_fits_the_gpus(file, workplace, capsys):
    trainer, engines = GPUS[file]
    kind = KIND.get(file, "h100")
    words = ["--gpu", kind, "--gpus", str(trainer + engines)]
    assert main(["plan", file, *words, *settings(file)]) == 0
    said = capsys.readouterr().out
    assert f"\nFITS on {trainer + engines} × {kind}" in said
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


@pytest.mark.parametrize(("readme", "command"), readme_plans())
def test_plan_as_the_readme_says(readme, command, workplace, capsys):
    """The plan fits, on all GPUs of the run, and the README's table has exactly its figures."""
    assert main([*shlex.split(command)[1:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    file = shlex.split(command)[2]
    assert plan["fits"] and plan["gpus"] == sum(GPUS[file])
    training = plan["gpus"] if "--engine-gpus 0" in command else GPUS[file][0]
    ranks = training // load_config(file).policy.model_ranks
    assert plan["layout"].endswith(f"DP{ranks}") or ranks == 1
    used, limit = plan["trainer_bytes"]["total"] / 2**30, plan["limit_bytes"] / 2**30
    names = ["generation", "log-probs", "training", "weight sync", "hand-over"]
    names[1:1] = [name for name in ("values", "critic") if name in plan["phases"]]
    phases = [plan["phases"].get(name) for name in names]
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


@pytest.mark.parametrize(
    ("variant", "original", "follows"),
    [
        (
            "qwen2.5_32b_fast/dapo.yaml",
            "qwen2.5_32b_dapo/dapo.yaml",
            {"rollout.weights.directory", "rollout.sampler.max_generation_batches"},
        ),
        ("qwen2.5_32b_lora_1gpu/dapo.yaml", "qwen2.5_32b_dapo/dapo.yaml", set()),
        ("gsm8k_lora/gsm8k.yaml", "gsm8k_1gpu/gsm8k.yaml", set()),
    ],
)
def test_a_variant_differs_only_as_its_readme_says(variant, original, follows):
    """Every other setting of the two files is equal, apart from directories and the limit on sampled prompts."""
    mine, theirs = (dict(flat(load_config(EXAMPLES / file).model_dump())) for file in (variant, original))
    differing = {key for key in mine if mine[key] != theirs[key]}
    listed = {key for key, _ in table_rows((EXAMPLES / variant).with_name("README.md"))}
    assert differing - follows - {"trainer.run_dir"} == listed


def test_ablation_table_is_what_ablate_runs():
    _, section = (EXAMPLES / "ablations/README.md").read_text().split("## Variants and their settings\n")
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    written = []
    for line in lines[1:]:
        name, added, paper = (cell.strip() for cell in line.strip("|").split("|"))
        written.append((name, tuple(re.findall(r"`([^`]+)`", added)), float(paper)))
    found = variants(load_config(EXAMPLES / "qwen2.5_32b_dapo/dapo.yaml"))
    total = {}
    for (name, added, paper), variant in zip(written, found, strict=True):
        total |= dict(item.split("=") for item in added)
        assert (name, total, paper) == (variant.name, dict(item.split("=") for item in variant.settings), variant.paper)
