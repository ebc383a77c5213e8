"""Rollout: prompts in, graded groups out. Engines, the servers behind them, and the sampler. Imports no megatron."""
