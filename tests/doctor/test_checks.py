"""Each check on a healthy machine and on one with the fault that it must find."""

import json
import resource
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from sparse_model import write_sparse_model

from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.doctor import gpu, machine, software
from megatron_dapo.doctor.check import NOT_INSTALLED, Check, CommandResult, Probe, examine, run_command

HEALTHY = {"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "transformers": "5.12.1", "psutil": "7.2.2"}
GIB = 1 << 30


def results(**by_word):
    """A fake `run_command`: the first key that occurs in the command selects the result."""

    def run(command, seconds=0, environment=None):
        text = " ".join(command)
        return next((result for word, result in by_word.items() if word in text), NOT_INSTALLED)

    return run


def program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


# --- running checks


def test_a_hanging_check_fails_in_time():
    started = time.monotonic()
    check = examine(Probe("slow", lambda: time.sleep(30) or Check("slow", "ok", ""), seconds=0.2))
    assert time.monotonic() - started < 5
    assert (check.status, check.name) == ("fail", "slow") and "0.2 s" in check.found and check.remedy


def test_a_raising_check_fails_with_its_error():
    def look() -> Check:
        raise RuntimeError("bus error")

    check = examine(Probe("x", look))
    assert check.status == "fail" and "RuntimeError: bus error" in check.found


def test_a_command_is_killed_after_its_time_limit():
    started = time.monotonic()
    assert run_command([sys.executable, "-c", "import time; time.sleep(60)"], 0.3).code is None
    assert time.monotonic() - started < 5
    assert run_command(["no-such-program-here"]).missing


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("0.5.18", (0, 5, 18)),
        ("2.9.0rc1", (2, 9, 0)),
        ("580.65.06", (580, 65, 6)),
        ("x", ()),
    ],
)
def test_version_numbers_are_parsed(text, expected):
    assert software.version_tuple(text) == expected


# --- software


def test_old_python_fails():
    assert software.python_version((3, 11, 7), HEALTHY.get).status == "ok"
    assert software.python_version((3, 10, 2), HEALTHY.get).status == "fail"
    newer = {**HEALTHY, "megatron-core": "0.19.2"}
    check = software.python_version((3, 11, 7), newer.get)
    assert check.status == "fail" and "3.12" in check.remedy
    assert software.python_version((3, 12, 1), newer.get).status == "ok"


def test_missing_and_unsupported_packages_fail():
    assert software.packages(HEALTHY.get).status == "ok"
    check = software.packages({**HEALTHY, "psutil": None}.get)
    assert check.status == "fail" and "psutil is not installed" in check.found and "hangs" in check.remedy
    assert "older than 0.16" in software.packages({**HEALTHY, "megatron-core": "0.15.2"}.get).found
    assert "newer" in software.packages({**HEALTHY, "megatron-core": "0.20.0"}.get).found
    assert "older than 5" in software.packages({**HEALTHY, "transformers": "4.57.1"}.get).found


@pytest.mark.parametrize(
    ("sglang", "torch", "fine"),
    [
        ("0.5.17", "2.11.0+cu130", True), ("0.5.18", "2.13.0", True), ("0.5.23", "2.14.0", True),
        ("0.5.23", "2.11.0", False), ("0.5.16", "2.11.0", False), ("0.5.17", "2.13.0", False),
    ],
)  # fmt: skip
def test_sglang_must_match_torch(sglang, torch, fine):
    assert (software.sglang_pairing(sglang, torch) is None) is fine


def test_versions_are_compared_with_those_that_were_measured_together():
    measured = software.read_lock(software.LOCKS / "cuda13.txt", (3, 12)) | {"torch": "2.11.0+cu130"}
    check = software.lock(measured.get, python=(3, 12))
    assert check.status == "ok" and check.found == f"{len(measured)} packages as in locks/cuda13.txt"
    check = software.lock((measured | {"sglang": "0.5.20", "soundfile": "0.14.0"}).get, python=(3, 12))
    assert check.status == "warn" and "sglang 0.5.20 (0.5.17), soundfile 0.14.0 (0.13.1)" in check.found
    assert "tools/install.sh cuda13" in check.remedy
    check = software.lock((measured | {"soundfile": "0.14.0"}).get, python=(3, 12))
    assert check.status == "ok" and "soundfile 0.14.0" in check.found
    assert software.lock(lambda name: None).status == "fail"


