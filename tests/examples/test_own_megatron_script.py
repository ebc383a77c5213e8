"""The example runs as it says, alone and under torchrun, and the reward rises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from long_lists import some

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "own_megatron_script.py"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMANDS = {
    "alone": [sys.executable, str(SCRIPT), "--steps", "10"],
    "torchrun-tp2": [*TORCHRUN, str(SCRIPT), "--tensor-parallel", "2", "--steps", "10"],
}


@pytest.mark.parametrize("name", some(COMMANDS, "torchrun-tp2"))
def test_reward_rises(name):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": "29518"}
    done = subprocess.run(COMMANDS[name], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    rewards = [float(x) for x in re.findall(r"reward (\d\.\d+)", done.stdout)]
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0] + 0.15
