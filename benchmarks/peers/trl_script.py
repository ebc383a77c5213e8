"""What a user of TRL writes for this task: trl_script.py MODEL PROMPTS OUTPUT STEPS SEED. See compare_trl.py."""

import sys

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

model, prompts, output, steps, seed = sys.argv[1:]


def exact(completions, answer, **_):
    return [1.0 if text.strip() == right else -1.0 for text, right in zip(completions, answer, strict=True)]


config = GRPOConfig(
    output_dir=output,
    loss_type="dapo",
    epsilon=0.2,
    epsilon_high=0.28,
    beta=0.0,
    scale_rewards="group",
    mask_truncated_completions=False,
    num_generations=8,
    max_completion_length=8,
    temperature=1.0,
    per_device_train_batch_size=128,
    steps_per_generation=2,
    max_steps=2 * int(steps),
    learning_rate=5e-4,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=4,
    weight_decay=0.0,
    max_grad_norm=1.0,
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=True,
    seed=int(seed),
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    logging_steps=2,
)
dataset = load_dataset("json", data_files=prompts, split="train").rename_column("question", "prompt")
trainer = GRPOTrainer(model=model, reward_funcs=exact, args=config, train_dataset=dataset)
trainer.train()
trainer.save_model(output)
trainer.save_state()
