"""`data`: where prompts come from and how they are written for the model."""

from __future__ import annotations

from pydantic import Field

from megatron_dapo.config.base import Section


class DataConfig(Section):
    path: str = Field("", description="jsonl or parquet file, or a hub dataset name.")
    template: str = Field("dapo", description="dapo, plain, chat, or your own text with {question} in it.")
