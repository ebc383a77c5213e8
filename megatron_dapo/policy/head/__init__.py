"""The output layer fused with log-probs, entropy and the loss, for a vocabulary that is split over ranks.

- `fused`     the head: one pass (loss and gradients) or two (log-probs and entropies), chunk by chunk
- `value`     the value head of a critic
- `triton`    its passes over a chunk of logits as Triton kernels
"""
