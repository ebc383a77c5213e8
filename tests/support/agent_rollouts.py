"""Rollout functions whose turns are requested by stock clients: the openai package, and smolagents in a thread."""

from __future__ import annotations

import asyncio
import copy
import logging

import openai

from megatron_dapo.rollout.agents.functions import rollout_function
from megatron_dapo.rollout.agents.openai_endpoint import openai_endpoint

TOKENS = 6  # of each turn


@rollout_function(resume="restart")
async def generate(prompt, conversation, settings):
    """Half of the rollouts with each library. Every rollout has two turns or more."""
    async with openai_endpoint(conversation) as endpoint:
        if conversation.samples[0].index % 2:
            await asyncio.to_thread(with_smolagents, endpoint, prompt.text)
        else:
            await with_openai(endpoint, prompt.text)


async def with_openai(endpoint, question):
    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    messages = [{"role": "user", "content": question}]
    first = await client.chat.completions.create(model="policy", messages=messages, max_tokens=TOKENS)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "sure?"},
    ]
    await client.chat.completions.create(model="policy", messages=messages, max_tokens=TOKENS)


def with_smolagents(endpoint, question):
    import smolagents
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES

    logging.getLogger("smolagents").setLevel(logging.CRITICAL)
    templates = copy.deepcopy(EMPTY_PROMPT_TEMPLATES)  # its own are longer than a tiny model can read
    templates["system_prompt"] = "Use tools."
    model = smolagents.OpenAIServerModel(
        "policy", api_base=endpoint.base_url, api_key=endpoint.api_key, max_tokens=TOKENS
    )
    agent = smolagents.ToolCallingAgent(
        tools=[], model=model, max_steps=1, verbosity_level=-1, prompt_templates=templates
    )  # fmt: skip
    agent.run(question)
