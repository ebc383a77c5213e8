"""The commands of README, docs and examples, given as they are written.

A block of commands starts with ```bash (a script) or ```console (commands after `$`, with what they print). Words after
that say what it needs beyond a checkout: gpu, slurm, network (downloads), model (weights of that size), minutes, hours.
Blocks that need nothing are executed here, in a directory with the files that they name; the others where these exist,
named in DOCS_HAVE (`DOCS_HAVE=gpu,minutes`). What is not executed must parse: the command exists, and its options do,
too. Where a block needs Slurm, `megatron-dapo slurm` is executed with recording stand-ins for Slurm's commands.
"""

import os
import re
import shlex
import shutil
import subprocess
import threading
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from workplace import ROOT

from megatron_dapo.arguments import with_set
from megatron_dapo.cli import build_parser, main
from megatron_dapo.launch.slurm import remember
from megatron_dapo.observe.watch import make_server

NEEDS = {"gpu", "slurm", "network", "model", "minutes", "hours"}
HAVE = set(os.environ.get("DOCS_HAVE", "").split(",")) - {""}
PLACEHOLDER = re.compile(r"SRC|DST|RUN_DIR|HF_DIR|CONFIG|JOB|DIR|PATH|A|B")
NUMBER = re.compile(r"\d[\d.,]*(?:e[-+]?\d+)?")
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)```", re.M | re.S)
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]  # fmt: skip


@dataclass
class Block:
    page: str
    line: int
    kind: str  # bash, console
    needs: set[str]
    text: str

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command with the lines that it is said to print."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.replace("\\\n", " ").splitlines():
            if self.kind == "console" and not line.startswith("$ "):
                found[-1][1].append(line)
            elif line.strip() and not line.startswith("#"):
                found.append((line.removeprefix("$ "), []))
        return found


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for fence in FENCE.finditer(text):
            kind, *needs = fence["info"].split() or [""]
            body = "\n".join(line.removeprefix(fence["indent"]) for line in fence["body"].splitlines())
            line = text[: fence.start()].count("\n") + 1
            found.append(Block(str(page.relative_to(ROOT)), line, kind, set(needs), body))
    return found


ALL = blocks()
SCRIPTS = [block for block in ALL if block.kind in ("bash", "console")]


def name(block: Block) -> str:
    return f"{block.page}:{block.line}"


def test_every_block_of_commands_is_marked():
    for block in ALL:
        if block.kind not in ("bash", "console"):
            commands = re.findall(r"^(?:\$ |megatron-dapo |make |pip |uv |hf |sbatch )", block.text, flags=re.M)
            assert not commands, f"{name(block)}: start the block with ```bash or ```console, and what it needs"
    unknown = {name(block): block.needs - NEEDS for block in SCRIPTS if block.needs - NEEDS}
    assert not unknown, f"{unknown}: known are {', '.join(sorted(NEEDS))}"
    assert len(SCRIPTS) >= 25 and sum(not block.needs for block in SCRIPTS) >= 10


@pytest.mark.parametrize("block", SCRIPTS, ids=name)
def test_every_command_exists(block, capsys):
    for command, _ in block.commands:
        words = shlex.split(command, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words[0] == "megatron-dapo":
            try:
                build_parser().parse_args(with_set(words[1:]))
            except SystemExit as stop:
                shown = not stop.code and {"--help", "--version"} & set(words)
                assert shown, f"{name(block)}: {command!r} does not parse: {capsys.readouterr().err}"
        elif words[0] == "make":
            check = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert check.returncode == 0, f"{name(block)}: {command!r}: {check.stderr}"


@pytest.fixture(scope="module")
def converted(sparse_models, tmp_path_factory):
    """The quickstart's first model as a Megatron checkpoint."""
    from megatron_dapo.weights.convert import hf_to_megatron

    target = tmp_path_factory.mktemp("converted") / "start-megatron"
    hf_to_megatron(sparse_models / "runs" / "quickstart" / "start", target)
    return target


def furnish(folder: Path, converted: Path) -> None:
    """What the pages assume besides the examples' files: a configuration run.yaml, a model directory, two runs."""
    from synthetic_runs import make_run

    shutil.copy(ROOT / "examples" / "qwen2.5_32b_dapo" / "dapo.yaml", folder / "run.yaml")
    (folder / "Qwen2.5-32B").symlink_to(folder / "models" / "Qwen2.5-32B")
    (folder / "runs" / "quickstart" / "start-megatron").symlink_to(converted)
    for run in ("quickstart", "32b", "dapo", "grpo"):
        make_run(folder / "runs" / run, 12)


def is_synopsis(words: list[str]) -> bool:
    return any(PLACEHOLDER.fullmatch(word) for word in words)


def run_main(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)


def watch_once(words: list[str]) -> int:
    """Serves the page until it was read once."""
    with make_server(build_parser().parse_args(words).runs, port=0) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with urllib.request.urlopen(server.url, timeout=60) as reply:
            page = reply.read()
        thread.join()
    return 0 if b"connect-src 'self'" in page else 1


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A directory like a checkout, in which nothing was made yet. Blocks share it: they train the same model."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in (".git", "runs"):
            (folder / path.name).symlink_to(path)
    return folder


def in_shell(command: str, folder: Path) -> tuple[int, str]:
    """(exit code, output); a command that ended well is not given again in this directory."""
    done = folder / "done"
    if done.exists() and command in done.read_text().splitlines():
        return 0, ""
    variables = {"PATH": f"{folder}/.venv/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["bash", "-ec", command], cwd=folder, capture_output=True, text=True, env=os.environ | variables
    )
    if result.returncode == 0:
        with done.open("a") as file:
            file.write(f"{command}\n")
    return result.returncode, result.stdout + result.stderr


def comparable(line: str, exact: bool) -> str:
    """What stays the same from run to run: with numbers that were measured, the words."""
    return line if exact else " ".join(re.findall(r"[\w@→#]+", NUMBER.sub("#", line)))


def is_planned_elsewhere(command: str, expected: list[str]) -> bool:
    """tests/examples/test_configs.py gives this command, and compares its figures with the page's table."""
    return command.startswith("megatron-dapo plan examples/") and not expected


def is_given(block: Block) -> bool:
    return bool(HAVE or not (block.needs or all(is_planned_elsewhere(*command) for command in block.commands)))


@pytest.mark.timeout(7200 if HAVE else 300)
@pytest.mark.parametrize("block", [block for block in SCRIPTS if is_given(block)], ids=name)
def test_commands_do_what_the_page_says(block, request, converted, monkeypatch, capsys):
    if block.needs - HAVE:
        pytest.skip(f"needs {', '.join(sorted(block.needs - HAVE))}: name it in DOCS_HAVE where it exists")
    lines = [shlex.split(command, comments=True) for command, _ in block.commands]
    makes_its_files = any(words[0] in ("make", "python") for words in lines)
    if makes_its_files:
        folder = request.getfixturevalue("checkout")
    else:
        folder = request.getfixturevalue("workplace")
        furnish(folder, converted)
    monkeypatch.setenv("COLUMNS", "120")  # of the tables that a page shows
    if "slurm" not in HAVE:
        monkeypatch.setattr(shutil, "which", lambda name, *_, **__: None)  # the tools may be here without a controller
    ran = 0
    for (command, expected), words in zip(block.commands, lines, strict=True):
        if is_synopsis(words) or words[:2] == ["make", "test"] or is_planned_elsewhere(command, expected):
            continue  # this test is part of `make test`
        capsys.readouterr()
        if words[:2] == ["megatron-dapo", "watch"]:
            code, said = watch_once(words[1:]), ""
        elif words[0] == "megatron-dapo" and not makes_its_files:
            code = run_main(words[1:])
            said = "".join(capsys.readouterr())
        else:
            code, said = in_shell(command, folder)
        failing = any("unknown key" in line for line in expected)
        assert code == (2 if failing else 0), f"{name(block)}: {command!r} ended with {code}: {said}"
        exact = "minutes" not in block.needs
        printed = {comparable(line, exact) for line in said.splitlines()}
        missing = [line for line in expected if line.strip() and comparable(line, exact) not in printed]
        assert not missing, f"{name(block)}: {command!r} printed\n{said}\nwithout\n{missing}"
        shown = {comparable(line, exact) for line in expected}
        rows = [line for line in said.splitlines() if line.startswith("│") and comparable(line, exact) not in shown]
        assert not rows or not expected, f"{name(block)}: {command!r} also printed {rows}"
        ran += 1
    assert ran or HAVE or all(is_synopsis(words) for words in lines), f"{name(block)}: nothing ran"


SLURM_COMMANDS = """\
#!/bin/bash
echo "${0##*/} $*" >> "$RECORD"
case "${0##*/} $*" in
  sinfo*%G*) echo gpu:h100:8 ;;
  sinfo*) printf 'h100\\nbatch*\\n' ;;
  *--test-only*) echo "sbatch: Job 1 to start at 2026-01-01T00:00:00" >&2 ;;
  sbatch*) echo 4711 ;;
  *"show job"*) echo "JobId=4711 JobState=$STATE Reason=None Restarts=0 ExitCode=0:0 NodeList=n[1-16] NumNodes=16" ;;
  scontrol*) echo "SelectType = select/cons_tres" ;;
esac
"""


@pytest.mark.parametrize("block", [block for block in SCRIPTS if block.needs == {"slurm"}], ids=name)
def test_slurm_commands_reach_the_cluster(block, workplace, converted, monkeypatch, capfd):
    """With recording stand-ins for Slurm's commands; real jobs run in tests/launch."""
    furnish(workplace, converted)
    remember(workplace / "runs" / "32b", [4711])
    commands, record = workplace / "bin", workplace / "record"
    commands.mkdir()
    for command in ("sinfo", "sbatch", "scontrol", "squeue", "sacct", "srun"):
        (commands / command).write_text(SLURM_COMMANDS)
        (commands / command).chmod(0o755)
    for variable, value in (("HOME", workplace), ("EDITOR", "true"), ("RECORD", record),
                            ("PATH", f"{commands}:{os.environ['PATH']}")):  # fmt: skip
        monkeypatch.setenv(variable, str(value))
    (workplace / ".config").mkdir()
    for command, _ in block.commands:
        words = shlex.split(command, comments=True)
        about_a_job = "--status" in words
        monkeypatch.setenv("STATE", "RUNNING" if about_a_job else "COMPLETED")
        if words[:2] == ["megatron-dapo", "slurm"]:
            record.write_text("")
            assert run_main(words[1:]) == 0, f"{name(block)}: {command!r}: {capfd.readouterr()}"
            wanted = "show job" if about_a_job else "sbatch --parsable"
            assert (wanted in record.read_text()) == ("--dry-run" not in words), f"{command!r}: {record.read_text()}"
        elif words[0] == "install":
            subprocess.run(["bash", "-ec", command], check=True)
