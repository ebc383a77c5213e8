"""The character-level tokenizer of the arithmetic tasks: a regular HF tokenizer directory with 100 tokens.

It is a Qwen tokenizer without merges (byte-level BPE, end of text, padding, ChatML marks and a chat template). A tiny
Qwen2 model therefore uses the same code as a 32B one, and `transformers` reads the directory in the same way with and
without a model's config.json in it. Every printable ASCII character and the line break are one token each; other
characters are dropped.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

END, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL = [PAD, END, TURN_START, TURN_END]
# Byte-level BPE writes a line break as Ċ and a space as Ġ.
CHARACTERS = ["Ċ", "Ġ", *sorted(c for c in string.printable if c.isprintable() and c != " ")]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def arithmetic_tokenizer() -> Any:
    """The tokenizer as a `transformers` fast tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END], chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=32768,
    )  # fmt: skip


def save_arithmetic_tokenizer(directory: str | Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template into `directory`."""
    arithmetic_tokenizer().save_pretrained(str(directory))
    file = Path(directory) / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}
    file.write_text(json.dumps(settings, indent=2) + "\n")
