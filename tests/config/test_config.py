"""The configuration: defaults are the recipe, mistakes are errors that say what to change."""

import contextlib
import json
from dataclasses import replace

import pytest

from megatron_dapo.config import (
    Config,
    ConfigError,
    ModelShape,
    Section,
    check_config,
    dump_config,
    load_config,
    parse_config,
)  # fmt: skip
from megatron_dapo.config.explain import description, explain
from megatron_dapo.config.load import known_keys
from megatron_dapo.config.other_names import spellings
from megatron_dapo.config.schema import check_model, check_world
from megatron_dapo.selfcheck.synthetic import synthetic_shape


def test_defaults_are_the_published_recipe():
    config = Config()
    algorithm, optimizer = config.algorithm, config.policy.optimizer
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.28, 10)
    assert (algorithm.aggregation, algorithm.advantage) == ("token-mean", "group-std")
    assert algorithm.kl.coefficient == algorithm.entropy_coefficient == 0
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2) == (1e-6, 0.9, 0.999)
    assert (optimizer.weight_decay, optimizer.grad_clip, optimizer.warmup_steps) == (0.1, 1.0, 10)
    assert (config.trainer.prompts_per_step, config.rollout.samples_per_prompt) == (512, 16)
    assert config.trainer.updates_per_step == 16
    assert (config.rollout.max_prompt_tokens, config.rollout.max_response_tokens) == (2048, 20480)


def test_evaluation_uses_the_template_of_training_unless_it_has_its_own():
    trained = {"template": "chat", "system": "Be brief."}
    data = parse_config({"data": trained, "evaluate": {"data": {"path": "a.jsonl", "system": ""}}}).evaluate.data
    assert (data.template, data.system) == ("chat", "")
    config = parse_config({"data": trained})
    assert config.evaluate.data.system == "Be brief." and Config().evaluate.data.template == "dapo"
    assert config.model_dump(exclude_unset=True) == {"data": trained}


def test_overrides_replace_values_of_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("policy:\n  tensor_parallel: 4\nalgorithm:\n")
    config = load_config(
        file,
        [
            "policy.optimizer.lr=1e-5",
            "algorithm.overlong.filter=true",
            "rollout.stop=[a, b]",
            "algorithm.dual_clip=null",
        ],
    )
    assert config.policy.tensor_parallel == 4
    assert config.policy.optimizer.lr == 1e-5
    assert config.algorithm.overlong.filter is True
    assert config.rollout.stop == ["a", "b"]
    assert config.algorithm.dual_clip is None


