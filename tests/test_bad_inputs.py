"""Wrong input of every command: exit code 2 and one line on stderr that names the mistake, before weights are loaded.
Settings that make no sense but can run are accepted, with one line that says so."""

import copy
import importlib.util
import json
import shutil
import sys
from dataclasses import dataclass, field

import pytest
import torch
import yaml
from tiny_run import raw_config, write_config

from megatron_dapo.cli import main
from megatron_dapo.processes.fork_ranks import run_in_fork
from megatron_dapo.weights.locate import TRACKER

DATA = "data.path"


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A folder with a tiny model and data, and the configuration of a run that works."""
    folder = tmp_path_factory.mktemp("complete")
    return folder, raw_config(folder / "model", folder / "run")


class Place:
    """A run's files, which a case may damage: model/, prompts.jsonl and the configuration."""

    def __init__(self, folder, complete):
        source, raw = complete
        self.folder, self.model, self.raw = folder, folder / "model", copy.deepcopy(raw)
        shutil.copytree(source / "model", self.model)
        self.raw["policy"]["model"] = str(self.model)
        self.raw["data"]["path"] = str(self.model / "prompts.jsonl")
        self.raw["trainer"]["run_dir"] = str(folder / "run")

    def set(self, key, value):
        *sections, name = key.split(".")
        node = self.raw
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value

    def edit_model(self, **changes):
        file = self.model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    def rows(self, *rows):
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.set(DATA, str(self.folder / "rows.jsonl"))

    def write(self):
        file = self.folder / "run.yaml"
        file.write_text(yaml.safe_dump(self.raw))
        return str(file)


@dataclass
class Case:
    name: str
    expect: str  # in the message
    settings: dict = field(default_factory=dict)  # dotted keys of the configuration
    damage: object = None  # called with the Place
    arguments: list = field(default_factory=lambda: ["train", "CONFIG", "--dry-run"])  # CONFIG: the file's path
    accepted: bool = False  # with a warning


def setting(key, value, expect, name=None):
    return Case(name or f"{key}={value}", expect, {key: value})


def override(item, expect):
    return Case(f"--set {item}", expect, arguments=["train", "CONFIG", "--dry-run", "--set", item])


def command(line, expect):
    return Case(line, expect, arguments=line.split())


def config_file(data):
    def damage(place):
        (place.folder / "bad.yaml").write_bytes(data)

    return damage


