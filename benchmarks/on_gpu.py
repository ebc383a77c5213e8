"""All measurements that need one GPU, one after the other, each with a time limit and a log of its own.

    python benchmarks/on_gpu.py --model MODEL_1_5B --out DIR [--group GROUP] [--only NAME …] [--list]
                                [--set KEY=VALUE …] [-- SERVER ARGUMENTS]

MODEL is the HF directory of Qwen2.5-1.5B (or another small Qwen2) with its tokenizer; `--data` has gsm8k_train.jsonl
and gsm8k_test.jsonl, for the runs, and for `switches` the first 400 lines of the latter as gsm8k_test_400.jsonl. A
measurement that has ended without an error is not repeated, so an interrupted session goes on with the same command.
The last lines of every log are printed. `--set` changes a key of every run. Arguments after `--` go to every SGLang
server.

Groups with several ranks on the one GPU, each at most 25 minutes: `layouts` (the self-check and its planted errors;
DIR/layouts.md is its table), `sync` (weights over NCCL) and `runs` (TP2, DP2, PP2 and CP2, TP2 with a server that is
tensor parallel as well, then a run that is killed twice and goes on in another layout). `exact` has one rank: 20 steps
with `policy.true_on_policy` and 20 without, then two runs of which one is killed; DIR/exact.md says what is equal.
`learning` has one rank, too: `full`, `lora` and `vapo` learn on equally many samples and can run at the same time, one
command each (`--only`); the `step_…` runs are for speed and must be alone on the GPU; DIR/learning.md is its table. Its
`model_32b` writes 65 GB into DIR, which `lora_32b` then trains; DIR may be on a RAM disk.
`maths` is one run of 25 minutes on DAPO-Math-17k, whose files `variants.py maths` writes.
`families` are short runs of what the others leave out: Qwen3-Next and Qwen3.5 (random, killed and resumed), experts
over two ranks of trainer and server, LoRA on the server's base, YaRN, tools, and distillation. Its teacher is started
before: `python -m sglang.launch_server --model-path MODEL --port 36000 --mem-fraction-static 0.1`.
Several ranks need NCCL 2.30 or newer and these settings; the Multi-Process Service lets their kernels run side by side:

    export LD_PRELOAD=…/nvidia/nccl/lib/libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_NCHANNELS=2
    export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps; nvidia-cuda-mps-control -d
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ablation import split_arguments

from megatron_dapo.config import load_config
from megatron_dapo.observe.metrics_file import is_wall_clock, read_records
from megatron_dapo.planner.assumptions import DEFAULT_MFU, GIB
from megatron_dapo.planner.hardware import cluster_of
from megatron_dapo.planner.memory import Layers
from megatron_dapo.planner.models import model_shape
from megatron_dapo.planner.plan import task_of
from megatron_dapo.planner.search import judge
from megatron_dapo.planner.workload import Workload

HERE = Path(__file__).resolve().parent
EXAMPLE = str(HERE.parent / "examples/gsm8k_1gpu/gsm8k.yaml")
ENDED = "ended with code"
SHOWN = 12  # lines of a log


@dataclass(frozen=True)
class Measurement:
    name: str
    seconds: int  # limit
    script: str
    arguments: list[str]
    group: str = "one"
    kill_at: Path | None = None  # kill -9 of everything as soon as this exists
    wait: int = 0  # seconds before it starts: the Multi-Process Service recovers from killed clients

    def command(self) -> list[str]:
        program = ["-m", "megatron_dapo"] if self.script == "megatron-dapo" else [str(HERE / self.script)]
        if self.script == "pytest":
            program = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
        if self.script == "torchrun":
            program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        return [sys.executable, "-W", "ignore", *program, *self.arguments]


def measurements(
    model: Path, data: Path, out: Path, server: list[str], changed: Sequence[str] = ()
) -> list[Measurement]:
    def servers(fraction: str, *more: str) -> list[str]:
        return ["--set", "rollout.servers.arguments=" + json.dumps(["--mem-fraction-static", fraction, *server, *more])]

    def gsm8k(
        steps: int,
        folder: str,
        *changes: str,
        fraction: str = "0.7",
        more: tuple[str, ...] = (),
        example: str = EXAMPLE,
    ) -> list[str]:
        """The recipe as it is shipped, with other paths and steps, and with `changes`."""
        settings = [
            f"policy.model={model}", f"data.path={data}/gsm8k_train.jsonl",
            f"evaluate.data.path={data}/gsm8k_test.jsonl", f"trainer.steps={steps}", "trainer.checkpoint.every=0",
            f"trainer.run_dir={out / folder}", "observe.console=plain", *changes, *changed,
        ]  # fmt: skip
        graphs = ("--cuda-graph-max-bs-decode", "384", "--max-running-requests", "384")
        return [example, *(word for item in settings for word in ("--set", item)), *servers(fraction, *graphs, *more)]

    def layouts(ranks: int, name: str, names: str, *more: str, seconds: int = 240) -> Measurement:
        table = ["--json", str(out / f"layouts_{name}.json")]
        command = ["-m", "megatron_dapo.cli", "selfcheck", "layouts", "--layouts", names, *more, "--updates", "2"]
        command += [*table, "--timeout", "90"]
        return Measurement(f"layouts_{name}", seconds, "torchrun", [str(ranks), *command], "layouts")

    def two_ranks(steps: int, folder: str, layout: str, *changes: str, more: tuple[str, ...] = ()) -> list[str]:
        return ["train", *gsm8k(
            steps, folder, "trainer.ranks=2", "evaluate.every=0", "policy.micro_batch_tokens=8192",
            *(f"policy.{key}_parallel={2 if key == layout else 1}" for key in ("tensor", "pipeline", "context")),
            *changes, fraction="0.35", more=more,
        )]  # fmt: skip

    def resumed(layout: str, steps: int, **more: Any) -> Measurement:
        kept = ("trainer.checkpoint.every=2", "trainer.checkpoint.keep=1", "trainer.checkpoint.keep_best=false")
        arguments = two_ranks(steps, "run_resumed", layout, *kept)
        return Measurement(f"resumed_{layout}", 400, "megatron-dapo", arguments, "runs", **more)

    def exact(name: str, steps: int, *changes: str, folder: str = "", seconds: int = 500, **more: Any) -> Measurement:
        same = ("rollout.sampler.order=prompt", "rollout.sampler.unfinished=finish", "rollout.sampler.surplus=drop")
        arguments = ["train", *gsm8k(steps, folder or f"run_{name}", "evaluate.every=0", *same, *changes)]
        return Measurement(name, seconds, "megatron-dapo", arguments, "exact", **more)

    on, unsaved = "policy.true_on_policy=true", "trainer.checkpoint.at_end=false"
    curve = (unsaved, "evaluate.every=10")
    pair = (
        on, "trainer.prompts_per_step=16", "trainer.mini_batch_prompts=8", "rollout.max_response_tokens=256",
        "algorithm.overlong.cache_length=64",
    )  # fmt: skip
    killed = out / "run_exact_killed" / "checkpoints" / "step_2"
    exact_runs = [
        exact("exact", 20, on, *curve),
        exact("exact_off", 20, *curve),
        exact("exact_undisturbed", 6, *pair, unsaved),
        exact("exact_killed", 6, *pair, "trainer.checkpoint.every=2", kill_at=killed),
        exact("exact_resumed", 6, *pair, unsaved, folder="run_exact_killed", wait=10),
    ]

    def learning(name: str, steps: int, seconds: int, fraction: str, *changes: str) -> Measurement:
        """The server keeps its memory beside the trainer; its KV cache has a fixed size, whatever else is started."""
        same = (unsaved, "rollout.servers.share_gpus=false", *changes)
        more = ("--max-total-tokens", "200000")
        arguments = ["train", *gsm8k(steps, f"run_{name}", *same, fraction=fraction, more=more)]
        return Measurement(name, seconds, "megatron-dapo", arguments, "learning")

    def learns(name: str, steps: int, every: int, port: int, *changes: str) -> Measurement:
        """One of three trainers on the GPU."""
        same = ("policy.micro_batch_tokens=4096", f"evaluate.every={every}", f"rollout.servers.port={port}")
        return learning(name, steps, 1500, "0.6", *same, *changes)

    # Nothing is carried over to the next step, so every token has the newest weights.
    fresh = ("rollout.dynamic_sampling=false", "rollout.sampler.oversampling=1")

    def alone(name: str, *changes: str) -> Measurement:
        """Every step trains on 512 samples, none is dropped."""
        return learning(name, 6, 300, "0.4", "evaluate.every=0", "policy.micro_batch_tokens=8192", *fresh, *changes)

    lora = ("policy.lora.rank=32", "policy.optimizer.lr=4e-5", "rollout.weights.transport=adapter")
    critic = ("algorithm.advantage=gae", "critic.optimizer.lr=1e-5", "critic.optimizer.warmup_steps=0")
    # Samples for tools/make_demo.py: two responses of 16 prompts, of 12 steps and the first.
    samples = ("observe.samples_every=2", "observe.samples_groups=16", "observe.samples_responses=2")
    # Eight steps train the critic alone, while the server generates on (its explained variance was 0.003, 0.04, 0.09
    # and 0.29 in steps 2, 4, 6 and 8); 24 steps train the policy. That is fewer samples than DAPO generates, which
    # drops groups. At five times the paper's rate few updates are enough. Responses have 300 tokens: the paper's
    # alpha of 0.05 would weight what the critic says 15 tokens later, and it knows little yet; 1.0 weights the reward.
    # Groups of two, because the critic is the baseline and other prompts teach more than further samples of one
    # (docs/critic.md).
    vapo = (
        "algorithm.preset=vapo", "algorithm.gae.alpha=1.0", "critic.pretraining.steps=8",
        "rollout.sampler.oversampling=1", "rollout.samples_per_prompt=2", "trainer.prompts_per_step=256",
        "trainer.mini_batch_prompts=128", "critic.offload=false",
    )  # fmt: skip
    learning_runs = [
        learns("full", 24, 12, 31000, *samples),
        learns("lora", 24, 12, 32000, *lora),
        learns("vapo", 32, 16, 33000, *critic, *vapo),
        # Merged: the server gets base and adapter added up and rounded to bf16.
        learns("lora_adapter", 8, 0, 32400, *lora, *fresh),
        learns("lora_merged", 8, 0, 32500, *lora, *fresh, "rollout.weights.transport=tensor"),
        alone("step_full"),
        alone("step_critic", *critic, "critic.offload=false"),
        alone("step_lora", *lora),
    ]
    big, recipe = out / "qwen2.5_32b", str(HERE.parent / "examples/qwen2.5_32b_lora_1gpu/dapo.yaml")
    short = (
        f"policy.model={big}", f"data.path={data}/gsm8k_train.jsonl", f"evaluate.data.path={data}/gsm8k_test.jsonl",
        "evaluate.every=0", "reward.grader=python:benchmarks.random_model.even_length",
        *fresh, "rollout.max_response_tokens=768",
        "algorithm.overlong.max_length=768", "algorithm.overlong.cache_length=128", "trainer.prompts_per_step=8",
        "trainer.mini_batch_prompts=4",
        "trainer.steps=4", f"trainer.run_dir={out / 'run_lora_32b'}", "observe.console=plain",
        "trainer.gate.max_mean_gap=0.5", "trainer.gate.max_gap=20", *changed,
    )  # fmt: skip
    sets = [word for item in short for word in ("--set", item)]
    graphs = ("--max-running-requests", "96", "--cuda-graph-max-bs-decode", "96")
    learning_runs += [  # a step of the recipe, with fewer and shorter responses and random weights
        Measurement("model_32b", 120, "random_model.py", [
            "32b", str(big), "--tokenizer", str(model),
        ], "learning"),
        Measurement("lora_32b", 500, "megatron-dapo", ["train", recipe, *sets, *servers("0.78", *graphs)], "learning"),
    ]  # fmt: skip

    def hybrid_run(name: str, **more: Any) -> Measurement:
        family = name.removesuffix("_killed")
        settings = ("rollout.servers.port=34000", "trainer.steps=4", "trainer.checkpoint.every=2", *changed)
        arguments = [
            "train", str(out / family), "--run", str(out / f"run_{family}"), "--set", "observe.console=plain",
            *(word for item in settings for word in ("--set", item)),
            *servers("0.15", "--cuda-graph-max-bs-decode", "16"),
        ]  # fmt: skip
        return Measurement(name, 240, "gated_delta_net.py", arguments, "families", **more)

    def variant(kind: str, source: Path) -> Measurement:
        made = out / (kind if source.is_dir() else f"{kind}.jsonl")
        return Measurement(f"{kind}_made", 60, "variants.py", [kind, str(source), str(made)], "families")

    def short_run(name: str, *changes: str) -> Measurement:
        arguments = gsm8k(
            6, f"run_{name}", unsaved, "evaluate.every=0", "rollout.servers.share_gpus=false",
            "rollout.servers.port=34000", "policy.micro_batch_tokens=4096", "trainer.prompts_per_step=32",
            "trainer.mini_batch_prompts=16", *changes, fraction="0.4", more=("--max-total-tokens", "100000"),
        )  # fmt: skip
        return Measurement(name, 240, "megatron-dapo", ["train", *arguments], "families")

    # Two ranks of a server on one GPU: each may see one device, and the list has it twice. CUDA stops at -1.
    two_on_one = (
        "rollout.servers.share_gpus=false", "rollout.weights.transport=distributed",
        "rollout.servers.tensor_parallel=2", "rollout.servers.environment=" + json.dumps(
            {"SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1", "CUDA_VISIBLE_DEVICES": "0,-1,0"}
        ),
    )  # fmt: skip
    no_peers = ("--gpu-id-step", "2", "--disable-custom-all-reduce", "--disable-cuda-graph")
    experts = out / "experts"
    families = [
        *(step for family in ("qwen3_next", "qwen3_5") for step in (
            Measurement(f"{family}_made", 60, "gated_delta_net.py", ["make", str(out / family), "--family", family],
                        "families"),
            hybrid_run(f"{family}_killed", kill_at=out / f"run_{family}" / "checkpoints" / "step_2"),
            hybrid_run(family, wait=5),
        )),
        Measurement("experts_made", 120, "routing_replay.py", ["make", str(experts), "--tokenizer", str(model)],
                    "families"),
        # Each of two expert-parallel ranks sends its experts; the server is expert parallel as well.
        Measurement("experts", 300, "megatron-dapo", two_ranks(
            4, "run_experts", "data", unsaved, f"policy.model={experts}", "policy.expert_parallel=2",
            "reward.grader=python:benchmarks.random_model.even_length", *fresh,
            "rollout.max_response_tokens=128", "algorithm.overlong.max_length=128",
            "algorithm.overlong.cache_length=32", "trainer.gate.max_mean_gap=0.5", "trainer.gate.max_gap=20",
            "trainer.prompts_per_step=16", "trainer.mini_batch_prompts=8",
            "rollout.weights.senders=expert_group", "rollout.weights.keep_snapshot=false",
            "rollout.servers.port=35000", "policy.micro_batch_tokens=4096", *two_on_one,
            more=(*no_peers, "--ep-size", "2", "--max-total-tokens", "50000"),
        ), "families"),
        variant("yarn", model), variant("noisy", model), variant("tools", data / "gsm8k_train.jsonl"),
        short_run("lora_shared", *lora, "rollout.servers.share_base=true"),
        short_run("yarn", f"policy.model={out / 'yarn'}"),
        short_run("tools", f"data.path={out / 'tools.jsonl'}",
                  "rollout.generate=python:megatron_dapo.rollout.agents.tools.call_tools.generate",
                  "rollout.generate_settings=" + json.dumps({
                      "format": "marks", "tools": ["calculator"], "max_calls": 6, "open": "<<", "close": ">>",
                      "result": " = {result}",
                  })),
        short_run("distillation", f"policy.model={out / 'noisy'}", *fresh, "policy.optimizer.lr=5e-6",
                  "algorithm.distillation.urls=[http://127.0.0.1:36000]", "algorithm.distillation.alone=true"),
    ]  # fmt: skip
    te, saved = ("--dtype", "bf16", "--layers", "te"), out / "run_resumed" / "checkpoints"
    many_ranks = [
        layouts(2, "torch", "tp2sp,pp2+uneven,pp2vpp2,cp2,dp2do,ep2", "--dtype", "fp32,bf16", "--models",
                "dense,moe,hybrid"),
        layouts(2, "te", "tp2sp,pp2vpp2,pp2+uneven,cp2+p2p,cp2+all_gather,cp2+a2a,dp2do,dp2do+sequential,ep2,"
                "ep2+replay,tp2sp+full", *te, "--models", "dense,moe,hybrid"),
        layouts(2, "fp8", "tp2sp,pp2vpp2,cp2+p2p,dp2do,ep2", "--fp8", "blockwise,tensorwise", "--layers", "te",
                "--models", "dense,moe"),
        layouts(4, "te_4", "tp2cp2sp,tp2pp2sp,ep2tp2sp+act_recompute,etp2tp2sp,tp4sp,ep2dp4do", *te, "--models",
                "dense,moe"),
        layouts(8, "te_8", "tp2pp2cp2sp,ep4pp2,tp2dp4spdo", *te, "--models", "dense,moe", seconds=200),
        Measurement("planted", 200, "torchrun", [
            "2", str(HERE.parent / "tests/support/planted_errors.py"), "--dtype", "bf16", "--layers", "te",
        ], "layouts"),
        layouts(2, "tp_overlap", "tp2sp+tp_overlap", *te, "--models", "dense", seconds=120),  # needs userbuffers
        Measurement("sync_nccl", 220, "sync.py", [
            str(model), "--only", "real", "--transports", "distributed", "--bucket-mib", "2048", "--",
            "--mem-fraction-static", "0.5", *server, "--cuda-graph-max-bs-decode", "64",
        ], "sync"),
        *(Measurement(f"run_{layout}", 300, "megatron-dapo", two_ranks(8, f"run_{layout}", layout), "runs")
          for layout in ("tensor", "data", "pipeline", "context")),
        Measurement("run_tensor_server", 400, "megatron-dapo", two_ranks(
            4, "run_tensor_server", "tensor", *two_on_one, more=no_peers,
        ), "runs"),
        resumed("tensor", 8, kill_at=saved / "step_2"),
        resumed("data", 8, kill_at=saved / "step_4", wait=30),
        resumed("pipeline", 8, wait=30),
    ]  # fmt: skip

    ahead = (
        "rollout.servers.share_gpus=false", "rollout.servers.count=2", "rollout.max_staleness=1",
        "policy.micro_batch_tokens=8192", "rollout.servers.max_running=256", f"rollout.weights.bucket_bytes={1 << 30}",
    )  # fmt: skip
    ahead_servers = (
        "--base-gpu-id", "0", "--max-running-requests", "256", "--cuda-graph-max-bs-decode", "256",
    )  # fmt: skip
    moe, fp8, few = (
        *(str(out / name) for name in ("moe", "fp8")),
        ("--cuda-graph-max-bs-decode", "64"),
    )
    return [
        *many_ranks,
        *exact_runs,
        *learning_runs,
        *families,
        Measurement("step", 150, "step.py", ["--options", "--only", "fp8", "--repeats", "5"]),
        Measurement("step_32k", 60, "step.py", ["--tokens", "32768", "--sequences", "16", "--repeats", "5"]),
        Measurement("step_moe", 90, "step.py", ["--model", "moe", "--repeats", "5"]),
        Measurement("step_7b", 150, "step.py", ["--model", "7b", "--options", "--only", "fp8", "--repeats", "5"]),
        Measurement("profile", 60, "step.py", ["--profile"]),
        Measurement("profile_fp8", 60, "step.py", ["--profile", "--set", "policy.fp8.recipe=tensorwise"]),
        Measurement("calibrate_train", 100, "calibrate.py", ["train"]),
        Measurement("sync", 140, "sync.py", [
            str(model), "--only", "real", "--transports", "tensor", "--bucket-mib", "2048", "--",
            "--mem-fraction-static", "0.5", *server, *few,
        ]),
        Measurement("sync_nccl", 200, "sync.py", [
            str(model), "--only", "real", "--transports", "distributed", "--bucket-mib", "2048", "--",
            "--mem-fraction-static", "0.3", *server, *few,
        ]),
        Measurement("planted_faults", 300, "planted_faults.py", [
            str(model), "--transports", "tensor", "distributed", "--", "--mem-fraction-static", "0.3", *server, *few,
        ]),
        Measurement("sync_moe", 220, "sync.py", [
            str(model), "--only", "moe", "--transports", "tensor", "--bucket-mib", "2048", "--",
            "--mem-fraction-static", "0.5", *server, "--cuda-graph-max-bs-decode", "8",
        ]),
        Measurement("sync_moe_packed", 220, "sync.py", [
            str(model), "--only", "moe", "--transports", "tensor", "--bucket-mib", "2048", "--pack-experts", "--",
            "--mem-fraction-static", "0.5", *server, "--cuda-graph-max-bs-decode", "8",
        ]),
        Measurement("replay_model", 60, "routing_replay.py", ["make", moe, "--tokenizer", str(model)]),
        Measurement("replay", 200, "routing_replay.py", [
            "run", EXAMPLE, "--set", f"policy.model={moe}", *servers("0.4", "--cuda-graph-max-bs-decode", "16"),
        ]),
        Measurement("hybrid_rule", 60, "gated_delta_net.py", ["rule"]),
        Measurement("calibrate_decode", 240, "calibrate.py", [
            "decode", "--tokenizer", str(model), "--", "--mem-fraction-static", "0.85", *server,
            "--cuda-graph-max-bs-decode", "256",
        ]),
        Measurement("memory", 300, "memory.py", [
            "--largest", "--recompute", "full", "--tokens", "4096", "--set", "policy.optimizer.cpu_offload=0.5",
        ]),
        Measurement("sync_fp8", 140, "sync.py", [
            str(model), "--only", "real", "--transports", "tensor", "--fp8", "--", "--mem-fraction-static", "0.5",
            *server, *few,
        ]),
        Measurement("loop_sync", 300, "megatron-dapo", ["train", *gsm8k(
            4, "run_sync", "evaluate.every=0", f"rollout.weights.bucket_bytes={4 << 30}",
        )]),
        Measurement("tests_sharing", 120, "pytest", [str(HERE.parent / "tests/engines/test_shared_memory.py")]),
        Measurement("tests", 300, "pytest", [str(HERE.parent / "tests/policy/test_cuda.py")]),
        Measurement("tests_options", 600, "pytest", [str(HERE.parent / "tests/policy/test_cuda_options.py")]),
        Measurement("fp8_model", 60, "megatron-dapo", ["convert", "hf-to-fp8", str(model), fp8]),
        Measurement("fp8", 600, "megatron-dapo", ["train", *gsm8k(
            20, "run_fp8", "policy.fp8.recipe=blockwise", "rollout.weights.quantization=fp8",
            f"rollout.servers.model={fp8}", "trainer.gate.max_mean_gap=0.2",
        )]),
        Measurement("fp8_mismatch", 300, "megatron-dapo", ["train", *gsm8k(
            3, "run_fp8_mismatch", "policy.fp8.recipe=blockwise", "rollout.weights.quantization=fp8",
            f"rollout.servers.model={fp8}", "trainer.gate.max_mean_gap=0.2", "evaluate.every=0",
            "policy.micro_batch_tokens=8192", "rollout.servers.max_running=128", "trainer.prompts_per_step=32",
            "rollout.servers.port=32000", fraction="0.2",
        )]),
        # Trainer and two servers keep their memory, and the servers generate during the updates.
        Measurement("run_100", 1500, "megatron-dapo", ["train", *gsm8k(
            100, "run_100", *ahead, fraction="0.5", more=(*ahead_servers, "--max-total-tokens", "300000"),
        )]),
        Measurement("maths", 1600, "megatron-dapo", ["train", *gsm8k(
            100, "run_maths", *ahead, f"data.path={data}/dapo_math_train.jsonl",
            f"evaluate.data.path={data}/dapo_math_held_out.jsonl", "rollout.max_response_tokens=2048",
            "algorithm.overlong.cache_length=512", "evaluate.every=15", unsaved,
            fraction="0.5", more=(*ahead_servers, "--max-total-tokens", "500000"),
        )], "maths"),
        Measurement("run", 600, "megatron-dapo", ["train", *gsm8k(20, "run")]),
        Measurement("switches", 590, "ablation.py", [
            "--out", str(out / "ablation_gsm8k"), "--seeds", "1", "--minutes", "8.5", "--set", f"policy.model={model}",
            "--set", f"data.path={data}/gsm8k_train.jsonl", "--set", f"evaluate.data.path={data}/gsm8k_test_400.jsonl",
            "--", *server, "--max-running-requests", "512", "--cuda-graph-max-bs-decode", "512",
        ]),
        Measurement("lora_as_shipped", 300, "megatron-dapo", [
            "train", *gsm8k(6, "run_lora_as_shipped", fraction="0.4", example=EXAMPLE.replace("_1gpu", "_lora")),
        ]),
        Measurement("engine", 200, "engine.py", [*gsm8k(20, "run_engine"), "--compare", str(out / "run")]),
    ]  # fmt: skip


def measure(one: Measurement, log: Path) -> int:
    """Ends the whole process group at the limit, servers included."""
    with log.open("a") as file:
        file.write(shlex.join(one.command()) + "\n")
        file.flush()
        process = subprocess.Popen(one.command(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = _wait(process, one)
            file.write(f"{one.name} {ENDED} {code}\n")
        except subprocess.TimeoutExpired:
            code = 124
            process.send_signal(signal.SIGTERM)  # it may end its servers itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            file.write(f"{one.name} was stopped after {one.seconds} s\n")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return code


def _wait(process: subprocess.Popen[bytes], one: Measurement) -> int:
    """Its exit code; 0 for one that is killed at the right time."""
    if one.kill_at is None:
        return process.wait(one.seconds)
    end = time.monotonic() + one.seconds
    while time.monotonic() < end:
        if one.kill_at.exists():
            return 0
        if (code := process.poll()) is not None:
            return code or 1  # it ended before
        time.sleep(0.2)
    raise subprocess.TimeoutExpired(process.args, one.seconds)


def write_table(out: Path) -> None:
    """DIR/layouts.md, of everything that the group `layouts` has measured so far."""
    rows = [row for file in sorted(out.glob("layouts_*.json")) for row in json.loads(file.read_text())]
    if not rows:
        return
    names = ("layout", "ranks", "model", "precision", "layers", "status", "gradients", "weights", "noise", "share")
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        cells = [row.get(name, "—") for name in names]
        lines.append(
            "| " + " | ".join(f"{cell:.1e}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"
        )
    bad = [row for row in rows if row["status"] != "ok"]
    lines += ["", f"{len(rows)} cases, {len(bad)} not ok. share: of the limit of the worst tensor.", ""]
    lines += [f"- {row['layout']} {row['model']} {row['precision']} {row['layers']}: {row['error']}" for row in bad]
    (out / "layouts.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[len(rows) + 2 :]), flush=True)


def read_metrics(run: Path, kind: str = "step") -> dict[int, dict[str, float]]:
    """By step; empty for a run that does not exist."""
    file = run / "metrics.jsonl"
    records = read_records(file) if file.exists() else []
    return {record.step: record.metrics for record in records if record.kind == kind}


def median(found: Sequence[dict[str, float]], metric: str) -> float:
    """Of the steps that have it; NaN: none has."""
    values = [metrics[metric] for metrics in found if metric in metrics]
    return statistics.median(values) if values else math.nan


def write_exact(out: Path) -> None:
    """DIR/exact.md: mismatch and speed of each run, and the numbers of the killed one that differ."""
    lines = [
        "| run | steps | trained tokens | largest mismatch | seconds a step | rollouts, tokens/s | updates, tokens/s |"
    ]
    lines += ["|---" * 7 + "|"]
    for name in ("run_exact", "run_exact_off"):
        if found := [*read_metrics(out / name).values()]:
            tokens, largest = sum(m["train/tokens"] for m in found), max(m["train/mismatch_max"] for m in found)
            later = found[1:] or found
            cells = [
                median(later, m) for m in ("time/step", "rollout/tokens_per_second", "train/tokens_per_second_per_gpu")
            ]
            numbers = " | ".join(f"{cell:,.1f}" for cell in cells)
            lines.append(f"| {name} | {len(found)} | {tokens:,.0f} | {largest} | {numbers} |")
    one, other = read_metrics(out / "run_exact_undisturbed"), read_metrics(out / "run_exact_killed")
    compared = [
        (step, name, one[step][name], other[step].get(name))
        for step in sorted(one.keys() & other.keys())
        for name in one[step]
        if not is_wall_clock(name)
    ]
    differing = [each for each in compared if each[2] != each[3]]
    lines += [
        "",
        f"killed and resumed: {len(differing)} of {len(compared)} numbers differ, {len(other)} of {len(one)} steps",
    ]
    lines += [f"- step {step}, {name}: {a} and {b}" for step, name, a, b in differing[:20]]
    (out / "exact.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)


def planned_gib(run: Path) -> float:
    """The trainer's peak that `megatron-dapo plan` calculates for one H200: torch.cuda.max_memory_allocated."""
    from megatron_dapo.policy.megatron.options import has_transformer_engine  # imports torch

    config = load_config(run / "config.yaml")
    cluster, shape = cluster_of(config.slurm, "h200", 1), model_shape(config.policy.model)
    layers: Layers = "te" if has_transformer_engine() else "local"
    task = task_of(config, shape, cluster, Workload.of(config), DEFAULT_MFU, layers)
    found = judge(task, config.policy)
    return max(memory.allocated for memory in (found.memory, found.critic) if memory) / GIB


