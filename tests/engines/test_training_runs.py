"""Training runs on real SGLang servers: shared by several runs, colocated with ranks, and generating during updates.
Each test gives the servers their first weights back."""

import contextlib
import os
import re
import shutil
import threading
from functools import partial

import pytest
from forked import run_in_ranks, steps_of
from installed_sglang import API_KEY_VARIABLE, SGLANG_VERSIONS
from subject import run, send_first_weights
from tiny_run import environment, evaluated_config, raw_config, write_config

from megatron_dapo import fault_points
from megatron_dapo.ablation.runs import Job, run_jobs


@contextlib.contextmanager
def run_on(servers, folder, steps, **weights):
    """The settings of a run on these servers, whose configuration is in `folder`."""
    shutil.copytree(servers[0].directory, folder / "model")
    urls = [server.process.url for server in servers]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
            yield {
                "rollout__engine": "sglang", "rollout__weights": weights,
                "rollout__servers": {
                    "device": "cpu", "dtype": "float32", "api_key_env": API_KEY_VARIABLE, "start_timeout": 20,
                    "urls": urls,
                },
            }  # fmt: skip
    finally:
        for server in servers:
            server.version = steps
            run(send_first_weights(server))


def test_every_run_starts_from_its_own_weights(server_of_version, tmp_path):
    """An ablation: generation goes on while the first run trains. The second finds the first one's last version in the
    server, and the server gives the same log-probs as before the first step of the first run. Neither saves."""
    with run_on(
        [server_of_version(SGLANG_VERSIONS[-1])], tmp_path, 2, transport="tensor", keep_snapshot=False
    ) as settings:
        checkpoint = {"every": 0, "at_end": False}
        raw = evaluated_config(tmp_path / "model", tmp_path / "run", 2, trainer__checkpoint=checkpoint, **settings)
        config = write_config(raw, tmp_path / "config.yaml")
        jobs = [
            Job(str(config), (f"rollout.max_staleness={staleness}",), tmp_path / "out", f"staleness_{staleness}", 0)
            for staleness in (1, 0)
        ]
        outcomes = run_jobs(jobs, 1, lambda outcome: None)
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


def of_its_own_node(rendezvous):
    os.environ["SLURM_NODEID"] = str(rendezvous.rank)


def test_real_servers_are_colocated_with_the_ranks_of_two_nodes(two_servers, tmp_path):
    """Three steps, with a checkpoint after the second and at the end. Each server gets its weights from the rank on its
    own node; tensor-parallel halves of every tensor cross the nodes first."""
    steps = 3
    with run_on(two_servers, tmp_path, steps, transport="tensor", keep_snapshot=False) as settings:
        settings["rollout__servers"]["share_gpus"] = True
        raw = raw_config(
            tmp_path / "model", tmp_path / "run", trainer__steps=steps, trainer__ranks=2,
            trainer__checkpoint={"every": 2}, policy__tensor_parallel=2, **settings,
        )  # fmt: skip
        assert run_in_ranks(raw, of_its_own_node) == [0, 0]
    log = (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert re.findall(r"version (\d) acknowledged by 2 of 2", log) == ["0", "1", "2", "3"]
    assert log.count("GPU to the engines") == 5 and log.count("GPU to the trainer") == 4
    gaps = [metrics["train/mismatch_max"] for metrics in steps_of(tmp_path / "run")]
    assert len(gaps) == steps and max(gaps) < 1e-2 and "trainer and engine agree" in log


def note_the_order(notes, rendezvous):
    """Rank 0 writes down where it arrives. Two updates wait for a sample of a later batch."""
    finished = threading.Event()

    def note(name):
        with notes.open("a") as file:
            file.write(f"{name}\n")

    def sampled():
        note("sampled")
        finished.set()

    def hold():
        note("training")
        finished.clear()
        assert finished.wait(120), "no sample was finished during an update"
        note("trained")

    if rendezvous.rank == 0:
        for count in range(1, 1000):
            fault_points.on("rollouts/sampling", sampled, count=count)
        for update in (3, 5):
            fault_points.on("loop/before_update", hold, count=update)


def test_a_server_generates_while_two_ranks_train(server_of_version, tmp_path):
    """Samples of later batches end during updates, and one batch has tokens of several versions."""
    steps, notes = 4, tmp_path / "notes"
    with run_on([server_of_version("0.5.23")], tmp_path, steps, pause_mode="retract") as settings:
        settings["rollout__weights"]["directory"] = str(tmp_path)
        # Two at a time: with many, on a busy machine, it has generated all that it may before the trainer is done. No
        # group is dropped: of few kept ones, all may be from after the update.
        settings["rollout__servers"]["max_running"] = 2
        raw = raw_config(
            tmp_path / "model", tmp_path / "run", trainer__steps=steps, rollout__max_staleness=2,
            rollout__max_response_tokens=64, rollout__dynamic_sampling=False, policy__timeout_seconds=500, **settings,
        )  # fmt: skip
        assert run_in_ranks(raw, partial(note_the_order, notes)) == [0, 0]
    found = steps_of(tmp_path / "run")
    assert len(found) == steps and all(metrics["rollout/samples_trained"] == 16 for metrics in found)
    assert all(metrics["rollout/staleness_max"] <= 2 for metrics in found)
    order = notes.read_text().split()
    updates = re.findall(r"training( sampled)+ trained", " ".join(order))
    assert len(updates) == order.count("trained") == 2
    mixed = [m for m in found if m["rollout/staleness_max"] != m["rollout/staleness_tokens"]]
    assert mixed and not any(metrics["rollout/samples_carried_in"] for metrics in found)
