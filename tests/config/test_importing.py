"""`megatron-dapo import`: published scripts of other tools, their units, and how files are read.

pytest tests/config/test_importing.py -s -k table    # prints what becomes of every script's settings
"""

import os
from pathlib import Path

import pytest
import yaml

from megatron_dapo.cli import main
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.importing import (
    UNITS,
    convert,
    import_file,
    nested,
    problem_with,
    recognise,
    render,
    write_or_print,
)
from megatron_dapo.config.other_names import tools
from megatron_dapo.config.scripts import Script, read_script

PUBLISHED = yaml.safe_load(Path(__file__).with_name("other_scripts.yaml").read_text())
MEANINGS = yaml.safe_load(Path(__file__).with_name("other_settings.yaml").read_text())


@pytest.fixture(scope="module")
def imported():
    scripts = {source: Script(settings) for source, settings in PUBLISHED.items()}
    return {source: convert(script, recognise(script, source), gpus=8) for source, script in scripts.items()}


def lost(found):
    return len(found.none) + len(found.unknown)


def test_table_of_published_scripts(imported):
    """Every setting is in exactly one list; 95 % of them are converted or are what happens here anyway."""
    assert [sum(found.tool.name == name for found in imported.values()) for name in ("verl", "slime", "trl")] == [
        10,
        6,
        4,
    ]
    print(f"\n{'settings':>8} {'set':>4} {'fill in':>7} {'default':>7} {'no equivalent':>13} {'unknown':>7}  script")
    for source, found in imported.items():
        lists = (
            found.converted,
            [key for key, *_ in found.fill_in],
            [key for key, *_ in found.same],
            [key for key, *_ in found.none],
            found.unknown,
        )
        assert sorted(key for keys in lists for key in keys) == sorted(found.given), source
        counts = [len(found.given), *map(len, lists)]
        print("{:8} {:4} {:7} {:7} {:13} {:7}  {}".format(*counts, source))
        assert problem_with(found) is None, source
    total = sum(len(found.given) for found in imported.values())
    share = 1 - sum(map(lost, imported.values())) / total
    print(f"{total} settings, {share:.1%} mapped")
    assert share >= 0.95


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        # 256 samples of groups of 8 are 32 prompts, all of a step's.
        (
            "run-qwen3-4B.sh",
            {"trainer.mini_batch_prompts": 32, "trainer.prompts_per_step": 32, "algorithm.dual_clip": None},
        ),
        ("run-qwen3-235B-A22B.sh", {"policy.micro_batch_tokens": 32768, "slurm.nodes": 16, "slurm.engine_nodes": 8}),
        ("run-qwen2.5-0.5B-fully_async.sh", {"rollout.max_staleness": 1}),
        (
            "run_qwen3_8b_megatron.sh",
            {"algorithm.kl.coefficient": 0.001, "algorithm.clip_high": 0.2, "trainer.mini_batch_prompts": 256},
        ),
        (
            "dapo_7b_math_fsdp2_colocate.sh",
            {
                "algorithm.kl.coefficient": 0.0,
                "policy.context_parallel": 4,
                "policy.micro_batch_tokens": 81920,
                "algorithm.overlong.penalty": "soft",
                "rollout.dynamic_sampling": False,
            },
        ),
        (
            "gspo_trainer/run_qwen3_30b_a3b_megatron.sh",
            {
                "algorithm.objective": "gspo",
                "policy.moe.permute_fusion": True,
                "policy.recompute": "full",
                "policy.megatron.model.moe_router_dtype": "fp32",
            },
        ),
        ("rloo_trainer/run_qwen3_8b_fsdp.sh", {"algorithm.advantage": "rloo"}),
        # 8 devices × 8 completions × 2 micro-batches / 8 completions per prompt.
        (
            "scripts/gspo.py",
            {"trainer.mini_batch_prompts": 16, "trainer.prompts_per_step": 64, "algorithm.kl.coefficient": 0.0},
        ),
        (
            "gsm8k_dapo_dynamic_bs.yaml",
            {
                "algorithm.off_policy.token_mask": [0.0, 5.0],
                "trainer.mini_batch_prompts": 256,
                "rollout.sampler.fill": "dynamic",
                "rollout.servers.count": 4,
            },
        ),
    ],
)
def test_units_of_published_scripts(imported, script, expected):
    found = next(found for source, found in imported.items() if source.endswith(script))
    assert {key: found.settings.get(key, "not set") for key in expected} == expected


