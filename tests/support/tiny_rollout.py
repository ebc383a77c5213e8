"""Rollout functions for runs of a random model: two turns with a reply between them."""

from megatron_dapo.rollout.agents.functions import rollout_function


@rollout_function(resume="turn")
async def two_turns(prompt, conversation, settings):
    first = await conversation.generate(max_tokens=4)
    conversation.append(f"<{len(first.text)}>")
    await conversation.generate(max_tokens=6)


@rollout_function(resume="restart")
async def two_turns_again(prompt, conversation, settings):
    return await two_turns(prompt, conversation, settings)
