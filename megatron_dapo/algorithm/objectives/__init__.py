"""The built-in objectives. A file here is an objective: its name is a value of `algorithm.objective`, and its module
attribute `objective` is the class.

dapo.py    token ratio, decoupled clip bounds, dual clip
gspo.py    the same bounds on the ratio of the whole sequence
cispo.py   REINFORCE with a clipped importance weight
"""