@pytest.mark.parametrize(
    ("tool", "settings", "expected"),
    [
        ("verl", {"data.gen_batch_size": 1536, "data.train_batch_size": 512}, {"rollout.sampler.oversampling": 3.0}),
        ("verl", {"actor_rollout_ref.actor.clip_ratio": 0.3}, {"algorithm.clip_low": 0.3, "algorithm.clip_high": 0.3}),
        ("verl", {"actor_rollout_ref.actor.kl_loss_coef": 0.1}, {"algorithm.kl.coefficient": None}),  # off by default
        ("verl", {"algorithm.norm_adv_by_std_in_grpo": False}, {"algorithm.advantage": "gae"}),  # its default
        ("verl", {"algorithm.adv_estimator": "grpo"}, {"rollout.samples_per_prompt": 1}),  # its default
        ("slime", {"over_sampling_batch_size": 64, "rollout_batch_size": 32}, {"rollout.sampler.oversampling": 2.0}),
        (
            "slime",
            {"lr_warmup_iters": 40, "rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 64},
            {"policy.optimizer.warmup_steps": 10, "trainer.mini_batch_prompts": 8},
        ),
        ("slime", {"eps_clip": 0.2, "eps_clip_high": 0.28}, {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28}),
        (
            "trl",
            {"beta": 0.04, "max_steps": 100, "steps_per_generation": 4},
            {"algorithm.kl.coefficient": 0.04, "trainer.steps": 25},
        ),
        (
            "ms-swift",
            {"max_resample_times": 3, "dynamic_sample": True},
            {"rollout.sampler.max_generation_batches": 4, "rollout.sampler.on_limit": "fill"},
        ),
    ],
)
def test_units(tool, settings, expected):
    found = convert(Script(settings), tools()[tool], gpus=8)
    assert {key: found.settings.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("tool", "settings", "expected"), [(tool, *case) for tool, cases in MEANINGS.items() for case in cases]
)
def test_a_run_trains_as_there(tool, settings, expected):
    found = convert(Script(settings), tools()[tool], gpus=8)
    assert {key: found.settings.get(key, "unset") for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "text", "tool"),
    [
        ("a.sh", "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8\n", "verl"),
        (
            "a.sh",
            "python3 -m verl.experimental.one_step_off_policy.main_ppo trainer.n_gpus_per_node=8\n",
            "verl-one-step",
        ),
        ("a.sh", "python -m x.fully_async_main actor_rollout_ref.rollout.n=8\n", "verl-async"),
        ("a.sh", "ray job submit -- python3 train.py --rollout-batch-size 8\n", "slime"),
        ("a.sh", "ray job submit -- python3 train_async.py --rollout-batch-size 8\n", "slime-async"),
        ("a.sh", "trl grpo --num_generations 8\n", "trl"),
        ("a.sh", "trl rloo --num_generations 8\n", "trl-rloo"),
        ("a.py", "RLOOConfig(num_generations=8)\n", "trl-rloo"),
        ("a.sh", "swift rlhf --rlhf_type grpo --num_generations 8 --seed 1 --use_vllm true\n", "ms-swift"),
        ("a.sh", "megatron rlhf --rlhf_type grpo --num_generations 8 --lr 1e-6\n", "ms-swift-megatron"),
    ],
)
def test_the_program_says_which_trainer_it_is(tmp_path, name, text, tool):
    (tmp_path / name).write_text(text)
    assert import_file(tmp_path / name).tool.name == tool


