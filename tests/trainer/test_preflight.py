"""Checks before a run starts that need more than a bad value; tests/test_bad_inputs.py has the table of bad inputs."""

import pytest

from megatron_dapo.config import ConfigError
from megatron_dapo.config.observe import WandbConfig
from megatron_dapo.trainer.preflight import _check_wandb


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
