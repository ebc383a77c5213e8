"""Evaluation against closed forms, with an engine whose responses are known in advance."""

import asyncio
import errno
import io
import json
import math

import pytest
from conversation_engine import END, TOKENIZER
from rich.console import Console

from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.config.data import EvalConfig, RewardConfig
from megatron_dapo.engines.protocol import Completion, SamplingParams
from megatron_dapo.errors import EngineError
from megatron_dapo.evaluation import EvaluationError, ProblemResult, Response, evaluate_sets, majority, summarise
from megatron_dapo.evaluation.command import create_output
from megatron_dapo.evaluation.results import EvalResult
from megatron_dapo.reward.combined import ResponseGrader
from megatron_dapo.types import FinishReason, Grade, Prompt, as_logprobs, as_tokens


def problem(index: int) -> Prompt:
    return Prompt(f"p{index}", f"template of question {index}", as_tokens([index]), str(100 + index),
                  meta={"question": f"question {index}"})  # fmt: skip


class KnownEngine:
    """Problem i: response j is right if j < right[i]; the wrong answers are 1, 2, 1, 2, …; `truncated` per problem."""

    def __init__(self, right: list[int], truncated: int = 0) -> None:
        self.right, self.truncated = right, truncated
        self.requests: dict[str, SamplingParams] = {}
        self.in_flight = self.most_in_flight = 0

    async def generate(self, request_id, prompt, params):
        self.requests[request_id] = params
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.001 * (len(self.requests) % 3))  # finish out of order
        self.in_flight -= 1
        i, j = int(prompt[0]), int(request_id.rsplit("-", 1)[1])
        text = f"Answer: {100 + i}" if j < self.right[i] else f"Answer: {1 + j % 2}  "
        tokens = as_tokens(TOKENIZER.encode(text, add_special_tokens=False) + [END] * j)  # 11 + j
        reason = FinishReason.LENGTH if j < self.truncated else FinishReason.STOP
        return Completion(tokens, as_logprobs([0.0] * len(tokens)), reason)

    async def abort(self, request_id=None):
        pass


async def evaluate(engine, prompts, graders, config, seed, progress=lambda done, total: None):
    return (await evaluate_sets(engine, {"": prompts}, graders, config, seed, progress)).results[""]


def run(engine, count, config, seed=0, **more):
    async def main():
        responses = ResponseGrader(RewardConfig(grader="math"), TOKENIZER)
        async with responses.graders:
            return await evaluate(engine, [problem(i) for i in range(count)], responses, config, seed, **more)

    return asyncio.run(main())


CONFIG = EvalConfig(samples=32, max_response_tokens=64)


def test_avg_at_32_of_a_deterministic_engine_is_exact():
    right = [0, 1, 8, 16, 20, 32]
    engine = KnownEngine(right, truncated=4)
    result = run(engine, 6, CONFIG)
    assert result.avg == sum(right) / (6 * 32) == 77 / 192
    assert result.mean_tokens == 11 + 31 / 2
    assert result.truncation_rate == 4 / 32
    assert result.pass_at[1] == pytest.approx(result.avg, abs=1e-12)
    assert result.pass_at[32] == 5 / 6
    assert list(result.pass_at) == [1, 2, 4, 8, 16, 32]
    # 1 of 32 right loses to 15 or 16 votes for "1"; 8 to 12 and 12; 16 right beat 8 and 8.
    assert result.majority == 3 / 6
    assert (result.ungraded, result.unusable) == (0, 0)


def test_the_seed_of_a_response_depends_only_on_run_problem_and_index():
    one, same, other, fewer = (KnownEngine([1] * 3) for _ in range(4))
    first = run(one, 3, CONFIG, seed=7)
    assert run(same, 3, CONFIG, seed=7).to_json()["problems"] == first.to_json()["problems"]
    run(other, 3, CONFIG, seed=8)
    run(fewer, 2, EvalConfig(samples=4, max_response_tokens=64), seed=7)
    seeds = {key: params.seed for key, params in one.requests.items()}
    assert len(set(seeds.values())) == 96
    assert seeds == {key: params.seed for key, params in same.requests.items()}
    assert not set(seeds.values()) & {params.seed for params in other.requests.values()}
    assert all(seeds[key] == params.seed for key, params in fewer.requests.items())


