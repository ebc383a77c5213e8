"""What the markdown files say exists: links lead somewhere, commands parse, keys are in the schema."""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.arguments import with_set
from megatron_dapo.cli import build_parser
from megatron_dapo.config import Config
from megatron_dapo.config.data import RemoteConfig
from megatron_dapo.config.load import known_keys
from megatron_dapo.config.other_names import find_row, shown, tools

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = re.compile(r"/(\.|runs/|build/|dist/)")
PAGES = sorted(
    path for path in ROOT.rglob("*.md") if not HIDDEN.search("/" + str(path.relative_to(ROOT))) and path.is_file()
)
KEYS = set(known_keys())
SECTIONS = set(Config.model_fields)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def outside_code(text):
    """The text without fenced blocks and inline code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors(page):
    """GitHub's anchors of a page's headings: lower case, punctuation left out, spaces as hyphens."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pages
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        assert file.is_relative_to(ROOT), f"{page.name} links to {target}, outside the repository"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}; {file.name} has no such heading"


def inline_code(text):
    """Every `…` outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def theirs(page):
    """Of migration.md, the settings of other tools."""
    named = page.name == "migration.md"
    return {shown(tool, row) for tool in tools().values() for row in tool.rows.values()} if named else set()


@pages
def test_keys_are_in_the_schema(page):
    foreign = theirs(page)
    for code in inline_code(page.read_text()):
        if code in foreign and code not in KEYS:
            continue
        match = re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?:: .+|=.+)?", code)
        if match is None or match[1].split(".")[0] not in SECTIONS or match[1].endswith((".py", ".md", ".yaml")):
            continue
        assert match[1] in KEYS, f"{page.name} names the key {match[1]}, which the schema does not have"


def commands(page):
    """(command line, whether it is complete) of everything that starts with megatron-dapo."""
    text = page.read_text()
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"\s*(?:\$ |\w+=\S+ )*(megatron-dapo .*)", line)
            if found:
                yield re.split(r"\s+#|\s*(?:&&|\||;|>)", found[1])[0].strip(), True
    for code in inline_code(text):
        found = re.search(r"(?:^|&& |\d )(megatron-dapo .+)", code)
        if found:
            yield found[1], False


def leaf(parser, words):
    """The parser of the command that `words` begin with; None where there is no such command."""
    for word in words:
        inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not inner:
            return parser
        if word not in inner[0].choices:
            return None
        parser = inner[0].choices[word]
    return parser


def test_the_documentation_lists_every_command():
    (inner,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    table = (ROOT / "docs" / "README.md").read_text().split("## Commands")[1]
    assert set(re.findall(r"^\| `megatron-dapo ([a-z]+)", table, flags=re.M)) == set(inner.choices)


@pages
def test_commands_parse(page, capsys):
    parser = build_parser()
    for line, complete in commands(page):
        words = shlex.split(line)[1:]
        if words[0] in ("COMMAND", "X") or words[0].startswith("-"):
            continue
        command = leaf(parser, words)
        assert command is not None, f"{page.name}: {line!r}: no such command"
        for word in words:
            flag = word.split("=")[0]
            if flag.startswith("--"):
                assert flag in command._option_string_actions, f"{page.name}: {line!r}: {flag} is no option of it"
        for key in re.findall(r"--set ([\w.]+)=", line):
            assert key in KEYS, f"{page.name}: {line!r} sets {key}, which the schema does not have"
        if complete and not re.search(r"[\[…]", line):
            try:
                parser.parse_args(with_set(words))
            except SystemExit as stop:
                if "--help" in words:
                    continue
                pytest.fail(f"{page.name}: {line!r} does not parse ({stop.code}): {capsys.readouterr().err}")


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, f"docs/README.md does not list {page.name}"


def test_configuration_reference_is_up_to_date():
    command = [sys.executable, str(ROOT / "tools" / "generate_config_reference.py"), "--check"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


def test_configuration_reference_has_every_key():
    text = (ROOT / "docs" / "configuration.md").read_text()
    listed_above = ("critic.optimizer.", "evaluate.data.", "reward.graders.http.", "reward.graders.judge.")
    repeated = {key for key in KEYS if key.startswith(listed_above)}
    repeated |= {f"reward.judge.{name}" for name in RemoteConfig.model_fields}  # listed under reward.http
    for key in KEYS - repeated:
        assert f"| `{key}` |" in text or f"# {key}\n" in text, key


def test_keys_of_the_recipe_are_described():
    """The sections that people read first leave no key without a description."""
    rows = [line.split(" | ") for line in (ROOT / "docs" / "configuration.md").read_text().splitlines()]
    bare = [row[0] for row in rows if re.match(r"\| `(policy|algorithm|trainer)\.", row[0]) and not row[3].strip(" |")]
    assert not bare, f"without a description: {', '.join(bare)}"


@pytest.mark.parametrize("tool", tools().values(), ids=lambda tool: tool.name)
def test_rows_of_other_tools_lead_to_keys_that_exist(tool):
    assert {*tool.settings, *(key for row in tool.rows.values() for key in row.also)} <= KEYS
    assert all(tool.row(name) for name in tool.defaults)
    for row in tool.rows.values():
        assert row.to in KEYS if row.to else row.none or row.same is not None or row.like in tools(), row


def test_every_name_of_verl_is_answered_with_our_key():
    """With and without actor_rollout_ref., which the table omits."""
    verl = tools()["verl"]
    rows = [row for row in verl.rows.values() if row.to and "*" not in row.name]
    assert len(rows) > 100
    for row in rows:
        assert find_row(shown(verl, row)) == find_row(f"actor_rollout_ref.{row.name}") == row
