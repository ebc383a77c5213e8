"""The training loop, and what it needs to be stopped, resumed and trusted.

One step
- `loop`               the loop: sample, update, record, save, sync weights, evaluate
- `rollout_driver`     rank 0's thread for sampling, grading, evaluation and weight updates
- `train_step`         one step being trained; it can be saved between two updates
- `advantages`         rewards, length penalty, advantages, masks
- `updates`            log-probs before the first update, the gate, the updates
- `logprob_gate`       trainer and engine must agree before the first update
- `weight_sync`        new weights for the engines; `caller_thread` runs its calls in the main thread
- `colocation`         hand-overs of GPU memory between trainer and engines
- `collectives`        data, decisions and errors of rank 0 for every rank; waits with a timeout

Start, end and resume
- `preflight`          checks of the set-up before anything starts
- `run_lock`           one run per run directory
- `resume`             what a resumed run must share with the run it continues
- `checkpoint`         checkpoints, written in the background; `checkpoint_folder` publishes and prunes them
- `state_files`        the state of the loop as files; `random_state`: torch's random states
- `best_metric`        which checkpoint is the best
- `signals`, `ending`  stopping, and what a run says when it ends early
- `watchdog`           heartbeats: a rank that hangs is found
"""
