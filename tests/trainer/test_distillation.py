"""On-policy distillation: exact advantages, teachers that score the sampled tokens, a student that gets closer."""

import asyncio
import os
import shutil

import numpy as np
import pytest
import torch
from aiohttp import web
from forked import records, run
from tiny_run import make_model, raw_config
from transformers import AutoModelForCausalLM

from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.config.algorithm import DistillationConfig
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.engines.teacher import Teacher, open_teacher
from megatron_dapo.errors import EngineError
from megatron_dapo.trainer.advantages import shape_batch
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, StepBatch, as_logprobs, as_tokens


def sample(index, engine, teacher, correct=True, trained=None, reason=FinishReason.STOP):
    tokens = as_tokens(range(10, 10 + len(engine)))
    return Sample(
        "p", index, as_tokens([1, 2, 3]), tokens, as_logprobs(engine), reason,
        grade=Grade(correct, {True: 1.0, False: -1.0, None: 0.0}[correct]),
        trained=None if trained is None else np.array(trained),
        teacher_logprobs=None if teacher is None else as_logprobs(teacher),
    )  # fmt: skip


def hand_made():
    """Right, wrong, ungraded, not scored, with an appended token, truncated."""
    samples = [
        sample(0, [-1.0, -2.0], [-0.5, -4.0]),
        sample(1, [-1.0, -1.0, -1.0], [-1.0, -31.0, -0.75], correct=False),
        sample(2, [-3.0], [-1.0], correct=None),
        sample(3, [-1.0, -1.0], None, correct=False),
        sample(4, [-1.0, 0.0, -2.0], [-2.0, -9.0, -1.0], trained=[True, False, True]),
        sample(5, [-1.0], [-2.0], reason=FinishReason.LENGTH, correct=False),
    ]
    return StepBatch(0, [Group(Prompt("p", "q", as_tokens([1, 2, 3])), samples)])


def shaped(**settings):
    overlong = {"filter": True}
    algorithm = {"distillation": {"model": "teacher", **settings}, "overlong": overlong, "advantage": "group-mean"}
    rollout = {"dynamic_sampling": not settings.get("alone", False)}
    config = parse_config({"algorithm": algorithm, "rollout": rollout})
    return shape_batch(hand_made(), config)


# weight 2, gap bounded by 10: 2·(teacher − engine); the appended token, and the sample that was not scored, get 0.
EXPECTED = [1.0, -4.0, 0.0, -20.0, 0.5, 4.0, 0.0, 0.0, -2.0, 0.0, 2.0, -2.0]


def test_added_to_the_advantages_of_the_group_exactly():
    batch, metrics = shaped(weight=2.0)
    assert batch.token_advantages.tolist() == EXPECTED
    np.testing.assert_allclose(batch.advantages, [1.2, -0.8, 0.0, -0.8, 1.2, -0.8], rtol=1e-6)
    # Ungraded and truncated samples, and the appended token, carry no loss.
    assert batch.loss_mask.tolist() == [True] * 5 + [False] + [True] * 2 + [True, False, True] + [False]
    gaps = [0.5, -2.0, 0.0, -30.0, 0.25, 2.0, -1.0, 1.0, -1.0]
    assert metrics["distillation/reverse_kl"] == pytest.approx(-np.mean(gaps))
    assert metrics["distillation/unscored_share"] == pytest.approx(1 / 6)


def test_alone_it_trains_on_everything_that_was_scored():
    batch, metrics = shaped(weight=2.0, alone=True)
    assert batch.token_advantages.tolist() == EXPECTED and not batch.advantages.any()
    assert batch.loss_mask.tolist() == [True] * 6 + [False] * 2 + [True, False, True] + [False]
    assert metrics["rollout/masked_share"] == pytest.approx(2 / 6)


