"""Every figure with a unit that README quotes is in benchmarks/RESULTS.md, with the same unit and digits. On the other
pages it is, or another test produces it, or it is no measurement: a limit, a size, a setting. A figure of
docs/results.md is in one of the sections of RESULTS.md that its own section names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README, RESULTS = (ROOT / "README.md").read_text(), (ROOT / "benchmarks" / "RESULTS.md").read_text()

UNITS = (
    r"[kM] tokens/s|tokens/s|tok/s|GB/s|MB/s|TB/s|GiB|GB|MiB|MB|TFLOP/s|k GPU-hours|GPU-hours|hours|days|minutes|"
    r"points|nats|µs|ns|ms|min|%|×|s"
)
NUMBER = r"\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e-?\d+)?"
# "1.06 to 1.11 ×", "54.7 % → 70.9 %", "38.0%", "MFU 0.59 to 0.65", "2,275.8 s", "14 and 23 GB/s"
WITH_UNIT = re.compile(rf"(?<![\w.,-])({NUMBER})(?:\s(?:to|and|or|–|→)\s({NUMBER}))?\s?({UNITS})(?![\w/])")
MFU = re.compile(rf"MFU ({NUMBER})(?: to ({NUMBER}))?")


def figures(text: str) -> set[tuple[str, str]]:
    """(number, unit) of everything in `text` that is outside tables or names its unit in a table's cell."""
    text = re.sub(r"```(?:mermaid|python).*?```", "", text, flags=re.S).replace("**", "").replace("|", " | ")
    found = {(number, match[3]) for match in WITH_UNIT.finditer(text) for number in match.group(1, 2) if number}
    return found | {(number, "MFU") for match in MFU.finditer(text) for number in match.groups() if number}


