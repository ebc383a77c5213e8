import shutil

import pytest
import tiny_qwen


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """HF directories by kind, fp32, in one file. Read only: tests that damage one take a `copy_of`."""
    root = tmp_path_factory.mktemp("models")
    return {kind: tiny_qwen.save(tiny_qwen.build(kind), root / kind) for kind in tiny_qwen.KINDS}


@pytest.fixture
def copy_of(models, tmp_path):
    def copy(kind):
        return shutil.copytree(models[kind], tmp_path / f"copy-{kind}")

    return copy
