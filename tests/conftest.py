"""Options of the test run; real SGLang servers, one per installed version, started together and shared by the whole
session; and the directory in which the commands of the documentation are given."""

import gc

gc.disable()  # until the tests are collected: a search for garbage visits everything imported so far and finds nothing

import asyncio
import os
import random
import signal
import socket
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch and its children read it when they are imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch
from cpu_time import CpuTimes
from installed_sglang import API_KEY_VARIABLE, SGLANG_VERSIONS, RealServer, sglang_python
from workplace import sparse_models, workplace  # noqa: F401  (fixtures)

# A machine that does other work as well takes longer than any deadline, and to draw its first examples.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")


def pytest_addoption(parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", help="append the CPU seconds of each test to FILE as JSON lines")
    parser.addoption(
        "--shuffle", metavar="SEED", type=int, help="run files, and the tests of each file, in random order"
    )


def pytest_configure(config) -> None:
    if path := config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(path))
    torch.set_num_threads(1)
    # A shell ignores SIGINT in the processes that it starts in the background. Tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault(API_KEY_VARIABLE, "key-of-the-test-servers")


def pytest_collection_modifyitems(config, items) -> None:
    """Tests of one file stay together, so that its fixtures are made once."""
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    files: dict[str, list] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    generator = random.Random(seed)
    for tests in (order := generator.sample([*files.values()], len(files))):
        generator.shuffle(tests)
    items[:] = [test for tests in order for test in tests]


def pytest_collection_finish() -> None:
    """The imported modules are never searched for garbage again: not here, nor in a forked rank, where a search would
    also copy the memory that it shares with this process."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def plugin_folders_end_with_their_test():
    """A plugin's folder is added to sys.path. With examples/quickstart there, `quickstart` would be no package."""
    before = [*sys.path]
    yield
    sys.path[:] = before
    if (module := sys.modules.get("quickstart")) is not None and not hasattr(module, "__path__"):
        del sys.modules["quickstart"]


@pytest.fixture(scope="module", autouse=True)
def process_groups_end_with_their_module():
    """Each has threads that wake up a hundred times a second: without this, 231 of them at the end of a part."""
    yield
    if torch.distributed.is_initialized():
        from megatron_dapo.policy.megatron.runtime import shutdown

        shutdown()


def start_servers(versions, directory, folders):
    """Yields a server of each version, and ends them."""
    from tiny_model import tiny_model

    from megatron_dapo.config.rollout import ServerConfig
    from megatron_dapo.engines.sglang.server_process import ServerProcess

    servers: dict[str, RealServer] = {}
    for version in versions:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        # SGLang's own keep-alive, so that tests meet what an external server does.
        config = ServerConfig(
            device="cpu", python=str(sglang_python(version)), dtype="float32", port=port, start_timeout=600,
            api_key_env=API_KEY_VARIABLE, environment={"SGLANG_TIMEOUT_KEEP_ALIVE": "5"},
        )  # fmt: skip
        config.demand(checksums=True)
        process = ServerProcess(str(directory), config, 0, folders.mktemp(f"sglang-{version}"))
        process.spawn()
        servers[version] = RealServer(process, config, directory, tiny_model())

    async def end() -> None:
        await asyncio.gather(*(server.process.end() for server in servers.values()))

    try:
        for server in servers.values():
            wait_ready(server)
        yield servers
    finally:
        asyncio.run(end())


@pytest.fixture(scope="session")
def sglang_servers(tmp_path_factory):
    from tiny_model import write_model

    directory = write_model(tmp_path_factory.mktemp("tiny-qwen3"))
    installed = [version for version in SGLANG_VERSIONS if sglang_python(version).exists()]
    yield from start_servers(installed, directory, tmp_path_factory)


@pytest.fixture(scope="session")
def another_server(sglang_servers, tmp_path_factory):
    """A second server of the newest version."""
    version, server = [*sglang_servers.items()][-1]
    for found in start_servers([version], server.directory, tmp_path_factory):
        yield found[version]


def wait_ready(server: RealServer) -> None:
    async def ready() -> None:
        client = server.process.client()
        await server.process.wait_ready(client)
        await client.close()

    asyncio.run(ready())


@pytest.fixture
def server_of_version(request):
    """A function that returns the running server of an SGLang version. One that a test has ended is started again
    with its first weights."""
    from tiny_model import tiny_model

    def find(version: str) -> RealServer:
        if not sglang_python(version).exists():
            pytest.skip(f"SGLang {version} is not installed: make sglang-cpu")
        server = request.getfixturevalue("sglang_servers")[version]
        if not server.process.alive():
            server.process.spawn()
            server.model, server.version = tiny_model(), 0
            wait_ready(server)
        return server

    return find


@pytest.fixture
def two_servers(request, server_of_version) -> list[RealServer]:
    """Of two versions, where two are tested."""
    first, *others = map(server_of_version, SGLANG_VERSIONS)
    return [first, *(others or [request.getfixturevalue("another_server")])]


@pytest.fixture(params=SGLANG_VERSIONS)
def sglang_server(request, server_of_version) -> RealServer:
    return server_of_version(request.param)
