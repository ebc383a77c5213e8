"""Model directories and checkpoints are checked from their headers: the error names what is missing or wrong."""

import json
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata

from megatron_dapo.config import ConfigError, ModelShape
from megatron_dapo.errors import UserError
from megatron_dapo.weights.convert import hf_to_megatron
from megatron_dapo.weights.formats import readers
from megatron_dapo.weights.formats.megatron_reader import open_megatron
from megatron_dapo.weights.locate import check_model_directory
from megatron_dapo.weights.verify import verify

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def sharded(copy_of):
    """A model in three files with an index."""
    folder = copy_of("qwen2")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{i % 3 + 1}-of-3.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: t for name, t in tensors.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def test_a_complete_directory_gives_its_shape_without_reading_tensors(sharded, monkeypatch):
    monkeypatch.setattr(readers, "map_file", lambda path: pytest.fail("a weight file was mapped"))
    monkeypatch.setattr(readers.mmap, "mmap", lambda *_, **__: pytest.fail("a weight file was mapped"))
    assert check_model_directory(sharded) == ModelShape.from_dir(sharded)


def test_a_model_directory_is_checked_converted_and_compared_without_torch(sharded, tmp_path):
    """Its import takes longer than the conversion of a small model; that of the whole configuration half as long."""
    script = f"""if True:
        import sys
        from megatron_dapo.cli import main
        from megatron_dapo.weights.locate import check_model_directory
        check_model_directory({str(sharded)!r})
        assert main(["convert", "hf-to-megatron", {str(sharded)!r}, "{tmp_path}/megatron"]) == 0
        assert main(["convert", "megatron-to-hf", "{tmp_path}/megatron", "{tmp_path}/hf"]) == 0
        assert main(["convert", "verify", {str(sharded)!r}, "{tmp_path}/megatron"]) == 0
        assert not {{"torch", "transformers", "megatron", "pydantic", "rich"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", script], check=True)
    assert verify(sharded, tmp_path / "hf").same and verify(sharded, tmp_path / "megatron").same
    hf_to_megatron(sharded, tmp_path / "with_torch")  # metadata of real objects
    found, expected = (
        pickle.loads((tmp_path / name / "release/.metadata").read_bytes()) for name in ("megatron", "with_torch")
    )
    assert found == expected and type(found) is Metadata
    common = torch.load(tmp_path / "megatron/release/common.pt", weights_only=False)
    assert common["args"].num_layers == 4 and common["iteration"] == 0


def damage(folder, change):
    match change:
        case dict():
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | change))
        case "files":
            (folder / "model-2-of-3.safetensors").unlink()
            (folder / "model-3-of-3.safetensors").unlink()
        case "truncated":
            raw = (folder / "model-1-of-3.safetensors").read_bytes()
            (folder / "model-1-of-3.safetensors").write_bytes(raw[:-100])
        case "index":
            (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
        case "brackets":
            (folder / "model.safetensors.index.json").write_text("[" * 100_000)
        case "directory":
            (folder / "model-1-of-3.safetensors").unlink()
            (folder / "model-1-of-3.safetensors").mkdir()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": "three"}, ["'num_hidden_layers' must be a positive integer (found 'three')"]),
        ({"num_hidden_layers": 6, "layer_types": None}, ["missing tensors model.layers.4.", " and 19 more"]),
        (
            {"intermediate_size": 95},
            ["mlp.gate_proj.weight: shape (96, 64), but config.json says (95, 64)", "12 tensors in all"],
        ),
        ("files", ["model-2-of-3.safetensors is missing", "2 files are missing", "model-3-of-3.safetensors"]),
        ("truncated", ["model-1-of-3.safetensors: truncated inside tensor"]),
        ("index", ["model.safetensors.index.json: damaged index"]),
        ("brackets", ["model.safetensors.index.json: damaged index"]),
        ("directory", ["model-1-of-3.safetensors: cannot be read (Is a directory)"]),
    ],
)
def test_what_is_wrong_with_a_directory_is_named_in_one_line(sharded, change, said):
    damage(sharded, change)
    with pytest.raises(UserError) as error:
        check_model_directory(sharded)
    assert all(part in str(error.value) for part in said), str(error.value)
    assert "\n" not in str(error.value) and str(sharded) in str(error.value)


def test_a_directory_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="is not a HF model directory"):
        check_model_directory(tmp_path / "none")
    with pytest.raises(UserError, match="is not a directory; expected a checkpoint"):
        open_megatron(tmp_path / "none", None)


def test_a_checkpoint_is_checked_against_the_model(models, tmp_path):
    checkpoint, shape = tmp_path / "megatron", ModelShape.from_dir(models["qwen2"])
    hf_to_megatron(models["qwen2"], checkpoint)
    open_megatron(checkpoint, shape)
    with pytest.raises(UserError, match=r"linear_qkv.*\(4, 128, 64\), but .*config\.json says \(4, 256, 64\)"):
        open_megatron(checkpoint, ModelShape.from_dir(models["qwen3"]))
    file = next(checkpoint.rglob("*.distcp"))
    file.rename(tmp_path / "away")
    with pytest.raises(UserError, match=rf"{file.name} is missing, but \.metadata places tensor"):
        open_megatron(checkpoint, shape)
    with pytest.raises(UserError, match="is a HF model; expected a Megatron checkpoint"):
        open_megatron(models["qwen2"], shape)
