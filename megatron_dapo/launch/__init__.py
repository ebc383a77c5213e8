"""Starting runs, on this machine and on Slurm. Imports no torch.

- `local.py`: `megatron-dapo train`: joins a torchrun or srun job, or starts ranks on this machine.
- `slurm.py`: `megatron-dapo slurm`: checks a run, writes its script and submits it.
- `slurm_script.py`, `job.sbatch.j2`, `finish.sh.j2`: the batch script.
- `slurm_status.py`: `megatron-dapo slurm --status`: the state of a run's jobs.
"""
