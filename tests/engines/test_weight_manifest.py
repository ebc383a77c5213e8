"""Which tensors an update must contain, for models whose files have more than what is trained."""

import json

import torch
from safetensors.torch import save_file

from megatron_dapo.engines.sglang.transports import WeightManifest

EXPERTS = "model.language_model.layers.0.mlp.experts"


def write(folder, **config):
    tensors = {
        "model.language_model.norm.weight": torch.zeros(4),
        f"{EXPERTS}.gate_up_proj": torch.zeros(2, 6, 4),
        f"{EXPERTS}.down_proj": torch.zeros(2, 4, 3),
        "model.visual.patch_embed.proj.weight": torch.zeros(3, 3),
        "mtp.fc.weight": torch.zeros(2, 2),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def test_what_is_never_synced_is_not_missing_and_experts_have_names(tmp_path):
    write(tmp_path, architectures=["Qwen3_5MoeForConditionalGeneration"], text_config={"tie_word_embeddings": True})
    manifest = WeightManifest(tmp_path)
    manifest.begin()
    update = {"model.language_model.norm.weight": (4,), "lm_head.weight": (5, 4)}
    for expert in (0, 1):
        update |= {f"{EXPERTS}.{expert}.{kind}_proj.weight": (3, 4) for kind in ("gate", "up")}
        update |= {f"{EXPERTS}.{expert}.down_proj.weight": (4, 3)}
    for name, shape in update.items():
        assert manifest.check([(name, torch.zeros(shape))]) == ""
    assert manifest.missing() == ""
    manifest.begin()
    assert manifest.missing().startswith("7 tensors are missing")
    assert manifest.check([("mtp.fc.weight", torch.zeros(2, 2))]) == "the model has no tensor 'mtp.fc.weight'"
    assert "has shape (4, 4)" in manifest.check([(f"{EXPERTS}.1.up_proj.weight", torch.zeros(4, 4))])


def test_other_models_need_all_of_their_tensors(tmp_path):
    write(tmp_path, architectures=["Qwen2ForCausalLM"])
    manifest = WeightManifest(tmp_path)
    assert manifest.missing().startswith("9 tensors are missing")
