"""Proof that this installation computes the right update: `megatron-dapo selfcheck`.

- `layouts`       the command: which cases run, and where
- `cases`         layout, model and loss of each comparison: the default table, and random ones
- `layout_spec`   names such as tp2cp2sp, and the configuration of the compared updates
- `report`        the table that the command prints
- `trace`         losses, gradients and weights of a few updates, gathered and compared
- `synthetic`     small models, random weights and awkward mini-batches; tests use them as well
"""
