"""Prompt sets, their templates, a cursor whose position can be saved, and the arithmetic tasks of the quickstart.

- `sources`     rows of jsonl, parquet and hub files; `DataError`
- `columns`     question and answer of a row
- `templates`   the text that the model sees
- `tokenizer`   the model's tokenizer, checked
- `prompts`     a file to a `PromptSet`, with a `LoadReport` on the rows left out
- `cursor`      the order of prompts, epoch after epoch (`PromptCursor`)
- `arithmetic`  sums and products at six levels
- `characters`  the character-level tokenizer of the arithmetic tasks
"""

from megatron_dapo.data.arithmetic import arithmetic_problems, arithmetic_prompts, write_arithmetic
from megatron_dapo.data.characters import arithmetic_tokenizer, save_arithmetic_tokenizer
from megatron_dapo.data.cursor import PromptCursor
from megatron_dapo.data.prompts import LoadReport, PromptSet, load_prompts
from megatron_dapo.data.sources import DataError
from megatron_dapo.data.tokenizer import load_tokenizer

__all__ = [
    "DataError", "LoadReport", "PromptCursor", "PromptSet", "arithmetic_problems", "arithmetic_prompts",
    "arithmetic_tokenizer", "load_prompts", "load_tokenizer", "save_arithmetic_tokenizer", "write_arithmetic",
]  # fmt: skip
