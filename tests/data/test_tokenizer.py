"""Loading a model's tokenizer: what is wrong with it is said in one line, before a prompt is read."""

import pytest

from megatron_dapo.config import ConfigError
from megatron_dapo.data import load_tokenizer, save_arithmetic_tokenizer


@pytest.fixture
def folder(tmp_path):
    save_arithmetic_tokenizer(tmp_path)
    return tmp_path


def test_a_tokenizer_that_the_vocabulary_covers_loads(folder):
    assert len(load_tokenizer(folder, 100)) == 100


def test_a_directory_without_a_tokenizer_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConfigError, match=r"has no tokenizer \(none of tokenizer\.json"):
        load_tokenizer(tmp_path, 100)


def test_a_tokenizer_larger_than_the_vocabulary_is_an_error(folder):
    with pytest.raises(ConfigError, match=r"has 100 tokens, but the model's vocabulary has 99: .*different models"):
        load_tokenizer(folder, 99)


@pytest.mark.parametrize("content", ["{", "", '{"version": "1.0"}', "[]"])
def test_a_damaged_tokenizer_is_one_line(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="does not load") as error:
        load_tokenizer(folder, 100)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