def test_token_advantages_follow_their_samples():
    batch, _ = shaped(weight=2.0)
    chosen = batch.select([4, 0])
    assert chosen.token_advantages.tolist() == [-2.0, 0.0, 2.0, 1.0, -4.0]
    batch.token_advantages[0] = np.nan
    with pytest.raises(Exception, match="token_advantages is nan"):
        batch.validate(100, 100)


def test_teacher_log_probs_are_part_of_a_state():
    one, two = hand_made().samples[0], hand_made().samples[3]
    assert Sample.from_state(one.to_state()).teacher_logprobs.tolist() == [-0.5, -4.0]
    assert Sample.from_state(two.to_state()).teacher_logprobs is None


TEACHER = {"model": "m", "alone": True}
ALONE = {"rollout": {"dynamic_sampling": False}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"algorithm": {"distillation": {"model": "m", "urls": ["http://x"]}}}, "two teachers"),
        ({"algorithm": {"distillation": {"alone": True}}}, "there is no teacher"),
        ({"algorithm": {"distillation": {"model": "m", "alone": True}}}, "dynamic_sampling drops groups"),
        (ALONE | {"algorithm": {"distillation": TEACHER, "advantage": "gae"}}, "without a critic"),
        (ALONE | {"algorithm": {"distillation": TEACHER, "positive_coefficient": 0.1}}, "positive_coefficient to 0"),
        (
            {"algorithm": {"distillation": {"model": "m"}}, "rollout": {"temperature": 0.7}},
            "rollout.temperature is 0.7",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(raw)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def score(config, samples):
    async def main():
        teacher = await open_teacher(DistillationConfig(**config))
        try:
            return await teacher.score(samples)
        finally:
            await teacher.close()

    return asyncio.run(main())


def test_a_teacher_with_the_policys_weights_agrees_with_the_engine(folder):
    async def generate():
        engine = EmbeddedEngine.from_directory(folder)
        try:
            prompt = as_tokens([20, 21, 22])
            params = SamplingParams(max_new_tokens=9, seed=3)
            return prompt, await engine.generate("r", prompt, params)
        finally:
            await engine.close()

    prompt, made = asyncio.run(generate())
    ours = Sample("p", 0, prompt, made.tokens, made.logprobs, FinishReason.STOP)
    score({"model": str(folder)}, [ours])
    np.testing.assert_allclose(ours.teacher_logprobs, made.logprobs, atol=1e-5)


def test_a_token_that_the_teacher_does_not_have_costs_the_sample_and_not_the_run(folder, caplog):
    """Qwen2.5-7B has 152064 tokens, and the smaller ones 151936."""
    made = [sample(i, [-1.0, -1.0], None) for i in range(2)]
    made[1].response_tokens[1] = 4999
    score({"model": str(folder), "retries": 0}, made)
    assert len(made[0].teacher_logprobs) == 2 and made[1].teacher_logprobs is None
    assert "token 4999" in caplog.text


def test_a_teacher_that_cannot_be_loaded_is_an_error_of_the_setting(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(EngineError, match=r"algorithm.distillation.model: cannot load a model from .*/model"):
        score({"model": str(tmp_path / "model")}, [])


async def test_an_sglang_teacher_scores_the_response_and_nothing_else(monkeypatch):
    """A stand-in for the server: its log-probs are −token/100; the first entry has none."""
    monkeypatch.setattr("megatron_dapo.engines.teacher.PAUSE", 0.0)
    monkeypatch.setenv("TEACHER_KEY", "secret")
    bodies, keys, broken = [], [], iter([500])

    async def answer(request):
        body = await request.json()
        bodies.append(body)
        keys.append(request.headers.get("Authorization"))
        if next(broken, None):
            return web.json_response({}, status=400)
        tokens = body["input_ids"][body["logprob_start_len"] :]
        if 99 in tokens:  # another tokenizer
            tokens = [token + 1 for token in tokens]
        entries = [[None if i == 0 else -token / 100, token, None] for i, token in enumerate(tokens)]
        return web.json_response({"text": "", "meta_info": {"input_token_logprobs": entries}})

    def made(prompt, response):
        return Sample(
            "p", 0, as_tokens(prompt), as_tokens(response), as_logprobs([-1.0] * len(response)), FinishReason.STOP
        )

    samples = [made([1, 2, 3], [40, 50]), made([5], [60, 70]), made([1, 2], [99])]
    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    settings = DistillationConfig(urls=[url], api_key_env="TEACHER_KEY", retries=1, concurrency=1)
    teacher = await open_teacher(settings)
    await teacher.score(samples)
    await teacher.close()
    await runner.cleanup()
    np.testing.assert_allclose(samples[0].teacher_logprobs, [-0.4, -0.5])
    np.testing.assert_allclose(samples[1].teacher_logprobs, [-0.6, -0.7])
    assert samples[2].teacher_logprobs is None, "tokens of another tokenizer are not scored"
    assert bodies[0]["input_ids"] == [1, 2, 3, 40, 50] and set(keys) == {"Bearer secret"}
    assert all(body["return_logprob"] and body["sampling_params"]["max_new_tokens"] <= 1 for body in bodies)


async def test_a_sample_is_scored_once_whether_scoring_began_before_or_not():
    class Slow:
        async def logprobs(self, prompt, response):
            asked.append(len(response))
            await asyncio.sleep(0.01)
            return as_logprobs([-2.0] * len(response))

        async def close(self):
            closed.append(len(asked))

    asked, closed, progress = [], [], []
    early, late, never = ([sample(i, [-1.0] * n, None) for i in range(4)] for n in (1, 2, 3))
    teacher = Teacher(Slow(), DistillationConfig(model="m", concurrency=3))
    teacher.begin(early)
    await asyncio.sleep(0.015)
    teacher.begin(early)
    await teacher.score([*early, *late], lambda: progress.append(1))
    assert asked == [1] * 4 + [2] * 4 and all(s.teacher_logprobs.tolist() == [-2.0] * s.length for s in [*early, *late])
    assert len(progress) == 5, "three were scored before"
    teacher.begin(never)
    await asyncio.sleep(0.001)
    await teacher.close()
    await asyncio.sleep(0.03)
    assert closed == [11] and len(asked) == 11 and all(s.teacher_logprobs is None for s in never)


def test_the_teacher_scores_groups_while_the_batch_fills(folder, tmp_path):
    def before():
        score = Teacher.score

        def checked(self, samples, on_progress):
            assert all(s.teacher_logprobs is not None or id(s) in self._running for s in samples)
            return score(self, samples, on_progress)

        Teacher.score = checked

    raw = raw_config(
        folder, tmp_path / "run", trainer__steps=2, rollout__dynamic_sampling=False,
        algorithm__distillation={"model": str(folder), "alone": True},
    )  # fmt: skip
    assert run(raw, before) == 0


def test_a_student_approaches_its_teacher(folder, tmp_path):
    teacher = tmp_path / "teacher"
    model = AutoModelForCausalLM.from_pretrained(make_model(teacher, seed=1))
    with torch.no_grad():  # the same distribution everywhere: a few steps are enough to learn it
        model.model.embed_tokens.weight[:] = model.model.embed_tokens.weight[5].clone()
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.mul_(15)
    model.save_pretrained(teacher)
    raw = raw_config(
        folder, tmp_path / "run", trainer__steps=6, rollout__dynamic_sampling=False, trainer__prompts_per_step=16,
        trainer__mini_batch_prompts=8, policy__optimizer={"lr": 1e-2}, trainer__checkpoint={"every": 100},
        algorithm__distillation={"model": str(teacher), "alone": True},
    )  # fmt: skip
    assert run(raw) == 0
    gaps = [m["distillation/reverse_kl"] for _, kind, m in records(tmp_path / "run") if kind == "step"]
    assert np.mean(gaps[-3:]) < 0.6 * np.mean(gaps[:2]), gaps
