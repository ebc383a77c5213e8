"""The exercise of docs/add_a_family.md: the file on the page is all that a dense family needs."""

import re
from pathlib import Path

import pytest
import torch
from config_sweep import Sweep, sweep
from tiny_model import byte_tokenizer

from megatron_dapo.config import ModelShape, parse_config
from megatron_dapo.config.families import FAMILIES
from megatron_dapo.engines.embedded.batch_invariant_model import BatchInvariantModel
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.weights.convert import hf_to_megatron, megatron_to_hf
from megatron_dapo.weights.formats.readers import HFReader
from megatron_dapo.weights.locate import check_model_directory
from megatron_dapo.weights.verify import verify

PAGE = Path(__file__).parents[2] / "docs" / "add_a_family.md"
FILES = re.findall(r"```python family\n# (\S+)\n(.*?)```", PAGE.read_text(), re.S)


@pytest.fixture
def seed_oss(monkeypatch):
    """The families of the page's files, as if the files were in the package."""
    for _, code in FILES:
        module = {}
        exec(compile(code, "page", "exec"), module)
        for family in module["FAMILIES"]:
            monkeypatch.setitem(FAMILIES, family.model_type, family)
    return "seed_oss"


def test_it_is_short():
    lines = sum(len(code.splitlines()) for _, code in FILES)
    assert 0 < len(FILES) <= 4 and 0 < lines <= 60
    assert all(name.startswith("megatron_dapo/config/families/") for name, _ in FILES)


def test_every_field_follows_transformers_or_is_refused(seed_oss, tmp_path):
    ((counts, wrong),) = run_ranks(1, sweep, seed_oss, tmp_path / "model", 10)
    assert wrong == {} and counts["equal"] and counts["refused"]


def write_model(rendezvous, model_type, folder):
    Sweep(model_type, folder, rendezvous)
    byte_tokenizer().save_pretrained(folder)


def loaded_equals_file(rendezvous, folder):
    config = parse_config({"policy": {"precision": "fp32", "model": str(folder), "tensor_parallel": 2}})
    policy = Policy(config, ModelShape.from_dir(folder), initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(folder)
    sent = {name: tensor for bucket in policy.weight_buckets().buckets() for name, tensor in bucket}
    return {name: bool(torch.equal(tensor, HFReader(folder)[name])) for name, tensor in sent.items()}


def test_it_converts_loads_syncs_and_generates(seed_oss, tmp_path):
    from transformers import AutoModelForCausalLM

    model = tmp_path / "model"
    run_ranks(1, write_model, seed_oss, model)
    assert check_model_directory(model).qkv_bias
    hf_to_megatron(model, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "again")
    assert verify(model, tmp_path / "again").same and verify(model, tmp_path / "megatron").same
    equal = run_ranks(2, loaded_equals_file, model)[0]
    assert equal.keys() == set(HFReader(model)) and all(equal.values())
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.arange(8)
    ours = BatchInvariantModel(theirs, batch_tokens=8)
    pages = torch.full((8, 1), ours.cache.allocate())
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(ours.forward(tokens, tokens, pages), expected, atol=1e-4, rtol=0)
