"""`observe.profile_steps`: one trace of those steps, on the chosen ranks."""

import gzip
import json

import pytest
import torch

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.trainer.throughput import StepProfiler


def test_the_trace_has_the_work_of_its_steps(tmp_path):
    config = load_config(None, ["observe.profile_steps=[2, 3]", f"trainer.run_dir={tmp_path}"])
    profiler, other = StepProfiler(config, rank=0), StepProfiler(config, rank=1)
    said = []
    for step in range(1, 5):
        for each in (profiler, other):
            each.begin(step)
        torch.zeros(step, 7) @ torch.zeros(7, step)
        said.append([each.end(step) for each in (profiler, other)])
    assert said == [[None, None], [None, None], [f"profile of steps 2 to 3: {profiler.file}", None], [None, None]]
    (file,) = (tmp_path / "profiles").iterdir()
    assert file.name == "rank_0_steps_2_3.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    shapes = [event["args"]["Input Dims"] for event in events if event.get("name") == "aten::mm"]
    assert [dims[0] for dims in shapes] == [[2, 7], [3, 7]]


@pytest.mark.parametrize("steps", ["[3, 2]", "[0, 2]", "[4]", "[1, 2, 3]"])
def test_wrong_steps_are_refused(steps):
    with pytest.raises(ConfigError, match="profile_steps"):
        load_config(None, [f"observe.profile_steps={steps}"])