def test_the_configured_sampling_reaches_the_engine():
    sections = {
        "rollout": {"max_response_tokens": 99, "stop": ["\n\n"], "stop_token_ids": [5, 7]},
        "evaluate": {"samples": 3, "top_p": 0.7, "concurrency": 2},
    }
    config = parse_config(sections).resolved_evaluate
    engine, seen = KnownEngine([1, 1]), []
    run(engine, 2, config, progress=lambda done, total: seen.append((done, total)))
    params = engine.requests["eval-p0-0"]
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (99, 1.0, 0.7, -1)
    assert (params.stop, params.stop_token_ids) == (("\n\n",), (5, 7))
    assert engine.most_in_flight == 2
    assert seen == [(i, 6) for i in range(1, 7)]
    sections["evaluate"] |= {"max_response_tokens": 5, "stop": [], "stop_token_ids": []}
    own = parse_config(sections).resolved_evaluate
    assert (own.max_response_tokens, own.stop, own.stop_token_ids) == (5, [], [])


def response(correct: bool | None, extracted: str | None = None) -> Response:
    return Response("", 1, "stop", correct, extracted, "")


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        # All right ones count as one answer.
        ([response(True, "42"), response(True, "42.0"), response(False, "7")], 1.0),
        ([response(True, "42"), response(False, "7"), response(False, " 7 ")], 0.0),
        ([response(True, "42"), response(False, "7")], 0.5),
        ([response(True, "42"), response(False, "7"), response(False, "8")], 1 / 3),
        ([response(True, "42"), response(False), response(False)], 1.0),  # no answer is no vote
        ([response(False), response(False)], 0.0),
        ([response(False, "7"), response(False, "8"), response(False, "8")], 0.0),
    ],
)
def test_majority(responses, expected):
    assert majority(responses) == pytest.approx(expected)


def test_majority_of_a_binomial_closed_form():
    """Two candidates, n odd: maj@n is 1 exactly when more than half are right."""
    for n in (1, 3, 7, 31):
        for right in range(n + 1):
            votes = [response(True, "1")] * right + [response(False, "0")] * (n - right)
            assert majority(votes) == float(right > n / 2)


def test_the_interval_is_clustered_by_problem():
    """Two problems, one always and one never right: 64 responses, but only two independent facts."""
    result = run(KnownEngine([32, 0]), 2, CONFIG)
    assert result.interval == (0.0, 1.0)
    assert result.sampling_error == 0.0


def test_the_sampling_error_by_hand():
    """One problem, 8 of 32 right: s²/n with s² = n/(n−1)·p(1−p)."""
    result = run(KnownEngine([8]), 1, CONFIG)
    assert result.sampling_error == pytest.approx(math.sqrt(0.25 * 0.75 / 31))
    assert result.interval is None


def test_one_response_says_nothing_of_the_sampling_error():
    """Nor does one graded response to one of the problems."""
    result = run(KnownEngine([1, 0]), 2, EvalConfig(samples=1, max_response_tokens=64))
    assert result.sampling_error is None and json.loads(json.dumps(result.to_json()))["sampling_error"] is None
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(result.table("AIME"))
    shown = console.export_text()
    assert "clustered by problem" in shown and "sampling alone" not in shown and "problem;" not in shown
    twice, once = (ProblemResult(name, "", "1", [response(True, "1")] * n) for name, n in (("a", 2), ("b", 1)))
    ungraded = ProblemResult("c", "", "1", [response(None)])
    assert summarise([twice, once], CONFIG, 0, 1.0).sampling_error is None
    assert summarise([twice, ungraded], CONFIG, 0, 1.0).sampling_error == 0.0


def test_ungraded_responses_are_excluded_and_counted():
    config = EvalConfig(samples=4, max_response_tokens=1)
    half = ProblemResult("a", "", "", [response(True, "1"), response(False, "0"), response(None), response(None)])
    none = ProblemResult("b", "", "", [response(None)] * 4)
    full = ProblemResult("c", "", "", [response(True, "1")] * 4)
    result = summarise([half, none, full], config, 0, 0.0)
    assert result.avg == (0.5 + 1.0) / 2  # not 5/12, not 5/8
    assert (result.ungraded, result.unusable) == (6, 1)
    assert result.pass_at[4] == 1.0
    with pytest.raises(EvaluationError, match="none of 4 responses could be graded"):
        summarise([none], config, 0, 0.0)


def test_the_lenient_score_counts_right_numbers_without_the_required_format():
    texts = ["Answer: 18", "so she earns $18", "18 is wrong, it is 20"]
    responses = [Response(text, 5, "stop", text.startswith("Answer"), None, "") for text in texts]
    config = EvalConfig(samples=3)
    result = summarise([ProblemResult("a", "", "18", responses)], config, 0, 0.0)
    assert (result.avg, result.lenient) == (1 / 3, 2 / 3)
    assert result.metrics()["eval/lenient@3"] == 2 / 3
    words = summarise([ProblemResult("a", "", "blue", responses)], config, 0, 0.0)
    assert words.lenient is None and "eval/lenient@3" not in words.metrics()


