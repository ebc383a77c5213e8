"""The Megatron side: runtime, Qwen model, packing, log-probs, and the DAPO update."""
