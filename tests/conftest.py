"""Options of the test run; real SGLang servers, one per installed version, started together and shared by the whole
session; and the directory in which the commands of the documentation are given."""

import gc

gc.disable()  # until the tests are collected: a search for garbage visits everything imported so far and finds nothing

import asyncio
import inspect
import os
import random
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch and its children read it when they are imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch
from cpu_time import CpuTimes
from event_loop import run_test
from installed_sglang import (
    API_KEY_VARIABLE,
    SGLANG_VERSIONS,
    RealServer,
    require_sglang,
    sglang_python,
    start_servers,
    wait_ready,
)
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


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem) -> bool | None:
    """Runs a test that is a coroutine in an event loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(run_test(test, arguments))
    return True


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


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def server_of_version(request):
    """A function that returns the running server of an SGLang version. One that a test has ended, or that served a
    failed test, is started again with its first weights."""
    from tiny_model import tiny_model

    used: list[RealServer] = []

    def find(version: str) -> RealServer:
        require_sglang(version)
        server = request.getfixturevalue("sglang_servers")[version]
        used.append(server)
        if not server.process.alive():
            server.process.spawn()
            server.model, server.version = tiny_model(), 0
            wait_ready(server)
        return server

    yield find
    if request.node.stash.get(FAILED, False):
        for server in used:
            asyncio.run(server.process.end())


@pytest.fixture
def two_servers(request, server_of_version) -> list[RealServer]:
    """Of two versions, where two are tested."""
    first, *others = map(server_of_version, SGLANG_VERSIONS)
    return [first, *(others or [request.getfixturevalue("another_server")])]


@pytest.fixture(params=SGLANG_VERSIONS)
def sglang_server(request, server_of_version) -> RealServer:
    return server_of_version(request.param)
