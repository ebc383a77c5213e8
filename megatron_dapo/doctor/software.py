"""Checks of Python and packages: versions, combinations that do not work, and the wrong apex."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

from megatron_dapo.doctor.check import Check, fail, ok, warn

Version = Callable[[str], str | None]  # of an installed distribution; None when it is not installed

# (lowest supported, first that is too new)
NEEDED: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "torch": ((2, 8), None),
    "megatron-core": ((0, 16), (0, 20)),
    "transformers": ((5,), (6,)),
    "psutil": ((5, 9), None),
}
# SGLang pins torch exactly: the releases for each torch.
SGLANG_FOR_TORCH = {(2, 11): ((0, 5, 11), (0, 5, 17)), (2, 13): ((0, 5, 18), (0, 5, 22)), (2, 14): ((0, 5, 23), None)}
LOCKS = Path(__file__).resolve().parents[1] / "locks"
# Versions that change results or speed; the others are only mentioned.
MEASURED = (
    "torch", "megatron-core", "transformer-engine", "sglang", "sglang-kernel", "transformers", "triton", "math-verify",
    "flashinfer-python", "torch-memory-saver",
)  # fmt: skip


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_tuple(text: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" is (2, 13, 0); the first part that is not a number ends it."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def python_version(found: tuple[int, ...] = tuple(sys.version_info[:3]), read: Version = installed) -> Check:
    text = ".".join(map(str, found))
    if found < (3, 11):
        return fail(text, "use Python 3.11 or newer")
    core = read("megatron-core")
    if core and version_tuple(core) >= (0, 17) and found < (3, 12):
        remedy = "megatron-core above 0.16 needs Python 3.12: use that, or pip install 'megatron-core<0.17'"
        return fail(f"{text} with megatron-core {core}", remedy)
    return ok(text)


def packages(read: Version = installed) -> Check:
    """The packages that every run needs, in supported versions."""
    found, wrong = [], []
    for name, (lowest, too_new) in NEEDED.items():
        version = read(name)
        if version is None:
            wrong.append(f"{name} is not installed")
            continue
        found.append(f"{name} {version}")
        number = version_tuple(version)
        wanted = ".".join(map(str, lowest))
        if number < lowest:
            wrong.append(f"{name} {version} is older than {wanted}")
        elif too_new and number >= too_new:
            wrong.append(f"{name} {version} is newer than supported (below {'.'.join(map(str, too_new))})")
    if wrong:
        remedy = "pip install -e . (in the environment that runs megatron-dapo)"
        if read("psutil") is None:
            remedy += "; without psutil Megatron hangs when it saves a checkpoint"
        return fail("; ".join(wrong), remedy)
    return ok(", ".join(found))


def lock(read: Version = installed, python: tuple[int, ...] = tuple(sys.version_info[:2])) -> Check:
    """The versions here and those we test (megatron_dapo/locks). Other versions may work."""
    torch = read("torch")
    if torch is None:
        return fail("torch is not installed", "tools/install.sh cpu, or cuda13")
    name = "cpu" if _is_cpu_build(torch, python) else "cuda13"
    pins = read_lock(LOCKS / f"{name}.txt", python)
    versions = {package: read(package) for package in pins}
    differ = [
        f"{package} {version} ({pins[package]})" for package, version in versions.items()
        if version and version_tuple(version) != version_tuple(pins[package])
    ]  # fmt: skip
    differ.sort(key=lambda text: text.split()[0] not in MEASURED)
    important = any(text.split()[0] in MEASURED for text in differ)
    same = sum(version is not None for version in versions.values()) - len(differ)
    found = f"{same} packages as in locks/{name}.txt"
    if differ:
        found += f"; other versions than measured: {', '.join(differ)}"
    if important:
        return warn(found, f"may work, but was not measured: tools/install.sh {name} installs what was")
    return ok(found)


def read_lock(path: Path, python: tuple[int, ...]) -> dict[str, str]:
    """Versions by package of a file of constraints; markers of the form `; python_version < '3.12'` are respected."""
    pins = {}
    for line in path.read_text().splitlines():
        pin, _, marker = line.partition("#")[0].partition(";")
        if "==" not in pin:
            continue
        if marker:
            _, sign, bound = marker.replace("'", "").split()
            if (python < version_tuple(bound)) != (sign == "<"):
                continue
        package, _, version = pin.strip().partition("==")
        pins[package] = version
    return pins


def _is_cpu_build(torch: str, python: tuple[int, ...]) -> bool:
    """By the local version, e.g. +cpu; a build without one is taken for that of the lock with the same version."""
    _, _, local = torch.partition("+")
    return local == "cpu" if local else read_lock(LOCKS / "cpu.txt", python)["torch"] == torch


def sglang_pairing(sglang: str, torch: str) -> str | None:
    """What is wrong with this pair of versions, or None."""
    number, pair = version_tuple(sglang), version_tuple(torch)[:2]
    if number < (0, 5, 17):
        return f"sglang {sglang} is older than 0.5.17, the oldest supported release"
    if pair in SGLANG_FOR_TORCH:
        lowest, newest = SGLANG_FOR_TORCH[pair]
        if number < lowest or (newest and number > newest):
            known = ".".join(map(str, lowest)) + (f" to {'.'.join(map(str, newest))}" if newest else " or newer")
            return f"sglang {sglang} was not built for torch {torch}, which needs sglang {known}"
    return None


def apex() -> Check:
    """NVIDIA's apex has fused optimizers; the PyPI package of that name is unrelated and breaks Megatron."""
    folder = _apex_folder()
    if folder is None:
        return ok("not installed (not needed)")
    if (folder / "optimizers").is_dir() or (folder / "multi_tensor_apply").is_dir():
        return ok("NVIDIA's")
    remedy = "pip uninstall apex: the PyPI package is not NVIDIA's, and Megatron does not need apex"
    return fail(f"{folder} is not NVIDIA's apex", remedy)


def _apex_folder() -> Path | None:
    try:
        spec = PathFinder.find_spec("apex")  # also where this process has hidden it (policy.megatron.importing)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        try:
            importlib.metadata.distribution("apex")
        except importlib.metadata.PackageNotFoundError:
            return None
        return Path("(distribution without a package)")
    places = list(spec.submodule_search_locations or [])
    return Path(places[0] if places else spec.origin or "apex")
