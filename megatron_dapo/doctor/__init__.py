"""`megatron-dapo doctor`: finds what is wrong with a machine before a run starts on it, and says how to fix it.

- `check.py`: a check, its result, its time limit; running a command.
- `command.py`: the list of checks and their output.
- `software.py`: Python and package versions, and the versions we test (`megatron_dapo/locks`).
- `gpu.py`: driver, CUDA, NCCL, attention kernels.
- `network.py`: all-reduce between the nodes of a Slurm job; a program of its own that imports torch.
- `machine.py`: run directory, disk space, /dev/shm, clock, ports, Slurm, limits, HF cache, SGLang's Python, model.
- `run_directory.py`: what the next start of a run would find in its directory.

Torch is imported in child processes that the checks start, and in this one only to load a model's tokenizer.
"""
