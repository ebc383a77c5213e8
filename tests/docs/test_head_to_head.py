"""benchmarks/head_to_head.py: step lines of each system, the table, the grader, and a run that fails."""

import json
import sys
from pathlib import Path

import pytest
from published_models import benchmark

h2h = benchmark("head_to_head")
OURS = {
    "rollout/samples_trained": 512, "train/tokens": 1e5, "rollout/response_tokens": 110_000,
    "reward/accuracy": 0.25, "reward/accuracy_all": 0.5,  # dynamic sampling drops groups: of those kept, and of all
    "time/rollout": 4.0, "time/update": 3.0, "time/sync": 1.0,
}  # fmt: skip
VERL = {
    "timing_s/step": 9.0, "timing_s/gen": 5.0, "timing_s/update_actor": 2.0, "timing_s/update_weights": 1.5,
    "response_length/mean": 200.0, "critic/score/mean": -0.5,
}  # fmt: skip
TRL = {"step": 2, "samples": 512, "tokens": 9e4, "accuracy": 0.25, "phases": {"generate": 6.0, "update": 8.0}}


def test_step_lines():
    ours = h2h.our_step({"step": 2, "kind": "step", "metrics": OURS})
    assert ours["tokens"] == 1e5 and ours["generated"] == 110_000 and ours["accuracy"] == 0.5
    assert ours["phases"] == {"generate": 4.0, "log_probs": 0.0, "update": 3.0, "sync": 1.0}
    verl = h2h.verl_step({"step": 2, "data": VERL}, 512)
    assert verl["tokens"] == 102_400 and verl["accuracy"] == 0.25 and verl["phases"]["sync"] == 1.5
    assert h2h.our_step({"step": 0, "kind": "eval", "metrics": {}}) is None
    assert h2h.verl_step({"step": 0, "data": {"val/score": 1.0}}, 512) is None
    assert h2h.trl_step(TRL)["generated"] == 9e4


def make_run(system: str, seconds: list[float], turn: int = 0, reason: str = "") -> dict:
    """Steps of 100 000 tokens that end at these times, with 2 s of CPU time for each second."""
    step = h2h.our_step({"step": 1, "kind": "step", "metrics": OURS})
    steps = [{**step, "at": at, "cpu": 2 * at} for at in seconds]
    return {"system": system, "lr": 0.0, "round": turn, "reason": reason, "warmup": 2, "peak": 70.0, "steps": steps}


def test_table():
    runs = [
        make_run("ours", [90, 100, 110, 120]),
        make_run("trl", [90, 120, 140, 160], reason="stopped | early"),
        make_run("ours", [90, 100, 120, 140], turn=1),
        make_run("trl", [90], turn=1, reason="OutOfMemoryError: no"),
        make_run("verl", [], reason="no output"),
    ]
    found = h2h.figures(runs[0])
    assert found["trained"] == 1e4 and found["step"] == 10 and found["other"] == pytest.approx(2.0)
    assert found["cpu"] == 20 and found["first"] == 90 and found["generated"] == 27_500
    lines = h2h.table(runs).splitlines()
    assert len({line.count("|") for line in lines[:7]}) == 1  # failed runs have as many cells
    assert "| 2 (stopped / early) | 5,000 | 20.0 |" in lines[3]
    assert "failed: OutOfMemoryError: no" in lines[5] and "failed: no output" in lines[6]
    assert lines[-1] == "- trl, lr 0: **1.50 ×** (by round: 2.00)"  # 7 500 ÷ 5 000; verl has no figure


