"""Starting runs: on this machine, and on Slurm."""
