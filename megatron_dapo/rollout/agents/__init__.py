"""Rollouts of several turns: conversations, rollout functions, tools, the OpenAI endpoint.

conversation     Conversation: what a rollout function generates and appends, token by token; ChatHistory
functions        `rollout.generate: python:module.function`: the user's own way to make a response; what they share
openai_endpoint  an OpenAI-compatible endpoint in front of a conversation, so that an agent library can be trained
tools/           tools for rollout functions, run in limited processes
"""
