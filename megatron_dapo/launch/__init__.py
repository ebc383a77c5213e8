"""Starting runs, on this machine, on Slurm and on Kubernetes. Imports no torch.

- `arguments.py`: arguments of the commands of this room.
- `local.py`: `megatron-dapo train`: joins a torchrun or srun job, or starts ranks on this machine.
- `slurm.py`: `megatron-dapo slurm`: checks a run, writes its script and submits it.
- `slurm_checks.py`: what is checked before a job is submitted.
- `slurm_script.py`, `job.sbatch.j2`, `engines.sh.j2`, `finish.sh.j2`: the batch script.
- `kubernetes.py`, `pod.sh.j2`: `megatron-dapo kubernetes`: a run as a JobSet.
- `shell_text.py`: values of a configuration as shell text.
- `slurm_status.py`: `megatron-dapo slurm --status` and `--on`: the state of a run's jobs, and commands on their nodes.
- `examples.py`: `megatron-dapo quickstart` and `examples`: the examples of this installation.
- `ablate.py`: `megatron-dapo ablate`: DAPO's changes switched on and off in training runs.
- `ablation_designs.py`, `ablation_runs.py`, `ablation_results.py`: which runs, the runs, their curves and effects.
"""
