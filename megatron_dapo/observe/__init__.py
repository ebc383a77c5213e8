"""What a run leaves to look at: metrics.jsonl, a live console, transcripts, trackers, warnings, and the HTML report."""

from megatron_dapo.observe.metric_names import is_wall_clock
from megatron_dapo.observe.observer import NullObserver, Observer, Phase

__all__ = ["NullObserver", "Observer", "Phase", "is_wall_clock"]
