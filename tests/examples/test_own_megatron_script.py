"""The example runs as it says, alone and under torchrun, and the reward rises."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from long_lists import some

from megatron_dapo.processes.fork_ranks import run_ranks

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "own_megatron_script.py"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMANDS = {
    "alone": [sys.executable, str(SCRIPT), "--steps", "10"],
    "torchrun-tp2": [*TORCHRUN, str(SCRIPT), "--tensor-parallel", "2", "--steps", "10"],
    "forked-tp2": [str(SCRIPT), "--tensor-parallel", "2", "--steps", "10"],  # shares the imports of this process
}


def as_script(rendezvous, arguments, port):
    """In the environment that torchrun gives to a rank."""
    place = {"RANK": rendezvous.rank, "LOCAL_RANK": rendezvous.rank, "WORLD_SIZE": rendezvous.world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


@pytest.mark.parametrize("name", some(COMMANDS, "forked-tp2"))
def test_reward_rises(name, capfd):
    command = COMMANDS[name]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if name.startswith("forked"):
        run_ranks(2, as_script, command, port)
        said = capfd.readouterr().out
    else:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        said = done.stdout
    rewards = [float(x) for x in re.findall(r"reward (\d\.\d+)", said)]
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0] + 0.15
