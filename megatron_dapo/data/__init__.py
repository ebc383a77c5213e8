"""Prompt sets, their templates, which prompt comes next, and the arithmetic tasks of the quickstart.

- `sources`     rows of jsonl, parquet and hub files; `DataError`
- `columns`     question and answer of a row
- `templates`   the text that the model sees
- `tokenizer`   the model's tokenizer, checked
- `prompts`     a file to a `PromptSet`, with a `LoadReport` on the rows left out
- `run_data`    all prompts of a run, loaded once (`RunData`)
- `cursor`      the order of prompts, epoch after epoch (`PromptCursor`)
- `history`     every prompt's accuracy, for the curriculum (`PromptHistory`)
- `mixture`     the prompts of several files by weight, and what a step drew (`PromptMixture`)
- `arithmetic`  sums and products at six levels
- `characters`  the character-level tokenizer of the arithmetic tasks
"""

from megatron_dapo.data.arithmetic import arithmetic_problems, arithmetic_prompts, write_arithmetic
from megatron_dapo.data.characters import arithmetic_tokenizer, save_arithmetic_tokenizer
from megatron_dapo.data.cursor import PromptCursor
from megatron_dapo.data.mixture import PromptMixture
from megatron_dapo.data.prompts import LoadReport, PromptSet, load_prompts
from megatron_dapo.data.run_data import RunData, load_run_data
from megatron_dapo.data.sources import DataError
from megatron_dapo.data.tokenizer import load_tokenizer

__all__ = [
    "DataError", "LoadReport", "PromptCursor", "PromptMixture", "PromptSet", "RunData", "arithmetic_problems",
    "arithmetic_prompts", "arithmetic_tokenizer", "load_prompts", "load_run_data", "load_tokenizer",
    "save_arithmetic_tokenizer", "write_arithmetic",
]  # fmt: skip
