"""TRL in benchmarks/head_to_head.py: trl_head_to_head.py WORK STEPS, two files: the task, and a line for each step.

The fast path of TRL's documentation on one GPU: vLLM colocated, its fused LM head, Liger's layers (the kernels of the
Hub need a network), no gradient checkpointing, fused AdamW, fp32 weights under bf16 autocast (TRL's default). vLLM
stays awake beside the trainer: sleep mode saves memory for time. vLLM's log-probs are not used: the correction for them
would cost a forward pass of its own. On the CPU transformers generates.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from datasets import Dataset
from grader import reward
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.extras.profiling import ProfilingContext

work, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
rows = [json.loads(line) for line in Path(work["prompts"]).read_text().splitlines()]
samples, updates, gpu = work["prompts_per_step"] * work["samples"], work["updates"], work["gpu"]
micro_batch = min(work["options"].pop("micro_batch", 16), samples // updates)
seconds: Counter[str] = Counter()
batch: dict[str, float] = {}
answers = iter([row["answer"] for row in rows])
PHASES = {"generate": "generate", "sync_weights": "sync", "_prepare_inputs": "prepare", "reward": "reward"}


def graded(completions, completion_ids, answer, **_):
    started, scores = time.perf_counter(), reward(completions, answer)
    expected = [next(answers) for _ in range(work["prompts_per_step"])]
    assert answer[:: work["samples"]] == expected, "TRL takes the prompts in another order"
    batch.update(
        tokens=sum(map(len, completion_ids)), samples=len(scores), accuracy=sum(s > 0 for s in scores) / len(scores)
    )
    seconds["reward"] += time.perf_counter() - started
    return scores


def record(context, duration):
    """In place of reports to a tracker: the seconds of TRL's own profiling contexts by phase."""
    seconds[PHASES.get(context.name.rpartition(".")[2], "unnamed")] += duration


class Steps(TrainerCallback):
    def __init__(self):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % updates:
            return
        if gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        phases = {name: seconds[name] for name in ("generate", "sync", "reward")}
        phases["update"] = now - self.began - seconds["prepare"]
        with output.open("a") as file:
            file.write(json.dumps({"step": state.global_step // updates, **batch, "phases": phases}) + "\n")
        seconds.clear()
        self.began = now


ProfilingContext._log_metrics = record
device = (
    {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": False, "vllm_gpu_memory_utilization": 0.25,
        "vllm_max_model_length": work["max_prompt_tokens"] + work["max_response_tokens"],
        "vllm_importance_sampling_correction": False, "use_liger_kernel": True, "bf16": True,
    }
    if gpu
    else {"use_cpu": True, "bf16": False}
)  # fmt: skip
config = GRPOConfig(
    **{
        "output_dir": str(output.parent / "trl"),
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "scale_rewards": "group",
        "mask_truncated_completions": False,
        "num_generations": work["samples"],
        "max_completion_length": work["max_response_tokens"],
        "temperature": 1.0,
        "top_p": 1.0,
        "shuffle_dataset": False,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": samples // updates // micro_batch,
        "steps_per_generation": samples // micro_batch,
        "max_steps": updates * work["steps"],
        "learning_rate": work["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "seed": work["seed"],
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        **device,
        **work["options"],
    }
)
dataset = Dataset.from_list([{"prompt": row["text"], "answer": row["answer"]} for row in rows])
trainer = GRPOTrainer(model=work["model"], reward_funcs=graded, args=config, train_dataset=dataset)
seen, *_ = trainer._tokenize_prompts([row["text"] for row in rows])
assert [list(ids) for ids in seen] == [row["ids"] for row in rows], "TRL makes other tokens of the prompts"
trainer.add_callback(Steps())
trainer.train()