BAD_FILE = ["train", "bad.yaml", "--dry-run"]
CONFIG_FILES = [
    Case("missing file", "no such file", arguments=["train", "none.yaml"]),
    Case("a directory as configuration", "directory", arguments=["train", "."]),
    Case("below a file", "Not a directory", damage=config_file(b""), arguments=["train", "bad.yaml/run.yaml"]),
    Case("not UTF-8", "UTF-8", damage=config_file(b"policy: {model: \xff\xfe}\n"), arguments=BAD_FILE),
    Case("not YAML", "line 3", damage=config_file(b"policy:\n  model: [a\ndata: }\n"), arguments=BAD_FILE),
    Case("tabs", "indent with spaces", damage=config_file(b"policy:\n\tmodel: a\n"), arguments=BAD_FILE),
    Case("a list", "sections", damage=config_file(b"- a\n- b\n"), arguments=BAD_FILE),
    Case("a text", "sections", damage=config_file(b"policy\n"), arguments=BAD_FILE),
    Case("a section that is a value", "policy", damage=config_file(b"policy: 3\n"), arguments=BAD_FILE),
    Case("duplicate keys", "twice", damage=config_file(b"trainer:\n  steps: 3\n  steps: 4\n"), arguments=BAD_FILE),
    Case("duplicate sections", "twice", damage=config_file(b"trainer: {}\ntrainer: {}\n"), arguments=BAD_FILE),
]
OVERRIDES = [
    override("trainer.steps", "section.key=value"),
    override("=3", "section.key=value"),
    override("policy..x=1", "section.key=value"),
    override("trainer.steps.more=3", "steps"),
    override("trainer.stepz=3", "did you mean 'trainer.steps'"),
    override("algorithm.epsilon_high=0.3", "algorithm.clip_high"),
    override("trainer.steps=[1", "YAML"),
]
VALUES = [
    setting("trainer.steps", "many", "trainer.steps"),
    setting("rollout.stop_token_ids", [10**6], "vocabulary"),
    setting("evaluate.stop_token_ids", [3, 10**6], "vocabulary"),
    setting("rollout.group_filter", "nonsense", "rollout.group_filter"),
    setting("rollout.samples_per_prompt", 1, "use 2 or more"),
    setting("policy.moe_aux_loss_coefficient", 0.1, "no experts"),
    setting("trainer.checkpoint.best_metric", "nonsense", "best_metric"),
    Case(
        "best_metric that the evaluation does not have",
        "eval/avg@32",
        {
            "trainer.checkpoint.best_metric": "eval/avg@8", "evaluate.every": 1,
            "evaluate.data.path": "model/problems.jsonl",
        },
    ),
    setting("trainer.mini_batch_prompts", 3, "mini_batch_prompts"),
    Case(
        "more prompts a step than the file has",
        "64 usable prompts",
        {"trainer.prompts_per_step": 100, "trainer.mini_batch_prompts": 50},
    ),
    Case("more prompts a step than good rows", "8 usable prompts (1 bad, first line 9: prompt: the prompt is empty)",
         damage=lambda place: rows(*GOOD, {"prompt": "", "answer": "1"})(place),
         settings={"trainer.prompts_per_step": 100, "trainer.mini_batch_prompts": 50}),
    Case(
        "heads not divisible", "policy.tensor_parallel", {"policy.tensor_parallel": 3, "policy.micro_batch_tokens": 258}
    ),
    Case("experts of a dense model", "no experts", {"policy.expert_parallel": 2, "trainer.ranks": 2}),
    Case(
        "ranks that the layout does not divide",
        "multiple of 2",
        {"trainer.ranks": 3, "policy.tensor_parallel": 2, "policy.micro_batch_tokens": 256},
    ),
    setting("rollout.max_response_tokens", 4000, "policy.micro_batch_tokens"),
    setting("reward.grader", "best", "grader"),
    setting("data.template", "none", "template"),
    setting("slurm.partition", "a\n#SBATCH --account=b", "line break"),
    setting("slurm.environment", {"WANDB_API_KEY": "x"}, "secret"),
    setting("rollout.servers.environment", {"HF_TOKEN": "x"}, "secret"),
    setting("policy.model", "", "policy.model is empty"),
    setting("policy.model", "nowhere", "not a directory"),
    setting("data.path", "", "data.path is empty"),
    setting("trainer.run_dir", "", "name a directory of its own"),
    setting("trainer.run_dir", "./", "name a directory of its own"),
    setting("trainer.seed", 2**70, "trainer.seed"),
    setting("policy.optimizer", {"warmup_steps": 5, "decay_steps": 5}, "must be more than warmup_steps"),
    setting("policy.expert_parallel", 2, "the model has no experts"),
    setting("rollout.sampler.oversampling", 0, "expected 'adaptive' or a number of at least 1"),
    Case("run_dir is the folder of the configuration", "name another directory", {"trainer.run_dir": "home"},
         lambda p: (p.folder / "home").mkdir(), ["train", "home/config.yaml", "--dry-run"]),
    Case("slurm run_dir is the folder of the configuration", "name another directory", {"trainer.run_dir": "home"},
         lambda p: (p.folder / "home").mkdir(), ["slurm", "home/config.yaml", "--dry-run"]),
]  # fmt: skip


def unusual(key, value, expect, **more):
    return Case(f"{key}={value} is unusual", expect, {key: value} | more, accepted=True)


UNUSUAL = [
    unusual("policy.optimizer.lr", 10, "published runs use"),
    unusual("algorithm.clip_low", 0.5, "clip_high"),
    unusual("algorithm.clip_high", 1000, "hardly any ratio"),
    unusual("algorithm.entropy_coefficient", 1000, "outweigh"),
    unusual("rollout.temperature", 100, "random tokens"),
    unusual("rollout.sampler.oversampling", 1536, "not a number of prompts"),
    unusual("trainer.steps", 10**11, "published runs have"),
    unusual("policy.optimizer.warmup_steps", 100000, "ends before"),
    unusual("evaluate.every", 10, "nothing is evaluated"),
    unusual("rollout.weights.transport", "tensor", "no effect"),
    unusual("rollout.servers.count", 2, "no effect"),
    unusual("rollout.sampler.max_generation_batches", None, "there is no limit",
            **{"rollout.sampler.on_limit": "stop"}),
    unusual("evaluate.data", {"path": "model/prompts.jsonl", "template": "plain"}, "64 of its 64 problems"),
]  # fmt: skip


