"""Checks of GPU, driver, CUDA, NCCL, fused kernels, and of the attention kernel that Transformer Engine selects.

Each check runs in its own Python process, because a broken library may crash the process that imports it. Transformer
Engine falls back silently when its preferred attention does not load: four to five times slower, and with the memory of
all attention scores. Therefore the check runs a tiny packed attention and reads Transformer Engine's debug output.
"""

from __future__ import annotations

import json
import os
import re
import sys

from megatron_dapo.doctor.check import Check, CommandResult, CommandRunner, fail, last_line, ok, run_command, warn
from megatron_dapo.doctor.software import version_tuple

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}  # major CUDA version: oldest major driver version
FAST = {"FusedAttention", "FlashAttention"}

TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "available": cuda,
    "devices": torch.cuda.device_count() if cuda else 0,
    "name": torch.cuda.get_device_name(0) if cuda else "",
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
}))
"""
KERNEL_PROBE = """
import importlib.util, torch
try:
    from torch.nn.attention import varlen
except ImportError:
    varlen = None
if not torch.cuda.is_available():
    print("cpu")
elif importlib.util.find_spec("transformer_engine") is None:
    print("one kernel" if varlen else "one call per sequence")
else:
    import transformer_engine.pytorch
    print("transformer engine")
"""
ATTENTION_PROBE = """
import logging, torch
logging.basicConfig(level=logging.DEBUG)
from transformer_engine.pytorch import DotProductAttention
attention = DotProductAttention(8, 64, num_gqa_groups=2, attention_dropout=0.0, qkv_format="thd",
                                attn_mask_type="padding_causal")