def test_a_grader_that_extracts_nothing_has_no_majority():
    result = summarise([ProblemResult("a", "", "", [response(True), response(False)])], EvalConfig(samples=2), 0, 0.0)
    assert result.majority is None and "eval/maj@2" not in result.metrics()


def test_errors_end_the_evaluation():
    class Broken(KnownEngine):
        async def generate(self, request_id, prompt, params):
            if request_id == "eval-p1-3":
                raise EngineError("server 2: connection refused")
            return await super().generate(request_id, prompt, params)

    class Aborting(KnownEngine):
        async def generate(self, request_id, prompt, params):
            return Completion(as_tokens([1]), as_logprobs([0.0]), FinishReason.ABORT)

    with pytest.raises(EngineError, match="server 2"):
        run(Broken([1] * 3), 3, CONFIG)
    with pytest.raises(EvaluationError, match=r"aborted response \d+ to problem p0 3 times"):
        run(Aborting([1]), 1, CONFIG)
    with pytest.raises(EvaluationError, match="no problem to evaluate"):
        run(KnownEngine([]), 0, CONFIG)


def test_results_are_written_and_shown(tmp_path):
    result = run(KnownEngine([1, 2]), 2, EvalConfig(samples=2, max_response_tokens=64))
    result.write(tmp_path / "out")
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert record["avg"] == 0.75 and record["pass_at"] == {"1": 0.75, "2": 1.0} and record["samples"] == 2
    assert "clustered by problem" in record["interval_kind"]
    assert [a["extracted"] for a in record["problems"][0]["responses"]] == ["100", "2"]
    files = sorted((tmp_path / "out" / "responses").iterdir())
    assert [f.name for f in files] == ["0001-p0.txt", "0002-p1.txt"]
    text = files[0].read_text()
    assert "1 of 2 right, reference 100" in text and "\ntemplate of question 0\n" in text, "as the model sees it"
    assert record["problems"][0]["question"] == "question 0"
    assert "response 2: wrong (different number), 12 tokens, stop, extracted: 2" in text and "Answer: 2" in text
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(result.table("AIME"))
    shown = console.export_text()
    for part in ("AIME: 2 problems × 2 responses", "avg@2", "75.00%", "pass@1", "maj@2", "mean length", "95% interval"):
        assert part in shown
    assert result.metrics()["eval/avg@2"] == 0.75


class Waiting(KnownEngine):
    """Requests run until they are aborted; aborting takes effect at the second attempt, as with a late request."""

    def __init__(self, right, refuse=False) -> None:
        super().__init__(right)
        self.refuse, self.running, self.aborts, self.ended = refuse, {}, 0, 0

    async def generate(self, request_id, prompt, params):
        self.requests[request_id] = params
        self.running[request_id] = asyncio.Event()
        try:
            await self.running[request_id].wait()
            return Completion(as_tokens([1]), as_logprobs([0.0]), FinishReason.ABORT)
        finally:
            del self.running[request_id]
            self.ended += 1

    async def abort(self, request_id=None):
        self.aborts += 1
        if self.refuse:
            raise EngineError("server 1: connection refused")
        if self.aborts > 1:
            for event in self.running.values():
                event.set()


@pytest.fixture
def quick_aborts(monkeypatch):
    monkeypatch.setattr("megatron_dapo.evaluation.requests.ABORT_REPEAT", 0.01)
    monkeypatch.setattr("megatron_dapo.evaluation.requests.ABORT_TIMEOUT", 0.2)


@pytest.mark.parametrize("refuse", [False, True], ids=["aborts", "a server that is gone"])
async def test_a_cancelled_evaluation_aborts_its_requests_and_starts_no_more(refuse, quick_aborts):
    engine = Waiting([1] * 4, refuse)
    config = EvalConfig(samples=8, max_response_tokens=64, concurrency=5)
    task = asyncio.ensure_future(evaluate(engine, [problem(i) for i in range(4)], None, config, 0))
    while len(engine.running) < 5:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.running == {} and engine.ended == 5 and len(engine.requests) == 5
    assert len(asyncio.all_tasks()) == 1
    assert engine.aborts >= 2


def test_an_error_aborts_the_other_requests(quick_aborts):
    class Half(Waiting):
        async def generate(self, request_id, prompt, params):
            if request_id == "eval-p0-3":
                await asyncio.sleep(0.01)
                raise EngineError("server 2: connection refused")
            return await super().generate(request_id, prompt, params)

    engine = Half([1])
    with pytest.raises(EngineError, match="server 2"):
        run(engine, 1, EvalConfig(samples=8, max_response_tokens=64))
    assert engine.running == {} and engine.ended == 7


