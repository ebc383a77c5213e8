"""Proof that this installation computes the right update: `megatron-dapo selfcheck`.

- `layouts`       the command: which layouts run, where they run, and the table
- `layout_spec`   names such as tp2cp2sp, and the configuration of the compared updates
- `trace`         losses, gradients and weights of a few updates, gathered and compared
- `synthetic`     small models, random weights and awkward mini-batches; tests use them as well
"""
