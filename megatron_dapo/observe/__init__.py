"""What a run records and shows.

- `observer`      the interface to the trainer: phases, steps, evaluations, warnings; everything below is behind it
- `metrics_file`  metrics.jsonl, one record per step or evaluation; files and queues that survive a full disk
- `console`       what is printed, and logs/status.json; `rich_console` is the version for a terminal
- `diagnosis`     warnings about unhealthy metrics, with likely causes (docs/diagnosis.md)
- `transcripts`   responses of a step, in samples/
- `timeline`      traces/: phases and requests of a step, for Perfetto
- `trackers`      Weights & Biases, TensorBoard; metrics under the names of other tools; a webhook for warnings
- `runs`          environment.json; reads run directories, and lists them
- `figures`       which metrics each figure of the report shows
- `report`        report.html (`page/`)
- `watch`         the report as a live page, `megatron-dapo watch`; /metrics for Prometheus
"""