def test_a_response_that_the_engine_aborts_by_itself_is_generated_again():
    class Restarting(KnownEngine):
        async def generate(self, request_id, prompt, params):
            if request_id == "eval-p0-1":
                self.requests[request_id] = params
                return Completion(as_tokens([1]), as_logprobs([0.0]), FinishReason.ABORT)
            return await super().generate(request_id.removesuffix("-try1"), prompt, params)

    engine = Restarting([2])
    result = run(engine, 1, EvalConfig(samples=2, max_response_tokens=64))
    assert result.avg == 1.0 and [r.finish_reason for r in result.problems[0].responses] == ["stop", "stop"]


def one_result(*ids):
    problems = [ProblemResult(name, "q", "1", [Response("text", 1, "stop", True, "1", "")]) for name in ids]
    return summarise(problems, EvalConfig(samples=1), 0, 0.0)


def test_results_json_exists_only_if_everything_was_written(tmp_path, monkeypatch):
    one_result("a", "b").write(tmp_path)

    def full_disk(number, problem):
        if number == 2:
            raise OSError(28, "No space left on device")
        return "text"

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("megatron_dapo.evaluation.results._readable", full_disk)
        one_result("c", "d").write(tmp_path)
    assert not (tmp_path / "results.json").exists()
    one_result("e").write(tmp_path)
    assert (tmp_path / "results.json").exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0001-e.txt", "responses", "results.json"]


def test_a_problem_id_is_never_a_path(tmp_path):
    one_result("algebra/12", "../up", "x" * 300).write(tmp_path)
    names = sorted(path.name for path in (tmp_path / "responses").iterdir())
    assert names == ["0001-algebra_12.txt", "0002-.._up.txt", f"0003-{'x' * 100}.txt"]


def test_an_output_that_cannot_be_written_is_found_before_anything_is_generated(tmp_path, tiny_model, capsys):
    from megatron_dapo.cli import main

    (tmp_path / "file").write_text("")
    (tmp_path / "run.yaml").write_text(
        f"policy: {{model: {tiny_model}, micro_batch_tokens: 64}}\n"
        "rollout: {engine: embedded, max_prompt_tokens: 16, max_response_tokens: 6}\n"
        f"trainer: {{run_dir: {tmp_path / 'run'}}}\n"
    )
    # The benchmark does not exist either: the output is checked first.
    arguments = ["eval", str(tmp_path / "run.yaml"), "--data", str(tmp_path / "none.jsonl")]
    for out in (tmp_path / "file", tmp_path / "file" / "deeper"):
        assert main([*arguments, "--out", str(out)]) == 2
        shown = capsys.readouterr()
        assert f"--out {out}: cannot write results there" in shown.err
        assert len(shown.err.strip().splitlines()) == 1 and "Traceback" not in shown.err


def test_a_response_cannot_control_the_terminal(tmp_path):
    hostile = Response("a\x1b[2J\rb\nc", 1, "stop", False, "\x9b31m", "")
    found = ProblemResult("a", "q", "", [hostile], prompt="\x1b]0;owned\x07")
    summarise([found], EvalConfig(samples=1), 0, 0.0).write(tmp_path)
    (file,) = (tmp_path / "responses").iterdir()
    text = file.read_text()
    assert "a\\x1b[2J\\rb\nc\n" in text and "\\x1b]0;owned\\x07" in text and "extracted: \\x9b31m" in text
    assert not set("\x1b\x07\r\x9b") & set(text)
    assert "()" not in text and "reference" not in text, "empty fields are left out"


