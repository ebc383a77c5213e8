"""The trainer: the loop, and what it needs to be stopped, resumed and trusted.

    loop             the run as a list of calls; `train` is the entry point
    rollout_driver   rank 0's thread for engines, graders, sampling and evaluation
    batch_queue      batches collected ahead of the trainer; admission control by staleness
    collectives      rank 0's data, decisions and errors on every rank
    batch_sharing    rank 0's batch on the ranks that train on it
    train_step       the step being trained; it can be saved between two updates
    advantages       from graded groups to rewards, advantages and masks
    turn_credit      rewards of single turns to advantages of tokens
    distillation     a teacher's log-probs to advantages of tokens
    updates          log-probs, the gate and the updates of one step
    logprob_gate     trainer and engine must agree on the log-probs of the first batch
    weight_sync      weights to the engines, in two calls
    colocation       hand-overs of GPU memory between trainer and engines
    checkpoint       saves in the background; checkpoint_folder, state_files, random_state: what is in a checkpoint
    resume           what a resumed run must share with the run that it continues
    run_lock         one run directory, one run
    preflight        checks before anything heavy starts
    signals          how a run is asked to stop
    ending           how a run ends early: what was saved, and how to continue
    watchdog         a rank that hangs is found, and all ranks write their stacks
    profiler         torch.profiler for some steps
    throughput       MFU, tokens per second and GPU, memory
    best_metric      the metric that decides which checkpoint is the best

Only rank 0 has a `RolloutDriver`; all other modules run on every rank. Threads of rank 0: the main thread (training,
every collective and all CUDA work), the rollout thread, the heartbeat, the lock's heartbeat, and a thread per save.
"""
