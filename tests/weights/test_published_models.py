"""Every published model of a supported family: config.json gives the stated size, a table of all tensors, a plan and a
dry run. What is not supported is refused by name."""

import json
import math
from dataclasses import replace

import pytest
from long_lists import some
from published_models import PUBLISHED, published
from sparse_model import write_sparse_model

from megatron_dapo.cli import main
from megatron_dapo.config import ConfigError, ModelShape, parse_config
from megatron_dapo.config.families import FAMILIES
from megatron_dapo.planner.hardware import Cluster, find_gpu
from megatron_dapo.planner.parameters import count_parameters
from megatron_dapo.planner.plan import make_plan
from megatron_dapo.planner.workload import Workload
from megatron_dapo.weights.mapping import hf_shapes, stored_mappings

ONE_OF_EACH = ("Qwen1.5-MoE-A2.7B", "DeepSeek-R1-Distill-Qwen-1.5B", "Qwen3-32B", "Qwen3-Next-80B-A3B", "Llama-3.2-1B",
               "Mistral-7B-v0.3")  # fmt: skip


def few_layers(shape, layers=4):
    linear = shape.linear and replace(shape.linear, layers=tuple(i for i in shape.linear.layers if i < layers))
    return replace(shape, layers=layers, linear=linear)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_size_is_the_stated_one(name):
    counted = count_parameters(published(name))
    assert counted.total / 1e9 == pytest.approx(PUBLISHED[name].billions, rel=0.01)
    if PUBLISHED[name].active:
        assert counted.active / 1e9 == pytest.approx(PUBLISHED[name].active, rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_uses_every_row_of_every_tensor_once(name):
    shape = few_layers(published(name))
    found = hf_shapes(shape)
    assert sum(math.prod(size) for size in found.values()) == count_parameters(shape).total
    for mapping in stored_mappings(shape):
        if mapping.expert:  # the first stands for all
            continue
        ends = [(s.start, s.start + s.rows) for s in mapping.segments]
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])] and ends[-1][1] == mapping.shape[0]
        for source, size in enumerate(mapping.hf_shapes):
            rows = [(s.hf_start, s.hf_start + s.rows) for s in mapping.segments_of(source)]
            assert [start for start, _ in rows] == [0, *(end for _, end in rows[:-1])] and rows[-1][1] == size[0]


def test_features_are_those_of_the_family():
    qwen15, distilled, coder = (
        published(n) for n in ("Qwen1.5-7B", "DeepSeek-R1-Distill-Qwen-1.5B", "Qwen3-Coder-480B-A35B")
    )
    assert qwen15.qkv_bias and qwen15.kv_heads == qwen15.heads and not qwen15.qk_norm
    assert not distilled.tied_embeddings and distilled.rope_theta == 1e4
    assert coder.qk_norm and coder.experts == 160 and not coder.has_shared_expert and not coder.qkv_bias
    moe, hybrid = published("Qwen2-57B-A14B"), published("Qwen3-Next-80B-A3B")
    assert moe.shared_ffn_hidden == 20480 and moe.qkv_bias and not moe.norm_topk_prob
    assert hybrid.attention_layers == 12 and hybrid.linear_layers[:4] == (0, 1, 2, 4) and hybrid.rotated == 64


@pytest.mark.parametrize("name", some(PUBLISHED, *ONE_OF_EACH))
def test_plan_and_dry_run(name, tmp_path, monkeypatch, capsys):
    config = parse_config({"policy": {"micro_batch_tokens": 16384}, "rollout": {"max_response_tokens": 2048}})
    shape = published(name)
    size = count_parameters(shape).total
    gpus = 8 if size < 1e10 else 64 if size < 3e11 else 256
    plan = make_plan(config, shape, Cluster(find_gpu("h200"), gpus, 8, 0), Workload.of(config), choose=True)
    assert plan.fits, plan.problems
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(8)))
    write_sparse_model(tmp_path / "model", PUBLISHED[name].config | {"num_hidden_layers": 4, "max_window_layers": 4})
    settings = {
        "policy.model": tmp_path / "model", "data.path": data, "trainer.run_dir": tmp_path / "run",
        "rollout.max_response_tokens": 256, "rollout.max_prompt_tokens": 256, "trainer.prompts_per_step": 4,
        "trainer.mini_batch_prompts": 4, "policy.micro_batch_tokens": 4096,
    }  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("megatron_dapo.trainer.rehearsal.CHECKED_BYTES", 1 << 24)  # all of them are zero
    (tmp_path / "run.yaml").write_text("{}")
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert main(["train", str(tmp_path / "run.yaml"), "--dry-run", *words]) == 0
    said = " ".join(capsys.readouterr().err.split())  # the console wraps long paths
    assert f"{shape.architecture}, 4 layers" in said


@pytest.mark.parametrize(
    ("architecture", "needed"),
    [
        ("Qwen2_5_VLForConditionalGeneration", "vision tower"),
        ("Qwen3VLMoeForConditionalGeneration", "three-dimensional rotary"),
        ("Qwen3OmniMoeForConditionalGeneration", "audio tower"),
        ("Qwen4ExpForCausalLM", "hyper-connections"),
        ("QWenLMHeadModel", "use Qwen1.5 or newer"),
        ("GemmaForCausalLM", "supported are LlamaForCausalLM"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(architecture, needed):
    config = PUBLISHED["Qwen3-8B"].config | {"architectures": [architecture]}
    with pytest.raises(ConfigError, match=rf"'{architecture}' is not supported.*{needed}"):
        ModelShape.from_hf(config)


def test_every_supported_architecture_is_published():
    seen = {PUBLISHED[name].config["architectures"][0] for name in PUBLISHED}
    known = {family.architecture for family in FAMILIES.values()}
    assert seen == {name for name in known if not name.startswith("Qwen3_5")}  # no published sizes at hand