def test_the_resolved_configuration_reads_back_as_itself(tmp_path):
    config = parse_config({"policy": {"tensor_parallel": 2}, "algorithm": {"clip_high": 0.3}})
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"policy": {"tensor_paralel": 2}}, "'policy.tensor_paralel'; did you mean 'policy.tensor_parallel'?"),
        ({"algoritm": {}}, "did you mean 'algorithm'?"),
        ({"algorithm": {"epsilon_high": 0.3}}, "here it is called 'algorithm.clip_high'"),
        ({"algorithm": {"off_policy": {"token_mask": [1.5, 2]}}}, "expected [low, high] with 0 ≤ low ≤ 1 ≤ high"),
        ({"algorithm": {"off_policy": {"product_mask": [0.5]}}}, "algorithm.off_policy.product_mask: expected"),
        ({"policy": {"lr": 1e-6}}, "did you mean 'policy.optimizer.lr'?"),
        ({"rollout": {"tensor_parallel": 2}}, "did you mean 'rollout.servers.tensor_parallel'?"),
        ({"rollout": {"temp": 1}}, "did you mean 'rollout.temperature'?"),
        ({"slurm": {"time_limit": "1:00:00"}}, "did you mean 'slurm.time'?"),
        ({"trainer": {"foo": 1}}, "unknown key 'trainer.foo'; keys of trainer: run_dir, ranks, steps, "),
        ({"algorithm": {"name": "dapo"}}, "unknown key 'algorithm.name'; keys of algorithm: preset, "),
        ({"foo": {"bar": 1}}, "unknown key 'foo'; sections: policy, rollout, "),
        ({"policy": {"tensor_parallel": "many"}}, "policy.tensor_parallel"),
        ({"policy": {"tensor_parallel": 0}}, "policy.tensor_parallel: expected a number of at least 1, found 0"),
        ({"algorithm": {"dual_clip": 1.0}}, "must be greater than 1"),
        ({"algorithm": {"clip_low": 1.2}}, "set it between 0 and 1"),
        ({"algorithm": {"clip_high": -0.1}}, "algorithm.clip_high"),
        ({"algorithm": {"aggregation": "mean"}}, "token-mean"),
        ({"trainer": {"prompts_per_step": 100, "mini_batch_prompts": 32}}, "must be a multiple of mini_batch_prompts"),
        ({"rollout": {"samples_per_prompt": 1}}, "use 2 or more"),
        ({"rollout": {"samples_per_prompt": 1}, "algorithm": {"advantage": "reinforce++"}}, "dynamic_sampling drops"),
        ({"algorithm": {"advantage": "gea"}}, "algorithm.advantage: expected group-std, group-mean, rloo, "),
        ({"algorithm": {"advantage": "rloo", "turn_credit": "turn"}}, "Remove turn_credit"),
        ({"algorithm": {"off_policy": {"normalize_weights": True}}}, "set it to token or sequence"),
        ({"algorithm": {"gae": {"lambda_policy": 2}}}, "expected a number of at most 1 or 'adaptive', found 2"),
        ({"policy": {"virtual_pipeline": 2}}, "set pipeline_parallel to 2 or more"),
        ({"policy": {"sequence_parallel": True}}, "raise tensor_parallel"),
        ({"policy": {"micro_batch_tokens": 4096}}, "raise it to at least 22528"),
        ({"policy": {"context_parallel": 2, "micro_batch_tokens": 32770}}, "multiple of 4"),
        ({"policy": {"optimizer": {"min_lr": 1.0}}}, "lower min_lr"),
        (
            {"algorithm": {"overlong": {"penalty": "soft", "max_length": 100, "cache_length": 100}}},
            "cache_length (100) must be smaller than L_max (100)",
        ),
        (
            {"rollout": {"max_response_tokens": 4096}, "algorithm": {"overlong": {"penalty": "soft"}}},
            "or every response is penalised",
        ),
        (
            {
                "rollout": {"max_response_tokens": 8000},
                "algorithm": {"overlong": {"penalty": "soft", "max_length": 20480}},
            },
            "it would never fire",
        ),
        ({"algorithm": {"overlong": {"penalty": "relative"}}}, "set algorithm.overlong.max_length below it"),
    ],
)  # fmt: skip
def test_mistakes_say_what_to_change(raw, said):
    with pytest.raises(ConfigError) as error:
        parse_config(raw)
    assert said in str(error.value)


def test_several_mistakes_are_all_named():
    with pytest.raises(ConfigError) as error:
        parse_config({"policy": {"a": 1}, "rollout": {"b": 2}})
    assert "policy.a" in str(error.value) and "rollout.b" in str(error.value)


def test_names_from_other_tools_point_to_keys_that_exist():
    assert set(spellings().values()) <= set(known_keys())


# ---- the model's shape ----

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27648,
    "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 131072,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "use_sliding_window": False,
}  # fmt: skip


def test_shape_of_qwen2_5_32b():
    shape = ModelShape.from_hf(QWEN2)
    assert (shape.architecture, shape.layers, shape.head_dim, shape.kv_heads) == ("qwen2", 64, 128, 8)
    assert shape.qkv_bias and not shape.qk_norm and not shape.tied_embeddings
    assert (shape.rope_theta, shape.norm_eps) == (1e6, 1e-5)


def test_the_rope_base_is_read_from_newer_configs():
    newer = {k: v for k, v in QWEN2.items() if k != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6}
    assert ModelShape.from_hf(newer).rope_theta == 5e6


SHAPE, HYBRID = ModelShape.from_hf(QWEN2), synthetic_shape("hybrid")


def four_heads(name, **hidden):
    return replace(synthetic_shape(name), heads=4, kv_heads=4, **hidden)