def test_the_lock_follows_the_torch_build_and_the_python_version():
    on_cpu = {"torch": "2.13.0+cpu", "megatron-core": "0.16.1"}
    assert software.lock(on_cpu.get, python=(3, 11)).found == "2 packages as in locks/cpu.txt"
    assert "megatron-core 0.16.1 (0.19.2)" in software.lock(on_cpu.get, python=(3, 12)).found
    assert "locks/cpu.txt" in software.lock({"torch": "2.13.0"}.get, python=(3, 11)).found
    assert "locks/cuda13.txt" in software.lock({"torch": "2.12.0"}.get, python=(3, 11)).found


def test_apex_from_pypi_is_found_by_its_distribution(tmp_path, monkeypatch):
    """A fake distribution as pip would leave it: a package called apex without fused optimizers."""
    (tmp_path / "apex" / "lib").mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("")
    (tmp_path / "apex-0.9.10.dist-info").mkdir()
    (tmp_path / "apex-0.9.10.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = software.apex()
    assert check.status == "fail" and "pip uninstall apex" in check.remedy
    (tmp_path / "apex" / "optimizers").mkdir()
    assert software.apex().status == "ok"


def test_no_apex_is_fine(monkeypatch):
    monkeypatch.setattr(software, "_apex_folder", lambda: None)
    assert software.apex().status == "ok"


# --- GPU


def test_nvidia_smi_output_is_judged(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.gpu().status == "warn"  # no nvidia-smi
    line = "NVIDIA H100 80GB HBM3, 580.65.06, 81559, 0"
    program(tmp_path, "nvidia-smi", f"echo '{line}'; echo '{line}'")
    check = gpu.gpu()
    assert check.status == "ok" and "2 × NVIDIA H100 80GB HBM3, driver 580.65.06, 80 GiB" in check.found
    program(tmp_path, "nvidia-smi", f"echo '{line}'; echo 'NVIDIA H100 80GB HBM3, 580.65.06, 81559, 40000'")
    check = gpu.gpu()
    assert check.status == "warn" and "in use on 1" in check.found
    program(tmp_path, "nvidia-smi", "echo 'NVIDIA GB10, 580.95.05, [N/A], [N/A]'")  # its memory is the CPU's
    assert gpu.gpu() == Check("", "ok", "1 × NVIDIA GB10, driver 580.95.05")
    program(tmp_path, "nvidia-smi", "echo 'Driver/library version mismatch' >&2; exit 18")
    check = gpu.gpu()
    assert check.status == "fail" and "mismatch" in check.found


def torch_says(**values):
    seen = {"torch": "2.13.0", "cuda": "13.0", "available": False, "devices": 0, "name": "", "nccl": ""}
    return CommandResult(0, json.dumps({**seen, **values}))


def test_torch_must_see_the_gpu():
    smi = {"nvidia-smi": CommandResult(0, "580.65.06\n")}
    good = torch_says(available=True, devices=8, name="H100", nccl="2.28.3")
    assert gpu.torch_cuda(results(import_=good, json=good, **smi)).status == "ok"
    built_for_cpu = gpu.torch_cuda(results(json=torch_says(cuda=None), **smi))
    assert built_for_cpu.status == "fail" and "built for the CPU" in built_for_cpu.found
    old = gpu.torch_cuda(results(json=torch_says(), **{"nvidia-smi": CommandResult(0, "535.104.05\n")}))
    assert old.status == "fail" and "580 or newer" in old.remedy
    hidden = gpu.torch_cuda(results(json=torch_says(), **smi))
    assert hidden.status == "fail" and "CUDA_VISIBLE_DEVICES" in hidden.remedy
    assert gpu.torch_cuda(results(json=torch_says(cuda=None))).status == "ok"  # no GPU, CPU build
    broken = gpu.torch_cuda(results(json=CommandResult(1, "", "OSError: libcudart.so.13 not found")))
    assert broken.status == "fail" and "libcudart" in broken.found


SELECTED = "DEBUG:DotProductAttention:Selected backend = {}\n"


@pytest.mark.parametrize(
    ("result", "status", "words"),
    [
        (
            CommandResult(0, "attention ran", SELECTED.format("FusedAttention (sub-backend 1)")),
            "ok",
            "FusedAttention",
        ),
        (CommandResult(0, "attention ran", SELECTED.format("FlashAttention (2.8.3)")), "ok", "FlashAttention"),
        (CommandResult(0, "", SELECTED.format("UnfusedDotProductAttention")), "fail", "UnfusedDotProductAttention"),
        (CommandResult(0, "attention ran", ""), "warn", "did not report"),
        (CommandResult(1, "", "CUDNN_STATUS_NOT_INITIALIZED"), "fail", "CUDNN_STATUS"),
    ],
)
def test_attention_backend(result, status, words):
    check = gpu.judge_attention(result)
    assert check.status == status and words in check.found


def test_slow_attention_suggests_unsetting_the_library_path(monkeypatch):
    result = CommandResult(0, "", SELECTED.format("UnfusedDotProductAttention"))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/lib/cudnn")
    assert "unset it" in gpu.judge_attention(result).remedy
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert "unset it" not in gpu.judge_attention(result).remedy


def test_attention_without_gpu_and_without_transformer_engine():
    assert gpu.attention(results(is_available=CommandResult(0, "cpu"))).status == "ok"
    check = gpu.attention(results(is_available=CommandResult(0, "one call per sequence\n")))
    assert check.status == "warn" and "one call per sequence" in check.found and "pip install" in check.remedy
    check = gpu.attention(results(is_available=CommandResult(0, "one kernel")))
    assert check.status == "ok" and "one kernel" in check.found
    broken = CommandResult(1, "", "ImportError: libcudnn_graph.so.9: undefined symbol")
    check = gpu.attention(results(is_available=broken))
    assert check.status == "fail" and "undefined symbol" in check.found


def test_attention_of_this_machine():
    assert gpu.attention().status in ("ok", "warn")


def test_attention_is_run_with_debug_output():
    seen = []

    def run(command, seconds=0, environment=None):
        seen.append(environment)
        if "DotProductAttention" in command[-1]:
            return CommandResult(0, "attention ran", SELECTED.format("FusedAttention"))
        return CommandResult(0, "transformer engine")

    assert gpu.attention(run).status == "ok"
    assert seen[-1]["NVTE_DEBUG"] == "1" and seen[-1]["NVTE_DEBUG_LEVEL"] == "2"


@pytest.mark.parametrize(
    ("cuda", "fusion", "adam", "status", "words"),
    [
        (False, "", "torch", "ok", "no GPU"),
        (True, "Transformer Engine", "Transformer Engine", "ok", "fused by Transformer Engine, Adam of Transformer"),
        (True, "apex", "torch", "ok", "fused by apex, torch's fused AdamW"),
        (True, "", "torch", "warn", "gradient accumulation is not fused"),
    ],
)
def test_fused_kernels(cuda, fusion, adam, status, words):
    seen = CommandResult(0, json.dumps({"cuda": cuda, "fusion": fusion, "adam": adam}))
    check = gpu.kernels(results(fusion_provider=seen))
    assert check.status == status and words in check.found
    assert bool(check.remedy) == (status != "ok")


def test_fused_kernels_of_this_machine():
    assert gpu.kernels().status in ("ok", "warn")
    broken = CommandResult(1, "", "ImportError: libcudart.so.12: cannot open shared object file")
    check = gpu.kernels(results(fusion_provider=broken))
    assert check.status == "fail" and "libcudart" in check.found


# --- storage


def test_run_directory_can_be_written_and_leaves_nothing(tmp_path):
    check = machine.run_directory(tmp_path / "runs" / "new")
    assert check.status in ("ok", "warn") and "MB/s" in check.found
    assert list(tmp_path.iterdir()) == []


def test_slow_run_directory_warns(tmp_path, monkeypatch):
    ticks = iter([0.0, 10.0])  # 64 MiB in ten seconds
    slow = machine.write_speed(tmp_path, clock=lambda: next(ticks))
    monkeypatch.setattr(machine, "write_speed", lambda folder: slow)
    check = machine.run_directory(tmp_path)
    assert check.status == "warn" and "7 MB/s" in check.found


def test_unwritable_run_directory_fails(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(machine, "write_speed", refuse)
    check = machine.run_directory(tmp_path)
    assert check.status == "fail" and "Read-only" in check.found
    (tmp_path / "file").write_text("")
    assert machine.run_directory(tmp_path / "file" / "run").status == "fail"


def test_local_file_system_with_several_nodes_warns(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(machine, "write_speed", lambda folder: 6700.0)
    mounts.write_text(f"root / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    assert machine.run_directory(tmp_path, 4, mounts).status == "ok"
    folder = tmp_path / "mes données"  # spaces are octal in the list, other letters are not
    folder.mkdir()
    mounts.write_text(f"root / ext4 rw 0 0\nserver:/x {str(folder).replace(' ', chr(92) + '040')} nfs4 rw 0 0\n")
    assert machine.run_directory(folder, 4, mounts).status == "ok"
    mounts.write_text("root / ext4 rw 0 0\n")
    check = machine.run_directory(tmp_path, 4, mounts)
    assert check.status == "warn" and "ext4 is local" in check.remedy
    assert machine.run_directory(tmp_path, 1, mounts).status == "ok"


def usage(free, total=None):
    return lambda path: SimpleNamespace(free=free, total=total or free)


def test_disk_must_hold_the_checkpoints(tmp_path):
    """7 B parameters at 14 bytes are 91 GiB; two kept and one being written are 274 GiB."""
    assert machine.free_disk(tmp_path, 7 * 10**9, 2, usage(275 * GIB)).status == "ok"
    check = machine.free_disk(tmp_path, 7 * 10**9, 2, usage(273 * GIB))
    assert check.status == "fail" and "274 GiB" in check.found
    assert machine.free_disk(tmp_path, 0, 2, usage(5 * GIB)).status == "warn"


def test_weights_directory_must_hold_two_versions(tmp_path):
    weights = 3 * GIB
    assert machine.weights_directory(tmp_path, weights, usage(7 * GIB)).status == "ok"
    assert machine.weights_directory(tmp_path / "made" / "by the run", weights, usage(7 * GIB)).status == "ok"
    check = machine.weights_directory(tmp_path, weights, usage(5 * GIB, 64 * GIB))
    assert check.status == "fail" and "6.0 GiB" in check.found and "--shm-size" in check.remedy
    check = machine.weights_directory(Path("/proc/weights"), 0)
    assert check.status == "fail" and "/proc/weights is not writable" in check.found


def test_small_or_missing_shared_memory(tmp_path):
    assert machine.shared_memory(tmp_path, usage(2 * GIB)).status == "ok"
    assert machine.shared_memory(tmp_path, usage(GIB // 16)).status == "warn"
    assert machine.shared_memory(tmp_path / "none").status == "fail"


def test_clock_skew_warns(tmp_path, monkeypatch):
    assert machine.clock_skew(tmp_path).status == "ok"
    monkeypatch.setattr(machine, "_touch", lambda folder: time.time() + 7.52)
    check = machine.clock_skew(tmp_path)
    assert check.status == "warn" and "+7.5 s" in check.found


# --- environment


def test_a_port_in_use_warns():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = machine.ports("127.0.0.1", port, 1)
        assert check.status == "warn" and str(port) in check.found
    assert machine.ports("127.0.0.1", port, 1).status == "ok"


def test_slurm_controller_is_judged_by_sinfo(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    # Every node is in two partitions; n3 does not respond, n4 is down.
    states = {"n1": "idle", "n2": "mixed", "n3": "idle*", "n4": "down*", "n5": "allocated"}
    lines = [f"echo '{node} {name} {state}'" for name in ("gpu*", "all") for node, state in states.items()]
    program(tmp_path, "sinfo", "\n".join(lines))
    program(tmp_path, "scontrol", 'echo "Configuration data as of $(date +%Y-%m-%dT%H:%M:%S)"')
    check = machine.slurm()
    assert check.status == "ok" and "partitions all, gpu; 3 nodes up" in check.found
    program(tmp_path, "scontrol", "echo 'Configuration data as of 2020-01-01T00:00:00'")
    assert machine.slurm().status == "warn"
    program(tmp_path, "sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    check = machine.slurm()
    assert check.status == "fail" and "Unable to contact" in check.found


def test_slurm_commands_without_a_cluster_are_no_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program(tmp_path, "sinfo", "echo 'sinfo: fatal: Could not establish a configuration source' >&2; exit 1")
    check = machine.slurm()
    assert check.status == "warn" and "no cluster is configured" in check.found


def test_slurm_absent_or_all_down():
    assert machine.slurm(results()).found == "not a Slurm machine"
    down = results(sinfo=CommandResult(0, "n1 gpu drained\n"), scontrol=CommandResult(1, ""))
    assert machine.slurm(down).status == "warn"


def test_low_limits_are_reported(tmp_path):
    def limit(files, locked):
        return lambda which: (files if which == resource.RLIMIT_NOFILE else locked, 0)

    unlimited = resource.RLIM_INFINITY
    assert machine.limits(limit(65536, unlimited), tmp_path).status == "ok"
    assert machine.limits(limit(1024, unlimited), tmp_path).status == "fail"
    assert machine.limits(limit(65536, 8 << 20), tmp_path).status == "warn"  # with InfiniBand
    assert machine.limits(limit(65536, 8 << 20), tmp_path / "none").status == "ok"


def test_hf_cache_must_be_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))  # of HF_HOME, XDG_CACHE_HOME and others
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert machine.hf_cache() == Check("", "ok", f"{tmp_path / 'hub'} (offline)")
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert machine.hf_cache().status == "warn"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert machine.hf_cache().status == "fail"


def test_sglang_must_import_in_the_servers_python(tmp_path):
    python = tmp_path / "python"
    program(tmp_path, "python", "echo 'found 0.5.18 2.13.0+cpu'")
    servers = ServerConfig(python=str(python))
    assert machine.serving_python(servers).status == "ok"
    program(tmp_path, "python", "echo 'found 0.5.23 2.11.0'")
    check = machine.serving_python(servers)
    assert check.status == "warn" and "not built for torch 2.11.0" in check.remedy
    program(tmp_path, "python", "echo \"ModuleNotFoundError: No module named 'sglang'\" >&2; exit 1")
    check = machine.serving_python(servers)
    assert check.status == "fail" and "No module named 'sglang'" in check.found
    assert machine.serving_python(ServerConfig(python=str(tmp_path / "none"))).status == "fail"
    assert machine.serving_python(ServerConfig(urls=["http://a:1"])).status == "ok"


@pytest.fixture
def model(tmp_path):
    config = {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300,
    }  # fmt: skip
    return write_sparse_model(tmp_path / "model", config)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{}"), "architecture"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer"),
    ],
)
def test_incomplete_model_directory_fails(damage, found, model):
    """weights/test_check.py and data/test_tokenizer.py have everything that can be wrong with one."""
    assert machine.model_directory(model).status == "ok"
    damage(model)
    check = machine.model_directory(model)
    assert check.status == "fail" and found in check.found and check.remedy


def test_a_tokenizer_of_another_model_fails(model, tmp_path):
    small = json.loads((model / "config.json").read_text()) | {"vocab_size": 100}
    check = machine.model_directory(write_sparse_model(tmp_path / "small", small))
    assert check.status == "fail" and "257 tokens" in check.found
