"""megatron-dapo: DAPO reinforcement learning on Megatron-Core, exact under every parallel layout."""

__version__ = "0.1.0"