def test_a_file_is_read_with_those_it_starts_from(tmp_path):
    """As NeMo-RL's recipes; null replaces a whole section, and what is not there is named."""
    (tmp_path / "base.yaml").write_text("""
defaults: missing
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16}
policy: {optimizer: {kwargs: {lr: 1}}, train_global_batch_size: "${mul:${grpo.num_prompts_per_step}, 8}"}
generation: {temperature: 0.7, val_temperature: "${.temperature}", inner: {a: "${..temperature}"}}
""")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.yaml").write_text(
        "defaults: [../base.yaml, _self_]\ngrpo: {num_prompts_per_step: 64}\npolicy: {optimizer: null}\n"
    )
    found = read_script(tmp_path / "sub" / "run.yaml")
    assert found.settings == {
        "grpo.num_prompts_per_step": 64, "grpo.num_generations_per_prompt": 16, "policy.optimizer": None,
        "policy.train_global_batch_size": 512, "generation.temperature": 0.7, "generation.val_temperature": 0.7,
        "generation.inner.a": 0.7,
    }  # fmt: skip
    assert found.notes == ["defaults: missing: not read, there is no such file beside this one"]


@pytest.mark.parametrize(
    ("tool", "settings", "key", "ours"),
    [
        ("verl", {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/a/global_step_9"},
         "trainer.resume_from_path", "policy.model: from '/a/global_step_9'"),
        ("slime", {"load": "/a", "save": "/b"}, "load", "policy.megatron_checkpoint: from '/a'"),
        ("trl", {"resume_from_checkpoint": "out/checkpoint-9"}, "resume_from_checkpoint", "policy.model: from 'out"),
        ("trl", {"save_strategy": "epoch"}, "save_strategy", "trainer.checkpoint.every: from 'epoch'"),
    ],
)  # fmt: skip
def test_what_only_the_user_can_convert_is_to_fill_in(tool, settings, key, ours):
    found = convert(Script(settings), tools()[tool])
    assert [(name, why[: len(ours)]) for name, _, why in found.fill_in] == [(key, ours)]


def test_a_path_that_the_other_tool_does_not_resume_from_is_not_to_fill_in():
    path = {"trainer.resume_mode": "auto", "trainer.resume_from_path": "/a/global_step_9"}
    for tool, settings in {"verl": path, "slime": {"load": "/a", "save": "/a"}}.items():
        found = convert(Script(settings), tools()[tool])
        assert not found.fill_in and "policy.megatron_checkpoint" not in found.settings


def test_an_estimator_that_is_not_offered_is_to_fill_in():
    found = convert(Script({"algorithm.adv_estimator": "grpo_passk"}), tools()["verl"])
    assert [key for key, *_ in found.fill_in] == ["algorithm.adv_estimator"] and not found.converted


@pytest.mark.parametrize(("size", "said"), [(1, True), (4, False)])
def test_a_model_that_is_not_split_is_named(size, said):
    """FSDP needs no layout there; here every GPU would hold the model."""
    key = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    found = convert(Script({key: size}), tools()["verl"])
    assert any("megatron-dapo plan" in note for note in found.notes) is said


def test_what_a_default_needs_is_named():
    found = convert(Script({"actor_rollout_ref.rollout.n": 8}), tools()["verl"])
    assert any("trainer.total_epochs=30: trainer.steps: 30 epochs × prompts" in note for note in found.notes)


@pytest.mark.parametrize(
    "key", ["data.shuffle", "actor_rollout_ref.rollout.do_sample", "data.apply_chat_template_kwargs.enable_thinking"]
)
def test_off_is_named_where_it_is_not_off_here(key):
    found = convert(Script({key: False}), tools()["verl"])
    assert [name for name, *_ in found.none] == [key]


@pytest.mark.parametrize("tool", tools().values(), ids=lambda tool: tool.name)
@pytest.mark.parametrize("value", [None, True, "auto", -1, 0, 2.5, [], ["a", 1], {"a": 1}, "$X"], ids=str)
def test_no_value_is_lost_or_ends_in_a_traceback(tool, value):
    given = dict.fromkeys([*(name.replace("*", "x") for name in tool.rows), "invented"], value)
    found = convert(Script(given), tool)
    named = [*found.converted, *(key for entry in (found.fill_in, found.same, found.none) for key, *_ in entry)]
    assert sorted([*named, *found.unknown]) == sorted(given) and "invented" in found.unknown
    assert render(found, "x") and all(row.unit in {*UNITS, "fill_in", ""} for row in tool.rows.values())


SHELL = r"""#!/bin/bash
source models/qwen.sh   # a file of its own
N=${N:-8}; TOTAL=$((N * 4)); LAST=${UNSET:-"$HOME/data"}
if [ "$DEVICE" = npu ]; then N=16; fi
DATA=(
   data.train_files="['$LAST/a.parquet', 'b.parquet']"
   # data.max_prompt_length=1
   data.train_batch_size=${TOTAL}
)
python3 -m verl.trainer.main_ppo --config-name x \
  "${DATA[@]}" +actor_rollout_ref.rollout.n=$N actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.model.path='Qwen/Qwen3-8B' \
  trainer.nnodes=$(wc -l hosts) invented.key=3 2>&1 | tee log
"""
PYTHON = '''"""python grpo.py --learning_rate 1"""
parser.add_argument("--steps", type=int, default=40)
config = GRPOConfig(learning_rate=2e-6, max_steps=args.steps, num_generations=4, output_dir=folder(), **more)
GRPOTrainer(model="Qwen/Qwen3-0.6B", args=config, train_dataset=rows)
'''
EXAMPLE = '''"""
python grpo.py --model_name_or_path Qwen/Qwen3-1.7B --num_generations 8
"""
training_args.chat_template_kwargs = {"enable_thinking": False}
GRPOTrainer(model=model_args.model_name_or_path, args=training_args, train_dataset=rows)
'''
HYDRA = """actor_rollout_ref: {rollout: {n: 4, response_length: "${data.max_response_length}"}}
data: {max_response_length: 99}
"""


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "run.sh",
            SHELL,
            {
                "config_name": "x",
                "data.train_files": ["~/data/a.parquet", "b.parquet"],
                "data.train_batch_size": 32,
                "actor_rollout_ref.rollout.n": 8,
                "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
                "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
                "trainer.nnodes": "$(wc -l hosts)",
                "invented.key": 3,
            },
        ),
        (
            "grpo.py",
            PYTHON,
            {
                "learning_rate": 2e-6,
                "max_steps": 40,
                "num_generations": 4,
                "output_dir": "${folder()}",
                "model": "Qwen/Qwen3-0.6B",
                "train_dataset": "${rows}",
            },
        ),
        (
            "example.py",
            EXAMPLE,
            {
                "model": "Qwen/Qwen3-1.7B",
                "train_dataset": "${rows}",
                "model_name_or_path": "Qwen/Qwen3-1.7B",
                "num_generations": 8,
                "chat_template_kwargs": {"enable_thinking": False},
            },
        ),
        (
            "verl.yaml",
            HYDRA,
            {
                "actor_rollout_ref.rollout.n": 4,
                "actor_rollout_ref.rollout.response_length": 99,
                "data.max_response_length": 99,
            },
        ),
        (
            "trl.sh",
            "trl grpo --beta 0.04 --num_generations=8 --use_vllm\n",
            {"beta": 0.04, "num_generations": 8, "use_vllm": True},
        ),
    ],
)
def test_files_are_read_without_being_executed(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    found = read_script(tmp_path / name)
    assert found.settings == expected
    if name == "run.sh":
        assert any("models/qwen.sh" in note for note in found.notes)
        assert any("N is also set to 16 under a condition" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python -m main_ppo a.b=1 reward.path=/x/r.py c.d=2", {"a.b": 1, "reward.path": "/x/r.py", "c.d": 2}),
        ("python train.py --lr 1 --rm-path x.py --kl 2", {"lr": 1, "rm_path": "x.py", "kl": 2}),
        ("accelerate launch --multi_gpu grpo.py --lr 1 --rm-path x.py", {"lr": 1, "rm_path": "x.py"}),
        ("python -m torch.distributed.run --nproc 8 t.py --backend megatron --lr 1", {"backend": "megatron", "lr": 1}),
        ("python t.py --every 20 2>&1 | tee log", {"every": 20}),
        ("python t.py --colocate > out.log 2>&1 &", {"colocate": True}),
        ("python t.py --colocate &>> out.log --lr 1 < /dev/null", {"colocate": True, "lr": 1}),
        ("X='--lr 1'\nX+=' --kl 2'\nexport X+=' --n 3'\npython t.py $X", {"lr": 1, "kl": 2, "n": 3}),
        ("E='a.b=1 c.d=2'\npython t.py $E", {"a.b": 1, "c.d": 2}),
        ("E=' a.b=1 '\nF=' c.d=2 '\nE+=$F\npython t.py ${E:-}e.f=3", {"a.b": 1, "c.d": 2, "e.f": 3}),
        ("E='a.b=1 '\nF=c.d=2\npython t.py $E$F g.h='x y'", {"a.b": 1, "c.d": 2, "g.h": "x y"}),
        ('E="a.b=$(wc -l hosts) c.d=2"\npython t.py $E', {"a.b": "$(wc -l hosts)", "c.d": 2}),
        ("L='[1, 2]'\npython t.py a.b=$L", {"a.b": [1, 2]}),
        ("X=1 # was 2 \\\nY=3\nA=(\n--lr $X\n# --n 1 \\\n--kl $Y)\npython t.py ${A[@]}", {"lr": 1, "kl": 3}),
        ("python t.py a.b=1 \\\n# c.d=2 \\\n e.f=3", {"a.b": 1}),
        ("A=(--lr 1 \\\n#--kl 2\n)\npython t.py ${A[@]} \\\n# --n 2", {"lr": 1}),
        ("X=1 && \\\nY=2\npython t.py --y $Y", {"y": 2}),
        ('python t.py \\\n  --lr 1\\\n  --text "a\\\nb" \\\n', {"lr": 1, "text": "ab"}),
    ],
)
def test_words_are_those_of_bash(tmp_path, text, expected):
    (tmp_path / "run.sh").write_text(text + "\n")
    assert read_script(tmp_path / "run.sh").settings == expected


