"""Rollouts of several turns: conversations, rollout functions, tools, the OpenAI endpoint.

conversation     The conversation of one rollout: what a rollout function generates and appends, token by token
functions        Rollout functions: `rollout.generate: python:module.function`, the user's own way to make a response
openai_endpoint  An OpenAI-compatible endpoint in front of a conversation, so that an agent library can be trained wi
tools/
"""
