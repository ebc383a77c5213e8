"""`megatron-dapo simulate`: the sampler on a virtual clock, against a model of the engines.

- `command.py`: the command; `report.py`: its tables and JSON; `page.py`: the picture of engines and trainer.
- `run.py`: the steps of a run: collecting, training, weight updates; `sweep.py`: the same for several settings.
- `engine.py`: an engine on the planner's queueing model; `virtual_clock.py`: an event loop whose time jumps.
- `workload.py`: prompts, lengths and grades, from flags or from a run's metrics.

The sampler is the one of a run (`rollout/`). Engines and trainer are the planner's: decoding and prefill time, KV
cache, seconds of the training phases and of a weight update.
"""
