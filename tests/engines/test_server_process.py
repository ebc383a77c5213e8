"""A server's processes: they end together and with their launcher, and nobody else can read their keys."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from event_loop import close_at_the_end
from fake_server import FakeServer
from installed_sglang import QUICK_IMPORT, SGLANG_VERSIONS, require_sglang
from waiting import wait_for
from workplace import FILES, FILLED_IN

from megatron_dapo.config import load_config
from megatron_dapo.config.policy import LoraConfig
from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.engines.sglang.client import EXACT_ARGUMENTS, IN_SERVER, SGLangClient
from megatron_dapo.engines.sglang.keys import Keys, command_with_keys
from megatron_dapo.engines.sglang.server_process import ServerProcess, log_tail, sglang_command
from megatron_dapo.errors import ConfigError, EngineError
from megatron_dapo.processes import supervisor
from megatron_dapo.processes.supervised import SupervisedProcess, members

# A main process with two workers that nothing tells of its death, as SGLang's while they import.
TREE = """\
import os, sys, time
for _ in range(2):
    if os.fork() == 0:
        time.sleep(100)
open(sys.argv[1], "w").close()
time.sleep(100)
"""


wait = partial(wait_for, pause=0.01)


def tree(tmp_path):
    command = [sys.executable, "-c", TREE, str(tmp_path / "ready")]
    process = ServerProcess("", ServerConfig(), 0, tmp_path, make_command=lambda *_: (command, {}))
    process.spawn()
    wait((tmp_path / "ready").exists, 20, "the workers")
    assert len(members(process.pid)) == 4  # supervisor, main, two workers
    return process


def launch(tmp_path):
    command = [sys.executable, "-c", TREE, str(tmp_path / "ready")]
    process = ServerProcess("", ServerConfig(), 0, tmp_path, make_command=lambda *_: (command, {}))
    process.spawn()
    (tmp_path / "session").write_text(str(process.pid))
    time.sleep(100)


# Its child detaches itself. Linux cuts the name of a process after 15 bytes, which may be within a letter.
DETACHED = """\
import ctypes, os, sys, time
if os.fork() == 0:
    os.setsid()
    ctypes.CDLL(None).prctl(15, b"worker-\\xe4\\xb8", 0, 0, 0)
    with open(sys.argv[1], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(100)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def test_a_name_that_is_no_text_hides_no_process(tmp_path):
    process = SupervisedProcess([sys.executable, "-c", DETACHED, str(tmp_path / "pid")])
    assert process.wait() == 0
    child = int((tmp_path / "pid").read_text())
    try:
        assert not members(child), "it went on"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("moment", ["ready", "session"])
def test_the_whole_tree_dies_with_a_killed_launcher(tmp_path, moment):
    """Also when the launcher dies before the server has started anything."""
    launcher = multiprocessing.get_context("fork").Process(target=launch, args=(tmp_path,))
    launcher.start()
    wait(lambda: (tmp_path / "session").exists() and (tmp_path / "session").read_text(), 20, "the session")
    wait((tmp_path / moment).exists, 20, moment)
    session = int((tmp_path / "session").read_text())
    launcher.kill()
    launcher.join()
    wait(lambda: not members(session), 20, "the end of the server's processes")


def test_the_whole_tree_dies_with_its_caller_without_a_signal(tmp_path):
    """The kernel's signal may come at any moment; the supervisor looks for its caller by itself, too."""
    deaf = (
        f"import sys; sys.path.insert(0, {str(Path(supervisor.__file__).parent)!r})\n"
        "import supervisor; supervisor.end_with_parent = lambda *_: None; sys.exit(supervisor.main())"
    )
    started = (
        "import os, subprocess, sys, time; me = str(os.getpid())\n"
        f"p = subprocess.Popen([sys.executable, '-c', {deaf!r}, me, *sys.argv[2:]], start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(str(p.pid)); time.sleep(100)"
    )
    command = [sys.executable, "-c", TREE, str(tmp_path / "ready")]
    caller = subprocess.Popen([sys.executable, "-c", started, str(tmp_path / "session"), *command])
    wait((tmp_path / "ready").exists, 20, "the workers")
    session = int((tmp_path / "session").read_text())
    assert len(members(session)) == 4
    caller.kill()
    caller.wait()
    wait(lambda: not members(session), 20, "the end of the server's processes")


def test_workers_die_with_a_killed_main_process(tmp_path):
    process = tree(tmp_path)
    main = next(pid for pid in members(process.pid) if parent_of(pid) == process.pid)
    os.kill(main, signal.SIGKILL)
    wait(lambda: not process.alive(), 20, "the end of the server")
    assert not members(process.pid) and process._process.status == "signal 9"


def test_workers_die_with_a_killed_supervisor(tmp_path):
    """The main process dies by itself; its workers when the launcher notices."""
    process = tree(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    wait(lambda: not process.alive(), 20, "the end of the server")
    assert not members(process.pid)


def test_end_leaves_no_process_even_if_one_ignores_the_request(tmp_path):
    command = [sys.executable, "-c", f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{TREE}"]
    process = ServerProcess(
        "", ServerConfig(), 0, tmp_path, make_command=lambda *_: ([*command, str(tmp_path / "ready")], {})
    )
    process.spawn()
    wait((tmp_path / "ready").exists, 20, "the workers")
    session = process.pid
    asyncio.run(process.end(patience=0.2))
    assert not members(session)


def test_the_exit_code_is_that_of_the_server(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit(7)"]
    process = ServerProcess("", ServerConfig(), 0, tmp_path, make_command=lambda *_: (command, {}))
    process.spawn()
    wait(lambda: not process.alive(), 20, "the end")
    assert process._process.status == "exit code 7"


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# ---- keys ----


MODULE = """\
import logging, os, sys, time
logging.basicConfig(level="INFO")
logging.info(f"server_args={sys.argv}")
logging.warning("key %s of %s", sys.argv[-1], "args")
logging.warning("one %s", "two", "three")  # logging reports it and goes on
print(__name__, sys.argv[1:-1], sys.argv[-1] == "--api-key=" + open(sys.argv[1]).read(), "THE_KEY" in os.environ)
sys.stdout.flush()
time.sleep(100)
"""


@pytest.mark.parametrize("has_package", [True, False])
def test_a_key_is_on_no_command_line_and_in_no_log(tmp_path, has_package):
    (tmp_path / "shows_arguments.py").write_text(MODULE)
    (tmp_path / "key").write_text("a-secret")
    command = command_with_keys(sys.executable, "shows_arguments", {"api-key": "THE_KEY"}, has_package=has_package)
    environment = os.environ | {"THE_KEY": "a-secret"}
    environment["PYTHONPATH"] = f"{tmp_path}:{environment.get('PYTHONPATH', '')}"
    pipes = {"stdout": subprocess.PIPE, "stderr": (tmp_path / "log").open("w")}
    process = subprocess.Popen([*command, str(tmp_path / "key"), "--x", "1"], env=environment, text=True, **pipes)
    try:
        said = process.stdout.readline()
        assert "a-secret" not in Path(f"/proc/{process.pid}/cmdline").read_text()
        log = (tmp_path / "log").read_text()
    finally:
        process.kill()
    assert said == f"__main__ ['{tmp_path / 'key'}', '--x', '1'] True False\n", log
    assert "a-secret" not in log and log.count("--api-key=***") == 2


def test_a_key_that_is_not_set_is_an_error():
    command = command_with_keys(sys.executable, "this", {"api-key": "NO_SUCH_KEY"}, has_package=False)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "NO_SUCH_KEY (for --api-key) is not set" in done.stderr


def test_every_started_server_has_a_key(monkeypatch, tmp_path):
    """Random where none is configured, and the same for no two runs; the configured one otherwise."""
    config = ServerConfig()
    first, second = Keys.of_started_servers(config), Keys.of_started_servers(config)
    assert first.api and second.api and first.api != second.api and len(first.api) >= 32
    assert first.api not in repr(first)
    command, _ = sglang_command("model", config, 0, 1)
    assert "--key-from" in command and first.environment(config) == {"MEGATRON_DAPO_API_KEY": first.api}
    monkeypatch.setenv("ONE", "api")
    monkeypatch.setenv("TWO", "admin")
    chosen = ServerConfig(api_key_env="ONE", admin_key_env="TWO")
    keys = Keys.of_started_servers(chosen)
    assert (keys.api, keys.admin) == ("api", "admin") and keys.environment(chosen) == {"ONE": "api", "TWO": "admin"}
    command, _ = sglang_command("model", chosen, 0, 1)
    assert [command[i + 1] for i, word in enumerate(command) if word == "--key-from"] == [
        "api-key=ONE",
        "admin-api-key=TWO",
    ]
    monkeypatch.delenv("TWO")
    with pytest.raises(ConfigError, match="TWO, which is not set"):
        ServerProcess("", chosen, 0, tmp_path)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_server_has_an_address_on_every_host_that_needs_no_key(tmp_path, host):
    config = ServerConfig(host=host)
    config.check()
    process = ServerProcess("", config, 0, tmp_path, make_command=lambda *_: (["true"], {}))
    process.spawn()
    found = urlsplit(process.url)
    assert (found.hostname, found.port) == (host, process.port)


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    """This one is larger than the memory of any machine."""
    log = tmp_path / "server-0.log"
    with log.open("wb") as file:
        file.truncate(1 << 42)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"".join(b"line %d \xff\n" % number for number in range(30)))
    said = log_tail(log).splitlines()
    assert len(said) == 26 and said[1].startswith("  line 5 ") and said[-1].startswith("  line 29 ")


def test_the_log_of_a_server_is_for_its_owner_only(tmp_path):
    process = ServerProcess("", ServerConfig(), 0, tmp_path, make_command=lambda *_: (["true"], {}))
    process.spawn()
    assert process.log.stat().st_mode & 0o777 == 0o600
    asyncio.run(process.end())


def test_the_servers_keep_idle_connections_longer_than_we_do():
    _, environment = sglang_command("model", ServerConfig(), 0, 1)
    assert float(environment["SGLANG_TIMEOUT_KEEP_ALIVE"]) > 5
    _, environment = sglang_command("model", ServerConfig(environment={"SGLANG_TIMEOUT_KEEP_ALIVE": "7"}), 0, 1)
    assert environment["SGLANG_TIMEOUT_KEEP_ALIVE"] == "7"


@pytest.mark.parametrize("ours, theirs", [(None, "1"), ("0", "0")])
def test_servers_and_trainer_have_the_same_kind_of_nccl_memory(ours, theirs, monkeypatch):
    """SGLang turns it off unless it is set; then they cannot share a communicator on one host."""
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if ours:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", ours)
    assert sglang_command("model", ServerConfig(), 0, 1)[1]["NCCL_CUMEM_ENABLE"] == theirs


# ---- policy.true_on_policy ----


def exact_config(**settings):
    config = ServerConfig(**settings)
    config.demand(exact=True)
    return config


def test_a_server_with_the_trainers_kernels_finds_the_plugin():
    command, environment = sglang_command("model", exact_config(arguments=["--attention-backend", "fa3"]), 0, 1)
    assert {*EXACT_ARGUMENTS, "bfloat16"} <= set(command) and command[-1] == "fa3"
    paths = environment["PYTHONPATH"].split(os.pathsep)
    (plugin,) = (entry for path in paths for d in distributions(path=[path]) for entry in d.entry_points)
    assert plugin.group == "sglang.srt.plugins" and plugin.name == environment["SGLANG_PLUGINS"]
    assert any((Path(path) / f"{plugin.module}.py").exists() for path in paths)
    plain = sglang_command("model", ServerConfig(), 0, 1)
    assert "SGLANG_PLUGINS" not in plain[1] and not {*EXACT_ARGUMENTS} & {*plain[0]}
    assert not list(distributions(path=[str(IN_SERVER)]))  # else every server with our loaders would have the plugin


def test_a_server_with_adapters_finds_the_plugin_that_compares_them():
    config = ServerConfig()
    config.demand(lora=LoraConfig(rank=4))
    environment = sglang_command("model", config, 0, 1)[1]
    paths = environment["PYTHONPATH"].split(os.pathsep)
    (plugin,) = (entry for path in paths for d in distributions(path=[path]) for entry in d.entry_points)
    assert plugin.group == "sglang.srt.plugins" and plugin.value == "megatron_dapo_checksums:serve_adapters"
    assert str(IN_SERVER) in paths and "SGLANG_PLUGINS" not in environment  # which would turn others' plugins off


@pytest.mark.parametrize("version", ["0.5.16", "0.5.10rc5", "0.5.16.post1", "0.5.9+cu130"])
async def test_an_older_sglang_is_refused(version):
    server = await FakeServer().start()
    server.broken_calls["/server_info"] = 200, {"version": version}
    with pytest.raises(EngineError, match=f"runs SGLang {re.escape(version)}; expected 0.5.17 or newer"):
        await close_at_the_end(SGLangClient(server.url, ServerConfig())).capabilities()


KERNELS = f"{zlib.crc32((IN_SERVER / 'megatron_dapo_kernels.py').read_bytes()):x}"
ACTIVE = {"kernels": KERNELS, "attention": "True", "products": "True"}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"checksums": ACTIVE | {"kernels": "0"}},
        {"checksums": ACTIVE | {"attention": "False"}},
        {"checksums": {}},
        {"broken_calls": {"/weights_checker": (400, {"success": False, "message": "Unsupported action='exact'"})}},
    ],
)
def test_a_server_without_the_trainers_kernels_is_refused(change):
    async def main():
        server = await FakeServer().start()
        vars(server).update({"checksums": ACTIVE} | change)
        client = SGLangClient(server.url, exact_config())
        try:
            if not change:
                return await client.capabilities()
            with pytest.raises(EngineError, match="does not compute with the trainer's kernels"):
                await client.capabilities()
        finally:
            await client.close()
            await server.stop()

    asyncio.run(main())


