"""Families beside Qwen3 on a real SGLang: it starts from our files and computes with the weights that it is sent."""

import pytest
from installed_sglang import SGLANG_VERSIONS, require_sglang, start_servers
from long_lists import some
from subject import PROMPT, Subject
from tiny_model import write_model

from megatron_dapo.engines.protocol import SamplingParams


@pytest.fixture(params=some(["llama", "mistral"], "llama"))
def server(request, tmp_path_factory):
    version = SGLANG_VERSIONS[-1]
    require_sglang(version)
    directory = write_model(tmp_path_factory.mktemp("model"), request.param)
    for found in start_servers([version], directory, tmp_path_factory, request.param):
        yield found[version]


async def test_a_server_follows_weight_updates(server):
    subject, params = Subject(server), SamplingParams(20, temperature=0.8, ignore_eos=True)
    async with subject.open() as engine:
        subject.assert_agrees(PROMPT, await engine.generate("before", PROMPT, params), params.temperature)
        report = await subject.update(engine, seed=1)
        subject.assert_agrees(PROMPT, await engine.generate("after", PROMPT, params), params.temperature)
    assert not report.failed and report.tensors == len(subject.model.state_dict())
