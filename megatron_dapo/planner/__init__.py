"""`megatron-dapo plan`: predicts whether a run fits its GPUs and how long a step takes. Imports no torch.

- `command.py`: the command; `report.py`: its tables and JSON.
- `plan.py`: joins trainer and engine into a `Plan`, with the phases of a step; `search.py`: the legal layouts, ranked;
  `advice.py`: what to change for time.
- `memory.py`, `parameters.py`: memory of the trainer's fullest rank.
- `timing.py`: seconds of the trainer's phases; `sync.py`: of a weight update.
- `engine.py`: memory of the engines; `server_model.py`: engines as a queueing model, with the time of a decoding step;
  `generation.py`: dynamic sampling on it.
- `models.py`: shapes of published models, and of those that are here.
- `hardware.py`: data sheets of GPUs; `workload.py`: samples of one step and their lengths.
- `assumptions.py`: the constants, with their sources.
- `init.py`: `megatron-dapo init`, a configuration with the layout that the plan chooses.
- `modes.py`: colocated engines and splits of the GPUs compared.
- `simulation/`: `megatron-dapo simulate`, the sampler itself on a virtual clock.
"""
