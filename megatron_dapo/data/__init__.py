"""Prompt sets, their templates, a cursor that can be saved, and the arithmetic tasks of the quickstart."""

from megatron_dapo.data.arithmetic import arithmetic_problems, arithmetic_prompts, write_arithmetic
from megatron_dapo.data.characters import arithmetic_tokenizer, save_arithmetic_tokenizer
from megatron_dapo.data.cursor import PromptCursor
from megatron_dapo.data.prompts import LoadReport, PromptSet, load_prompts
from megatron_dapo.data.sources import DataError

__all__ = [
    "DataError", "LoadReport", "PromptCursor", "PromptSet", "arithmetic_problems", "arithmetic_prompts",
    "arithmetic_tokenizer", "load_prompts", "save_arithmetic_tokenizer", "write_arithmetic",
]  # fmt: skip
