"""Ablations: designs of several runs, their workers, and the page that compares them.

command  `megatron-dapo ablate CONFIG...`: DAPO's changes switched on and off in real training runs
designs  Which runs an ablation consists of: combinations of DAPO's changes, and the three designs that choos
results  The results of an ablation: curves of every run, means with confidence intervals, and the effect of
runs     Trains the runs of an ablation in the given order, several at a time, each in its own process
"""
