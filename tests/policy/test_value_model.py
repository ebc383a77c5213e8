"""The value model: transformers' values for the same weights, what it may start from, and turns with the policy."""

import numpy as np
import pytest
import torch
from save_policy import save_policy
from test_model_parity import fp32_config, sequences, some_batch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification, Qwen2ForTokenClassification

from megatron_dapo.config import ConfigError, ModelShape, check_config, parse_config
from megatron_dapo.policy.critic import Critic
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.weights.convert import megatron_to_hf
from megatron_dapo.weights.value_weights import ValueWeights, value_shape

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True, "num_labels": 1,
}  # fmt: skip
CLASSES = {
    "language model": Qwen2ForCausalLM, "reward model": Qwen2ForSequenceClassification,
    "critic": Qwen2ForTokenClassification,
}  # fmt: skip


def hf_model(kind):
    torch.manual_seed(4)
    model = CLASSES[kind](Qwen2Config(**SIZES)).eval()
    with torch.no_grad():  # a head that an error would show in
        for name, parameter in model.named_parameters():
            if name.startswith("score"):
                parameter.normal_()
    return model


def with_trl_head(folder):
    """The files that TRL's AutoModelForCausalLMWithValueHead saves."""
    from safetensors.torch import load_file, save_file

    tensors, other = load_file(folder / "model.safetensors"), hf_model("critic").score
    tensors |= {"v_head.summary.weight": other.weight.data, "v_head.summary.bias": other.bias.data}
    save_file(tensors, folder / "model.safetensors")


def critic_config(folder, **critic):
    raw = fp32_config().model_dump(mode="json")
    raw["policy"] |= {"model": str(folder)}
    return parse_config(raw | {"algorithm": {"advantage": "gae"}, "critic": critic})


def our_values(rendezvous, config, save=None):
    policy = Policy(config, ModelShape.from_dir(config.policy.model), initialize(config.policy, rendezvous=rendezvous))
    critic = Critic(config, policy)
    with critic.turn():
        critic.load_start()
        values = critic.values(some_batch(critic.shape))
        if save is not None:
            save_policy(critic, save)
    return values


def expected(model, shape):
    """Of the hidden state that predicts each response token."""
    batch, found = some_batch(shape), []
    with torch.no_grad():
        for tokens, prompt in zip(sequences(batch), batch.prompt_lengths, strict=True):
            hidden = model.model(tokens[None]).last_hidden_state[0]
            found.append(model.score(hidden)[prompt - 1 : -1, 0])
    return torch.cat(found).numpy()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = {kind: tmp_path_factory.mktemp(kind.replace(" ", "-")) for kind in (*CLASSES, "trl")}
    for kind, folder in folders.items():
        hf_model("language model" if kind == "trl" else kind).save_pretrained(folder)
    with_trl_head(folders["trl"])
    return folders


@pytest.mark.parametrize("kind", ["language model", "reward model", "critic", "trl"])
def test_values_are_those_of_transformers(kind, models, tmp_path):
    """The saved critic, exported, is one that transformers loads. Turns with the policy change nothing."""
    config = critic_config(models["language model"], model=str(models[kind]))
    found = run_ranks(1, our_values, config, str(tmp_path / "saved"))[0]
    weights = ValueWeights(models[kind], value_shape(models[kind]))
    model = hf_model("critic")
    model.load_state_dict(dict(weights))
    assert (kind != "language model") == bool(found.any())
    np.testing.assert_allclose(found, expected(model, value_shape(models[kind])), atol=2e-6)
    again = critic_config(models["language model"], model=str(tmp_path / "saved"), offload=True)
    np.testing.assert_array_equal(run_ranks(1, our_values, again)[0], found)
    megatron_to_hf(tmp_path / "saved", tmp_path / "exported")
    exported = Qwen2ForTokenClassification.from_pretrained(tmp_path / "exported")
    assert exported.config.num_labels == 1
    assert all(torch.equal(exported.state_dict()[name], value) for name, value in model.state_dict().items())


def test_a_value_model_is_no_policy(models):
    with pytest.raises(ConfigError, match=r"policy.model: .* is a value model"):
        check_config(critic_config(models["critic"]), 1)
