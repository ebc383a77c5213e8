"""torch.profiler for the steps of `observe.profile_steps`: one trace per rank, for ui.perfetto.dev.

`profiles/rank_R_steps_A_B.json.gz` covers the time from the log-probs of step A to the last update of step B on this
rank, weight sync and hand-overs between them included; generation runs in other processes. Profiling changes no
result. It costs memory and some time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_dapo.config import Config


class StepProfiler:
    """`begin` and `end` are called around the training of each step, on every rank."""

    def __init__(self, config: Config, rank: int) -> None:
        observe = config.observe
        self._steps = observe.profile_steps if rank in observe.profile_ranks else []
        name = f"rank_{rank}_steps_{'_'.join(map(str, self._steps))}.json.gz"
        self.file = Path(config.trainer.run_dir) / "profiles" / name
        self._profile: Any = None

    def begin(self, step: int) -> None:
        if self._steps and self._profile is None and self._steps[0] <= step <= self._steps[1]:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = torch.profiler.profile(activities=kinds, record_shapes=True)
            self._profile.start()

    def end(self, step: int) -> str | None:
        """After the last update of a step. Writes the trace when the last step is done; returns what to log."""
        if self._profile is None or step < self._steps[1]:
            return None
        profile, self._profile = self._profile, None
        profile.stop()
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self.file))
        except (OSError, RuntimeError) as error:  # a full disk does not end the run
            return f"the profile could not be written: {error}"
        return f"profile of steps {self._steps[0]} to {self._steps[1]}: {self.file}"