def without(*names):
    return lambda place: [(place.model / name).unlink() for name in names]


def cut_weights(place):
    file = place.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def more_tokens(place):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place.model)
    tokenizer.add_tokens([f"<extra{i}>" for i in range(50)])
    tokenizer.save_pretrained(place.model)


def lost_shard(place):
    (place.model / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (place.model / "model.safetensors.index.json").write_text(json.dumps(index))


def without_tokenizer(place):
    for file in place.model.glob("*token*"):
        file.unlink()


MODELS = [
    Case("no config.json", "config.json", damage=without("config.json")),
    Case(
        "a Megatron checkpoint as model",
        "belongs into policy.megatron_checkpoint",
        {"policy.model": "converted"},
        damage=lambda p: ((p.folder / "converted").mkdir(), (p.folder / "converted" / TRACKER).touch()),
    ),
    Case("config.json is no JSON", "JSON", damage=lambda p: (p.model / "config.json").write_text("{")),
    Case("another architecture", "GPT2LMHeadModel", damage=lambda p: p.edit_model(architectures=["GPT2LMHeadModel"])),
    Case("no tokenizer", "no tokenizer", damage=without_tokenizer),
    Case("tokenizer larger than the vocabulary", "different models", damage=more_tokens),
    Case("no weights", "model.safetensors", damage=without("model.safetensors")),
    Case("truncated weights", "truncated", damage=cut_weights),
    Case("missing weight file", "model-00001-of-00001.safetensors", damage=lost_shard),
    Case("missing Megatron checkpoint", "megatron_checkpoint", {"policy.megatron_checkpoint": "nowhere"}),
    Case(
        "a Megatron checkpoint that is none",
        "megatron_checkpoint",
        {"policy.megatron_checkpoint": "empty"},
        damage=lambda p: (p.folder / "empty").mkdir(),
    ),
]


def rows(*items):
    return lambda place: place.rows(*items)


# data/test_prompts.py and data/test_tokenizer.py have the files that cannot be used.
GOOD = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
DATA_FILES = [
    setting(DATA, "none.jsonl", "does not exist"),
    setting(DATA, "model/config.txt", "data.path"),
    Case("most rows broken", "59 of 64 rows", damage=rows(*GOOD[:5], *[{"prompt": "", "answer": "1"}] * 59)),
    Case(
        "most prompts too long", "max_prompt_tokens", {"rollout.max_prompt_tokens": 5},
        rows(*[{"prompt": f"{i}+{i}=", "answer": "1"} for i in range(5, 21)]),
    ),
    Case("evaluation data missing", "evaluate.data.path", {"evaluate.data.path": "none.jsonl"}),
    Case(
        "evaluation data broken", "evaluate.data", {"evaluate.data.path": "e.jsonl", "evaluate.data.template": "plain"},
        lambda p: (p.folder / "e.jsonl").write_text('{"a": 1}\n{"prompt": "1+1=", "answer": "2"}\n{"a": 1}\n'),
    ),
]  # fmt: skip


def module(text):
    return lambda place: (place.folder / "bad_plugin.py").write_text(text)


PLUGINS = [
    setting("reward.grader", "python:no_such_module.grade", "reward.grader"),
    setting("reward.grader", "python:json.no_such_function", "no_such_function"),
    setting("reward.grader", "python:grade", "python:module.function"),
    setting("rollout.group_filter", "python:no_such_module.keep", "rollout.group_filter"),
    setting("algorithm.objective", "python:no_such_module.loss", "algorithm.objective"),
    setting("algorithm.objective", "nonsense", "algorithm.objective"),
    setting("algorithm.objective_options", {"scale": 1.0}, "algorithm.objective_options"),
    Case("syntax error", "SyntaxError", {"reward.grader": "python:bad_plugin.grade"}, module("def grade(:\n")),
    Case("raises", "ZeroDivisionError", {"reward.grader": "python:bad_plugin.grade"}, module("1 / 0\n")),
]
TRACKERS = [
    setting("observe.tensorboard", True, "tensorboard", "tensorboard is not installed"),
    setting("observe.wandb", {"mode": "offline"}, "wandb", "wandb is not installed"),
    setting("observe.wandb", {"mode": "sometimes"}, "observe.wandb.mode", "wandb mode"),
]


# What only a rehearsal finds: the code of the user is called, on a real prompt.
def plugin(key, name, text, expect, **settings):
    found = {key: "python:bad_plugin.one"} | {k.replace("__", "."): v for k, v in settings.items()}
    return Case(name, expect, found, module(text))


GRADE, FILTER, OBJECTIVE, GENERATE = "reward.grader", "rollout.group_filter", "algorithm.objective", "rollout.generate"
MY_LOSS = """import torch
from megatron_dapo.algorithm import Objective
class one(Objective):
    def token_losses(self, scores, batch, sums):
        return {}
"""
VERL = "def one(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"
TRL = "def one(completions, **kwargs): return [1.0] * len(completions)\n"
AGENT = "async def one(prompt, conversation, settings):\n    await conversation.generate()\n    "


def nan_weights(place):
    from safetensors.torch import load_file, save_file

    weights = load_file(place.model / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, place.model / "model.safetensors", metadata={"format": "pt"})


def image(place):
    (place.folder / "image.sif").touch()
    (place.folder / "data").mkdir()
    mounts = [f"{place.folder / 'data'}:/data"]
    place.set("slurm", {"container_image": str(place.folder / "image.sif"), "container_mounts": mounts})


REMOTE, LOST = {"urls": ["http://127.0.0.1:9"]}, {"urls": ["http://no-such-host.invalid"]}
REHEARSED = [
    plugin(GRADE, "a grader with verl's signature", VERL, "TypeError: one() missing 1 required positional argument"),
    plugin(GRADE, "a grader with TRL's signature", TRL, "TypeError: one() takes 1 positional argument"),
    plugin(GRADE, "a grader that raises when called", "def one(p, r): return 1 / 0\n", "ZeroDivisionError"),
    plugin(GRADE, "a grader that returns text", "def one(p, r): return 'right'\n", "expected a Grade, a bool, a"),
    plugin(GRADE, "a grader that returns NaN", "def one(p, r): return float('nan')\n", "nan is not a number"),
    plugin(GRADE, "a grader that returns nothing", "def one(p, r): pass\n", "found None"),
    plugin(GRADE, "an async grader that raises", "async def one(p, r): return p.nonsense\n", "'nonsense'"),
    plugin(GRADE, "a grader that exits", "import os\ndef one(p, r): os._exit(3)\n", "reward.grader"),
    setting("reward", {"grader": "http", "http": REMOTE}, "127.0.0.1:9", "an http grader that does not listen"),
    setting("reward", {"grader": "judge", "judge": REMOTE | {"model": "m"}}, "127.0.0.1:9", "a judge that is away"),
    setting("reward", {"grader": "http", "http": LOST}, "no address", "a lost host"),
    plugin(FILTER, "a filter that returns text", "def one(group): return 'keep'\n", "must return a bool"),
    plugin(FILTER, "a filter that raises", "def one(group): return group.nonsense\n", "AttributeError"),
    plugin("observe.tracker", "a tracker that raises", "def one(run_dir, settings): settings['trainer']['seed'] / 0\n",
           "python:bad_plugin.one raised ZeroDivisionError at bad_plugin.py:1"),
    plugin(OBJECTIVE, "an objective that is a function", "def one(config): return 1\n", "must be a class derived from"),
    plugin(OBJECTIVE, "a loss that raises", MY_LOSS.format("batch.nonsense"), "AttributeError"),
    plugin(OBJECTIVE, "a loss of another shape", MY_LOSS.format("scores.logprobs[:1]"), OBJECTIVE),
    plugin(OBJECTIVE, "a loss that is NaN", MY_LOSS.format("scores.logprobs * float('nan')"), "not finite"),
    plugin("algorithm.advantage", "an estimator that raises", "def one(batch, config): return batch.nonsense\n",
           "algorithm.advantage: AttributeError"),
    plugin(GENERATE, "a rollout function that raises", AGENT + "1 / 0\n", "ZeroDivisionError at bad_plugin.py:3"),
    plugin(GENERATE, "a rollout function that returns text", AGENT + "return 'x'\n", "found 'x'"),
    plugin(GENERATE, "a rollout function without await", "def one(p, c, s): pass\n", "`async def`"),
    Case("SGLang's Python is missing", "nowhere/python", {"rollout.engine": "sglang",
         "rollout.servers.python": "nowhere/python"}),
    Case("SGLang is not installed", "No module named 'sglang'", {"rollout.engine": "sglang",
         "rollout.servers.device": "cpu"}),
    setting("slurm.container_image", "image.sif", "does not exist", "a container image that is missing"),
    Case("a mount that is missing", "/nowhere does not exist", {"slurm.container_mounts": ["/nowhere:/data"],
         "slurm.container_image": "docker://image"}),
    Case("a model outside of all mounts", "in none of the container's mounts", damage=image),
    Case("a model with a NaN", "model.norm.weight", damage=nan_weights),
]  # fmt: skip


def file_at(name):
    def damage(place):
        (place.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (place.folder / name).write_text("")

    return damage


GRADER = {"reward.grader": "python:no_such_module.grade"}
REAL_STARTS = [  # not a dry run: the same checks come first
    Case("start with a wrong grader", "reward.grader", GRADER, arguments=["train", "CONFIG"]),
    Case("start of two ranks", "reward.grader", GRADER | {"trainer.ranks": 2}, arguments=["train", "CONFIG"]),
    Case("start without a tokenizer", "no tokenizer", damage=without_tokenizer, arguments=["train", "CONFIG"]),
    Case("start without usable data", "usable", damage=rows(), arguments=["train", "CONFIG"]),
    Case("submission with a wrong grader", "reward.grader", GRADER | {"slurm.gpus_per_node": 0},
         arguments=["slurm", "CONFIG", "--dry-run"]),
]  # fmt: skip
RUN_DIRECTORIES = [
    Case("run_dir is a file", "trainer.run_dir", {"trainer.run_dir": "taken"}, file_at("taken")),
    Case("run_dir below a file", "trainer.run_dir", {"trainer.run_dir": "taken/run"}, file_at("taken")),
    setting("trainer.run_dir", "/proc/run", "trainer.run_dir"),
    Case("slurm run_dir below a file", "trainer.run_dir", {"trainer.run_dir": "taken/run", "slurm.gpus_per_node": 0},
         file_at("taken"), ["slurm", "CONFIG", "--dry-run"]),
]  # fmt: skip
COMMANDS = [
    command("train", "CONFIG"),
    command("quickstart trainer.stepz=1", "did you mean 'trainer.steps'?"),
    command("trian CONFIG", "did you mean 'train'?"),
    command("dance CONFIG", "choose from 'quickstart', "),
    command("train CONFIG --no-such-option", "--no-such-option"),
    command("train CONFIG steps=5", "with their section: trainer.steps=5"),
    command("plan CONFIG --gpus 0", "--gpus"),
    command("plan CONFIG --gpus -8", "--gpus"),
    command("plan CONFIG --gpus many", "--gpus"),
    command("plan CONFIG --gpus 8 --gpus-per-node 0", "--gpus-per-node"),
    command("plan CONFIG --gpus 8 --engine-gpus 8", "--engine-gpus"),
    command("plan CONFIG --gpu h1000", "h1000"),
    command("plan CONFIG --gpu-memory -1", "--gpu-memory"),
    command("plan CONFIG --mfu 2", "--mfu"),
    command("plan CONFIG --mfu nan", "--mfu"),
    command("plan CONFIG --kept 0", "--kept"),
    command("plan CONFIG --kept 1.5", "--kept"),
    command("plan CONFIG --mean-response 0", "--mean-response"),
    command("plan CONFIG --mean-prompt 9999", "--mean-prompt"),
    command("plan CONFIG --top 0", "--top"),
    command("plan --gpus 8", "policy.model"),
    command("plan --model nowhere --gpus 8", "not a directory"),
    command("ablate CONFIG --seeds 0", "--seeds"),
    command("ablate CONFIG --seeds -1", "--seeds"),
    command("ablate CONFIG", "evaluate.data.path"),
    command("slurm", "CONFIG"),
    command("slurm CONFIG --nodes 0", "--nodes"),
    command("slurm CONFIG --chain 0 --dry-run", "--chain"),
    command("slurm --status nowhere", "nowhere"),
    command("slurm CONFIG --dry-run --set slurm.time=soon", "slurm.time"),
    command("doctor CONFIG --only heart", "heart"),
    command("doctor CONFIG --timeout 0 --only python", "--timeout"),
    command("doctor none.yaml", "no such file"),
    command("report nowhere", "nowhere"),
    command("watch nowhere", "nowhere"),
    command("watch --demo --port 80000", "port 80000 cannot be used"),
    Case("explain without a sample", "explain run STEP SAMPLE", damage=file_at("run/metrics.jsonl"),
         arguments=["explain", "run", "3"]),
    command("examples /proc/mine", "/proc/mine cannot be created"),
    command("convert hf-to-megatron nowhere out", "nowhere"),
    command("convert verify nowhere model", "nowhere"),
    command("convert megatron-to-hf model out --shard-size 0", "--shard-size"),
    command("convert megatron-to-hf model out --shard-size -1", "--shard-size"),
    command("convert megatron-to-hf model out", "is a HF model already"),
    command("eval none.yaml", "no such file"),
    Case("eval of a run directory", "dapo convert megatron-to-hf", damage=file_at("run/checkpoints/step_1"),
         arguments=["eval", "CONFIG", "--model", "run"]),
    command("eval CONFIG --samples 0", "evaluate.samples"),
    command("eval CONFIG", "data.path"),
]  # fmt: skip
CASES = [
    *CONFIG_FILES, *OVERRIDES, *VALUES, *UNUSUAL, *MODELS, *DATA_FILES, *PLUGINS, *TRACKERS, *REHEARSED, *REAL_STARTS,
    *RUN_DIRECTORIES, *COMMANDS,
]  # fmt: skip


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch):
    """No GPU, no Slurm job, no trackers, even if this machine has them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a plugin's folder is added to it
    monkeypatch.delitem(sys.modules, "bad_plugin", raising=False)  # another test's
    find_spec = importlib.util.find_spec
    hidden = ("wandb", "tensorboard")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in hidden else find_spec(name, *a))


def run(arguments):
    try:
        return main(arguments)
    except SystemExit as exit:  # argparse
        return exit.code


def place_of(case, complete, tmp_path, monkeypatch):
    place = Place(tmp_path, complete)
    monkeypatch.chdir(tmp_path)
    for key, value in case.settings.items():
        place.set(key, value)
    if case.damage is not None:
        case.damage(place)
    return place


def test_the_table_is_long_enough():
    assert len({case.name for case in CASES}) == len(CASES)
    dry_runs = [case for case in CASES if "--dry-run" in case.arguments and "train" in case.arguments]
    assert sum(not case.accepted for case in dry_runs) >= 100 and sum(case.accepted for case in dry_runs) >= 13


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_one_line_before_weights_are_loaded(case, complete, tmp_path, monkeypatch, capsys):
    place = place_of(case, complete, tmp_path, monkeypatch)
    config = place.write()
    if (tmp_path / "home").exists():
        shutil.copy(config, tmp_path / "home/config.yaml")
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *a, **b: pytest.fail("a model was built"))
    code = run([config if word == "CONFIG" else word for word in case.arguments])
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if line.startswith("warning: ")] if case.accepted else lines
    assert code == (0 if case.accepted else 2), lines
    assert len(said) == 1 and (case.accepted or said[0].startswith("megatron-dapo")), lines
    assert case.expect in said[0], said[0]


def test_rank_0_leaves_the_reason_for_the_batch_script(complete, tmp_path, monkeypatch, capsys):
    place = place_of(Case("", "", GRADER), complete, tmp_path, monkeypatch)
    config = place.write()
    (tmp_path / "run/logs/attempt_0").mkdir(parents=True)
    (tmp_path / "run/logs/latest").symlink_to("attempt_0")
    for name, value in {"PROCID": "0", "NTASKS": "2", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert run(["train", config]) == 2
    reason = (tmp_path / "run/logs/attempt_0/setup_error").read_text()
    assert reason.startswith("reward.grader") and reason.strip() in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reward.grader": "exact"},
        {"algorithm.preset": "vapo", "policy.micro_batch_tokens": 1024},
        {"algorithm.preset": "gspo", "algorithm.kl": {"coefficient": 0.1}, "algorithm.entropy_coefficient": 0.01},
        {
            "algorithm.off_policy": {"importance_weight": "token", "normalize_weights": True},
            "algorithm.turn_credit": "turn",
        },
    ],
    ids=str,
)
def test_the_complete_run_is_accepted(settings, complete, tmp_path, monkeypatch, capsys):
    """Otherwise the cases above would show nothing."""
    place = place_of(Case("", "", settings), complete, tmp_path, monkeypatch)
    assert run(["train", place.write(), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "valid" in said.out and "64 prompts of 64 rows" in said.err and "the loss is finite" in said.err
    assert "reward.grader" not in settings or "scores 1, -1, -1 (the reference answer alone, " in said.err


def test_a_dry_run_never_writes_over_a_config_file(complete, tmp_path, monkeypatch, capsys):
    place = place_of(Case("", ""), complete, tmp_path, monkeypatch)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("# mine\n")
    assert run(["train", place.write(), "--dry-run"]) == 0
    assert (tmp_path / "run/config.yaml").read_text() == "# mine\n"
    assert "config.dry-run.yaml" in capsys.readouterr().out


def test_the_data_report_names_dropped_rows(complete, tmp_path, monkeypatch, capsys):
    place = place_of(Case("", "", damage=rows(*GOOD, {"prompt": "", "answer": "1"})), complete, tmp_path, monkeypatch)
    assert run(["train", place.write(), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "8 prompts of 9 rows" in said and "line 9: prompt: the prompt is empty" in said


def test_home_directories_are_expanded(complete, tmp_path, monkeypatch, capsys):
    place = place_of(Case("", ""), complete, tmp_path, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    place.set("policy.model", "~/model")
    place.set(DATA, "~/model/prompts.jsonl")
    place.set("trainer.run_dir", "~/elsewhere")
    assert run(["train", place.write(), "--dry-run"]) == 0
    assert (tmp_path / "elsewhere/config.yaml").exists()


@pytest.fixture(scope="module")
def trained(complete, tmp_path_factory):
    """The folder of a run of one step."""
    folder, raw = tmp_path_factory.mktemp("trained"), copy.deepcopy(complete[1])
    raw["trainer"] |= {"run_dir": str(folder / "run"), "steps": 1}
    assert run_in_fork(main, ["train", str(write_config(raw, folder / "run.yaml"))]) == 0
    return folder / "run"


def resumed(complete, trained, tmp_path, monkeypatch, **settings):
    """A directory with that run, and the arguments of a dry run with other settings."""
    place = place_of(Case("", ""), complete, tmp_path, monkeypatch)
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    place.set("policy.model", str(complete[0] / "model"))
    place.set(DATA, str(complete[0] / "model/prompts.jsonl"))
    return ["train", place.write(), "--dry-run", *(w for k, v in settings.items() for w in ("--set", f"{k}={v}"))]


def test_a_dry_run_lists_changed_settings_and_keeps_the_configuration_of_the_run(
    complete, trained, tmp_path, monkeypatch, capsys
):
    arguments = resumed(complete, trained, tmp_path, monkeypatch, **{"policy.optimizer.lr": 1e-5})
    before = (tmp_path / "run/config.yaml").read_text()
    assert run(arguments) == 0
    shown = capsys.readouterr()
    assert "policy.optimizer.lr: 0.003 → 1e-05" in shown.err and "resumes from" in shown.err
    assert "config.dry-run.yaml" in shown.out
    assert (tmp_path / "run/config.yaml").read_text() == before


@pytest.mark.parametrize("dry_run", [True, False], ids=["dry run", "run"])
@pytest.mark.parametrize(
    ("damage", "settings", "expect"),
    [
        (None, {"trainer.seed": 5}, "trainer.seed"),
        (None, {DATA: "other.jsonl"}, "this is another set"),
        ("step_1/policy/.metadata", {}, "can be used"),
        ("step_1/trainer.json", {}, "can be used"),
    ],
)
def test_a_dry_run_refuses_what_a_resumed_run_refuses(
    damage, settings, expect, dry_run, complete, trained, tmp_path, monkeypatch, capfd
):
    """With the same words and exit code."""
    arguments = resumed(complete, trained, tmp_path, monkeypatch, **settings)
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GOOD))
    if damage:
        (tmp_path / "run/checkpoints" / damage).write_bytes(b"damaged")
    if not dry_run:
        arguments.remove("--dry-run")
    assert run_in_fork(run, arguments) == 2 and expect in capfd.readouterr().err.splitlines()[-1]