@pytest.mark.parametrize(
    ("shape", "policy", "said"),
    [
        (
            SHAPE,
            {"tensor_parallel": 3},
            "3 does not divide the model's 40 attention heads; choose one of 1, 2, 4, 5, 8",
        ),
        (SHAPE, {"tensor_parallel": 40}, r"policy: micro_batch_tokens \(32768\) must be a multiple of 40"),
        (SHAPE, {"tensor_parallel": 10, "micro_batch_tokens": 30000}, "8 key/value heads: .* one of 1, 2, 4, 8, 40"),
        (SHAPE, {"pipeline_parallel": 3}, "64 layers: choose a product among 1, 2, 4"),
        (SHAPE, {"pipeline_parallel": 8, "virtual_pipeline": 3}, "8 × 3 = 24"),
        (SHAPE, {"expert_parallel": 2}, "the model has no experts"),
        (HYBRID, {"context_parallel": 16, "precision": "fp32"}, "8 key heads, .*: choose a product among 1, 2,"),
        (HYBRID, {"tensor_parallel": 4, "precision": "fp32"}, "2 key/value heads, and Megatron cannot give one head"),
        (HYBRID, {"distributed_optimizer": False}, "gated DeltaNet layers have parameters in fp32 among those in bf16"),
        (four_heads("dense", ffn_hidden=90), {"tensor_parallel": 4}, "4, but the MLP has 90 hidden units: .* of 1, 2"),
        (four_heads("moe-shared", shared_ffn_hidden=90), {"tensor_parallel": 4}, "4, but the shared expert has 90"),
        (four_heads("moe", ffn_hidden=90), {"tensor_parallel": 4}, ""),  # no layer has that MLP
    ],
)
def test_layouts_that_the_model_cannot_have_are_refused(shape, policy, said):
    expected = pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext()
    with expected:
        check_model(parse_config({"policy": policy}).policy, shape)


def test_rank_counts_that_do_not_fit_the_layout_are_refused():
    policy = parse_config({"policy": {"tensor_parallel": 4, "pipeline_parallel": 2}}).policy
    check_world(policy, 16)
    with pytest.raises(ConfigError, match="use a multiple of 8 ranks"):
        check_world(policy, 12)
    moe = parse_config({"policy": {"expert_parallel": 8}}).policy
    with pytest.raises(ConfigError, match="a pipeline stage has 4 ranks"):
        check_world(moe, 4)


def test_the_model_directory_is_checked(tmp_path):
    with pytest.raises(ConfigError, match="is not a directory"):
        check_config(parse_config({"policy": {"model": str(tmp_path / "none")}}))
    with pytest.raises(ConfigError, match=r"config\.json not found"):
        check_config(parse_config({"policy": {"model": str(tmp_path)}}))
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | {"max_position_embeddings": 4096}))
    with pytest.raises(ConfigError, match=r"rollout\.max_response_tokens is 22528, .* has 4096 positions"):
        check_config(parse_config({"policy": {"model": str(tmp_path)}}))
    settings = {"policy": {"model": str(tmp_path)}, "rollout": {"max_prompt_tokens": 96, "max_response_tokens": 4000}}
    longer = settings | {"evaluate": {"max_response_tokens": 4001, "data": {"path": "a.jsonl"}}}
    check_config(parse_config(settings | {"evaluate": {"max_response_tokens": 4001}}))  # nothing is evaluated
    with pytest.raises(ConfigError, match=r"evaluate\.max_response_tokens is 4097, .* has 4096 positions"):
        check_config(parse_config(longer))


def test_both_names_of_the_expert_count_are_read():
    moe = QWEN2 | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "num_local_experts": 128, "head_dim": 128,
    }  # fmt: skip
    assert ModelShape.from_hf(moe).experts == 128
    with pytest.raises(ConfigError, match="'num_experts' is 64, but 'num_local_experts' is 128; remove one of them"):
        ModelShape.from_hf(moe | {"num_experts": 64})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("importance_weight", "token"),
        ("token_mask", [0.5, 2]),
        ("geometric_mask", [0.9, 1.1]),
        ("product_mask", [0, 2]),
    ],
)
def test_corrections_that_compare_old_and_engine_log_probs_recompute_the_old_ones(key, value):
    raw = {"trainer": {"prompts_per_step": 32, "mini_batch_prompts": 32}, "algorithm": {"off_policy": {key: value}}}
    assert not parse_config({"trainer": raw["trainer"]}).recomputes_old_logprobs  # one update per step
    assert parse_config(raw).recomputes_old_logprobs
    raw["trainer"]["old_logprobs"] = "engine"
    with pytest.raises(ConfigError, match=rf"algorithm.off_policy.{key} compares .* it would do nothing"):
        parse_config(raw)


def test_opsm_compares_the_current_policy_with_the_engine_and_needs_no_old_log_probs():
    raw = {"trainer": {"old_logprobs": "engine"}, "algorithm": {"off_policy": {"opsm_delta": 0.1}}}
    assert not parse_config(raw).recomputes_old_logprobs


