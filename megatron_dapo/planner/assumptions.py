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
# Rows that the engines' expert kernel computes at least for an expert: the smallest block of vLLM's and SGLang's fused
# kernel (64 for more tokens than experts, without a tuned configuration).
EXPERT_BLOCK = 16
SECONDS_PER_LAYER = 60e-6  # launches and small kernels
# And with an adapter. SGLang, H200, 32B, rank 32 on all linear layers, 64 sequences: 6.8 to 7.7 ms a step in 64 layers.
SECONDS_PER_ADAPTED_LAYER = 110e-6
ALL_REDUCE_SECONDS = 15e-6  # one all-reduce of a layer, inside a node
# One all-reduce of a layer between nodes; 235B at TP 16 (NeMo-RL) needs 40 to 60 µs.
ALL_REDUCE_BETWEEN_NODES = 50e-6
# Between hosts that NVLink connects (GB200): NCCL instead of a kernel that maps the memory of the other GPUs, which
# works inside a host only. 11 µs more: SGLang on GB300, TP 8 on two hosts, 96 all-reduces for a token, 5.55 ms instead
# of 4.53 ms (sgl-project/sglang#36429). vLLM had no other way until 2026 (vllm-project/vllm#50000).
ALL_REDUCE_BETWEEN_HOSTS = 26e-6
# Scheduling and output of one sequence, on the CPU. vLLM: fitted as above. SGLang without streaming: 5.3 ms for 256.
SECONDS_PER_SEQUENCE: dict[EngineSoftware, float] = {"sglang": 6e-6, "vllm": 64e-6}

# ---- response lengths
LENGTH_SIGMA = 0.92  # of the logarithm: a policy's responses to DAPO-Math-17k
GROUP_SHARE = 0.5  # of that variance is between prompts

# ---- memory: trainer, engine
# CUDA context and kernels after an update, 2.4 GiB on an H200; NCCL's buffers when there is more than one rank.
CONTEXT_BYTES, NCCL_BYTES = 2.5 * GIB, 2.0 * GIB
# Of activations and working space, what torch keeps beyond its peak: about half (RESULTS.md, memory.py). Most of it is
# returned when an allocation of its own fails, but not to an engine that keeps its memory on the same GPU.
FRAGMENTATION, FRAGMENTATION_BESIDE_ENGINE = 0.05, 0.5
DEFAULT_FRACTION = 0.88  # SGLang's --mem-fraction-static
ENGINE_OVERHEAD_BYTES = 3.0 * GIB  # CUDA context, graphs, activations: outside that fraction
ENGINE_RELEASED_BYTES = 1.5 * GIB  # kept after a release: 2.7 GiB on an H200 less 1.2 of a trainer before its updates

# ---- advice
MARGIN = 0.05  # of a GPU's memory that recommended layouts leave free: the largest error of a predicted peak

# Published time over predicted time of four in five runs (`benchmarks/published.py`).
LIKELY = 0.85, 1.5

# ---- training
# Of the peak, in products that are very long and wide. A product reaches width / (width + HALF_SPEED_WIDTH) of it with
# the model's width: 0.52 measured on an H200 at 1 536 (1.5B, `benchmarks/step.py`), 0.60 at 5 120 (layers of 32B,
# `benchmarks/calibrate.py train`, whose head takes three products at this speed). Narrow models wait for memory: norms,
# rotations, activations and residuals move at least 110 bytes × width for a token and layer, beside 77 × width² FLOPs
# (an MLP of 3.5 × width, forward and backward, everything fused), which is half of these 390 on an H200. So it changes
# with the FLOPs per byte of a GPU.
DEFAULT_MFU, HALF_SPEED_WIDTH = 0.65, 390
# Of the MFU, in attention: FlashAttention 3, head size 128, causal, H100: 0.6 of the peak forward, 0.45 backward.
ATTENTION_MFU_SHARE = 0.77
# Products in fp8 take 1/1.66 of the time; conversions take 29.6 ms beside 207.9 ms of bf16 products at a width of
# 1 536 (36 608 converted values and 46.8 M weights in a layer). H200, `on_gpu.py --only profile profile_fp8`.
FP8_SPEED, FP8_CONVERSION = 1.66, 29.6 / 207.9 * 46.8e6 / 36_608
# A CPU's Adam, for one GPU's share of a node (host memory bandwidth of about 200 GB/s for 8 GPUs); not measured.
HOST_ADAM_BYTES_PER_SECOND = 25e9
WIRE_SHARE = 0.7  # of a link's bandwidth that collectives reach
FILL = 0.9  # of a micro-batch that first-fit packing fills, unless one sequence already does
BALANCE = 1.05  # tokens of the busiest data-parallel rank, relative to the mean
EXPOSED_CONTEXT = 0.25  # of the context-parallel exchange that attention does not hide
# Tokens of the fullest expert rank relative to the mean: at its peak, for memory; and on average, for waiting.
EXPERT_IMBALANCE, EXPERT_WAIT = 1.25, 1.1
# A matrix product of HALF_SPEED_TOKENS reaches half of the speed of a long one. Context parallelism and small
# micro-batches shrink products; attention works on chunks of a sequence / (2 × context_parallel).
HALF_SPEED_TOKENS, HALF_SPEED_CHUNK = 384, 128
# Each copy of a token is written and read once before the exchange and once after it, both ways.
PERMUTATION_PASSES = 3
# Router and the wait for token counts, per MoE layer, micro-batch and pass (backward: twice). Fitted to
# Megatron-Bridge's 41.25 s and 31.3 s (all-to-all hidden) for 30B-A3B on 16 H100.
MOE_LAYER_SECONDS = 0.3e-3

# ---- moving weights and state
DISK_BYTES_PER_SECOND = 2e9  # of a shared file system, to or from one node
DISK_TOTAL_BYTES_PER_SECOND = 20e9  # and to all nodes together
# Engines copy a bucket into their own parameters; measured on an H200: 15.23 GB in 0.160 s, 21.18 GB in 0.241 s.
LOAD_BYTES_PER_SECOND = 90e9
# One NCCL broadcast of a large bucket to many GPUs; more than the network's share only inside a node.
BROADCAST_LIMIT = 100e9
# SGLang's loader for one tensor: the 339 of a dense model cost next to nothing beside their bytes. For the tensor of an
# expert it searches a list of 3 × experts (80 ns a comparison: 0.89 s of CPU time for 18 432 names on a busy virtual
# machine, a third of that on a server's core) and finds its place. Together 100 µs for each of 6144 experts' tensors on
# an H200: 0.898 s without `pack_experts`, 0.340 s with it.
SECONDS_PER_NAME, SECONDS_PER_EXPERT_NAME, SECONDS_PER_NAME_COMPARED = 10e-6, 85e-6, 80e-9
SNAPSHOT_BYTES_PER_SECOND = 40e9  # into pinned host memory, while the weights are sent: HOST_BYTES_PER_SECOND
HOST_BYTES_PER_SECOND = 40e9  # between a GPU and pinned host memory; measured on an H200
# Of a weight update, without the transfer: pause, labels, probe, resume. Measured on an H200: 0.04 s.
PAUSE_SECONDS = 0.04
SHA256_BYTES_PER_SECOND = 1.5e9  # of one core, in SGLang's check of an adapter
