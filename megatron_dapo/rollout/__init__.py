"""Rollout: which prompts are sampled, and which of their groups make a batch. Never imports megatron.

    sampler.py           Sampler: one batch per training step; its state is saved with every checkpoint
    step_collector.py    StepCollector: collects the batch of one step
    carry_over.py        CarryOver: everything a step leaves for the next one
    fill_policy.py       FillPolicy: how many groups are in flight, and when sampling stops
    yield_estimate.py    YieldEstimate: the expected share of groups that the filter keeps
    interrupted_step.py  InterruptedStep: what a cancelled step needs to continue
    pending_group.py     PendingGroup and its states
    running_groups.py    RunningGroups: waits for the groups that are in flight, or aborts them
    group_runner.py      GroupRunner: generates and grades the samples of a group
    generation.py        Generation: one response or turn, continued after aborts
    completion.py        adds what an engine generated to a sample
    functions.py         RolloutFunction: the user's function of `rollout.generate`
    conversation.py      Conversation: what a rollout function generates and appends
    chat_history.py      ChatHistory: what a chat template adds for new messages
    openai_endpoint.py   an OpenAI-compatible endpoint in front of a conversation
    occupancy.py         Occupancy: how full the engine was during a step
    staleness.py         how old the tokens of a batch are, and the limit
    accounting.py        StepAccounting: every sample that enters a step leaves it exactly once

A prompt moves from the data cursor through `Sampler.collect` into a `StepBatch`. Engines are in `engines/`, graders in
`reward/`, group filters in `algorithm/`. `trainer/rollout_driver.py` runs the sampler in a thread of rank 0.
"""
