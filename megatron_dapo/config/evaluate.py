"""`evaluate`: the benchmarks, the number of responses per problem, and how they are sampled."""

from __future__ import annotations

from pydantic import Field, model_validator

from megatron_dapo.config.base import NonEmptyText, Section
from megatron_dapo.config.data import PromptFileConfig, SourceConfig, check_sources, files_of


class EvalSourceConfig(SourceConfig):
    """One of several benchmarks. Null: the setting of `evaluate.data`."""

    samples: int | None = Field(None, ge=1, description="Responses per problem; null: evaluate.samples.")


class EvalDataConfig(PromptFileConfig):
    """One benchmark (`path`), or several (`sources`), each with metrics of its own: `eval/NAME/avg@k`."""

    sources: list[EvalSourceConfig] = Field(
        default_factory=list, description="Several benchmarks instead of `path`; all are evaluated."
    )

    @model_validator(mode="after")
    def _files(self) -> EvalDataConfig:
        check_sources(self.path, self.sources)
        return self

    @property
    def files(self) -> dict[str, PromptFileConfig]:
        """Every benchmark by its name in metrics; empty if none is named."""
        return files_of(self, self.sources)


class EvalConfig(Section):
    data: EvalDataConfig = EvalDataConfig()
    every: int = Field(5, ge=0, description="Evaluate after every this many training steps; 0: never.")
    samples: int = Field(32, ge=1, description="k: responses per problem, for avg@k, pass@k and maj@k.")
    temperature: float = Field(
        1.0,
        ge=0,
        description="As rollout.temperature; 0: always the most likely token, so samples: 1 is enough.",
    )
    top_p: float = Field(
        0.7, gt=0, le=1, description="As rollout.top_p; the published AIME scores were sampled with 0.7."
    )
    top_k: int = Field(-1, ge=-1, description="As rollout.top_k; -1: all tokens.")
    stop: list[NonEmptyText] | None = Field(None, description="Strings that end a response; null: rollout.stop.")
    max_response_tokens: int | None = Field(
        None, gt=0, description="Longest response, in tokens; null: rollout.max_response_tokens."
    )
    concurrency: int = Field(512, ge=1, description="Responses generated at one time.")
    confidence: float = Field(0.95, gt=0, lt=1, description="Confidence level of the interval of avg@k.")
    pass_at: list[int] = Field(
        default_factory=list, description="The k of pass@k; empty: the powers of two up to samples."
    )

    def for_set(self, name: str) -> EvalConfig:
        """The settings of one benchmark: its own number of samples, and the k of pass@k that it allows."""
        samples = {source.label: source.samples for source in self.data.sources}.get(name) or self.samples
        return self.model_copy(update={"samples": samples, "pass_at": [k for k in self.pass_at if k <= samples]})

    def metric_prefix(self, name: str) -> str:
        """`eval/`, or `eval/NAME/` where there are several benchmarks."""
        return f"eval/{name}/" if self.data.sources else "eval/"

    @property
    def pass_at_values(self) -> list[int]:
        if self.pass_at:
            return sorted(set(self.pass_at))
        powers = [2**i for i in range(self.samples.bit_length()) if 2**i < self.samples]
        return [*powers, self.samples]

    @model_validator(mode="after")
    def _enough_samples(self) -> EvalConfig:
        most = max([self.samples, *(source.samples or 0 for source in self.data.sources)])
        for k in self.pass_at:
            if not 1 <= k <= most:
                raise ValueError(f"pass_at has {k}, but needs 1 ≤ k ≤ samples ({most}): raise samples")
        return self