def write_learning(out: Path, names: Sequence[str]) -> None:
    """DIR/learning.md. Times: medians of the policy's steps without the first. Memory: the highest of all steps."""
    times = ("time/step", "time/rollout", "time/update", "time/critic", "time/sync")
    titles = ["run", "policy steps", "samples trained", "generated", "greedy accuracy after policy steps"]
    titles += ["step, s", "rollout, s", "update, s", "critic, s", "sync, s", "updates, tokens/s"]
    titles += ["peak, GiB", "planned, GiB", "measured : planned", "explained variance at the end"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for run in (out / f"run_{name}" for name in names):
        if not (found := [*read_metrics(run).values()]):
            continue
        policy = [m for m in found if "train/tokens" in m]  # the critic's pre-training has none
        later = policy[1:] or found
        trained = sum(m["rollout/samples_trained"] for m in policy)
        generated = sum(m["rollout/samples_submitted"] for m in found)
        before, scored = len(found) - len(policy), read_metrics(run, "eval")
        scores = ", ".join(f"{max(0, step - before)}: {m['eval/avg@1']:.1%}" for step, m in scored.items())
        peak, planned = max(m.get("memory/gpu_peak_gib", math.nan) for m in found), planned_gib(run)
        numbers = [*(median(later, name) for name in times), median(later, "train/tokens_per_second_per_gpu")]
        numbers += [peak, planned, peak / planned, median(found[-6:], "critic/explained_variance")]
        cells = ["—" if math.isnan(number) else f"{number:,.2f}" for number in numbers]
        first = [run.name, f"{len(policy)}", f"{trained:,.0f}", f"{generated:,.0f}", scores]
        lines.append("| " + " | ".join([*first, *cells]) + " |")
    (out / "learning.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)


def main() -> int:
    own, server = split_arguments()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--group",
        choices=["one", "layouts", "sync", "runs", "exact", "learning", "families", "maths"],
        default="one",
        help="one: one rank",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of any group")
    parser.add_argument("--list", action="store_true", help="print the commands, then exit")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of every run")
    args = parser.parse_args(own)
    known = measurements(args.model.resolve(), args.data.resolve(), args.out.resolve(), server, args.set)
    if unknown := set(args.only or ()) - {one.name for one in known}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(one.name for one in known)}")
    chosen = [one for one in known if (one.name in args.only if args.only else one.group == args.group)]
    if args.list:
        for one in chosen:
            print(f"{one.name} ({one.seconds} s): {shlex.join(one.command())}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for one in chosen:
        log = args.out / f"{one.name}.log"
        if log.exists() and f"{one.name} {ENDED} 0" in log.read_text():
            continue
        time.sleep(one.wait)
        began = time.monotonic()
        code = measure(one, log)
        print(f"== {one.name}: code {code} after {time.monotonic() - began:.0f} s", flush=True)
        print("\n".join(line[:240] for line in log.read_text().splitlines()[-SHOWN:]), flush=True)
    if any(one.group == "layouts" for one in chosen):
        write_table(args.out)
    if any(one.group == "exact" for one in chosen):
        write_exact(args.out)
    if any(one.group == "learning" for one in chosen):
        write_learning(args.out, [one.name for one in known if one.group == "learning"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