# ---- in the Python of an installed SGLang ----

IN_SGLANG = """
import argparse, json, sys
from unittest.mock import Mock
from sglang.srt.server_args import ServerArgs
parser, refused = argparse.ArgumentParser(), []
ServerArgs.add_cli_args(parser)
for command in json.load(sys.stdin):
    try:
        parser.parse_args(command)
    except SystemExit:
        refused.append(command)

from sglang.srt.plugins import load_plugins
load_plugins()
import megatron_dapo_exact as exact
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.utils.weight_checker import WeightChecker
WeightChecker._get_model = WeightChecker._parallelism_info = Mock()
reply = WeightChecker.handle(WeightChecker.__new__(WeightChecker), exact.ACTION)
found = {"refused": refused, "norm": RMSNorm.forward_cuda is exact._norm, "checksums": sorted(reply["checksums"])}
print("\\n" + json.dumps(found))
"""


@pytest.fixture(scope="module", params=SGLANG_VERSIONS)
def in_sglang(request):
    """What one process found, with its stderr: an import of SGLang costs 9 CPU seconds."""
    python = require_sglang(request.param)
    commands = []
    for file in FILES:
        config = load_config(file, FILLED_IN.get(file, []))
        command, _ = sglang_command(config.policy.model, config.rollout.servers, 0, 30000)
        commands.append(command[command.index("--model-path") :])
    assert any("--cuda-graph-max-bs-decode" in command for command in commands)
    _, environment = sglang_command("model", exact_config(device="cpu"), 0, 1)
    done = subprocess.run(
        [python, "-c", QUICK_IMPORT + IN_SGLANG], input=json.dumps(commands), env=os.environ | environment, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_sglang_knows_every_argument_of_the_examples_servers(in_sglang):
    """An option that a version has dropped or made ambiguous would end a server at its start."""
    found, said = in_sglang
    assert not found["refused"], said[-500:]


def test_the_plugin_installs_into_a_real_sglang(in_sglang):
    found, _ = in_sglang
    assert found["norm"] and found["checksums"] == ["attention", "kernels", "products"]
