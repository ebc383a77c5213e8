"""Megatron-Core: its import, its options, its runtime, and everything that we replace in it.

- `importing`         imports Megatron-Core without what a CPU does not use, and without initializing CUDA
- `patches`           the list of all patches of Megatron-Core, torch and SGLang, with reasons
- `cpu`               the device "cuda" on a machine without CUDA
- `options`           Megatron's configuration objects, checked against the installed version
- `runtime`           device, process groups, errors that reach all ranks (`initialize`)
- `optimizer_state`   the optimizer state as whole parameters, for every Adam that Megatron may pick
"""
