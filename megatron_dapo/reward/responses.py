"""Grades responses that are tokens: text is made from them once, and where it costs the driving process least.

A short response is decoded in this process. A long one is decoded in the grading process that grades it: this process
drives all engines, and decoding would be most of its work. `Sample.text` of a long response is then the engine's own
text, for reading; `decode` gives the text that was graded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from megatron_dapo.reward.combined import Graders
from megatron_dapo.types import Grade, Prompt, Sample, Tokens

SHORT = 512  # tokens; decoding fewer costs less than sending them to a process


class ResponseGrader:
    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a transformers tokenizer."""
        self._tokenizer = tokenizer
        # Only the tokenizers library can decode elsewhere; other tokenizers, and this clean-up, are Python code.
        fast = getattr(tokenizer, "is_fast", False) and not tokenizer.clean_up_tokenization_spaces
        self.tokenizer_json = str(tokenizer.backend_tokenizer.to_str()) if fast else ""

    def decode(self, tokens: Tokens) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    async def grade(self, pool: Graders, prompt: Prompt, sample: Sample) -> Grade:
        """`pool` has `tokenizer_json`."""
        tokens = sample.final_tokens
        if len(tokens) > SHORT and self.tokenizer_json:
            if pool.decodes_tokens:
                return await pool.grade_tokens(prompt, sample)
            sample.text = await asyncio.to_thread(self.decode, tokens)  # releases the GIL
        else:
            sample.text = self.decode(tokens)
        return await pool.grade(prompt, sample)

    def add_texts(self, samples: Iterable[Sample]) -> None:
        """For samples that are shown to people."""
        for sample in samples:
            sample.text = readable(sample, self.decode)


def readable(sample: Sample, decode: Callable[[Tokens], str]) -> str:
    """The response; the turns of a conversation under their roles."""
    if not sample.turns:
        return decode(sample.response_tokens)
    turns = ((turn.role, decode(sample.response_tokens[turn.start : turn.end])) for turn in sample.turns)
    return "\n".join(f"[{role}] {text}" for role, text in turns)