q = torch.randn(256, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
k, v = (torch.randn(256, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
ends = torch.tensor([0, 100, 256], device="cuda", dtype=torch.int32)
attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=156, max_seqlen_kv=156).sum().backward()
torch.cuda.synchronize()
print("attention ran")
"""
KERNELS_PROBE = """
import json, warnings
warnings.simplefilter("ignore")
from megatron_dapo.policy.megatron import cpu
from megatron_dapo.policy.megatron.options import adam_provider, fusion_provider, has_transformer_engine
fusion = fusion_provider(has_transformer_engine())
print(json.dumps({"cuda": not cpu.needed(), "fusion": fusion, "adam": adam_provider()}))
"""
DELTA_RULE_PROBE = """
import importlib.metadata, json, torch
from megatron_dapo.policy.model.delta_rule import has_fla
version = importlib.metadata.version("flash-linear-attention") if has_fla() else ""
print(json.dumps({"cuda": torch.cuda.is_available(), "version": version}))
"""


def gpu(run: CommandRunner = run_command) -> Check:
    """The GPUs that nvidia-smi lists."""
    fields = "name,driver_version,memory.total,memory.used"
    result = run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], 15)
    if result.missing:
        remedy = "needed for GPUs only: install the driver, or start the container with GPUs"
        return warn("no NVIDIA driver (no nvidia-smi)", remedy)
    if result.code != 0:
        why = last_line(result.err) or last_line(result.out)
        return fail(f"nvidia-smi failed: {why}", "the driver does not respond: reload it or reboot")
    rows = [[cell.strip() for cell in line.split(",")] for line in result.out.splitlines() if line.strip()]
    kinds = sorted({row[0] for row in rows})
    memory = [[float(cell) if cell.isdecimal() else 0.0 for cell in row[2:]] for row in rows]  # GB10 reports none
    size = f", {memory[0][0] / 1024:.0f} GiB" if memory[0][0] else ""
    found = f"{len(rows)} × {', '.join(kinds)}, driver {rows[0][1]}{size}"
    if len(kinds) > 1:
        return warn(found, "GPUs of several kinds: the slowest sets the pace; choose with CUDA_VISIBLE_DEVICES")
    busy = [i for i, (total, used) in enumerate(memory) if used > 0.1 * total]
    if busy:
        remedy = "other processes use memory there (nvidia-smi lists them): stop those that are yours"
        return warn(f"{found}; memory in use on {', '.join(map(str, busy))}", remedy)
    return ok(found)


def torch_cuda(run: CommandRunner = run_command) -> Check:
    """torch sees the GPUs, and its CUDA version works with the driver."""
    result = run([sys.executable, "-c", TORCH_PROBE], 90)
    if result.code != 0:
        return fail(f"torch does not import: {last_line(result.err)}", "reinstall torch")
    seen = json.loads(last_line(result.out))
    smi = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 15)
    if seen["available"]:
        found = f"torch {seen['torch']}, CUDA {seen['cuda']}, NCCL {seen['nccl']}, {seen['devices']} × {seen['name']}"
        return ok(found)
    if smi.code != 0:
        return ok(f"torch {seen['torch']}, CPU only")
    driver = smi.out.split()[0] if smi.out.split() else "?"
    if seen["cuda"] is None:
        remedy = "pip install torch built for CUDA (pytorch.org says which index)"
        return fail(f"torch {seen['torch']} is built for the CPU, but the machine has a GPU", remedy)
    oldest = OLDEST_DRIVER.get(version_tuple(seen["cuda"])[0], 0)
    if version_tuple(driver) and version_tuple(driver)[0] < oldest:
        remedy = f"update the driver to {oldest} or newer, or install torch for an older CUDA"
        return fail(f"driver {driver} is too old for CUDA {seen['cuda']}", remedy)
    remedy = "check CUDA_VISIBLE_DEVICES and the container's access to GPUs"
    return fail(f"torch {seen['torch']} sees no GPU, though driver {driver} does", remedy)


def attention(run: CommandRunner = run_command) -> Check:
    """Transformer Engine imports, and selects a fast attention backend for packed sequences."""
    result = run([sys.executable, "-c", KERNEL_PROBE], 180)
    if result.code != 0:
        remedy = "install the build that matches torch and its CUDA" + _library_path()
        return fail(f"Transformer Engine does not import: {last_line(result.err)}", remedy)
    kernel = last_line(result.out)
    if kernel == "cpu":
        return ok("no GPU: torch's attention on the CPU")
    if kernel == "one kernel":
        why = "no Transformer Engine here; it needs less memory under context parallelism"
        return ok(f"torch's, one kernel for packed sequences ({why})")
    if kernel == "one call per sequence":
        return warn(
            f"Transformer Engine is not installed, and this torch has no kernel for packed sequences: {kernel}",
            "install torch 2.10 or newer, or pip install --no-build-isolation 'transformer-engine[pytorch]'",
        )
    debug = os.environ | {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"}
    return judge_attention(run([sys.executable, "-c", ATTENTION_PROBE], 120, debug))


def kernels(run: CommandRunner = run_command) -> Check:
    """Which libraries add weight gradients inside matrix products, and update weights in one kernel."""
    result = run([sys.executable, "-c", KERNELS_PROBE], 120)
    if result.code != 0:
        remedy = "reinstall megatron-core, or the library that the message names"
        return fail(f"megatron-core does not import: {last_line(result.err)}", remedy)
    seen = json.loads(last_line(result.out))
    if not seen["cuda"]:
        return ok("no GPU: nothing to fuse")
    adam = "torch's fused AdamW" if seen["adam"] == "torch" else f"Adam of {seen['adam']}"
    if seen["fusion"]:
        return ok(f"gradient accumulation fused by {seen['fusion']}, {adam}")
    engine, apex = "'transformer-engine[pytorch]'", "NVIDIA's apex with CUDA extensions (not PyPI's apex)"
    return warn(f"gradient accumulation is not fused, {adam}", f"pip install --no-build-isolation {engine}, or {apex}")


def delta_rule(run: CommandRunner = run_command) -> Check:
    """The kernels of gated DeltaNet layers, for a model that has them."""
    remedy = "pip install flash-linear-attention"
    result = run([sys.executable, "-c", DELTA_RULE_PROBE], 120)
    if result.code != 0:
        found = f"flash-linear-attention does not import: {last_line(result.err)}"
        return fail(found, f"{remedy}, for this torch and triton; or uninstall it")
    seen = json.loads(last_line(result.out))
    if not seen["cuda"]:
        return ok("no GPU: gated DeltaNet layers run in torch")
    if not seen["version"]:
        found = "no flash-linear-attention: the gated DeltaNet layers of this model run in torch, which is slower"
        return warn(found, remedy)
    return ok(f"flash-linear-attention {seen['version']}")


def judge_attention(result: CommandResult) -> Check:
    """Reads the selected backend from Transformer Engine's debug output."""
    text = result.out + "\n" + result.err
    chosen = re.findall(r"Selected backend = (\w+)", text) or re.findall(r"Running with (\w+Attention)", text)
    if result.code != 0:
        remedy = "reinstall Transformer Engine and cuDNN for this torch" + _library_path()
        return fail(f"a tiny packed attention failed: {last_line(result.err)}", remedy)
    if not chosen:
        remedy = "run with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 and look for 'Selected backend'"
        return warn("it ran, but did not report its backend", remedy)
    if chosen[-1] in FAST:
        return ok(f"Transformer Engine with {chosen[-1]}")
    found = f"Transformer Engine falls back to {chosen[-1]}: 4 to 5 times slower, and several times the memory"
    return fail(found, "its cuDNN does not load" + _library_path())


def _library_path() -> str:
    if os.environ.get("LD_LIBRARY_PATH"):
        return "; LD_LIBRARY_PATH is set and may mix cuDNN libraries of two installations: unset it and try again"
    return "; all cuDNN libraries must be of one release (pip install --force-reinstall nvidia-cudnn-cu12 or -cu13)"
