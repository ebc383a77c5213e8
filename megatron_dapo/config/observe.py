"""`observe`: what is shown and recorded besides metrics.jsonl, which is always written."""

from __future__ import annotations

from typing import Literal

from megatron_dapo.config.base import Section


class ObserveConfig(Section):
    console: Literal["auto", "rich", "plain", "off"] = "auto"
