"""Modules that run inside an SGLang server. The folder is on the server's PYTHONPATH; they import nothing of ours.

- megatron_dapo_checksums.py   checksums of the weights that it was sent, from the memory that it serves; with
                               adapter_plugin/ it is a plugin of SGLang (rollout.weights.transport: adapter)
- megatron_dapo_layers.py      sketches of what goes through the layers, for `selfcheck engine`
- megatron_dapo_base.py        hands its weights' memory to a trainer on the same GPU (rollout.servers.share_base)
- megatron_dapo_experts.py     loads the experts of a layer at once
- megatron_dapo_exact.py       replaces operations by those of megatron_dapo_kernels.py, which the trainer shares; with
                               exact_plugin/ it is a plugin of SGLang (policy.true_on_policy)
"""
