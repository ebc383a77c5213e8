"""Checkpoints: save, load, resume, retention. A checkpoint appears complete or not at all.

checkpoints       Checkpoints of a run: written in the background, complete or absent, checked before they are used
files             Files of a checkpoint: written in parallel with a checksum, synced to disk, and checked before they
folder            The folder `checkpoints/` of a run, as rank 0 sees it: publishing, pruning, scores, damaged checkpoi
host_buffers      Host memory for copies of device tensors, kept from one checkpoint to the next
optimizer_state   The optimizer state as whole parameters, which any layout and any Adam that Megatron may pick can re
policy_state      Saves and loads the policy: weights and optimizer as a Megatron `torch_dist` checkpoint
resume            What a resumed run must share with the run that it continues, and what else differs
torch_dist_files  This rank's files of a `torch_dist` checkpoint, fixed before anything is written
"""
