"""The trainer: the loop, and what it needs to be stopped, resumed and trusted.

    loop             the run as a list of calls; `train` is the entry point
    rollouts         sampling, evaluation and weights of the engines, as every rank sees them
    rollout_driver   rank 0's thread for engines, graders, sampling and evaluation; batches collected ahead
    collectives      rank 0's data, decisions and errors on every rank; all waits are on the CPU
    train_step       the step being trained, on every rank: log-probs, the gate, updates; it can be saved between two
    explain          what each token of a recorded step added to the loss
    advantages       from graded groups to rewards, advantages and masks
    colocation       weight sync with hand-overs of GPU memory between trainer and engines
    saves            what was saved, and what a user is told when a run ends
    run_lock         one run directory, one run
    preflight        checks before anything heavy starts
    rehearsal        a dry run: one group through the run's own code, the checkpoint it would resume, the container
    signals          how a run is asked to stop
    watchdog         a rank that hangs is found, and all ranks write their stacks
    throughput       MFU, tokens per second and GPU, memory; torch.profiler for some steps

Only rank 0 has a `RolloutDriver`, which only `Rollouts` knows; all other modules run on every rank. Threads of rank 0:
the main thread (training, every collective and all CUDA work), the rollout thread, the heartbeat, the lock's heartbeat,
and a thread per save.
"""