def test_the_command_writes_a_configuration_that_names_everything(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(SHELL)
    output = tmp_path / "run.yaml"
    assert main(["import", str(tmp_path / "run.sh"), "--output", str(output)]) == 0
    assert "1 unknown" in capsys.readouterr().err
    config, text = load_config(output), output.read_text()
    assert (
        config.trainer.prompts_per_step == 32
        and config.algorithm.clip_high == 0.2
        and not config.rollout.dynamic_sampling
    )
    assert "samples_per_prompt: 8  # actor_rollout_ref.rollout.n" in text
    assert all(
        said in text for said in ("invented.key=3", "slurm.nodes: $(wc -l hosts) is not a constant", "verl's default")
    )
    assert nested(import_file(tmp_path / "run.sh").settings) == yaml.safe_load(text)
    assert main(["import", str(tmp_path / "run.sh"), "--output", str(output)]) == 2
    assert "name a new file" in capsys.readouterr().err


def test_a_file_that_appears_during_the_write_is_not_replaced(tmp_path, monkeypatch):
    output = tmp_path / "run.yaml"
    monkeypatch.setattr(os, "fsync", lambda _: output.write_text("theirs"))
    with pytest.raises(ConfigError, match=r"run\.yaml exists: name a new file"):
        write_or_print("ours", str(output))
    assert output.read_text() == "theirs" and os.listdir(tmp_path) == ["run.yaml"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.sh", "echo hello\n", "no settings found"),
        ("a.yaml", "color: red\n", "settings of no tool"),
        ("a.py", "def (", "not valid py"),
        ("none.sh", None, "No such file"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path, capsys, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["import", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


CRITIC = {
    "algorithm.lam": 0.95, "algorithm.gamma": 0.99, "critic.optim.lr": 9e-6, "critic.model.path": "value-model",
    "critic.cliprange_value": 0.2, "critic.ppo_epochs": 2, "trainer.critic_warmup": 10,
    "critic.megatron.tensor_model_parallel_size": 2,
}  # fmt: skip


def settings_of_verl(estimator, **more):
    found = convert(Script({"algorithm.adv_estimator": estimator, **more}), tools()["verl"])
    assert not found.unknown and not found.none and not found.fill_in
    return {key: value for key, value in found.settings.items() if key.startswith(("critic.", "algorithm.gae."))}


def test_ppo_of_verl_keeps_its_critic():
    """Its default λ is 1, ours adapts to the length; its policy is trained from step `critic_warmup` on."""
    assert settings_of_verl("gae") == {
        "algorithm.gae.lambda_policy": 1.0, "algorithm.gae.lambda_critic": 1.0, "critic.optimizer.lr": 1e-5,
        "critic.optimizer.weight_decay": 0.01, "critic.optimizer.warmup_steps": 0,
    }  # fmt: skip
    assert settings_of_verl("gae", **CRITIC) == {
        "algorithm.gae.lambda_policy": 0.95, "algorithm.gae.lambda_critic": 0.95, "algorithm.gae.gamma": 0.99,
        "critic.optimizer.lr": 9e-6, "critic.optimizer.weight_decay": 0.01, "critic.optimizer.warmup_steps": 0,
        "critic.model": "value-model", "critic.clip": 0.2, "critic.epochs": 2, "critic.pretraining.steps": 9,
    }  # fmt: skip
    assert settings_of_verl("reinforce_plus_plus", **CRITIC) == {"algorithm.gae.gamma": 0.99}


def test_a_run_is_evaluated_before_its_first_step():
    first = {"trainer.val_before_train": True, "trainer.test_freq": 5}
    found = convert(Script({**first, "algorithm.adv_estimator": "grpo"}), tools()["verl"])
    assert "trainer.val_before_train" in [key for key, *_ in found.same] and not found.none
    found = convert(Script({**first, "trainer.val_before_train": False}), tools()["verl"])
    assert [key for key, *_ in found.none] == ["trainer.val_before_train"]


@pytest.mark.parametrize(("hybrid", "shared"), [(None, True), (True, True), (False, False)])
def test_engines_of_verl_share_gpus_unless_it_separates_them(hybrid, shared):
    given = {} if hybrid is None else {"actor_rollout_ref.hybrid_engine": hybrid}
    found = convert(Script({"algorithm.adv_estimator": "grpo", **given}), tools()["verl"])
    assert found.settings["rollout.servers.share_gpus"] is shared


def test_without_a_critic_its_settings_are_named_as_unread():
    found = convert(Script({"algorithm.adv_estimator": "grpo", **CRITIC, "critic.optim.lr": "$LR"}), tools()["verl"])
    reasons = {key: why for key, _, why in found.same}
    assert set(CRITIC) <= set(reasons) and found.converted == ["algorithm.adv_estimator"]
    assert reasons["critic.optim.lr"] == "read only with algorithm.adv_estimator=gae"
    assert not any(key.startswith(("critic.", "algorithm.gae.")) for key in found.settings)


def test_the_estimator_of_verl_is_gae_unless_it_is_set():
    settings = {"critic.model.path": "$HOME/model", "critic.optim.lr_warmup_steps_ratio": 0.05}
    found = convert(Script({**settings, "trainer.total_training_steps": 100}), tools()["verl"])
    assert found.settings["algorithm.advantage"] == "gae" and found.sources["algorithm.advantage"] == "verl's default"
    assert found.settings["critic.model"] == "$HOME/model" and found.settings["critic.optimizer.warmup_steps"] == 5
    assert found.settings["algorithm.gae.lambda_policy"] == 1.0


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("trainer.mini_batch_prompts", ["integer, > 0; default 32", "slime: --global-batch-size (there in samples"]),
        ("global_batch_size", ["here it is called 'trainer.mini_batch_prompts' (there in samples", "default 32"]),
        ("beta", ["'algorithm.kl.coefficient'"]),
        ("algorithm.adv_estimator", ["'algorithm.advantage'", "rloo and gae have the same names"]),
        ("policy.fp8", ["keys: recipe, format"]),
        ("push_to_hub", ["no equivalent"]),
        ("ppo_epochs", ["every sample is used once"]),  # the policy's, not the critic's
        ("critic.ppo_epochs", ["'critic.epochs'"]),
    ],
)
def test_explain(capsys, key, said):
    assert main(["explain", key]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in said), text


def test_explain_of_an_unknown_key_suggests_one(capsys):
    assert main(["explain", "nothing.at.all"]) == 2
    assert "; sections: policy, rollout" in capsys.readouterr().err
    assert main(["explain", "rollout.smapler"]) == 2
    assert "did you mean 'rollout.sampler'?" in capsys.readouterr().err
