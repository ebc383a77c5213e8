"""The assumptions of a plan as text: every number that follows from neither the model nor the configuration."""

from __future__ import annotations

from megatron_dapo.config import Config
from megatron_dapo.planner import assumptions, engine, memory
from megatron_dapo.planner.hardware import GIB
from megatron_dapo.planner.search import Task
from megatron_dapo.plugins import is_plugin


def assumption_lines(task: Task, config: Config) -> list[str]:
    return [*_machine(task), *_workload(task, config), *_trainer(task), *_engine(task, config)]


def _machine(task: Task) -> list[str]:
    gpu, cluster = task.cluster.gpu, task.cluster
    return [
        (
            f"{gpu.name}: {gpu.memory_gib:g} GiB, {gpu.tflops:g} TFLOP/s bf16, {gpu.bandwidth:g} TB/s, "
            f"{gpu.nvlink:g} GB/s inside a node of {cluster.gpus_per_node}, {gpu.network:g} GB/s between nodes"
        ),
        f"collectives reach {assumptions.WIRE_SHARE:.0%} of that bandwidth",
    ]


def _workload(task: Task, config: Config) -> list[str]:
    work = task.work
    lines = [
        (
            f"lengths: prompts {work.mean_prompt} tokens on average (at most {work.max_prompt}), responses "
            f"{work.mean_response} (at most {work.max_response}); memory is planned for the maximum"
        ),
        (
            f"{work.kept:.0%} of the sampled groups are kept: {work.generated} samples are generated for "
            f"{work.samples} that train"
        ),
    ]
    if config.algorithm.kl.coefficient:
        lines.append(
            "the reference policy (algorithm.kl.coefficient) adds one log-prob pass; its weights are in host memory "
            "and change places with the policy's, so it takes no GPU memory"
        )
    elif is_plugin(config.algorithm.objective):
        lines.append(
            f"{config.algorithm.objective} is not imported: if it reads the reference policy (Needs.reference), a step "
            "has one more log-prob pass"
        )
    return lines


def _trainer(task: Task) -> list[str]:
    layers = "Transformer Engine, fused attention" if task.layers == "te" else "torch (no Transformer Engine)"
    lines = [
        f"kernels reach an MFU of {task.mfu:g}; recomputation, bubbles and exposed collectives are added",
        (
            f"{assumptions.EXPOSED_CONTEXT:.0%} of the context-parallel exchange is not hidden; packing fills "
            f"{assumptions.FILL:.0%} of a micro-batch; the busiest rank has {assumptions.BALANCE:g} times the mean "
            f"tokens; products of {assumptions.HALF_SPEED_TOKENS} tokens and attention over chunks of "
            f"{assumptions.HALF_SPEED_CHUNK} reach half of the speed"
        ),
        f"layers: {layers}; the head holds one chunk of logits, which their gradient replaces",
        (
            f"reserve: {memory.CONTEXT_BYTES / GIB:g} GiB CUDA, {memory.NCCL_BYTES / GIB:g} GiB NCCL, "
            f"{memory.FRAGMENTATION:.0%} of activations and working space lost to fragmentation"
        ),
    ]
    if task.shape.is_moe:
        lines.append(
            f"experts: the fullest rank gets {assumptions.EXPERT_IMBALANCE:g} times the mean tokens (in time "
            f"{assumptions.EXPERT_WAIT:g}), their products reach {assumptions.EXPERT_MFU_SHARE:.0%} of the MFU, and "
            f"{assumptions.MOE_LAYER_SECONDS * 1e3:g} ms are added per layer, pass and micro-batch"
        )
    return lines


def _engine(task: Task, config: Config) -> list[str]:
    servers = config.rollout.servers
    if config.rollout.engine == "embedded":
        return ["the embedded engine runs on the CPU: no memory on the GPU, and its time is not predicted"]
    if servers.urls:
        where = f"{len(servers.urls)} external servers, on GPUs of the same kind"
    elif task.cluster.colocated:
        where = (
            "colocated with a fixed split: the engine keeps its share of the GPU, the trainer has the rest"
            if not engine.hands_over(config.rollout)
            else "colocated with hand-over (rollout.servers.share_gpus must be true): engines release weights and KV "
            f"cache while the trainer works ({assumptions.ENGINE_OVERHEAD_BYTES / GIB:g} GiB stay), the trainer's "
            f"state is in host memory while they generate ({task.kept / GIB:.1f} GiB stay)"
        )
    else:
        ahead = config.rollout.max_staleness
        order = f"at the same time (max_staleness {ahead})" if ahead else "one after the other"
        where = f"disaggregated: {task.cluster.engine_gpus} GPUs only serve, {task.world} only train, {order}"
    return [
        where,
        f"an engine takes at most {engine.memory_fraction(servers.arguments):.0%} of a GPU for weights and KV cache",
        (
            f"decoding reaches {assumptions.READ_SHARE:.0%} of memory bandwidth; "
            f"{assumptions.SECONDS_PER_LAYER * 1e6:g} µs per layer and "
            f"{assumptions.SECONDS_PER_SEQUENCE['sglang'] * 1e6:g} µs per sequence are added (fitted to vLLM on H100 "
            "and SGLang on H200)"
        ),
        (
            f"response lengths are log-normal with sigma {task.work.sigma:g} (--sigma), cut at the maximum; "
            f"{assumptions.GROUP_SHARE:.0%} of the variance is between prompts"
        ),
        (
            f"weights move at {assumptions.DISK_BYTES_PER_SECOND / 1e9:g} GB/s per node and "
            f"{assumptions.DISK_TOTAL_BYTES_PER_SECOND / 1e9:g} GB/s in all (disk: written, then read), "
            f"engine GPUs copy their shards at {assumptions.LOAD_BYTES_PER_SECOND / 1e9:g} GB/s, and the tensor "
            f"of an expert costs {assumptions.SECONDS_PER_EXPERT_NAME * 1e6:g} µs more; snapshots "
            f"{assumptions.SNAPSHOT_BYTES_PER_SECOND / 1e9:g} GB/s"
        ),
    ]
