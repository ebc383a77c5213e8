"""`rollout`: how responses are sampled, and the engines that generate them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PrivateAttr, field_validator

from megatron_dapo.config.base import Address, NonEmptyText, PathText, Section, TokenId, hide_secrets, is_secret
from megatron_dapo.config.policy import LoraConfig

PauseMode = Literal["abort", "retract", "in_place"]  # SGLang's names

# The default of rollout.servers.sample_timeout: a fixed part for queueing, and a rate that no working server is below.
SAMPLE_SECONDS, SLOWEST_TOKENS_PER_SECOND = 300.0, 5.0


class EmbeddedConfig(Section):
    """The engine inside the trainer's process: transformers on the CPU, for small models and tests."""

    batch_tokens: int = Field(64, ge=32, le=1024, multiple_of=32)
    """Tokens computed in one forward pass; also the most requests that run at a time."""
    prompt_cache: int = Field(64, ge=0)
    """Prompts whose keys and values are kept until the weights change."""
    _exact: bool = PrivateAttr(False)  # policy.true_on_policy; set while a configuration is validated

    @property
    def exact(self) -> bool:
        """The engine's log-probs are those of the trainer, bit for bit (policy.true_on_policy)."""
        return self._exact


def is_source(url: str) -> bool:
    """Whether it names servers that may come and go, and is not the address of one."""
    return url.startswith(("file://", "dns://", "listen://"))


class ServerDemands(NamedTuple):
    """What other sections ask of the servers, which are started with section `rollout.servers` alone."""

    returns_experts: bool = False  # of each token (policy.routing_replay: engine)
    loads_packed_experts: bool = False  # the experts of a layer at once (rollout.weights.pack_experts)
    computes_checksums: bool = False  # of the weights that they were sent (rollout.weights.proof: checksum)
    exact: bool = False  # they compute with the trainer's kernels (policy.true_on_policy)
    lora: LoraConfig = LoraConfig()  # the adapters that they load (rollout.weights.transport: adapter); rank 0: none
    first_gpu: int = 0  # behind those of the trainer, where they have GPUs of their own


