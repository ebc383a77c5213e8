"""The built-in objectives. A file here is an objective: its name is a value of `algorithm.objective`, and its module
attribute `objective` is the class.

- `dapo`    token ratio, decoupled clip bounds, dual clip
- `gspo`    the same bounds on the ratio of the whole sequence
- `cispo`   REINFORCE with a clipped importance weight
"""