def test_off_is_text_and_not_a_boolean(tmp_path):
    (tmp_path / "c.yaml").write_text("observe: {console: off}\nalgorithm: {overlong: {filter: true}}\n")
    config = load_config(tmp_path / "c.yaml", ["algorithm.off_policy.importance_weight=off"])
    assert config.observe.console == config.algorithm.off_policy.importance_weight == "off"
    assert config.algorithm.overlong.filter is True


def fields(section=Config, path=""):
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from fields(inner, f"{path}{name}.")
        else:
            yield f"{path}{name}", description(f"{path}{name}")


def test_every_key_is_explained():
    """Also those of sections in a list, as `data.sources.weight`."""
    assert "data.sources.weight" in known_keys()
    for key in known_keys():
        assert explain(key).startswith(f"{key}: ")


def test_every_key_is_described():
    """By a sentence that says what it does, not only what its default means: docs/configuration.md has nothing else."""
    found = dict(fields())
    assert set(found) <= set(known_keys()) and len(found) > 100
    poor = {key: said for key, said in found.items() if len(said.split()) < 4 or said.startswith(("null", "Empty"))}
    assert not poor
    assert not {key: said for key, said in found.items() if not said.endswith(".")}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfea\x00", "is not UTF-8 text (byte 0)"),
        ("trainer: {steps: true}", "trainer.steps: expected a number, found true"),
        ("rollout: {stop_token_ids: [5, false]}", "rollout.stop_token_ids: expected a number, found false"),
        ("policy: {optimizer: {lr: .inf}}", "policy.optimizer.lr: expected a finite number, found inf"),
        ("policy: {optimizer: {lr: .nan}}", "policy.optimizer.lr: expected a finite number, found nan"),
        ('rollout: {stop: [""]}', "rollout.stop.0: expected a text, found an empty one: remove it"),
        ('evaluate: {stop: [""]}', "evaluate.stop.0: expected a text, found an empty one: remove it"),
        ("policy: {model: ~nobody-of-that-name/x}", "the home directory of '~nobody-of-that-name' is not known"),
        ("trainer: {run_dir: true}", "trainer.run_dir: expected text, found True; put it in quotes"),
        ("policy: {optimizer: {lr: -1e-6}}", "policy.optimizer.lr"),
        ("rollout: {temperature: .inf}", "rollout.temperature: expected a finite number"),
        ("rollout: {stop_token_ids: [-1]}", "rollout.stop_token_ids"),
        ("evaluate: {stop_token_ids: [-1]}", "evaluate.stop_token_ids"),
        ("evaluate: {pass_at: [true]}", "evaluate.pass_at: expected a number, found true"),
        ("trainer: 5", "trainer: expected a section with its own keys, found 5"),
        ("1: 2", "Keys should be strings"),
        ("trainer: {steps: 1.5}", "trainer.steps: expected a whole number, found 1.5"),
        ("trainer: {steps: abc}", "trainer.steps: expected a whole number, found 'abc'"),
        ("data: {too_long: all}", "data.too_long: expected 'drop' or 'cut-left', found 'all'"),
        ("a: &a [*a]", "its aliases (*name) expand to more than"),
    ],
)
def test_bad_files_are_one_line(tmp_path, content, said):
    file = tmp_path / "c.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert said in str(error.value) and "\n" not in str(error.value) and str(file) in str(error.value)


