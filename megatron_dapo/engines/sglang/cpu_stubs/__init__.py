"""Packages that SGLang imports and that do not exist for CPU-only machines.

The fleet puts this directory on the PYTHONPATH of CPU servers, and of nothing else. Importing them costs nothing;
calling what they lack says so. SGLang's own torch-native path needs one real function, which sgl_kernel.py has.
"""
