"""Proof that this installation computes the right update, and an engine what its trainer does: `megatron-dapo
selfcheck`.

- `layouts`     the command: which cases run, where, and the table that it prints
- `cases`       layout, model and loss of each comparison: names such as tp2cp2sp, the default table, random cases
- `trace`       losses, gradients and weights of a few updates, gathered and compared
- `engine`      compares the engine of a run with its trainer, and names what differs
- `objective`   the rules that a custom objective must keep
- `synthetic`   small models, random weights and awkward mini-batches; tests use them as well
"""
