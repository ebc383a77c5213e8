"""Checks before a run starts that need more than a bad value; tests/test_bad_inputs.py has the table of bad inputs."""

import pytest
from tiny_model import write_model
from tiny_run import raw_config

from megatron_dapo.config import ConfigError, check_config, parse_config
from megatron_dapo.config.trainer import WandbConfig
from megatron_dapo.data import arithmetic_problems, run_data, write_arithmetic
from megatron_dapo.errors import UserError
from megatron_dapo.launch.local import run_training
from megatron_dapo.trainer.preflight import _check_best_metric, _check_wandb, check_setup
from megatron_dapo.trainer.rollout_driver import RolloutDriver


@pytest.fixture(autouse=True)
def no_keys(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("mode", ["off", "offline"])
def test_only_online_runs_need_a_wandb_key(mode):
    _check_wandb(WandbConfig(mode=mode))
    with pytest.raises(ConfigError, match=r"no key for api\.wandb\.ai: run `wandb login`"):
        _check_wandb(WandbConfig(mode="online"))


def test_the_wandb_key_may_be_in_the_environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x")
    _check_wandb(WandbConfig(mode="online"))


def test_the_wandb_key_may_be_in_netrc(monkeypatch, tmp_path):
    """As `wandb login` leaves it, for the host that WANDB_BASE_URL names."""
    file = tmp_path / ".netrc"
    file.write_text("machine wandb.example.org\n  login user\n  password x\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="no key for api"):
        _check_wandb(WandbConfig(mode="online"))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    _check_wandb(WandbConfig(mode="online"))
    file.write_text("machine")  # damaged
    with pytest.raises(ConfigError, match=r"no key for wandb\.example\.org"):
        _check_wandb(WandbConfig(mode="online"))


def of_values(batch, config):
    return batch.values


of_values.reads_values = True


SHARED_BASE = {
    "policy__lora": {"rank": 2}, "policy__precision": "bf16", "rollout__engine": "sglang", "trainer__ranks": 1,
    "rollout__weights": {"transport": "adapter"}, "rollout__servers": {"share_base": True, "python": "/bin/true"},
}  # fmt: skip
WITHOUT_GRADES = {"algorithm__distillation": {"model": "m", "alone": True}, "rollout__dynamic_sampling": False}


@pytest.mark.parametrize("advantage", ["gae", "python:test_preflight.of_values"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy__precision": "bf16", "policy__distributed_optimizer": False}, "the critic's value head is in fp32"),
        (SHARED_BASE, "share_base needs a run with no critic"),
        (WITHOUT_GRADES, "algorithm.distillation.alone .* without a critic"),
    ],
)
def test_what_a_critic_cannot_have_is_refused_for_every_advantage_with_one(advantage, changes, message, tmp_path):
    raw = raw_config(tmp_path / "model", tmp_path / "run", algorithm__advantage=advantage, **changes)
    with pytest.raises(ConfigError, match=message):
        config = parse_config(raw)
        check_setup(config, check_config(config))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"lora": {"rank": 2, "targets": ["foo"]}}, "no linear layer foo"),
        ({"lora": {"rank": 2, "start": "nowhere"}}, "policy.lora: nowhere is not a PEFT adapter"),
        ({"lora": {"rank": 2}, "tensor_parallel": 2}, "does not split .*in_proj_qkv"),
        ({"lora": {"rank": 2, "targets": ["q_proj"]}, "pipeline_parallel": 2}, "leaves pipeline stage 0 without"),
    ],
)
def test_adapters_are_checked_before_a_run(policy, message, tmp_path):
    """The first layer of the model has linear attention, so no q_proj."""
    write_model(tmp_path / "model", "qwen3_5")
    raw = raw_config(tmp_path / "model", tmp_path / "run")
    config = parse_config(raw | {"policy": raw["policy"] | policy})
    with pytest.raises(ConfigError, match=message):
        check_setup(config, check_config(config))


# ---- prompts are loaded once ----


@pytest.fixture
def config(tmp_path):
    raw = raw_config(tmp_path / "model", tmp_path / "run", reward__grader="exact")
    raw["evaluate"] |= {"data": {"path": str(tmp_path / "model" / "problems.jsonl"), "template": "plain"}}
    return raw


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_run_gets_the_prompts_that_were_checked(ranks, config, monkeypatch):
    """With several ranks the check runs in a process of its own."""
    config["policy"]["tensor_parallel"] = config["trainer"]["ranks"] = ranks

    def train(config, shape, rendezvous, lock, data):
        monkeypatch.setattr(run_data, "load_prompts", None)  # a second time would fail
        driver = RolloutDriver(config, data=data)
        return len(driver.problems["problems"]) + len(driver.cursor.take(64))

    monkeypatch.setattr("megatron_dapo.trainer.loop.train", train)
    assert run_training(parse_config(config)) == 6 + 64


