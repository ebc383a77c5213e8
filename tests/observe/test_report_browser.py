"""The report in a real browser: every figure has real paths, no error is logged, no request leaves the page.

Chromium takes seconds to start, so one browser serves all tests.
"""

import asyncio
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import BINARY, Tab, chromium
from synthetic_runs import HOSTILE, make_run

from megatron_dapo.observe.metrics_file import STEP, MetricsFile, Record
from megatron_dapo.observe.report import write_report

pytestmark = pytest.mark.skipif(BINARY is None, reason="no chromium is installed (Debian: apt-get install chromium)")

FIGURES = """[...document.querySelectorAll("figure")].map((figure) => ({
  id: figure.id,
  title: figure.querySelector("h3").textContent,
  panels: [...figure.querySelectorAll(".panel")].map((panel) => ({
    width: panel.clientWidth,
    svg: panel.querySelector("svg") ? panel.querySelector("svg").getBoundingClientRect().width : 0,
    label: panel.querySelector("svg") ? panel.querySelector("svg").getAttribute("aria-label") : "",
    ticks: [...panel.querySelectorAll(".grid text")].map((text) => text.textContent),
    paths: [...panel.querySelectorAll("path.line, path.area")].map((path) => path.getAttribute("d")),
    boxes: [...panel.querySelectorAll("path.line, path.area")].map((path) => path.getBBox())
      .map((box) => [box.x, box.y, box.width, box.height]),
  })),
}))"""
MOVE = """(selector, x) => {
  const figure = document.querySelector(selector); figure.scrollIntoView({ block: "center" });
  const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x * box.width, clientY: box.top + 90 }));
  return figure.querySelector(".tip").innerText;
}"""


@dataclass
class Visit:
    """What the browser reported about one page."""

    figures: list[dict[str, Any]]
    complaints: list[str]
    requests: list[str]
    facts: dict[str, Any]


async def visit(tab: Tab, page: Path, facts: dict[str, str], **options: Any) -> Visit:
    await tab.open(page, **options)
    found = {name: await tab.evaluate(script) for name, script in facts.items()}
    await tab.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    await tab.evaluate("new Promise((done) => setTimeout(done, 100))")
    return Visit(await tab.evaluate(FIGURES), tab.complaints, tab.requests, found)


CHOOSE = """(selector, value, event) => {
  const control = document.querySelector(selector); control.value = value; control.dispatchEvent(new Event(event));
}"""
REWARD_LINES = "document.querySelectorAll('#figure-reward path.line').length"
CLICK_RUN = "document.querySelectorAll('.chip')[1].click()"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
THREE = {
    "hacked": "String(window.hacked)",
    "background": BACKGROUND,
    "overflow": "document.documentElement.scrollWidth - document.documentElement.clientWidth",
    "columns": "getComputedStyle(document.querySelector('.figures')).gridTemplateColumns.split(' ').length",
    "tip": f"({MOVE})('#figure-entropy', 0.5)",
    "stack_tip": f"({MOVE})('#figure-phases', 0.3)",
    "cursors": "document.querySelectorAll('.cursor line').length",
    "raw": "document.querySelectorAll('path.raw').length",
    "unsmoothed": f"({CHOOSE})('#smoothing', 0, 'input'), document.querySelectorAll('path.raw').length",
    "hidden": f"{CLICK_RUN}, {REWARD_LINES}",
    "shown_again": f"{CLICK_RUN}, {REWARD_LINES}",
    "differences": "[...document.querySelectorAll('#differences tbody tr')].map((row) => row.innerText)",
    "transcript": (
        f"({CHOOSE})('#transcripts select', 2, 'change'), document.querySelector('.response pre').textContent"
    ),
    "findings": "document.querySelector('#findings').innerText",
    "dark": f"document.getElementById('theme').click(), {BACKGROUND}",
}


async def visit_all(folder: Path) -> dict[str, Visit]:
    three = [
        make_run(folder / "dapo", 120),
        make_run(folder / "naive-grpo", 120, 1, clip_higher=False),
        make_run(folder / "seed-2", 90, 2, hostile=True),
    ]
    odd = MetricsFile(folder / "odd" / "metrics.jsonl")
    values = [math.nan, 0.5, math.nan, 0.4, 0.3, math.inf, 0.0, -2.0]
    for step, value in enumerate(values, start=1):
        odd.append(Record(step, STEP, {"train/entropy": value, "train/grad_norm": value, "reward/mean": 0.0}))
    pages = {
        "three": (three, {}), "narrow": (three, {"width": 400, "height": 800}), "one": ([three[0]], {"scheme": "dark"}),
        "single_step": ([make_run(folder / "single", 1)], {}), "odd": ([folder / "odd"], {}),
    }  # fmt: skip
    seen = {}
    async with chromium() as new_tab:
        for name, (runs, options) in pages.items():
            (page,) = write_report(runs, folder / f"{name}.html", png=False)
            asked = THREE if name == "three" else {key: THREE[key] for key in ("background", "overflow", "columns")}
            seen[name] = await visit(await new_tab(), page, asked, **options)
        tab = await new_tab()  # the same checks on a page that fails all of them
        (folder / "bad.html").write_text(
            "<script>console.error('a'); setTimeout(() => missing(), 0)</script><img src='http://127.0.0.1:9/x.png'>"
        )
        seen["bad"] = await visit(tab, folder / "bad.html", {"wait": "new Promise((done) => setTimeout(done, 300))"})
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, Visit]:
    return asyncio.run(visit_all(tmp_path_factory.mktemp("reports")))


