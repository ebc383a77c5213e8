"""Prompt sets, their templates, which prompt comes next, and the arithmetic tasks of the quickstart.

- `columns`     rows of jsonl, parquet and hub files; question and answer of a row, and the text that the model sees
- `prompts`     a file to a `PromptSet`, with a `LoadReport` on the rows left out; the model's tokenizer
- `run_data`    all prompts of a run, loaded once (`RunData`), and drawn by weight (`PromptMixture`, `PromptCursor`)
- `arithmetic`  sums and products at six levels, and their character-level tokenizer
"""

from megatron_dapo.data.arithmetic import (
    arithmetic_problems,
    arithmetic_prompts,
    arithmetic_tokenizer,
    save_arithmetic_tokenizer,
    write_arithmetic,
)
from megatron_dapo.data.columns import DataError
from megatron_dapo.data.prompts import LoadReport, PromptSet, load_prompts, load_tokenizer
from megatron_dapo.data.run_data import PromptCursor, PromptMixture, RunData, load_run_data

__all__ = [
    "DataError", "LoadReport", "PromptCursor", "PromptMixture", "PromptSet", "RunData", "arithmetic_problems",
    "arithmetic_prompts", "arithmetic_tokenizer", "load_prompts", "load_run_data", "load_tokenizer",
    "save_arithmetic_tokenizer", "write_arithmetic",
]  # fmt: skip