def cells_with_header(text: str) -> set[tuple[str, str]]:
    """(number, unit) of table cells that hold a bare number; the unit is in the column's header."""
    found, header = set(), []
    for line in text.replace("**", "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells or len(cells) != len(header):
            header = cells
            continue
        for title, cell in zip(header, cells, strict=True):
            unit = next((unit for unit in ("×", "MFU", "tokens/s") if unit in title), None)
            number = re.fullmatch(rf"({NUMBER})( k)?", cell)
            if unit and number:
                found.add((number[1], f"k {unit}" if number[2] else unit))
    return found


MEASURED = figures(RESULTS) | cells_with_header(RESULTS)


@pytest.mark.parametrize(("number", "unit"), sorted(figures(README)))
def test_a_figure_of_the_readme_is_in_the_results(number, unit):
    assert (number, unit) in MEASURED, f"README quotes {number} {unit}, which benchmarks/RESULTS.md does not have"


def result(section: str, row: str, column: str) -> str:
    """The cell of a table in RESULTS.md: the first row of that section that contains `row`."""
    body = next(part for part in RESULTS.replace("**", "").split("\n## ") if part.startswith(section))
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"]
    (found,) = [cells for cells in table if row in " | ".join(cells)][:1]
    header = next(cells for cells in table if column in cells)
    return found[header.index(column)]


def test_readme_quotes_the_right_rows():
    """A figure of another row would also be in RESULTS.md; these sentences are tied to their rows."""
    text = " ".join(README.replace("**", "").split())
    update = "8 × 2048 tokens: DAPO update"
    for layers, words in (("torch", "torch layers"), ("TE 2.20.2", "Transformer Engine")):
        row = f"{update} | {layers}"
        speed, mfu = (result("step.py", row, column) for column in ("tokens/s", "MFU"))
        assert f"{speed} tokens/s and MFU {mfu} with {words}" in text
    best = result("step.py", f"{update} | torch", "× cross-entropy")
    recomputed = result("step.py", "full recompute: DAPO update", "MFU")
    top = result("step.py", f"{update} | TE", "MFU")
    assert f"to {best} × the speed of plain cross-entropy, MFU 0.59 to {top} (MFU {recomputed} with full" in text
    head, memory = (result("head.py", "ours, one pass", column) for column in ("× limit", "extra memory"))
    assert f"output layer with loss: {head} × the time of its three matrix products, {memory} of extra memory" in text
    hand_over = result("examples/gsm8k_1gpu on one H200", "6.4 s (41.2 k tokens/s)", "hand-over")
    assert f"a hand-over takes {hand_over}" in text
    (xeon, xeon_time), (arm, arm_time) = (
        [result("examples/quickstart", row, column) for column in ("held-out avg@8", "time after installation")]
        for row in ("Xeon (x86-64)", "Neoverse-N1")
    )
    assert f"held-out avg@8: {xeon}" in text and f"in {xeon_time} after installation" in text
    assert f"the same seed gave {arm}, in {arm_time}" in text


def test_the_figures_that_matter_are_found():
    """The patterns above see what they should: a figure that they miss would go unchecked."""
    seen = figures(README)
    for figure in [("1.05", "×"), ("0.62", "MFU"), ("0.66", "MFU"), ("0.59", "MFU"), ("50.3", "k tokens/s"),
                   ("35.0", "%"), ("90.0", "%"), ("76.5", "%"), ("205", "s"), ("1.2", "GiB"), ("5", "%")]:  # fmt: skip
        assert figure in seen, figure
    assert len(seen) >= 18
    assert figures("1.06 to 1.11 × and MFU 0.4 to 0.5, 3 s, 12 steps, 0.5.18 on") == {
        ("1.06", "×"), ("1.11", "×"), ("0.4", "MFU"), ("0.5", "MFU"), ("3", "s"),
    }  # fmt: skip


def test_a_wrong_figure_would_be_found():
    assert ("0.87", "MFU") not in MEASURED and ("2.05", "×") not in MEASURED
    assert not figures("a GSM8K step: 1.99 × the speed") <= MEASURED


def test_seconds_in_the_readme_have_no_second_meaning():
    """README says no speed, memory or accuracy in words that the patterns cannot read."""
    vague = re.findall(r"\b(?:half a second|twice as|a third|nearly \d|about \d+ (?:s|%|GiB))\b", README)
    assert not vague, vague


# Figures of other pages that are not in RESULTS.md, and what they are. Rows of `plan` (| TP…) are checked by
# tests/examples/test_configs.py, those of planning.md's comparison by tests/planner/test_published.py.
ELSEWHERE = {
    "docs/architecture.md": {"13 %": "limit in tests/test_imports.py"},
    "docs/concepts.md": {"0.05 nats": "a limit to choose"},
    "docs/conversion.md": dict.fromkeys(("1 MB", "64 MB", "128 MB"), "sizes of buffers"),
    "docs/configuration.md": {"0.2 s": "default", "300 s": "default", "128 ×": "size of a block"},
    "docs/diagnosis.md": {f"{n} %": "limit of a rule" for n in ("1", "10", "15", "20", "30", "99")},
    "docs/megatron.md": {"6 ×": "layers of stages"},
    "docs/monitoring.md": {"989 TFLOP/s": "data sheet, planner/hardware.py"},
    "docs/planning.md": {
        "10 %": "tests/planner/test_decoding.py", "15 %": "tests/planner/test_decoding.py",
        "3 %": "tests/planner/test_against_megatron.py", "25 %": "tests/planner/test_sync_model.py",
        "14 GB/s": "published", "23 GB/s": "published",
        **dict.fromkeys(("50 GB/s", "40 GB/s", "90 GB/s", "0.04 s", "0.89 s", "3 ×"), "planner/assumptions.py"),
        **dict.fromkeys(
            [f"{n} s" for n in ("0.2", "0.5", "1.1", "1.7", "1.9", "2.1", "3.6", "5.4", "7.1", "14.1")],
            "tests/planner/test_sync_model.py",
        ),
        "100 GB/s": "assumed", **dict.fromkeys(("10 µs", "85 µs", "80 ns", "250 ns"), "planner/assumptions.py"),
        "61 GiB": "2 bytes × parameters", "438 GiB": "2 bytes × parameters",
    },
    "docs/results.md": {
        "14 GB/s": "published", "23 GB/s": "published", "35 minutes": "published", "52 %": "published",
        "376 s": "published", "200 s": "published", "374.9 s": "tests/planner/test_published.py",
        "14.2 s": "published", "6.2 s": "published",
        **dict.fromkeys(("2.1 s", "0.213 s"), "tests/planner/test_sync_model.py"),
        "95 %": "confidence level", "2.7 points": "1.96 √(p (1 − p) / 1319)", "2.3 points": "likewise",
        "1.5 points": "the standard error of 800 samples",
        "50 %": "default of --kept",
        **{f"{n} s": "test_results.py" for n in ("2,257.5", "2,095", "3,066", "770.2", "715", "1,046")},
    },
    "docs/rollout.md": {"7 000 tokens/s": "default", "128 ×": "size of a block"},
    "examples/README.md": {"16 ×": "nodes", "80 GB": "GPU", "20 minutes": "about, of the paper's order"},
    "examples/ablations/README.md": {"95 %": "confidence level", "20 minutes": "about, of the paper's order"},
    "examples/gsm8k_1gpu/README.md": {
        "1 s": "1.06 s in RESULTS.md, rounded", "128 ×": "setting", "22 GB": "14 bytes × 1.54 B parameters",
        "3 GiB": "of a server that has released its memory", "70 %": "setting", "80 GB": "GPU",
    },
    "examples/qwen2.5_32b_dapo/README.md": {
        "2 ×": "setting", "522.6 GiB": "`plan` without parallelism", "38 minutes": "its table",
    },
    "examples/qwen2.5_32b_fast/README.md": {
        "914 s": "`simulate`", "92 %": "`simulate`", "2.9 ×": "quotient of two plans",
        "2,257.5 s": "`plan` of the other",
    },
    "examples/qwen3_30b_a3b/README.md": {
        "14.2 GiB": "`plan`", "132 GiB": "`plan`", "96 GiB": "`plan`", "80 GB": "calculated from sizes",
        "0.3 MB": "calculated from sizes",
    },
}  # fmt: skip
OTHER_PAGES = [
    str(page.relative_to(ROOT)) for folder in ("docs", "examples") for page in sorted((ROOT / folder).rglob("*.md"))
]
CHECKED_ROWS = re.compile(r"^\| (?:TP\d|[\w.-]+ \| (?:Qwen|Llama)).*$|^(?:naive GRPO|\+ ).*±.*$", re.M)


RESULTS_PAGE = "docs/results.md"
RAW = "Raw figures: "  # the last line of a section of docs/results.md


def without_a_source(page: str, text: str, measured: set[tuple[str, str]]) -> list[str]:
    text = CHECKED_ROWS.sub("", text)
    found = {f"{number} {unit}" for number, unit in (figures(text) | cells_with_header(text)) - measured}
    return sorted(found - set(ELSEWHERE.get(page, {})))


def results_sections(text: str) -> list[tuple[str, str, list[str]]]:
    """(title, text, names of sections of RESULTS.md) of every section of docs/results.md that has figures."""
    found = []
    for part in text.split("\n## ")[1:]:
        title, raw = part.partition("\n")[0], [line for line in part.splitlines() if line.startswith(RAW)]
        if raw or figures(part):
            found.append((title, part, re.findall(r"`([^`]+)`", " ".join(raw))))
    return found


def measured_in(names: list[str]) -> set[tuple[str, str]]:
    parts = RESULTS.split("\n## ")
    for name in names:
        assert any(part.startswith(name) for part in parts), f"RESULTS.md has no section {name}"
    text = "\n\n".join(part for part in parts if part.startswith(tuple(names)))
    return figures(text) | cells_with_header(text)


@pytest.mark.parametrize("page", OTHER_PAGES)
def test_a_figure_of_another_page_has_a_source(page):
    missing = without_a_source(page, (ROOT / page).read_text(), MEASURED)
    assert not missing, f"{page} quotes {missing}: neither in RESULTS.md nor in ELSEWHERE"


@pytest.mark.parametrize(
    ("title", "text", "names"), [pytest.param(*s, id=s[0]) for s in results_sections((ROOT / RESULTS_PAGE).read_text())]
)
def test_a_section_of_the_results_page_quotes_the_sections_that_it_names(title, text, names):
    assert names, f"{RESULTS_PAGE}: '{title}' has figures and no line '{RAW}…'"
    missing = without_a_source(RESULTS_PAGE, text, measured_in(names))
    assert not missing, f"{RESULTS_PAGE}, '{title}' quotes {missing}: not in {names} of RESULTS.md"


PLANTED = ["it takes 7.77 s", "1,777.7 s", "7 to 77.7 GB/s", "MFU 0.777", "77.7 minutes", "| × |\n|---|\n| 77.7 |"]


@pytest.mark.parametrize("page", [*OTHER_PAGES, "README.md"])
def test_a_planted_figure_is_found_on_every_page(page):
    text = (ROOT / page).read_text()
    for planted in PLANTED:
        assert without_a_source(page, f"{text}\n\n{planted}\n", MEASURED), planted


def test_a_figure_of_another_section_is_found():
    """12.76 × is a figure of head.py; the section about weight sync may not quote it."""
    _, text, names = next(s for s in results_sections((ROOT / RESULTS_PAGE).read_text()) if s[0] == "Weight sync")
    assert without_a_source(RESULTS_PAGE, f"{text}\nliger 12.76 ×\n", measured_in(names)) == ["12.76 ×"]
