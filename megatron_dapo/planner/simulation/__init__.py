"""`megatron-dapo simulate`: the sampler on a virtual clock, against a model of the engines.

- `command.py`: the command; `report.py`: its tables and JSON, and the trace of engines and trainer.
- `run.py`: the steps of a run on an event loop whose time jumps: collecting, training, weight updates; sweeps.
- `incidents.py`: slow, mixed, dying and joining servers, tools, a drifting yield.
- `engine.py`: an engine on the planner's queueing model; prompts, lengths and grades, from flags or a run's metrics.

The sampler is the one of a run (`rollout/`). Engines and trainer are the planner's: decoding and prefill time, KV
cache, seconds of the training phases and of a weight update.
"""