def test_lone_surrogates_do_not_break_the_files(tmp_path):
    broken = ProblemResult("a", "q", "1", [Response("bad \ud800", 1, "stop", False, "bad \ud800", "")])
    summarise([broken], EvalConfig(samples=1), 0, 0.0).write(tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["problems"][0]["right"] == 0


def test_the_values_of_k():
    with pytest.raises(ConfigError, match=r"evaluate: pass_at has 64, but needs 1 ≤ k ≤ samples \(32\)"):
        parse_config({"evaluate": {"pass_at": [64]}})
    assert EvalConfig(samples=10).pass_at_values == [1, 2, 4, 8, 10]
    assert EvalConfig(samples=1).pass_at_values == [1]
    assert EvalConfig(samples=10, pass_at=[5, 1, 5]).pass_at_values == [1, 5]
    with pytest.raises(ValueError, match="resolved_evaluate"):
        run(KnownEngine([1]), 1, EvalConfig())


def test_a_grade_can_come_from_anywhere_and_is_checked():
    class Graders:
        def decode(self, tokens):
            return TOKENIZER.decode(tokens, skip_special_tokens=True)

        async def grade(self, prompt, sample):
            right = self.decode(sample.response_tokens).endswith("100")
            return Grade(right, math.nan if sample.index == 0 else 1.0)

    result = asyncio.run(evaluate(KnownEngine([5]), [problem(0)], Graders(), CONFIG, 0))
    assert (result.problems[0].right, result.ungraded) == (4, 1)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A random Qwen2 of a few thousand parameters with the character tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from megatron_dapo.data import save_arithmetic_tokenizer

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    shape = Qwen2Config(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    save_arithmetic_tokenizer(folder)
    return folder


def test_the_default_folder_is_the_first_without_results(tmp_path):
    for _ in range(2):  # the first evaluation failed
        assert create_output(None, str(tmp_path)) == tmp_path / "eval"
    (tmp_path / "eval" / "aime24").mkdir()
    (tmp_path / "eval" / "aime24" / "results.json").touch()
    assert create_output(None, str(tmp_path)) == tmp_path / "eval_2"


def fail_to_write(self, folder):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_command(tmp_path, tiny_model, capsys, monkeypatch):
    from megatron_dapo.cli import main
    from megatron_dapo.data import arithmetic_problems, write_arithmetic

    write_arithmetic(tmp_path / "sums.jsonl", arithmetic_problems(1, 3, seed=0, split="held-out"))
    (tmp_path / "run.yaml").write_text(
        f"policy: {{model: {tiny_model}, micro_batch_tokens: 64}}\n"
        "rollout: {engine: embedded, max_prompt_tokens: 16, max_response_tokens: 6}\n"
        f"trainer: {{run_dir: {tmp_path / 'run'}}}\n"
        f"evaluate: {{data: {{template: plain, sources: [{{path: {tmp_path / 'sums.jsonl'}, name: a, samples: 2}}, "
        f"{{path: {tmp_path / 'sums.jsonl'}, name: b}}]}}, samples: 1}}\n"
    )
    assert main(["eval", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "both")]) == 0
    shown = capsys.readouterr().out
    assert "a: 3 problems × 2 responses" in shown and "b: 3 problems × 1 responses" in shown
    found = {name: json.loads((tmp_path / "both" / name / "results.json").read_text()) for name in ("a", "b")}
    assert [p["id"] for p in found["a"]["problems"]] == [p["id"] for p in found["b"]["problems"]]
    data = (tmp_path / "sums.jsonl").rename(tmp_path / "sums #1.jsonl")  # in YAML the rest would be a comment
    arguments = ["eval", str(tmp_path / "run.yaml"), "--data", str(data), "--samples", "4"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "sums_1: 3 problems × 4 responses" in shown and "avg@4" in shown
    assert f"written: results.json and readable responses of {tiny_model} in" in " ".join(shown.split())
    first = json.loads((tmp_path / "run" / "eval" / "results.json").read_text())
    assert len(first["problems"]) == 3 and all(len(p["responses"]) == 4 for p in first["problems"])
    assert len(list((tmp_path / "run" / "eval" / "responses").iterdir())) == 3
    assert main([*arguments, "--out", str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again" / "results.json").read_text())["problems"] == first["problems"]
    monkeypatch.setattr(EvalResult, "write", fail_to_write)
    assert main([*arguments, "--out", str(tmp_path / "again")]) == 2
    shown = capsys.readouterr()
    assert "avg@4" in shown.out, "the numbers are not lost"
    assert f"--out {tmp_path / 'again'}: cannot write results there: No space left on device" in shown.err
    monkeypatch.undo()
    rows = [{"question": "[INST]1+1=[/INST]", "answer": answer} for answer in "23"]  # markup to rich
    with data.open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    assert main([*arguments, "--set", "rollout.max_prompt_tokens=20"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "conflicting answers to '[INST]1+1=[/INST]'" in shown and shown.endswith("/run/eval_2")
    assert json.loads((tmp_path / "run" / "eval" / "results.json").read_text()) == first
    assert main([*arguments, "--model", "/nowhere"]) == 2
    assert "policy.model: /nowhere is not a directory" in capsys.readouterr().err
    closed = ["--set", "rollout.engine=sglang", "--set", "rollout.servers.urls=['http://127.0.0.1:9']"]
    closed += ["--set", "rollout.servers.start_timeout=1"]
    assert main([*arguments, *closed]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err
