"""Checkpoints: save, load, resume, retention. A checkpoint appears complete or not at all.

- `checkpoints`    `Checkpoints` of a run: written in the background, checked before they are used
- `folder`         the folder `checkpoints/`: publishing, pruning, scores, damaged checkpoints, the state of the loop;
                   settings that a resumed run must share with the run it continues
- `run_dir`        what else a start finds in a run directory: things in the way, memory of killed runs
- `policy_state`   weights and optimizer as a Megatron `torch_dist` checkpoint
- `files`          writes files with checksums and checks them; host memory for copies of device tensors
"""
