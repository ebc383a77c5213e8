"""The example runs as it says, alone and under torchrun, and the reward rises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "own_megatron_script.py"


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, str(SCRIPT), "--steps", "10"],
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT),
         "--tensor-parallel", "2", "--steps", "10"],
    ],
    ids=["alone", "torchrun-tp2"],
)  # fmt: skip
def test_reward_rises(command):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": "29518"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    rewards = [float(x) for x in re.findall(r"reward (\d\.\d+)", done.stdout)]
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0] + 0.15
