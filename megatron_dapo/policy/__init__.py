"""The policy: a Qwen model on Megatron-Core, and its updates. A critic is another one with a value head.

- `policy`            `Policy`: builds the model under Megatron's DDP and optimizer; scores, updates and offloads it
- `critic`            `Critic`: a value model beside the policy; turns on the GPU
- `step`              one update: pack, run the pipeline schedule, reduce metrics, step the optimizer
- `batch`             a mini-batch as flat numpy arrays (`TrainBatch`), a micro-batch as a pack of tokens
- `schedule`          which rank trains on which sample, and in which micro-batch
- `loss_func`         Megatron's loss function, made from DAPO's policy loss, and its metrics
- `routing_replay`    given experts instead of the router's choice; the load of the experts
- `model/`            the layers
- `head/`             the output layer fused with log-probs, entropy and loss
- `megatron/`         options, runtime and patches of Megatron-Core
"""

from megatron_dapo.policy.megatron import importing
from megatron_dapo.policy.megatron.importing import keep_cuda_uninitialized

keep_cuda_uninitialized()
importing.install()