def test_a_start_names_hosts_without_an_address(config, monkeypatch, capsys):
    """It goes on: under Kubernetes names come with the pods."""
    config["rollout"]["servers"] = {"urls": ["http://engien.invalid:1", "http://localhost:1"]}
    config["reward"] = {"grader": "judge", "judge": {"urls": ["https://jugde.invalid/v1"], "model": "m"}}
    monkeypatch.setattr("megatron_dapo.trainer.loop.train", lambda *arguments: 0)
    assert run_training(parse_config(config)) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "has no address here" in line]
    assert [line.split(" has")[0] for line in warnings] == [
        "warning: reward.judge.urls: the host name 'jugde.invalid'",
        "warning: rollout.servers.urls: the host name 'engien.invalid'",
    ]
    config["reward"] = {"graders": [{**config["reward"], "weight": 1.0}, {"grader": "python:nowhere.f", "weight": 1.0}]}
    with pytest.raises(UserError, match="nowhere"):
        run_training(parse_config(config))


def test_every_source_is_reported_and_checked(config, tmp_path):
    write_arithmetic(tmp_path / "more.jsonl", arithmetic_problems(3, 5, seed=0))
    sources = [{"path": config["data"].pop("path")}, {"path": str(tmp_path / "more.jsonl")}]
    config["data"]["sources"] = sources
    parsed = parse_config(config)
    report = check_setup(parsed, check_config(parsed, 1)).data.report().splitlines()
    assert [line.split(": ")[1].split(" (")[0] for line in report] == [
        "64 prompts of 64 rows", "5 prompts of 5 rows", "6 prompts of 6 rows",
    ]  # fmt: skip
    config["trainer"] |= {"prompts_per_step": 20, "mini_batch_prompts": 10}
    parsed = parse_config(config)
    with pytest.raises(ConfigError, match=r"is 20, 10 of them from this source, but .*more\.jsonl has only 5 usable"):
        check_setup(parsed, check_config(parsed, 1))
    sources[1]["path"] = str(tmp_path / "broken.jsonl")
    (tmp_path / "broken.jsonl").write_text("{}\n")
    parsed = parse_config(config)
    with pytest.raises(ConfigError, match=r"data\.sources \(broken\): .*no question column"):
        check_setup(parsed, check_config(parsed, 1))


def test_the_best_metric_names_its_benchmark(config):
    config["evaluate"] = {"data": {"sources": [{"path": "a.jsonl", "samples": 4}, {"path": "b.jsonl"}]}, "samples": 2}
    for known in ("eval/a/avg@4", "eval/b/pass@1"):
        config["trainer"]["checkpoint"]["best_metric"] = known
        _check_best_metric(parse_config(config))
    for unknown in ("eval/avg@4", "eval/b/avg@4", "eval/c/avg@2"):
        config["trainer"]["checkpoint"]["best_metric"] = unknown
        with pytest.raises(ConfigError, match="the evaluation has no metric"):
            _check_best_metric(parse_config(config))
    config["evaluate"]["every"] = 0
    config["trainer"]["checkpoint"]["best_metric"] = "eval/a/avg@4"
    with pytest.raises(ConfigError, match="without evaluation it is one of a step's"):
        _check_best_metric(parse_config(config))


def test_without_evaluation_the_best_metric_may_be_the_critics(config):
    """A run that only pre-trains a critic keeps the one that explains most."""
    config.pop("evaluate", None)
    config["trainer"]["checkpoint"]["best_metric"] = "critic/explained_variance"
    _check_best_metric(parse_config(config))
    config["trainer"]["checkpoint"]["best_metric"] = "explained_variance"
    with pytest.raises(ConfigError, match="there is no metric 'explained_variance'"):
        _check_best_metric(parse_config(config))


def test_megatrons_options_are_checked_and_reported(config):
    config["policy"]["megatron"] = {"ddp": {"bucket_size": 12345}}
    parsed = parse_config(config)
    assert "bucket_size=12345" in check_setup(parsed, check_config(parsed, 1)).report()
    config["policy"]["megatron"] = {"ddp": {"bucket_sise": 12345}}
    parsed = parse_config(config)
    with pytest.raises(ConfigError, match=r"ddp\.bucket_sise: megatron-core .* did you mean 'bucket_size'"):
        check_setup(parsed, check_config(parsed, 1))
