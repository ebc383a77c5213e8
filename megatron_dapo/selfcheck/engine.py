"""`megatron-dapo selfcheck engine CONFIG`: does the engine of a run compute what its trainer computes? If not, where?

Weights are loaded and sent as in a run, the engine samples from the run's prompts, and the trainer scores the samples:
the gap is that of `trainer.gate`. Then every server is asked for the usual causes: tensors, tokens or a layer that
differ, or log-probs that differ between decoding and prefill. Layers are compared for one sample, the probe, by
sketches of their output (engines/sglang/in_server/megatron_dapo_layers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from megatron_dapo.config import Config, ConfigError, check_config
from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.config.data import EvalConfig, RewardConfig
from megatron_dapo.engines.embedded.batch_invariant_model import checkpoint_tensors
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.engines.protocol import SamplingParams, derive_seed
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.in_server import megatron_dapo_layers as layers
from megatron_dapo.engines.sglang.weight_proof import Sums, checksums_of, compare
from megatron_dapo.errors import EngineError
from megatron_dapo.policy.batch import Floats, TrainBatch
from megatron_dapo.processes.fork_ranks import Rendezvous
from megatron_dapo.sync.bucket import flatten
from megatron_dapo.trainer.collectives import DriverError
from megatron_dapo.trainer.loop import Trainer, train
from megatron_dapo.trainer.rollout_driver import RolloutDriver
from megatron_dapo.trainer.rollouts import weight_buckets
from megatron_dapo.trainer.signals import Stopped
from megatron_dapo.trainer.train_step import check_gate, share_batch
from megatron_dapo.types import Sample, Tokens

Sketches = dict[str, NDArray[Any]]  # as of `layers.Recorder.end`
PROBE_TOKENS = 2048  # at most
REPEATED_SAMPLES, REPEATED_TOKENS = 4, 256  # which an engine computes twice
SHOWN = 3  # samples
# A layer stands out if its output differs by more than this, and by JUMP times as much as any before it.
NOISE, JUMP = {"fp32": 1e-4, "bf16": 0.03, "fp8": 0.2}, 4.0
GRAPH = (
    "no hook has run. SGLang computes prompts in a CUDA graph: start it with --disable-prefill-cuda-graph "
    "(rollout.servers.arguments)"
)


def run_engine_check(config: Config, tokens: int) -> int:
    """The command, on this rank: prints the report; returns 0 if the gap is within `trainer.gate`, else 1."""
    shape = check_config(config, Rendezvous.from_environment().world_size)
    if shape is None or not config.data.files:
        raise ConfigError("policy.model or data.path is empty: name the model and the prompts of the run")
    folder = Path(config.trainer.run_dir) / "selfcheck"  # for logs; what the run has written is not touched
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    changes = {
        "reward": RewardConfig(),  # nothing is graded, trained or evaluated
        "algorithm": AlgorithmConfig(),
        "evaluate": EvalConfig(),
        "rollout": config.rollout.model_copy(update={"generate": None}),
        "trainer": config.trainer.model_copy(update={"run_dir": str(folder)}),
    }
    try:
        return train(config.model_copy(update=changes), shape, make_trainer=partial(EngineCheck, tokens=tokens))
    except Stopped as stopped:
        return stopped.exit_code


@dataclass(slots=True)
class Answers:
    """What one server says of itself. A text is the reason why it cannot be compared."""

    server: str
    checksums: list[dict[str, str]] | str
    sketches: Sketches | str
    prompt_tokens: int | None  # of the probe, as the server counts them
    repeated: Floats | str  # |decoding − prefill| of the log-probs of the same tokens


class EngineCheck(Trainer):
    """Every method is called by all ranks, in the same order."""

    def __init__(self, *args: Any, tokens: int) -> None:
        super().__init__(*args)
        self._tokens = tokens

    def run(self) -> int:
        with self.collectives.on_driver("opening the engine") as mine:
            if mine:
                self.rollouts.open(self.observer, self.data)
        try:
            self._start()
            self.colocation.sync_weights(0)
        except DriverError as error:
            if not error.by_engine:
                raise
            if self.runtime.rank == 0:
                print(f"weights: {error}")
            return 1
        found = self.rollouts.wait_for(
            "asking the engine", lambda driver: _ask(driver, self.config, self._tokens), stoppable=True
        )
        self.colocation.onload()
        samples, answers = found or ([], [])
        batch = TrainBatch.from_samples(samples, [0.0] * len(samples), [True] * len(samples)) if samples else None
        everyone = [[*range(len(samples))]] if samples else None
        everywhere, indices = share_batch(self.collectives, batch, everyone, self.policy.step.shares)
        logprobs, _ = self.policy.log_probs(everywhere, indices)
        probe = self.collectives.share_array(_probe(samples) if samples else None)
        assert probe is not None
        sums, sketches, passed = self._sums(), self._sketches(probe), False
        with self.collectives.on_driver("comparing") as mine:
            if mine:
                report = Report(self.config, everywhere, logprobs, samples)
                print("\n".join([*report.gaps(), *report.diagnosis(answers, sums, sketches), report.verdict]))
                passed = report.passed
        return 0 if self.collectives.agree(passed) else 1

    def _sums(self) -> Sums:
        """The checksums of the trainer's weights; in the engine's data type, where that is always fp32."""
        sums: Sums = {}
        for bucket in weight_buckets(self.policy, self.config).buckets():
            if self.config.rollout.engine == "embedded":
                bucket = [(name, tensor.float()) for name, tensor in bucket]
            if len(bucket):  # else it is another rank's
                sums |= checksums_of(flatten(bucket)).read()
        return {name: found for rank in self.runtime.gather(sums) for name, found in rank.items()}

    def _sketches(self, probe: Tokens) -> Sketches:
        """The trainer's, of the layers of all ranks."""
        found: dict[str, list[NDArray[Any]]] = {}

        def record(name: str, module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            found.setdefault(name, []).append(layers.sketch(hidden))

        hooks = [module.register_forward_hook(partial(record, name)) for name, module in self._modules()]
        response = len(probe) - 1
        micro_batches = self.policy.step.pack(
            TrainBatch(probe, np.array([1]), np.array([response]), np.zeros(1, np.float32), np.ones(response, np.bool_))
        )
        self.policy.step.score(micro_batches)
        for hook in hooks:
            hook.remove()
        rows = [micro.routed for micro in micro_batches]  # −1: padding
        whole: Sketches = {}
        for rank in self.runtime.gather({name: list(zip(rows, parts, strict=True)) for name, parts in found.items()}):
            for name, parts in rank.items():
                table = whole.setdefault(name, np.zeros((len(probe), 1 + layers.PROJECTIONS), np.float32))
                for places, values in parts:
                    table[places[places >= 0]] = values[places >= 0]
        return whole

    def _modules(self) -> Iterator[tuple[str, Any]]:
        """Those of this rank whose output is the stream, by the name of its sketch."""
        for chunk in self.policy.model:
            if chunk.pre_process:
                yield "0", chunk.embedding
            yield from ((str(layer.layer_number), layer) for layer in chunk.decoder.layers)
            if chunk.post_process:
                yield layers.FINAL, chunk.decoder.final_layernorm


def _probe(samples: list[Sample]) -> Tokens:
    longest = max(samples, key=lambda sample: len(sample.prompt_tokens) + sample.length)
    return np.concatenate([longest.prompt_tokens, longest.response_tokens])[:PROBE_TOKENS]


# ---- the engine, in rank 0's rollout thread ----


async def _ask(driver: RolloutDriver, config: Config, tokens: int) -> tuple[list[Sample], list[Answers]]:
    """Samples with at least `tokens` tokens in all, and the answers of each server."""
    engine, rollout, samples = driver.engine, config.rollout, list[Sample]()
    size = min(rollout.samples_per_prompt, -(-tokens // rollout.max_response_tokens))

    async def sample(number: int, prompt: Any) -> Sample:
        params = SamplingParams(
            rollout.max_response_tokens, rollout.temperature, stop=tuple(rollout.stop),
            stop_token_ids=tuple(rollout.stop_token_ids), seed=derive_seed(config.trainer.seed, 0, prompt.id, number),
            routed_experts_from=0 if rollout.servers.demands.returns_experts else None,
        )  # fmt: skip
        made = await engine.generate(f"selfcheck-{number}", prompt.tokens, params)
        found = Sample(prompt.id, number, prompt.tokens, made.tokens, made.logprobs, made.finish_reason)
        found.routed_experts = made.routed_experts
        return found

    while (missing := tokens - sum(sample.length for sample in samples)) > 0:
        count = min(engine.max_running, -(-missing // rollout.max_response_tokens))
        prompts = [prompt for prompt in driver.cursor.take(-(-count // size)) for _ in range(size)]
        samples += await asyncio.gather(*(sample(len(samples) + i, prompt) for i, prompt in enumerate(prompts)))
    probe, again = _probe(samples), [sample.prompt_tokens for sample in samples[::size][:REPEATED_SAMPLES]]
    if isinstance(engine, EmbeddedEngine):
        return samples, [await _ask_embedded(engine, probe)]
    servers: list[SGLangClient] = engine.servers  # type: ignore[attr-defined]
    serving = [server for server in servers if server.state.serves(engine.weight_version)]
    return samples, [await _ask_server(server, config, probe, again) for server in serving]


async def _ask_embedded(engine: EmbeddedEngine, probe: Tokens) -> Answers:
    recorder = layers.Recorder(engine.model)
    await engine.generate("selfcheck-probe", probe[:-1], SamplingParams(1, 0.0))
    sums = checksums_of(flatten(checkpoint_tensors(engine.model))).read()
    held = {name: f"{elements}:x:{total}" for name, (elements, total) in sums.items()}
    held |= {name.replace("model.", "model.language_model.", 1): value for name, value in held.items()}
    return Answers("embedded", [held], recorder.end(), None, "it computes every token in the same way")


async def _ask_server(server: SGLangClient, config: Config, probe: Tokens, prompts: list[Tokens]) -> Answers:
    found, weights = Answers(server.name, "", "", None, ""), config.rollout.weights
    if weights.proof != "checksum" or not (await server.capabilities()).checksums:
        found.checksums = found.sketches = "needs rollout.weights.proof: checksum, and our loaders in external servers"
    elif weights.quantization != "none":
        found.checksums = "quantized weights are compared only while they are sent"
    try:
        found.checksums = found.checksums or await server.checksums()
        await server.flush_cache()  # else the probe would not be computed
        if records := not found.sketches:
            await server.checksums(layers.RECORD)
        found.prompt_tokens = (await server.score(probe.tolist()))["meta_info"].get("prompt_tokens")
        if records:
            ranks = [layers.decode(rank) for rank in await server.checksums(layers.RECORDED)]
            found.sketches = {name: values for rank in ranks for name, values in rank.items()}
        params = SamplingParams(min(REPEATED_TOKENS, config.rollout.max_response_tokens))
        gaps = []
        for number, prompt in enumerate(prompts):
            decoded = await server.generate(f"selfcheck-repeated-{number}", prompt, params)
            prefilled = await server.logprobs_of([*prompt.tolist(), *decoded.tokens.tolist()])
            gaps.append(np.abs(decoded.logprobs - prefilled[len(prompt) - 1 :]))
        found.repeated = np.concatenate(gaps)
    except EngineError as error:
        found.checksums, found.sketches = found.checksums or str(error), found.sketches or str(error)
        found.repeated = str(error)
    return found


# ---- the report, on rank 0 ----


class Report:
    def __init__(self, config: Config, batch: TrainBatch, logprobs: Floats, samples: list[Sample]) -> None:
        assert batch.engine_logprobs is not None
        self._gate = config.gate
        self._batch = batch
        self._logprobs = logprobs
        self._theirs = batch.engine_logprobs
        self._samples = samples
        fp8 = config.policy.fp8.recipe != "none" or config.rollout.weights.quantization != "none"
        self._noise = NOISE["fp8" if fp8 else config.policy.precision]
        self._decode = AutoTokenizer.from_pretrained(config.policy.model).decode
        no_limits = self._gate.model_copy(update={"max_mean_gap": np.inf, "max_gap": np.inf})
        self._gap = check_gate(batch, logprobs, no_limits)
        self.passed = self._gap.mean <= self._gate.max_mean_gap and self._gap.largest <= self._gate.max_gap

    @property
    def verdict(self) -> str:
        limits = f"mean {self._gate.max_mean_gap:g}, largest {self._gate.max_gap:g}"
        return f"the gap is {'within' if self.passed else 'BEYOND'} the limits of trainer.gate: {limits}"

    def gaps(self) -> Iterator[str]:
        gap, lengths = np.abs(self._logprobs.astype(np.float64) - self._theirs), self._batch.response_lengths
        yield f"compared: {len(gap)} tokens of {len(lengths)} samples, of which {int((gap > 0).sum())} differ at all"
        yield f"gap: mean {self._gap.mean:.3g} nats, largest {self._gap.largest:.3g}, KL {self._gap.kl:.3g}"
        index = np.arange(len(gap)) - np.repeat(self._batch.response_offsets[:-1], lengths)
        quarter = np.where(index > 0, index * 4 // np.repeat(lengths, lengths), -1)
        places = {-1: "first token", 0: "0–25 %", 1: "25–50 %", 2: "50–75 %", 3: "75–100 %"}
        largest = {name: gap[quarter == i].max() for i, name in places.items() if (quarter == i).any()}
        yield f"largest by position in the response: {', '.join(f'{n} {g:.3g}' for n, g in largest.items())}"
        worst = [start + int(gap[start:end].argmax()) for start, end in pairwise(self._batch.response_offsets.tolist())]
        for number, token in sorted(enumerate(worst), key=lambda item: -gap[item[1]])[:SHOWN]:
            sample, at = self._samples[number], int(index[token])
            text = np.concatenate([sample.prompt_tokens, sample.response_tokens])
            here = len(sample.prompt_tokens) + at
            parts = (text[max(0, here - 12) : here], text[here : here + 1], text[here + 1 : here + 7])
            before, token_text, after = map(self._decode, parts)
            yield (
                f"  prompt {sample.prompt_id}, response token {at}: trainer {self._logprobs[token]:.4f}, engine "
                f"{self._theirs[token]:.4f}: {f'{before}⟦{token_text}⟧{after}'!r}"
            )

    def diagnosis(self, answers: list[Answers], sums: Sums, ours: Sketches) -> Iterator[str]:
        probe = _probe(self._samples)
        for found in answers:
            if len(answers) > 1:
                yield f"{found.server}:"
            yield f"weights: {_weights(found.checksums, sums)}"
            given = found.sketches.get(layers.TOKENS) if isinstance(found.sketches, dict) else None
            same = given is not None and np.array_equal(given, probe[: len(given)]) and len(given) >= len(probe) - 1
            if isinstance(found.sketches, str) or given is None:
                yield f"prompt tokens: the engine counts {found.prompt_tokens}, we sent {len(probe)}"
                yield f"layers: not compared: {found.sketches if isinstance(found.sketches, str) else GRAPH}"
            else:
                yield f"prompt tokens: {'those that were sent' if same else self._other_tokens(given, probe)}"
                yield f"layers: {self._layers(ours, found.sketches) if same else 'not compared: the tokens differ'}"
            yield f"engine against itself: {_repeated(found.repeated)}"

    def _other_tokens(self, given: NDArray[Any], probe: Tokens) -> str:
        shared = min(len(given), len(probe))
        differing = np.flatnonzero(given[:shared] != probe[:shared])
        at = int(differing[0]) if len(differing) else shared
        theirs, ours = (repr(self._decode(tokens[at : at + 8])) for tokens in (given, probe))
        return (
            f"DIFFERENT: {len(given)} in the engine's model, {len(probe)} sent; from position {at} on {theirs} instead "
            f"of {ours}: another template, a BOS token, truncation"
        )

    def _layers(self, ours: Sketches, theirs: Sketches) -> str:
        differences = layer_differences(ours, theirs)
        names, values = [*differences], [*differences.values()]
        at = first_to_stand_out(values, self._noise)
        if not names:
            return "not compared: the engine does not call its norms as modules"
        if at is None:
            rest = "" if self.passed else "; what is left is the output layer, the temperature or the log-probs"
            return (
                f"none stands out; relative difference {values[0]:.2g} after the {names[0]}, {values[-1]:.2g} after "
                f"the {names[-1]}{rest}"
            )
        return (
            f"DIFFERENT from {names[at]} on: relative difference {values[at]:.2g}, at most "
            f"{max(values[:at], default=0.0):.2g} before it"
        )


def _weights(held: list[dict[str, str]] | str, sums: Sums) -> str:
    if isinstance(held, str):
        return f"not compared: {held}"
    found = compare(sums, held)
    if found.differing:
        shown = "; ".join(f"{name}: {wrong}" for name, wrong in [*found.differing.items()][:8])
        return f"DIFFERENT: {len(found.differing)} of {len(sums)} tensors: {shown}"
    return f"the engine holds {len(sums) - len(found.unproven)} of {len(sums)} tensors as the trainer does"


def _repeated(found: Floats | str) -> str:
    if isinstance(found, str):
        return f"not compared: {found}"
    return f"decoding and prefill of {len(found)} tokens differ by {found.mean():.3g} nats, at most {found.max():.3g}"


def layer_differences(ours: Sketches, theirs: Sketches) -> dict[str, float]:
    """Relative difference of the stream after each layer, a mean over the tokens, estimated from sketches."""
    found = {}
    for key in sorted(ours.keys() & theirs.keys(), key=lambda key: int(key) if key.isdigit() else len(ours)):
        count = min(len(ours[key]), len(theirs[key]))
        one, other = ours[key][:count], theirs[key][:count]
        distance = np.linalg.norm(one[:, 1:] - other[:, 1:], axis=1) / layers.PROJECTIONS**0.5
        name = "embedding" if key == "0" else f"layer {int(key) - 1}" if key.isdigit() else key
        found[name] = float((distance / np.maximum(one[:, 0], 1e-30)).mean())
    return found


def first_to_stand_out(differences: list[float], noise: float) -> int | None:
    for index, difference in enumerate(differences):
        if not difference <= max(noise, JUMP * max(differences[:index], default=0.0)):
            return index
    return None
