"""API keys of SGLang servers: where they come from, and how a server that this run starts gets them.

A key is never an argument of a process, since every user of the machine can read those. A started server gets its keys
in environment variables, which only its owner can read; run_with_keys.py passes them to SGLang inside the process.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from megatron_dapo.config.base import key_of
from megatron_dapo.config.rollout import ServerConfig

API_KEY_VARIABLE = "MEGATRON_DAPO_API_KEY"
API_KEY_SETTING, ADMIN_KEY_SETTING = "rollout.servers.api_key_env", "rollout.servers.admin_key_env"
RUN_WITH_KEYS = Path(__file__).with_name("run_with_keys.py")


@dataclass(slots=True, frozen=True)
class Keys:
    """`admin`: for control calls, where the server has a key of its own for them; otherwise `api` opens everything."""

    api: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)

    @classmethod
    def of_external_servers(cls, config: ServerConfig) -> Keys:
        return cls(key_of(API_KEY_SETTING, config.api_key_env), key_of(ADMIN_KEY_SETTING, config.admin_key_env))

    @classmethod
    def of_started_servers(cls, config: ServerConfig) -> Keys:
        """A random key unless the configuration names one: a server without a key obeys every user of the machine."""
        api = key_of(API_KEY_SETTING, config.api_key_env) or secrets.token_hex(24)
        return cls(api, key_of(ADMIN_KEY_SETTING, config.admin_key_env))

    def environment(self, config: ServerConfig) -> dict[str, str]:
        """For the process of a server whose command is `command_with_keys`."""
        keys = {"api-key": self.api, "admin-api-key": self.admin}
        return {variable: keys[option] or "" for option, variable in key_variables(config).items()}


def key_variables(config: ServerConfig) -> dict[str, str]:
    """SGLang's options for keys, and the environment variable from which a started server takes each."""
    found = {"api-key": config.api_key_env or API_KEY_VARIABLE}
    return found | ({"admin-api-key": config.admin_key_env} if config.admin_key_env else {})


def command_with_keys(python: str, module: str, variables: dict[str, str], *, has_package: bool) -> list[str]:
    """Runs `module` with the options in `variables` taken from the environment; its other arguments follow.

    `has_package`: `python` can import this package, wherever it is installed there. Otherwise it must see our files.
    """
    options = [word for option, variable in variables.items() for word in ("--key-from", f"{option}={variable}")]
    wrapper = ["-m", "megatron_dapo.engines.sglang.run_with_keys"] if has_package else [str(RUN_WITH_KEYS)]
    return [python, *wrapper, module, *options]