PAGES = ["three", "narrow", "one", "single_step", "odd"]


@pytest.mark.parametrize("page", PAGES)
def test_no_console_error_and_no_request_leaves_the_page(seen, page):
    assert seen[page].complaints == []
    assert [url for url in seen[page].requests if not url.startswith(("file://", "data:"))] == []
    assert len([url for url in seen[page].requests if url.startswith("file://")]) == 1, (
        "the page itself, nothing beside"
    )


def test_the_checks_fail_on_a_bad_page(seen):
    complaints = " ".join(seen["bad"].complaints)
    assert "'a'" in complaints and "missing is not defined" in complaints
    assert "http://127.0.0.1:9/x.png" in seen["bad"].requests


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_renders_with_real_paths_inside_its_axes(seen, page):
    assert len(seen[page].figures) >= (3 if page == "odd" else 17)
    for figure in seen[page].figures:
        assert figure["panels"], figure["id"]
        for panel in figure["panels"]:
            where = f"{page} {figure['id']}"
            assert panel["svg"] > 200 and abs(panel["svg"] - panel["width"]) < 1, where
            assert panel["paths"] and all(re.match(r"M[\d.]+ [\d.]+[LVhM]", path) for path in panel["paths"]), where
            assert not re.search("NaN|Infinity|undefined|null", " ".join([*panel["paths"], panel["label"]])), where
            assert len(panel["ticks"]) >= 3 and not re.search("NaN|undefined", " ".join(panel["ticks"])), where
            for x, y, width, height in panel["boxes"]:
                assert x >= 49 and y >= 9 and x + width <= panel["svg"] + 1 and y + height <= 207, where


def test_the_paths_hold_every_point(seen):
    figures = {figure["id"]: figure for figure in seen["three"].figures}
    reward = figures["figure-reward"]["panels"][0]["paths"]
    assert [len(re.findall(r"[ML]", path)) for path in reward] == [120, 120, 90]
    assert len(figures["figure-clip"]["panels"][0]["paths"]) == 9, "three runs × three series"
    assert len(figures["figure-phases"]["panels"]) == 3, "a stack for each run"
    gaps = {f["id"]: f["panels"][0]["paths"][0] for f in seen["odd"].figures}
    assert (gaps["figure-entropy"].count("M"), gaps["figure-entropy"].count("L")) == (3, 2), "NaN and infinity are gaps"
    assert gaps["figure-grad_norm"].count("L") == 1, "so is what a logarithmic axis cannot show"


def test_a_single_step_is_drawn_in_the_middle(seen):
    for figure in seen["single_step"].figures:
        for panel in figure["panels"]:
            middle = (50 + panel["svg"] - 12) / 2
            assert all(abs(x + width / 2 - middle) < 1 for x, _, width, _ in panel["boxes"]), figure["id"]


def test_hovering_shows_the_values_of_every_run(seen):
    facts = seen["three"].facts
    assert re.search(r"step \d+", facts["tip"]) and all(
        name in facts["tip"] for name in ("dapo", "naive-grpo", "seed-2")
    )
    assert len(re.findall(r"0\.\d+", facts["tip"])) >= 3
    assert "rollout" in facts["stack_tip"] and "total" in facts["stack_tip"] and " s" in facts["stack_tip"]
    assert facts["cursors"] >= 17, "all figures mark the same step"


def test_smoothing_and_hiding_a_run(seen):
    facts = seen["three"].facts
    assert facts["raw"] > 20 and facts["unsmoothed"] == 0
    assert (facts["hidden"], facts["shown_again"]) == (2, 3)


def test_runs_are_compared(seen):
    assert [row.split() for row in seen["three"].facts["differences"]] == [
        ["algorithm.clip_high", "0.28", "0.2", "0.28"],
        ["trainer.steps", "120", "120", "90"],
        ["trainer.seed", "0", "1", "2"],
    ]
    assert "naive-grpo: entropy is" in seen["three"].facts["findings"]


def test_a_hostile_response_is_shown_as_text(seen):
    facts = seen["three"].facts
    assert facts["hacked"] == "undefined"
    shown = HOSTILE
    for character in "\x00\x1b\u202e\u202c\u2028\ud800":
        shown = shown.replace(character, f"⟨U+{ord(character):04X}⟩")
    assert facts["transcript"] == shown


def test_light_dark_wide_and_narrow(seen):
    light, dark = seen["three"].facts["background"], seen["one"].facts["background"]
    assert light == "rgb(246, 247, 249)" and dark == "rgb(17, 20, 24)"
    assert seen["three"].facts["dark"] == dark, "the button switches"
    assert (seen["three"].facts["columns"], seen["narrow"].facts["columns"]) == (2, 1)
    assert max(seen[page].facts["overflow"] for page in PAGES) <= 0, "nothing is wider than the window"
