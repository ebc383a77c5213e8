"""Ablations: designs of several runs, their workers, and the page that compares them.

- `command`: `megatron-dapo ablate CONFIG...`; the tables and the figure.
- `designs`: which runs an ablation consists of: combinations of DAPO's changes, or of VAPO's.
- `runs`: trains them in the given order, several at a time, each in its own process.
- `results`: their curves, means with confidence intervals, the effect of each change, and the interactive page.
"""
