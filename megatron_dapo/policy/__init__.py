"""The policy: a Qwen model on Megatron-Core, its updates, its memory and its checkpoints.

- `policy`            `Policy`: builds the model under Megatron's DDP and optimizer; scores and updates mini-batches
- `step`              one update: pack, run the pipeline schedule, reduce metrics, step the optimizer
- `batch`             a mini-batch as flat numpy arrays (`TrainBatch`)
- `packing`           the samples of a micro-batch as one sequence of tokens
- `schedule`          which rank trains on which sample, and in which micro-batch
- `loss_func`         Megatron's loss function, made from DAPO's policy loss
- `expert_load`       the load of the experts, and the load-balancing loss
- `routing_replay`    given experts instead of the router's choice
- `metrics`           training metrics over micro-batches, ranks and updates
- `learning_rate`     the schedule of the learning rate
- `megatron_options`  Megatron's options by name against the installed version; what needs CUDA; its DDP and optimizer
- `options_report`    what `train --dry-run` says about them
- `megatron_import`   imports Megatron-Core without what a CPU does not use
- `runtime`           device, process groups, errors that reach all ranks (`initialize`, `Rendezvous`)
- `gpu_count`         the number of GPUs, without initializing CUDA
- `cpu`               Megatron-Core on a machine without CUDA
- `gloo`              one network device for all gloo groups of a process
- `offload`           device memory to the host and back, for engines on the same GPUs
- `checkpoint`        saves and loads weights and optimizer state
- `optimizer_state`   the optimizer state as whole parameters, for every Adam that Megatron may pick
- `sharded_files`     this rank's files of a torch_dist checkpoint
- `checkpoint_files`  writes files with checksums and checks them
- `host_buffers`      pinned host memory for the copies that a background save writes
- `model/`            the layers
- `head/`             the output layer fused with log-probs, entropy and loss
"""

from megatron_dapo.policy.megatron import importing
from megatron_dapo.policy.megatron.importing import keep_cuda_uninitialized

keep_cuda_uninitialized()
importing.install()
