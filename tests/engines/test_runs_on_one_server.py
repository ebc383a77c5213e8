"""An ablation on one real external server: runs follow each other, each from its own start weights."""

import re
import shutil

from installed_sglang import API_KEY_VARIABLE, SGLANG_VERSIONS
from subject import run, send_first_weights
from tiny_run import environment, evaluated_config, write_config

from megatron_dapo.ablation.runs import Job, run_jobs

STEPS = 2
VERSION = SGLANG_VERSIONS[-1]


def test_every_run_starts_from_its_own_weights(server_of_version, tmp_path, monkeypatch):
    """Generation goes on while the first run trains. The second finds the first one's last version in the server, and
    the server gives the same log-probs as before the first step of the first run. Neither saves at its end."""
    server = server_of_version(VERSION)
    model = shutil.copytree(server.directory, tmp_path / "model")
    raw = evaluated_config(
        model, tmp_path / "run", STEPS, trainer__checkpoint={"every": 0, "at_end": False}, rollout__engine="sglang",
        rollout__weights={"transport": "tensor", "keep_snapshot": False},
        rollout__servers={
            "device": "cpu", "dtype": "float32", "api_key_env": API_KEY_VARIABLE, "start_timeout": 20,
            "urls": [server.process.url],
        },
    )  # fmt: skip
    config = write_config(raw, tmp_path / "config.yaml")
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    jobs = [
        Job(str(config), (f"rollout.max_staleness={staleness}",), tmp_path / "out", f"staleness_{staleness}", 0)
        for staleness in (1, 0)
    ]
    try:
        outcomes = run_jobs(jobs, 1, lambda outcome: None)
    finally:
        server.version = STEPS
        run(send_first_weights(server))
    assert [outcome.problem for outcome in outcomes] == ["", ""], jobs[-1].log.read_text()
    proofs = []
    for job in jobs:
        log = (job.folder / "logs" / "trainer.log").read_text()
        found = re.findall(r"version (\d) acknowledged by 1 of 1, 1 with the checksums of (\d+) of \2 tensors", log)
        assert [version for version, _ in found] == ["0", "1", "2"] and "trainer and engine agree" in log
        proofs += re.findall(r"log-prob of a fixed text: (\S+)", log)[:1]  # of the run's first version
        assert not (job.folder / "checkpoints").exists()
    assert len(proofs) == 2 and proofs[0] == proofs[1]
    assert [outcome.skipped for outcome in run_jobs(jobs, 1, lambda outcome: None)] == [True, True]