class ServerConfig(Section):
    """SGLang servers: external ones by URL, or servers that this run starts and restarts."""

    urls: list[Address] = Field(default_factory=list)
    """External servers; empty: start `count` servers. An entry is an address (http://host:port), or it names servers
    that may come and go: file:///path (one address per line), dns://name:port (all of its addresses),
    listen://host:port (POST /servers; needs api_key_env)."""
    router_url: Address | None = None
    """sglang-router in front of them; it gets the generate requests."""
    count: int = Field(1, ge=1)
    """Servers to start on this node."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of each server (SGLang's --tp-size); the model must fit on them."""
    share_gpus: bool = False
    """Engines and trainer are colocated on the same GPUs: engines release weights and KV cache while the trainer works,
    and the trainer's state is offloaded to host memory while they generate."""
    share_base: bool = False
    """With LoRA (weights.transport: adapter), one rank and one server on one GPU: the trainer computes with the
    server's copy of the frozen base, and both keep their memory. Such a server is not restarted."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the servers that this run starts; cpu is for tests with small models."""
    model: PathText = ""
    """HF directory that servers are started with; empty: policy.model. It may be quantised, see
    weights.quantization."""
    python: PathText = ""
    """The Python that has sglang installed; empty: the one that runs this."""
    host: str = "127.0.0.1"
    """Interface to bind to; anything but loopback needs api_key_env."""
    port: int = Field(30000, ge=1024, le=65535)
    """First port; a port in use is skipped."""
    dtype: str = "auto"
    """SGLang's --dtype, e.g. bfloat16 or float32; auto: as the model's config.json says."""
    arguments: list[str] = Field(default_factory=list)
    """More arguments for sglang.launch_server."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables for the servers, e.g. NCCL_* or SGLANG_*."""
    api_key_env: str | None = None
    """Environment variable that holds the API key; null: started servers get a random key."""
    admin_key_env: str | None = None
    """Environment variable that holds the admin API key."""
    max_running: int = Field(256, ge=1)
    """Most requests in flight on one server."""
    start_timeout: float = Field(900.0, gt=0)
    """How long to wait for a server to start, in seconds."""
    sample_timeout: float | None = Field(None, gt=0)
    """Seconds for one sample on one server; then it is sent to another one. null: 300 s plus 0.2 s per token of the
    longest response."""
    control_timeout: float = Field(60.0, gt=0)
    """Seconds for any call other than a sample or a weight update."""
    heartbeat: float = Field(5.0, gt=0)
    """Seconds between two checks of a server."""
    health_interval: float = Field(60.0, gt=0)
    """Seconds without a completed sample after which a server must prove that it still generates."""
    attempts: int = Field(4, ge=1)
    """Tries of one request before it fails, each on another server if possible."""
    restarts: int = Field(3, ge=0)
    """How often one server is restarted after a failure."""
    restart_recovery: float = Field(1800.0, gt=0)
    """Seconds of service that restore one restart."""

    _demands: ServerDemands = PrivateAttr(ServerDemands())

    @property
    def server_count(self) -> int:
        return len(self.urls) or self.count

    @property
    def addresses(self) -> list[str]:
        """Of the external servers that never change."""
        return [url for url in self.urls if not is_source(url)]

    @property
    def need_own_gpus(self) -> bool:
        """They neither take turns with the trainer nor leave it memory: SGLang takes nearly all of a GPU."""
        limited = any(argument.startswith("--mem-fraction-static") for argument in self.arguments)
        return not self.share_gpus and not limited

    @property
    def demands(self) -> ServerDemands:
        return self._demands

    def demand(self, **changes: Any) -> None:
        """Only while a configuration is validated, and before a run starts."""
        self._demands = self._demands._replace(**changes)

    def sample_seconds(self, tokens: int) -> float:
        """How long one server may take for a sample of at most `tokens` tokens."""
        return self.sample_timeout or SAMPLE_SECONDS + tokens / SLOWEST_TOKENS_PER_SECOND

    @field_validator("arguments")
    @classmethod
    def _no_keys(cls, arguments: list[str]) -> list[str]:
        for argument in arguments:
            option = argument.split("=")[0].lstrip("-")
            # argparse takes every beginning of --api-key and --admin-api-key.
            if argument.startswith("-") and (is_secret(option) or option.startswith(("api", "admin"))):
                raise ValueError(
                    f"{argument.split('=')[0]} would be written to the run directory and shown by ps: name the "
                    "environment variable that holds the key in api_key_env or admin_key_env"
                )
            if hide_secrets(argument) != argument:
                raise ValueError("an argument holds a password, which would be written to the run directory")
        return arguments

    def check(self) -> None:
        if self.host not in ("127.0.0.1", "localhost", "::1") and not self.api_key_env:
            raise ValueError(
                f"host is {self.host}: a server that others can reach needs a key: set api_key_env, or 127.0.0.1"
            )
        if self.router_url and not self.urls:
            raise ValueError("router_url needs urls: weights and aborts go to the servers themselves, not the router")
        for url in self.urls:
            if url.startswith("listen://") and not self.api_key_env:
                raise ValueError(f"{url} lets others add servers, which needs a key: set api_key_env")
            if is_source(url) and self.share_gpus:
                raise ValueError(f"{url} names servers that come and go, which share_gpus does not allow")


Senders = Literal["one", "stage", "expert_group"]
Quantization = Literal["none", "fp8"]


class WeightTransportConfig(Section):
    """How new weights get to the engines, and how that is verified."""

    transport: Literal["disk", "tensor", "distributed", "adapter"] = "disk"
    """disk: files that both sides can read. tensor: memory on the same host (CUDA IPC); with share_gpus also on several
    nodes. distributed: NCCL or gloo, to GPUs that the trainer does not use. adapter: only LoRA's adapter, to servers
    that go on generating (docs/lora.md)."""
    directory: PathText = "/dev/shm"
    """Where disk updates (and snapshots) are written."""
    keep_snapshot: bool = True
    """Also write tensor and distributed updates to `directory`, for servers that are restarted: at the speed of the bus
    on a RAM disk, elsewhere from a copy in host memory while training goes on."""
    backend: Literal["nccl", "gloo"] = "nccl"
    """Backend of the distributed transport: nccl between GPUs, gloo between CPUs."""
    master_address: str = "127.0.0.1"
    """Address of this process for the servers (distributed)."""
    senders: Senders = "one"
    """Which ranks send weights (distributed), or pass them to other nodes (tensor). one: rank 0. stage: the first rank
    of each pipeline stage. expert_group: also the first rank of each expert-parallel group."""
    quantization: Quantization = "none"
    """fp8: the sender quantises the matrices of attention and MLP in blocks of 128 × 128, as the Qwen FP8 checkpoints
    have them, and sends half of the bytes; servers.model must be such a checkpoint."""
    pack_experts: bool = False
    """MoE models: send the experts of a layer as few large tensors (tensor, distributed). SGLang spends seconds on the
    names of thousands of expert tensors. External servers need --custom-weight-loader megatron_dapo_experts.install."""
    bucket_bytes: int = Field(512 << 20, gt=0)
    """Largest size of one bucket of tensors. A sender needs memory for two."""
    timeout: float = Field(600.0, gt=0)
    """Seconds for one weight update call."""
    in_flight: bool = True
    """With max_staleness above 0. true: weights change while requests run; their next tokens come from the new weights.
    false: a new version waits until the batches that max_staleness admits are complete, so timing does not change a
    batch (exact resume with a deterministic engine), but engines wait for the trainer."""
    pause_mode: PauseMode = "abort"
    """Running requests while weights change. abort: they return what they have and are sent again; works with every
    server. retract: they stay in the server, which computes their KV cache again. in_place: they keep the KV cache of
    the older weights, which is fastest, but later log-probs are of neither version."""
    proof: Literal["checksum", "probe", "version"] = "checksum"
    """Checked besides the version that a server reports. checksum: the memory of every server has the checksum of every
    tensor that was sent; external servers need --custom-weight-loader megatron_dapo_checksums.install
    megatron_dapo_checksums.record_again, otherwise they are probed. probe: the servers agree on the log-probs of a
    fixed text. version: nothing more."""

    def check(self) -> None:
        if self.senders != "one" and self.keep_snapshot and self.transport != "disk":
            raise ValueError(
                f"senders is {self.senders} and keep_snapshot is true, but no rank has all weights: set keep_snapshot "
                "to false (a restarted server then gets its weights with the next update), or senders to one"
            )

    @property
    def writes_files(self) -> bool:
        """Whether versions are written to `directory`."""
        return self.transport == "disk" or (self.keep_snapshot and self.transport != "adapter")

    @property
    def flushes_cache(self) -> bool:
        """in_place: running requests hold the KV cache of the older weights, and SGLang refuses to flush it."""
        return self.pause_mode != "in_place"