def test_text_keys_take_a_value_as_it_is_written(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("trainer: {run_dir: 007}\nslurm: {memory: 0, environment: {A: 1e5}}\nrollout: {stop: [1.50]}\n")
    config = load_config(file)
    assert (config.trainer.run_dir, config.slurm.memory, config.rollout.stop) == ("007", "0", ["1.50"])
    assert config.slurm.environment == {"A": "1e5"}
    overrides = [
        "trainer.run_dir=1e5",
        "data.template={question} = ?",
        "policy.megatron_checkpoint=null",
        "data.path=on",
    ]
    texts = ("a #b.jsonl", "#b.jsonl", "x: y", '"a": "b"', "&a", "*.jsonl", "[ab]*.jsonl", "'it's'.jsonl", "two\nlines")
    for text in texts:
        assert load_config(None, [f"data.path={text}", f"policy.model={text}"]).data.path == text
    sources = load_config(None, ["data.path=[a, 'b #c']"]).data.sources
    assert [source.path for source in sources] == ["a", "b #c"]
    assert load_config(None, ["trainer.run_dir='a #b'"]).trainer.run_dir == "a #b"
    config = load_config(file, overrides)
    assert (config.trainer.run_dir, config.data.template, config.data.path) == ("1e5", "{question} = ?", "on")
    assert config.policy.megatron_checkpoint is None
    file.write_text(dump_config(config))
    assert load_config(file) == config


def test_numbers_are_plain_numbers(tmp_path):
    config = load_config(None, ["trainer.steps=010", "policy.optimizer.lr=1e-5", "trainer.prompts_per_step=0x40"])
    assert (config.trainer.steps, config.policy.optimizer.lr, config.trainer.prompts_per_step) == (10, 1e-5, 64)
    assert type(config.trainer.steps) is int and type(config.policy.optimizer.lr) is float


def test_the_home_directory_is_expanded_in_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    keys = ["policy.model", "policy.megatron_checkpoint", "data.path", "evaluate.data.path", "trainer.run_dir",
            "rollout.servers.python", "rollout.weights.directory", "slurm.python"]  # fmt: skip
    config = load_config(None, [f"{key}=~/x" for key in keys]).model_dump()
    for key in keys:
        value = config
        for part in key.split("."):
            value = value[part]
        assert value == "/home/me/x", key


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe\xfa", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"[]", "expected a JSON object, found list"),
        ({"num_hidden_layers": "three"}, "'num_hidden_layers' must be a positive integer (found 'three')"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' must be a positive integer (found True)"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": 51.2}, "'hidden_size' must be a positive integer (found 51.2)"),
        ({"hidden_size": -1}, "'hidden_size' must be a positive integer (found -1)"),
        ({"vocab_size": 0}, "'vocab_size' must be a positive integer (found 0)"),
        ({"num_attention_heads": []}, "'num_attention_heads' must be a positive integer (found [])"),
        ({"num_key_value_heads": 7}, "num_attention_heads (40) must be a multiple of num_key_value_heads (7)"),
        ({"rope_theta": "1e6"}, "'rope_theta' must be a positive number (found '1e6')"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' must be a positive float (found -1)"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' must be true or false (found 'no')"),
        ({"rope_scaling": "yarn"}, "must be objects (found 'yarn')"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope type 'longrope' is not supported in training"),
        ({"rope_scaling": {"type": "yarn"}}, "'factor' of rope type 'yarn' must be a positive number (found None)"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": "x"}}, "'beta_fast' of rope type 'yarn' must be"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "'rope_theta' is 1000000.0, but 5.0 in 'rope_parameters'; remove"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"factor": 2.0}}, "remove one of them"),
        ({"hidden_size": 1}, "'head_dim' must be a positive integer (found 0)"),
        ({"is_causal": False}, "is_causal is False; qwen2 is supported with True only"),
        ({"model_type": "llama"}, "architecture 'Qwen2ForCausalLM' of model_type 'llama' is not supported"),
        ({"architectures": ["GemmaForCausalLM"]}, "architecture 'GemmaForCausalLM' is not supported"),
        ({"architectures": "GemmaForCausalLM"}, "architecture 'GemmaForCausalLM' is not supported"),
        ({"architectures": [3]}, "architecture 3 is not supported"),
        ({"architectures": 5}, "is not supported"),
        ({"architectures": None}, "is not supported"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_a_config_json_that_cannot_be_used_is_one_line(tmp_path, content, said):
    """Damaged, with wrong types, or of a model that is not supported."""
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(QWEN2 | content).encode())
    with pytest.raises(ConfigError) as error:
        ModelShape.from_dir(tmp_path)
    assert said in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_gspo_has_its_published_settings_by_default():
    gspo = parse_config({"algorithm": {"objective": "gspo"}})
    found = gspo.algorithm
    assert (found.clip_low, found.clip_high, found.dual_clip) == (3e-4, 4e-4, None)
    assert found.aggregation == "seq-mean-token-mean"
    assert gspo.warnings == []
    assert parse_config(gspo.model_dump(mode="json")) == gspo
    dapo = parse_config({"algorithm": {"objective": "dapo"}}).algorithm
    assert (dapo.clip_low, dapo.clip_high, dapo.dual_clip, dapo.aggregation) == (0.2, 0.28, 10.0, "token-mean")


def test_cispo_has_no_lower_bound_and_a_wide_upper_one_by_default():
    found = parse_config({"algorithm": {"objective": "cispo"}}).algorithm
    assert (found.clip_low, found.clip_high, found.dual_clip, found.aggregation) == (1.0, 4.0, None, "token-mean")
    assert parse_config({"algorithm": {"objective": "cispo", "clip_high": 0.5}}).algorithm.clip_high == 0.5


def test_settings_that_do_not_belong_to_gspo_are_kept_and_named():
    own = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0, "aggregation": "token-mean"}
    config = parse_config({"algorithm": {"objective": "gspo", **own}})
    assert {name: getattr(config.algorithm, name) for name in own} == own
    assert [line.split()[0] for line in config.warnings] == [
        "algorithm.clip_low", "algorithm.clip_high", "algorithm.aggregation", "algorithm.dual_clip",
    ]  # fmt: skip
    assert "0.28, which is meant for the ratio of a token" in config.warnings[1]


@pytest.mark.parametrize(
    ("raw", "warned"),
    [
        ({"rollout": {"max_staleness": 4}}, True),
        ({"rollout": {"max_staleness": 1}}, False),
        ({"rollout": {"max_staleness": 4}, "algorithm": {"off_policy": {"importance_weight": "token"}}}, False),
        ({"rollout": {"max_staleness": 4}, "algorithm": {"off_policy": {"opsm_delta": 0.1}}}, False),
        ({"rollout": {"max_staleness": 4}, "trainer": {"old_logprobs": "engine"}}, False),
    ],
)
def test_stale_batches_without_a_correction_are_named(raw, warned):
    trainer = {"prompts_per_step": 32, "mini_batch_prompts": 16} | raw.get("trainer", {})
    found = parse_config(raw | {"trainer": trainer}).warnings
    assert len(found) == warned and all("importance_weight: token" in line for line in found)


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_rollouts_from_a_part_of_the_vocabulary_are_refused(key):
    with pytest.raises(ConfigError, match=rf"rollout.{key}.*rollouts are sampled from the whole vocabulary"):
        parse_config({"rollout": {key: 0.95}})


SECRETS_IN_PLAIN_SIGHT = [
    ("rollout.servers.urls", "['http://me:hunter2@host:80']"), ("rollout.servers.urls", "['me:hunter2@host:80']"),
    ("rollout.servers.urls", "http://me:hunter2@host:80"), ("rollout.servers.urls", "[http://me:hunter2@host"),
    ("rollout.servers.urls", "['http://host/?api_key=hunter2']"), ("rollout.servers.router_url", "http://me:hunter2@h"),
    ("rollout.servers.arguments", "[--api-key, hunter2]"), ("rollout.servers.arguments", "[--api-key=hunter2]"),
    ("rollout.servers.arguments", "[--api-k, hunter2]"), ("rollout.servers.arguments", "[--admin-api-key, hunter2]"),
    ("rollout.servers.arguments", "[--ssl-keyfile-password=hunter2]"),
    ("rollout.servers.arguments", "--api-key=hunter2"),
    ("rollout.servers.arguments", "[--dist-init-addr, 'tcp://me:hunter2@h']"),
    ("reward.judge.urls", "['https://me:hunter2@host/v1']"), ("reward.judge.urls", "['https://h/v1?x=1&token=hunter2']"),
    ("reward.http.urls", "['ftp://hunter2@host']"), ("algorithm.distillation.urls", "['http://hunter2@host']"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), SECRETS_IN_PLAIN_SIGHT)
def test_keys_and_passwords_are_refused_and_not_printed(key, value):
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"{key}={value}"])
    assert "hunter2" not in str(error.value) and key.rpartition(".")[0] in str(error.value)
    if value.startswith(("['", "[--a", "[--s")):
        assert "api_key_env" in str(error.value), "the right place is named"


def test_arguments_and_addresses_without_secrets_are_kept():
    arguments = "[--ssl-keyfile, /k, --max-total-tokens, '9', --tokenizer-path, /t, --skip-tokenizer-init]"
    config = load_config(
        None, [f"rollout.servers.arguments={arguments}", "rollout.servers.urls=['http://h:1/a@b?x=2']"]
    )
    assert len(config.rollout.servers.arguments) == 7 and config.rollout.servers.urls == ["http://h:1/a@b?x=2"]


def test_dense_layers_of_a_moe_model_are_not_served_by_sglang(tmp_path):
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "max_position_embeddings": 32768,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}))
    settings = {"policy": {"model": str(tmp_path)}, "rollout": {"engine": "embedded"}}
    assert check_config(parse_config(settings)).dense_layers == (0, 1, 2)
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        check_config(parse_config(settings | {"rollout": {"engine": "sglang"}}))
    (tmp_path / "config.json").write_text(json.dumps(config | {"decoder_sparse_step": 9}))
    assert not check_config(parse_config(settings)).is_moe  # no layer has experts
