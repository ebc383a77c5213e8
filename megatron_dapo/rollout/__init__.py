"""Rollout: which prompts are sampled, and which of their groups make a batch. Never imports megatron.

    sampler        Sampler: one batch per training step; its state is saved with every checkpoint
    group_runner   GroupRunner: generates and grades the samples of a group; RunningGroups: those in flight
    generation     Generation: one response or turn, continued after aborts
    pending_group  PendingGroup and its states; CarryOver: what a step leaves for the next one
    fill_policy    FillPolicy: how many groups are in flight, when sampling stops, how stale tokens may be
    accounting     StepAccounting: every sample leaves a step exactly once; GroupEvents: what running groups report
    agents/        responses of several turns: conversations, rollout functions, tools

A prompt moves from the data cursor through `Sampler.collect` into a `StepBatch`. Engines are in `engines/`, graders in
`reward/`, group filters in `algorithm/`. `trainer/rollout_driver.py` runs the sampler in a thread of rank 0.
"""
