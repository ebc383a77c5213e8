"""The constants of a plan: every number that follows from neither the model, nor the configuration, nor a data sheet.

Each is measured or fitted once and used for every prediction; its comment says from what. `plan` prints them, and
`benchmarks/published.py` shows how far the predictions are from published runs.
"""

from __future__ import annotations

from typing import Literal

GIB = 1 << 30

EngineSoftware = Literal["sglang", "vllm"]

# ---- decoding: fitted to 104 vLLM measurements on H100 (8B to 235B, TP 1 to 8, batch 8 to 1 019; rms error 10 %,
# tests/planner/decode_measurements.json), and checked with SGLang 0.5.17 on an H200 (1.5B, batch 1, 64, 256).
READ_SHARE = 0.9  # of the memory bandwidth, while weights and keys and values are read
# Of the peak, where a decoding step is limited by arithmetic; also of prefill. SGLang: 32B in bf16 on an H200, 16 to
# 256 sequences with prompts of 256 or 4 096 tokens, six points within 6 % (`benchmarks/calibrate.py decode`).
DECODE_MFU: dict[EngineSoftware, float] = {"sglang": 0.6, "vllm": 0.4}
SECONDS_PER_LAYER = 60e-6  # launches and small kernels
ALL_REDUCE_SECONDS = 15e-6  # one all-reduce of a layer, inside a node
# One all-reduce of a layer between nodes; 235B at TP 16 (NeMo-RL) needs 40 to 60 µs.
ALL_REDUCE_BETWEEN_NODES = 50e-6
# Scheduling and output of one sequence, on the CPU. vLLM: fitted as above. SGLang without streaming: 5.3 ms for 256.
SECONDS_PER_SEQUENCE: dict[EngineSoftware, float] = {"sglang": 6e-6, "vllm": 64e-6}

# ---- response lengths
LENGTH_SIGMA = 0.92  # of the logarithm: a policy's responses to DAPO-Math-17k
GROUP_SHARE = 0.5  # of that variance is between prompts

# ---- engine memory
DEFAULT_FRACTION = 0.88  # SGLang's --mem-fraction-static
ENGINE_OVERHEAD_BYTES = 3.0 * GIB  # CUDA context, graphs, activations: outside that fraction, and kept after a release

# ---- training
# Of the peak, in long products: 0.50 to 0.53 measured on an H200 (1.5B, torch and Transformer Engine), 0.60 with layers
# of 32B (`benchmarks/calibrate.py train`). The lower value is used: published runs on H100s fit it.
DEFAULT_MFU = 0.5
WIRE_SHARE = 0.7  # of a link's bandwidth that collectives reach
FILL = 0.9  # of a micro-batch that first-fit packing fills, unless one sequence already does
BALANCE = 1.05  # tokens of the busiest data-parallel rank, relative to the mean
EXPOSED_CONTEXT = 0.25  # of the context-parallel exchange that attention does not hide
# Tokens of the fullest expert rank relative to the mean: at its peak, for memory; and on average, for waiting.
EXPERT_IMBALANCE, EXPERT_WAIT = 1.25, 1.1
# A matrix product of this many tokens reaches half of the speed of a long one. Context parallelism and small
# micro-batches shrink products; attention works on chunks of a sequence / (2 × context_parallel).
HALF_SPEED_TOKENS, HALF_SPEED_CHUNK = 384, 128
EXPERT_MFU_SHARE = 0.8  # of the MFU, in the grouped products of experts: many small matrices
# Router, permutation and the wait for token counts, per MoE layer, micro-batch and pass (backward: twice). This and
# the line above are fitted to Megatron-Bridge's 41.25 s and 31.3 s (all-to-all hidden) for 30B-A3B on 16 H100.
MOE_LAYER_SECONDS = 0.3e-3

# ---- moving weights and state
DISK_BYTES_PER_SECOND = 2e9  # of a shared file system, to or from one node
DISK_TOTAL_BYTES_PER_SECOND = 20e9  # and to all nodes together
# Engines copy a bucket into their own parameters; measured on an H200: 15.23 GB in 0.160 s, 21.18 GB in 0.241 s.
LOAD_BYTES_PER_SECOND = 90e9
# One NCCL broadcast of a large bucket to many GPUs; more than the network's share only inside a node.
BROADCAST_LIMIT = 100e9
# Other systems, from gathered parameters to engines: 14 and 20 GB/s (verl, H20), 23 GB/s (miles, H100).
PEER_BROADCAST_BYTES_PER_SECOND = 20e9
PEER_PAUSE_SECONDS = 0.3  # besides the transfer; assumed
PEER_IPC_BYTES_PER_SECOND = 18.6e9  # tensor by tensor; measured here before buckets were flat: 3.1 GB in 0.166 s
# SGLang's loader for one tensor: the 339 of a dense model cost next to nothing beside their bytes. For the tensor of an
# expert it searches a list of 3 × experts (80 ns a comparison: 0.89 s of CPU time for 18 432 names on a busy virtual
# machine, a third of that on a server's core) and finds its place. Together 100 µs for each of 6144 experts' tensors on
# an H200: 0.898 s without `pack_experts`, 0.340 s with it.
SECONDS_PER_NAME, SECONDS_PER_EXPERT_NAME, SECONDS_PER_NAME_COMPARED = 10e-6, 85e-6, 80e-9
SNAPSHOT_BYTES_PER_SECOND = 40e9  # into pinned host memory, while the weights are sent: HOST_BYTES_PER_SECOND
HOST_BYTES_PER_SECOND = 40e9  # between a GPU and pinned host memory; measured on an H200
# Of a weight update, without the transfer: pause, labels, probe, resume. Measured on an H200: 0.04 s.
PAUSE_SECONDS = 0.04