def test_accuracy_at_equal_samples():
    fast, slow = (make_run(name, at) for name, at in (("ours", range(60, 121, 10)), ("trl", [70, 90, 120, 190])))
    for run, first in ((fast, 0.0), (slow, 0.02)):
        run["lr"] = 2e-6
        run["steps"] = [{**step, "accuracy": first + 0.1 * i} for i, step in enumerate(run["steps"])]
    slow["steps"][1]["accuracy"] = 0.0
    assert h2h.learning([make_run("ours", [1, 2, 3])]) == ""  # learning rate 0
    heads, _, *rows = h2h.learning([fast, slow, {**fast, "system": "ours+dynamic"}]).splitlines()[3:]
    assert heads == "| system | round | step 3 | step 6 |"
    assert rows[:2] == ["| ours | 0 | 10.0% (1.3 min) | 40.0% (1.8 min) |", "| trl | 0 | 8.0% (2.0 min) |  |"]
    assert rows[-1] == "- trl, round 0: 1.0 ± 3.0, 4 steps"  # -2, 10, -2 and -2


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("so 3 + 4 = 7\nAnswer: $1,234.", True), ("Answer: 1234.0", True), ("Answer: 12\nAnswer: 1234", True),
        ("1234", True), ("Answer: 1234\nAnswer: 7", False), ("Answer: none, 1234 was before?", True),
        ("Answer: -1234", False), ("", False),
    ],
)  # fmt: skip
def test_one_rule_behind_three_signatures(response, right):
    sys.path.insert(0, str(h2h.PEERS))
    import grader

    expected = 1.0 if right else -1.0
    prompt = type("Prompt", (), {"answer": "1,234"})
    assert grader.grade(prompt, response) == expected
    assert grader.reward([response], ["1,234"], completion_ids=[[1]]) == [expected]
    assert grader.compute_score("gsm8k", response, "1,234", extra_info={}) == expected


def test_verl_reads_a_file_without_the_columns_of_the_others():
    work = h2h.Work("model", prompts="/out/prompts.jsonl", steps=3)
    command = h2h.verl_command(work, Path("/out/run"), "python")
    assert "data.train_files=/out/verl.jsonl" in command and "actor_rollout_ref.rollout.max_model_len=1280" in command


SCRIPT = """
import json, os, subprocess, sys, time
assert "TORCHDYNAMO_DISABLE" not in os.environ
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
for step in (1, 2):
    with open("steps.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "samples": 4, "tokens": 40, "accuracy": 1, "phases": {"generate": 0.01}}))
        file.write(chr(10))
    open("child", "w").write(str(child.pid))
raise RuntimeError("no third step")
"""


def test_a_run_that_fails_keeps_its_steps_and_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(h2h, "ENDING", 1)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    system = h2h.System(lambda *_: [sys.executable, "-c", SCRIPT], "steps.jsonl", h2h.trl_step, "")
    run = h2h.run_one(system, h2h.Work("model", steps=3), tmp_path / "run", limit=100)
    assert run["reason"] == "RuntimeError: no third step" and [step["step"] for step in run["steps"]] == [1, 2]
    assert [json.loads(line) for line in (tmp_path / "run" / "seen").open()] == run["steps"]
    child = int((tmp_path / "run" / "child").read_text())
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_only_complete_lines_are_read(tmp_path):
    file = tmp_path / "steps.jsonl"
    read = h2h.new_lines(file)
    assert [*read()] == []
    file.write_text(json.dumps({"a": 1}) + '\n{"b"')
    assert [*read()] == [{"a": 1}] and [*read()] == []
    file.write_text(json.dumps({"a": 1}) + '\n{"b": 2}\n')
    assert [*read()] == [{"b": 2}]


def test_arguments_behind_two_dashes_are_the_servers(monkeypatch):
    words = ["--out", "runs", "--", "--tp", "2", "--"]
    monkeypatch.setattr(sys, "argv", ["script", *words])
    assert h2h.split_arguments("--default", "1") == (["--out", "runs"], ["--tp", "2", "--"])
    monkeypatch.setattr(sys, "argv", ["script", *words[:3]])
    assert h2h.split_arguments("--default", "1") == (["--out", "runs"], [])
    monkeypatch.setattr(sys, "argv", ["script", *words[:2]])
    assert h2h.split_arguments("--default", "1") == (["--out", "runs"], ["--default", "1"])