class SamplerConfig(Section):
    """Dynamic sampling: which groups make a batch, and what happens to the rest."""

    oversampling: Literal["adaptive"] | Annotated[float, Field(ge=1)] = "adaptive"
    """Groups in flight for each missing group. adaptive: a margin ÷ the expected yield, and with unfinished: continue
    no more than the engines can run at a time. The paper uses 3, in waves of 512."""
    order: Literal["completion", "prompt"] = "completion"
    """completion: the first groups to finish fill the batch (faster, but prefers short responses). prompt: groups are
    taken in the order of their prompts, so timing does not change the batch."""
    fill: Literal["full", "dynamic"] = "full"
    """full: sample until the batch is full. dynamic: stop once kept and dropped groups together reach the batch size,
    and train on the kept ones."""
    max_generation_batches: int | None = Field(10, ge=1)
    """Limit on prompts per step, in batches of oversampling × prompts_per_step (adaptive counts as 1); null: no
    limit."""
    on_limit: Literal["train", "fill", "stop"] = "train"
    """At the limit: train on the kept groups, fill the batch with dropped ones, or stop the run (the kept groups are
    saved and count when it resumes)."""
    unfinished: Literal["continue", "finish", "restart", "drop"] = "continue"
    """Samples that are running when the batch is full. continue: abort them and continue in the next step with the new
    weights (partial rollouts). finish: wait for them. restart: sample them again from the start in the next step. drop:
    discard them."""
    surplus: Literal["keep", "drop"] = "keep"
    """Kept groups beyond the batch: keep them for the next step, or drop them."""
    max_carryover_staleness: int = Field(1, ge=0)
    """How many weight versions older than the trained policy a carried-over token may be."""
    give_up_after: int | None = Field(None, ge=2)
    """Reject a group as soon as its first N samples (by index) are all correct or all wrong, and abort its other
    samples. Saves tokens, but also rejects groups that would have been informative, mostly very easy and very hard
    ones. Needs group_filter: accuracy. null: decide when all samples are graded."""
    max_failed_groups: Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] = 8
    """Groups that may fail in one step before the run stops; below 1: as a share of the batch."""
    stall_timeout: float = Field(7200.0, gt=0)
    """Seconds in which at least one sample must finish."""


