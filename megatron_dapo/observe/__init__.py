"""What a run records and shows.

- `observer`       the interface to the trainer: phases, steps, evaluations, warnings; everything below is behind it
- `phases`         timed phases of a step
- `metrics_file`   metrics.jsonl: one record per step or evaluation
- `append_file`    a file that grows by whole blocks, for metrics, logs and TensorBoard
- `retry_queue`    keeps what cannot be written and writes it later: a full disk does not end a run
- `console`        what is printed; rich_console is the version for a terminal
- `waiting`        what a command waits for before a run has its console
- `formatting`     numbers and durations as short texts
- `metric_names`   what a metric's name implies
- `diagnosis`      warnings about unhealthy metrics, with likely causes (docs/diagnosis.md)
- `transcripts`    some responses of a step, in samples/
- `status`         logs/status.json: what the run is doing now
- `environment`    environment.json: versions, commit, hardware and date of each start
- `timeline`       traces/: phases and requests of a step, for Perfetto
- `trackers`       Weights & Biases, TensorBoard
- `aliases`        metrics under the names of other tools
- `runs`           reads run directories
- `figures`        which metrics each figure of the report shows
- `report`, `page/` report.html; curves draws the same figures as curves.png
- `ablation_page`  ablation.html: the curves of an ablation, with four switches
- `watch`          the report as a live page, `megatron-dapo watch`
"""

from megatron_dapo.observe.metric_names import is_wall_clock
from megatron_dapo.observe.observer import NullObserver, Observer
from megatron_dapo.observe.timeline import Phase

__all__ = ["NullObserver", "Observer", "Phase", "is_wall_clock"]
