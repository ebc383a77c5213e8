"""Models by their name on the Hugging Face hub (`policy.model: Qwen/Qwen2.5-1.5B`): the directory in the local cache.

A directory of that name wins. What the cache has is used as it is; the rest is downloaded, unless HF_HUB_OFFLINE is
set. `NAME@REVISION` selects a branch, tag or commit.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_dapo.config.base import ConfigError
from megatron_dapo.config.schema import Config

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w./-]+)?")
TEXTS = ["*.json", "*.jinja", "*.txt", "*.model"]  # configuration and tokenizer
WEIGHTS = ["*.safetensors"]


def with_local_model(config: Config, *, weights: bool = True) -> Config:
    """The configuration with `policy.model` as a directory. Without `weights` only the small files are needed."""
    directory = local_model(config.policy.model, weights=weights)
    if directory == config.policy.model:
        return config
    return config.model_copy(update={"policy": config.policy.model_copy(update={"model": directory})})


def local_model(name: str, *, weights: bool = True) -> str:
    """The directory of a model of the hub; any other text as it is."""
    if not name or Path(name).exists() or not HUB_ID.fullmatch(name) or name.endswith((".json", ".safetensors")):
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    repository, _, revision = name.partition("@")
    patterns = [*TEXTS, *WEIGHTS] if weights else TEXTS
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    try:
        return str(snapshot_download(
            repository, revision=revision or None, allow_patterns=patterns, local_files_only=offline
        ))  # fmt: skip
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        raise ConfigError(
            f"policy.model: there is no directory {name}. A model of that name on the hub is not in the cache, and "
            f"{why}: name an existing directory, or download it where there is a network (hf download {repository})"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"policy.model: {name} is no directory, and the hub refused it: {first}") from None
