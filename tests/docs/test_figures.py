"""Measured figures on the pages come from benchmarks/results.yaml (tools/figures.py), and those from RESULTS.md."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(ROOT / "tools/figures.py"))
RESULTS = TOOL["read"]()
KNOWN = TOOL["figures"](RESULTS)
SECTIONS = re.split(r"^###? ", (ROOT / "benchmarks/RESULTS.md").read_text().replace("**", ""), flags=re.M)


def test_the_pages_have_the_figures_of_the_results_file():
    done = subprocess.run([sys.executable, TOOL["__file__"], "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("group", RESULTS)
def test_a_figure_is_in_its_section_of_the_raw_results(group):
    text = "\n".join(part for part in SECTIONS if part.startswith(RESULTS[group]["section"]))
    assert text, f"RESULTS.md has no section {RESULTS[group]['section']!r}"
    numbers = set(TOOL["NUMBER"].findall(text))
    for key, value in KNOWN.items():
        if key.startswith(f"{group}."):
            missing = set(TOOL["NUMBER"].findall(value)) - numbers
            assert not missing, f"{key}: RESULTS.md, {RESULTS[group]['section']!r}, has no {missing}"


def test_every_figure_is_quoted():
    """A mark that was lost leaves its key behind."""
    marks = {mark for page in TOOL["pages"]() for mark in TOOL["MARK"].findall(page.read_text())}
    unused = [key for key in KNOWN if key.count(".") == 1 and not any(f"{m}.".startswith(f"{key}.") for m in marks)]
    assert not unused


def unmarked(text):
    """Figures with a unit, outside code, that no mark follows."""
    text = re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", text, flags=re.M | re.S)
    for key in set(TOOL["MARK"].findall(text)):
        text = text.replace(f"{KNOWN[key]}<!-- {key} -->", "")
    return re.findall(r"MFU [\d.]+|(?<!\w)[\d.,]+ ?(?:×|%|(?:k )?tokens/s|GB/s|GiB|m?s|minutes)(?!\w)", text)


def test_every_measured_figure_of_the_readme_is_marked():
    text = (ROOT / "README.md").read_text()
    assert unmarked(text) == []
    lost = text.replace("<!-- engine.share -->", "").replace("<!-- step.torch -->", "")
    assert unmarked(lost) == ["89 %", "50.3 k tokens/s", "MFU 0.62"]


def test_a_wrong_figure_is_replaced_and_other_text_is_refused():
    known = {"head.ratio": "1.05 ×", "sync.row": "3.55 GB | 0.083 s"}
    text = "takes 9.99 ×<!-- head.ratio --> | 3 GB | 1,234.5 s<!-- sync.row --> |"
    right = "takes 1.05 ×<!-- head.ratio --> | 3.55 GB | 0.083 s<!-- sync.row --> |"
    assert TOOL["rewritten"](text, known) == right
    for wrong in ("1.05 s<!-- head.ratio -->", "1.05 ×<!-- head.rate -->", "twice<!-- head.ratio -->"):
        with pytest.raises(ValueError, match="mark head"):
            TOOL["rewritten"](wrong, known)