class RolloutConfig(Section):
    engine: Literal["embedded", "sglang"] = "sglang"
    """embedded: transformers in this process (CPU, tests). sglang: SGLang servers."""
    samples_per_prompt: int = Field(16, ge=1)
    """G: responses per prompt."""
    max_prompt_tokens: int = Field(2048, gt=0)
    """Longest prompt, in tokens; data.too_long decides about longer ones."""
    max_response_tokens: int = Field(20480, gt=0)
    """Longest response, in tokens; one that reaches it ends there and counts as truncated. In a conversation:
    everything after the prompt."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits while sampling. The trainer divides its own by it as well: log-probs, ratios and
    entropy are those at this temperature."""
    stop: list[NonEmptyText] = Field(default_factory=list)
    """Strings that end a response, besides the model's own end tokens."""
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    """Tokens that end a response, besides the model's own."""
    generate: str | None = None
    """python:module.function: a custom rollout, with several turns, tools or an environment
    (docs/rollouts_of_your_own.md). null: a response is one generated turn."""
    generate_settings: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function of rollout.generate as its settings."""
    dynamic_sampling: bool = True
    """Drop groups that group_filter rejects, and sample others."""
    group_filter: str = "accuracy"
    """accuracy: keep groups with 0 < correct < G. reward-range: keep groups whose scores differ.
    python:module.function: a custom filter, Group -> (keep, reason) or bool."""
    max_staleness: int = Field(0, ge=0)
    """How many weight versions older than the trained policy a token may be. 0: on-policy, engines and trainer take
    turns. Above 0: engines generate the next batches while the trainer trains."""
    sampler: SamplerConfig = SamplerConfig()
    embedded: EmbeddedConfig = EmbeddedConfig()
    servers: ServerConfig = ServerConfig()
    weights: WeightTransportConfig = WeightTransportConfig()

    @property
    def in_flight(self) -> bool:
        """Whether engines are generating while their weights change."""
        return self.max_staleness > 0 and self.weights.in_flight

    @property
    def staleness_limit(self) -> int:
        """How many weight versions older than the trained policy a token may be, also if its group was carried over."""
        return max(self.max_staleness, self.sampler.max_carryover_staleness)

    @property
    def shares_gpus(self) -> bool:
        return self.engine == "sglang" and self.servers.share_gpus

    @property
    def engines_read_memory(self) -> bool:
        """Whether engines read weights from the memory of a rank on their own node."""
        return self.engine == "sglang" and self.weights.transport == "tensor"

    @property
    def sends_adapters(self) -> bool:
        """Whether engines get LoRA's adapters beside the base, instead of merged weights."""
        return self.engine == "sglang" and self.weights.transport == "adapter"

    @property
    def shares_base(self) -> bool:
        """Whether the trainer computes with the frozen base in a server's memory."""
        return self.engine == "sglang" and self.servers.share_base

    @property
    def broadcasts_weights(self) -> bool:
        return self.engine == "sglang" and self.weights.transport == "distributed"

    def check(self) -> None:
        if self.servers.share_gpus and self.max_staleness:
            raise ValueError(
                "servers.share_gpus is on and max_staleness is above 0: engines cannot generate while the trainer uses "
                "their GPUs; change one of the two"
            )
        if self.shares_gpus and self.weights.transport == "distributed" and self.weights.backend == "nccl":
            raise ValueError(
                "servers.share_gpus is on and weights.transport is distributed: trainer and engine would be two ranks "
                "of one NCCL communicator on one GPU, which NCCL refuses; use tensor (CUDA IPC), or disk"
            )
        weights = self.weights
        if weights.transport == "tensor" and any(is_source(url) for url in self.servers.urls):
            raise ValueError(
                "weights.transport is tensor, which needs to know the node of every server, but servers.urls names "
                "servers that come and go: use disk or distributed"
            )
        merged = not self.sends_adapters
        self.servers.demand(
            loads_packed_experts=weights.pack_experts and weights.transport != "disk" and merged,
            computes_checksums=weights.proof == "checksum" and merged,
        )
        if not merged:
            self._check_adapters()
        if weights.quantization != "none" and (not self.servers.model or self.engine != "sglang"):
            raise ValueError(
                f"weights.quantization is {weights.quantization}: it needs engine sglang and servers.model (an fp8 "
                "checkpoint, see megatron-dapo convert hf-to-fp8)"
            )
        after = self.sampler.give_up_after
        if after is not None and self.group_filter != "accuracy":
            raise ValueError(
                f"sampler.give_up_after needs group_filter: accuracy, found {self.group_filter}; a custom "
                "filter can have its own reject_early (docs/rollout.md)"
            )
        if after is not None and after >= self.samples_per_prompt:
            raise ValueError(
                f"sampler.give_up_after is {after}: it must be less than samples_per_prompt ({self.samples_per_prompt})"
            )

    def _check_adapters(self) -> None:
        refused = {
            "servers.share_gpus": (self.servers.share_gpus, "a server that releases its memory loses the base"),
            "servers.router_url": (self.servers.router_url, "each server's requests must be known to unload adapters"),
            "servers.model": (self.servers.model, "adapters are added to policy.model"),
            "weights.quantization": (self.weights.quantization != "none", "adapters are not quantised"),
        }
        for key, (found, why) in refused.items():
            if found:
                raise ValueError(f"weights.transport is adapter, which {key} does not allow: {why}")
