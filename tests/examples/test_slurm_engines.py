"""examples/slurm/engines.sbatch: a task adds its server to the file and removes it when it is preempted."""

import os
import subprocess
import time

import pytest
from workplace import ROOT

SCRIPT = ROOT / "examples/slurm/engines.sbatch"


@pytest.mark.parametrize("end", ["preempted", "server ended"])
def test_a_task_joins_and_leaves(tmp_path, end):
    (tmp_path / "python3").write_text('#!/bin/bash\necho "$@" > said\ntouch up\nwhile [ -e up ]; do sleep 0.05; done\n')
    (tmp_path / "python3").chmod(0o755)
    servers = tmp_path / "servers"
    servers.write_text("http://other:1\n")
    names = {"SERVERS": str(servers), "MODEL": "m", "MEGATRON_DAPO_API_KEY": "k", "SLURM_ARRAY_TASK_ID": "3"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **names}
    task = subprocess.Popen(["bash", str(SCRIPT)], cwd=tmp_path, env=environment)
    for _ in range(600):
        if len(servers.read_text().split()) == 2 and (tmp_path / "up").exists():
            break
        time.sleep(0.05)
    other, mine = servers.read_text().split()
    assert other == "http://other:1" and mine.endswith(":30003")
    assert "--port 30003" in (tmp_path / "said").read_text()
    if end == "preempted":
        task.terminate()
    else:
        (tmp_path / "up").unlink()
    assert task.wait(30) == (143 if end == "preempted" else 0)
    assert servers.read_text() == "http://other:1\n"
