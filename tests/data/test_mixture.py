"""Several files: exact shares by weight, one owner for every question, exact resume, and metrics of each."""

import json
from collections import Counter

import pytest

from megatron_dapo.config import parse_config
from megatron_dapo.data import DataError, PromptMixture, arithmetic_tokenizer, load_run_data
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, StepBatch, as_logprobs, as_tokens

SIZES = {"a": 5, "b": 40, "c": 11}


def sources(sizes=SIZES):
    return {
        name: [Prompt(f"{name}{i}", "", as_tokens([]), str(i), meta={"file": name}) for i in range(count)]
        for name, count in sizes.items()
    }


def mixture(weights, seed=1, sizes=SIZES):
    return PromptMixture(sources(sizes), seed, weights=weights)


def ids(prompts):
    return [p.id for p in prompts]


def test_every_beginning_has_the_shares_of_the_weights():
    weights = {"a": 1.0, "b": 2.5, "c": 0.5}
    mixed, seen = mixture(weights), Counter()
    for count in range(1, 400):
        seen[mixed.take(1)[0].meta["file"]] += 1
        for name, weight in weights.items():
            assert abs(seen[name] - count * weight / 4) <= 1 + 1e-9


def test_every_source_has_its_own_epochs():
    mixed = mixture({"a": 1.0, "b": 1.0, "c": 2.0})
    by_source = {name: [] for name in SIZES}
    for prompt in mixed.take(400):
        by_source[prompt.meta["file"]].append(prompt.id)
    for name, size in SIZES.items():
        for start in range(0, len(by_source[name]) - size, size):
            assert len(set(by_source[name][start : start + size])) == size


@pytest.mark.parametrize("before", [0, 1, 17, 120])
def test_resume_is_exact(before):
    weights = {"a": 0.2, "b": 0.7, "c": 0.1}
    straight = mixture(weights)
    straight.take(before)
    resumed = mixture(weights, seed=9)
    resumed.take(13)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.state_dict() == straight.state_dict()
    assert ids(resumed.take(200)) == ids(straight.take(200))


def test_weights_may_change_when_a_run_is_resumed():
    before = mixture({"a": 1.0, "b": 1.0, "c": 1.0})
    before.take(90)
    after = mixture({"a": 1.0, "b": 8.0, "c": 1.0})
    after.load_state_dict(before.state_dict())
    seen = Counter(p.meta["file"] for p in after.take(100))
    assert seen["b"] == pytest.approx(80, abs=2)  # not more, to make up for what was drawn before


def test_other_files_are_refused_when_a_run_is_resumed():
    state = mixture(None).state_dict()
    with pytest.raises(DataError, match="was started with a, b, c, but now its data is a, b: use the same files"):
        mixture(None, sizes={"a": 5, "b": 40}).load_state_dict(state)
    with pytest.raises(DataError, match="source b: the saved position belongs to a set of 40 prompts"):
        mixture(None, sizes={**SIZES, "b": 39}).load_state_dict(state)
    one = mixture(None, sizes={"a": 5})
    with pytest.raises(DataError, match="was started with a, b, c, but now its data is a:"):
        one.load_state_dict(state)
    with pytest.raises(DataError, match="was started with a, but now its data is a, b, c"):
        mixture(None).load_state_dict(one.state_dict())


def test_a_single_file_may_have_another_name_when_a_run_is_resumed():
    before = mixture(None, sizes={"a": 5})
    before.take(8)
    after = PromptMixture({"renamed": sources({"a": 5})["a"]}, seed=1)
    after.load_state_dict(before.state_dict())
    (cursor,) = after.state_dict()["sources"].values()
    assert cursor["epoch"] * 5 + cursor["position"] == 8
    assert ids(after.take(20)) == ids(before.take(20))


def group(prompt, right, graded=4):
    """Four samples, of which `graded` have a grade."""
    empty = as_tokens([]), as_logprobs([]), FinishReason.STOP
    grades = [Grade(i < right if i < graded else None, float(i < right)) for i in range(4)]
    return Group(prompt, [Sample(prompt.id, i, as_tokens([1]), *empty, grade=g) for i, g in enumerate(grades)])


