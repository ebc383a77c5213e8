"""Megatron-Core: its import, its options, its runtime, and what it needs without CUDA.

cpu             Megatron-Core, unmodified, on a machine without CUDA
importing       Imports Megatron-Core without what a machine without CUDA does not use; a third of the imports of a
options         `policy.megatron` against the installed Megatron-Core, and the options that need CUDA or Transformer
options_report  What `train --dry-run` says about Megatron's options, after it has checked them against the installe
runtime         This process in the job: device, process groups, and errors that reach all ranks
"""
