"""The model's tokenizer, checked: a directory without one, or with another model's, is an error that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dapo.config import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(model: str | Path, vocab: int) -> Any:
    """The tokenizer of a model directory. `vocab`: the model's vocabulary size, which must cover every token."""
    from transformers import AutoTokenizer

    folder = Path(model)
    # Without these files transformers returns an empty tokenizer, and every prompt would be empty.
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"policy.model: {folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): "
            "copy the tokenizer files of the model there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged file can raise anything
        reason = next(iter(str(error).splitlines()), "no details")
        raise ConfigError(
            f"policy.model: the tokenizer in {folder} does not load ({type(error).__name__}: {reason}): "
            "copy the tokenizer files of the model there again"
        ) from error
    if not len(tokenizer):
        raise ConfigError(f"policy.model: the tokenizer in {folder} has no tokens: copy the model's tokenizer files")
    if len(tokenizer) > vocab:
        raise ConfigError(
            f"policy.model: the tokenizer in {folder} has {len(tokenizer)} tokens, but the model's vocabulary has "
            f"{vocab}: they belong to different models; use the tokenizer of the weights"
        )
    return tokenizer
