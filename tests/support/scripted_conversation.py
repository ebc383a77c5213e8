"""A conversation whose generated turns are given texts."""

from __future__ import annotations

from conversation_engine import TOKENIZER

from megatron_dapo.engines.protocol import Completion
from megatron_dapo.rollout.agents.conversation import Conversation
from megatron_dapo.rollout.generation import append_completion
from megatron_dapo.rollout.pending_group import new_samples
from megatron_dapo.types import FinishReason, Prompt, WeightSpan, as_logprobs, as_tokens

TURN_END = "<|im_end|>"


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def chat(*messages):
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return encode(text + "<|im_start|>assistant\n")


def conversation_of(replies, room=4000, end=TURN_END):
    """A conversation whose turns are `replies`; None: it is interrupted."""
    texts = iter(replies)

    async def extend(sample, request):
        text = next(texts)
        if text is None:
            return False
        # Two spaces for one: were the response encoded from a client's message, the tokens would differ.
        tokens = as_tokens(encode(text + end)[: request.end - request.start])
        spans = [WeightSpan(3, 0, len(tokens))]
        append_completion(sample, Completion(tokens, as_logprobs([-0.5] * len(tokens)), FinishReason.STOP, spans))
        return True

    prompt = Prompt(
        "p", TOKENIZER.decode(chat(("user", "hi"))), as_tokens(chat(("user", "hi"))), meta={"question": "hi"}
    )
    return Conversation(prompt, new_samples(prompt, [17]), extend, TOKENIZER, max_response_tokens=room)