def test_metrics_of_each_source():
    """Accuracy is of all decided groups, the share is of the trained ones."""
    mixed = mixture({"a": 1.0, "b": 1.0, "c": 1e-9})
    mixed.begin_step(0)
    taken = mixed.take(4)
    groups = [group(prompt, right) for prompt, right in zip(taken, (1, 4, 2, 4), strict=True)]
    for one in groups:
        mixed.record(one)
    found = mixed.metrics(StepBatch(0, [g for g in groups if 0 < sum(g.accuracies) < 4]))
    assert [p.meta["file"] for p in taken] == ["a", "b", "a", "b"]
    assert found["data/a/accuracy"] == 3 / 8 and found["data/b/accuracy"] == 1.0
    assert (found["data/a/share"], found["data/b/share"], found["data/c/share"]) == (1.0, 0.0, 0.0)
    assert "data/c/accuracy" not in found
    mixed.record(group(taken[0], 1, graded=2))  # ungraded samples do not count
    mixed.record(group(taken[1], 0, graded=0))
    resumed = mixture({"a": 1.0, "b": 1.0, "c": 1e-9})
    resumed.load_state_dict(mixed.state_dict())
    resumed.begin_step(0)  # a step that continues does not begin again
    found = resumed.metrics(StepBatch(0, []))
    assert found["data/a/accuracy"] == 4 / 10 and found["data/b/accuracy"] == 1.0
    mixed.begin_step(1)
    assert "data/a/accuracy" not in mixed.metrics(StepBatch(1, []))


# ---- from files ----


def write(path, rows):
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return str(path)


def load(tmp_path, data, **more):
    raw = {"data": {"template": "plain", **data}, **more}
    return load_run_data(parse_config(raw), arithmetic_tokenizer())


def test_a_question_in_two_files_belongs_to_the_first(tmp_path):
    first = write(tmp_path / "first.jsonl", [("1+1=", "2"), ("2+2=", "4"), ("3+3=", "6")])
    second = write(tmp_path / "second.jsonl", [("2+2=", "04"), ("3+3=", "7"), ("4+4=", "8")])
    found = load(tmp_path, {"sources": [{"path": first, "weight": 3}, {"path": second, "name": "more"}]})
    questions = {name: [p.text for p in loaded] for name, loaded in found.training.items()}
    assert questions == {"first": ["1+1=", "2+2="], "more": ["4+4="]}  # 3+3= has two answers
    report = found.training["more"].report
    assert (report.rows, report.kept, report.duplicates, report.in_conflict) == (3, 1, 1, 1)
    assert "first.jsonl: 2 prompts of 3 rows" in found.report() and "second.jsonl: 1 prompts of 3" in found.report()
    assert {p.meta["file"] for p in found.training["more"]} == {"more"}


def test_a_question_that_one_file_disputes_is_not_taken_from_another(tmp_path):
    first = write(tmp_path / "first.jsonl", [("1+1=", "2"), ("1+1=", "3"), ("2+2=", "4")])
    second = write(tmp_path / "second.jsonl", [("1+1= ", "3"), ("4+4=", "8")])
    for one, other in ((first, second), (second, first)):
        found = load(tmp_path, {"sources": [{"path": one}, {"path": other}]}).training
        assert {p.text for loaded in found.values() for p in loaded} == {"2+2=", "4+4="}
        report = found["second"].report
        assert (report.rows, report.kept, report.duplicates, report.in_conflict) == (2, 1, 0, 1)
        assert "conflicting answers to '1+1=': 2 (line 1); 3 (line 2)" in report.summary()


def test_a_file_without_a_question_of_its_own_is_refused(tmp_path):
    path = write(tmp_path / "one.jsonl", [("1+1=", "2")])
    again = write(tmp_path / "again.jsonl", [("1+1=", "2")])
    with pytest.raises(DataError, match=r"again\.jsonl: all of its 1 prompts are also in the files listed before it"):
        load(tmp_path, {"sources": [{"path": path}, {"path": again}]})


def test_a_source_overrides_the_settings_of_the_section(tmp_path):
    one = write(tmp_path / "one.jsonl", [("1+1=", "2")])
    two = tmp_path / "two.jsonl"
    two.write_text('{"q": "2+2=", "a": "sum #### 4"}\n')
    own = {"path": str(two), "question_column": "q", "answer_column": "a", "template": "{question}0"}
    found = load(tmp_path, {"sources": [{"path": one}, own]})
    assert [p.text for loaded in found.training.values() for p in loaded] == ["1+1=", "2+2=0"]
    assert found.training["two"][0].answer == "4"


def test_several_benchmarks(tmp_path):
    one = write(tmp_path / "one.jsonl", [("1+1=", "2")])
    two = write(tmp_path / "two.jsonl", [("1+1=", "2"), ("2+2=", "4")])
    sets = {"data": {"template": "plain", "sources": [{"path": one, "samples": 2}, {"path": two, "name": "second"}]}}
    found = load(tmp_path, {"path": one}, evaluate=sets)
    assert {name: len(loaded) for name, loaded in found.evaluation.items()} == {"one": 1, "second": 2}
    config = parse_config({"evaluate": {"samples": 8, "pass_at": [1, 4], **sets}}).evaluate
    assert (config.for_set("one").samples, config.for_set("one").pass_at_values) == (2, [1])
    assert (config.for_set("second").samples, config.for_set("second").pass_at_values) == (8, [1, 4])
    assert config.metric_prefix("second") == "eval/second/"
