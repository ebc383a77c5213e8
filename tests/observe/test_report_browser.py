"""The report and the live page in a real browser: every figure has real paths, no error is logged, no request leaves
the page, every control is reachable with the keyboard, 400 and 1400 pixels wide, light and dark.

Chromium takes seconds to start, so one browser serves all tests.
"""

import asyncio
import json
import math
import re
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import BINARY, Tab, chromium
from synthetic_runs import HOSTILE, make_run

from megatron_dapo.observe.metrics_file import STEP, MetricsFile, Record
from megatron_dapo.observe.report import write_report
from megatron_dapo.observe.runs import record_environment
from megatron_dapo.observe.timeline import Span, Trace, write_trace
from megatron_dapo.observe.watch import make_server

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


TRACE = Trace(
    phases=[Span("rollout", 0.0, 4.0), Span("log_probs", 4.0, 4.5), Span("update", 4.5, 6.0)],
    requests={"http://a:1": [Span("p", 0.0, 3.0, 30), Span("q", 1.0, 4.0, 9)], "http://b:2": [Span("r", 0.5, 3.5, 31)]},
)


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
        f"({CHOOSE})('#samples select', 2, 'change'),"
        " new Promise((done) => setTimeout(() => done(document.querySelector('.response pre').textContent), 100))"
    ),
    "findings": "document.querySelector('#findings').innerText",
    "dashes": (
        "[...document.querySelectorAll('#figure-reward path.line')]"
        ".map((line) => line.getAttribute('stroke-dasharray'))"
    ),
    "about": "document.querySelector('#about').innerText",
    "summary": "document.querySelector('#summary').innerText",
    "bars": "document.querySelectorAll('#timeline rect').length",
    "curves": "[...document.querySelectorAll('#timeline path')].map((path) => path.getAttribute('d'))",
    "fits": (
        "[...document.querySelectorAll('#summary .scroll, #differences')].every((n) => n.scrollWidth <= n.clientWidth)"
    ),
    "dark": f"document.getElementById('theme').click(), {BACKGROUND}",
}


CONTROLS = """[...document.querySelectorAll("button, select, input, summary, svg[role=img]")]
  .filter((node) => node.checkVisibility())"""
FOCUSED = f"""(() => {{
  const node = document.activeElement, ring = getComputedStyle(node);
  return [{CONTROLS}.indexOf(node), ring.outlineStyle !== "none" && parseFloat(ring.outlineWidth) > 0];
}})()"""


async def tab_through(tab: Tab) -> dict[str, Any]:
    """Presses Tab until every control had the focus; the order, and the controls without a visible ring.

    Between them Chromium also stops at areas that can be scrolled."""
    count = await tab.evaluate(f"{CONTROLS}.length")
    await tab.focus_start()
    reached, bare = [], []
    for _ in range(2 * count):
        await tab.press("Tab")
        index, ring = await tab.evaluate(FOCUSED)
        reached += [index] if index >= 0 else []
        bare += [] if ring else [index]
        if len(reached) == count:
            break
    return {"count": count, "reached": reached, "bare": bare}


async def use_keyboard(tab: Tab) -> dict[str, Any]:
    """Moves through a chart with the arrow keys and switches a button with Enter."""
    found = await tab_through(tab)
    await tab.evaluate("document.querySelector('#figure-reward svg[role=img]').focus()")
    await tab.press("ArrowRight")
    await tab.press("ArrowRight")
    found["tip"] = await tab.evaluate("document.querySelector('#figure-reward .tip').innerText")
    await tab.evaluate("document.querySelector('#figure-entropy button').focus()")
    await tab.press("Enter")
    found["log"] = await tab.evaluate("document.querySelector('#figure-entropy button').getAttribute('aria-pressed')")
    return found


LIVE = "document.getElementById('live').textContent"


async def watch_a_run(new_tab: Any, folder: Path, width: int, scheme: str) -> Visit:
    """A run that has not started, then runs, then ends; the page is open all the time."""
    source, run = make_run(folder / f"source-{width}", 40), folder / f"watched-{width}"
    lines = (source / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "logs").mkdir(parents=True)

    def status(state: str, **more: Any) -> None:
        phases = [{"name": "start", "since": 0.0, "text": "starting SGLang"}] if state == "running" else []
        entry = {"state": state, "step": 0, "total": 40, "phases": phases, "updated": 4e9, **more}
        (run / "logs" / "status.json").write_text(json.dumps(entry))

    status("running")
    facts: dict[str, Any] = {}
    with make_server([run], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            tab = await new_tab()
            await tab.open(server.url, width=width, height=800, scheme=scheme)
            await tab.until(f"{LIVE}.includes('starting SGLang')")
            (run / "metrics.jsonl").write_text("".join(lines[:12]))
            shutil.copytree(source / "samples", run / "samples")
            await tab.until("document.querySelectorAll('#figure-reward path.line').length === 1")
            await tab.evaluate(f"({CHOOSE})('#smoothing', 0, 'input')")
            facts |= await use_keyboard(tab)
            await tab.evaluate("document.querySelector('#figure-entropy svg[role=img]').focus(), scrollTo(0, 700)")
            (run / "metrics.jsonl").write_text("".join(lines))
            points = "document.querySelector('#figure-reward path.line').getAttribute('d').match(/[ML]/g).length"
            await tab.until(f"{points} === 40")
            facts["focus"] = await tab.evaluate("document.activeElement.closest('figure')?.id")
            facts["scroll"] = await tab.evaluate("scrollY")
            facts["smoothing"] = await tab.evaluate("document.querySelector('#smoothing').value")
            facts["log_kept"] = await tab.evaluate(
                "document.querySelector('#figure-entropy button').getAttribute('aria-pressed')"
            )
            status("finished", step=40)
            await tab.until(f"{LIVE} === 'finished'")
            facts |= {"background": await tab.evaluate(BACKGROUND), "overflow": await tab.evaluate(THREE["overflow"])}
            await tab.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
            seen = Visit(await tab.evaluate(FIGURES), list(tab.complaints), list(tab.requests), facts)
        finally:
            server.shutdown()
            thread.join()
    await tab.until(f"{LIVE}.includes('still running?')")
    return seen


async def visit_all(folder: Path) -> dict[str, Visit]:
    three = [
        make_run(folder / "dapo", 120),
        make_run(folder / "naive-grpo", 120, 1, clip_higher=False),
        make_run(folder / "seed-2", 90, 2, hostile=True),
    ]
    write_trace(three[0], 40, TRACE)
    record_environment(three[0], ranks=2)
    odd = MetricsFile(folder / "odd" / "metrics.jsonl")
    values = [math.nan, 0.5, math.nan, 0.4, 0.3, math.inf, 0.0, -2.0]
    for step, value in enumerate(values, start=1):
        odd.append(Record(step, STEP, {"train/entropy": value, "train/grad_norm": value, "reward/mean": 0.0}))
    pages = {
        "three": (three, {"width": 1400}), "narrow": (three, {"width": 400, "height": 800}),
        "one": ([three[0]], {"scheme": "dark", "width": 1400}),
        "narrow_dark": ([three[0]], {"scheme": "dark", "width": 400, "height": 800}),
        "single_step": ([make_run(folder / "single", 1)], {}), "odd": ([folder / "odd"], {}),
    }  # fmt: skip
    seen = {}
    async with chromium() as new_tab:
        for name, (runs, options) in pages.items():
            page = write_report(runs, folder / f"{name}.html")
            asked = (
                THREE if name == "three" else {key: THREE[key] for key in ("background", "overflow", "columns", "fits")}
            )
            tab = await new_tab()
            seen[name] = await visit(tab, page, asked, **options)
            if name in KEYBOARD:
                seen[name].facts |= await use_keyboard(tab)
        for width, scheme in ((400, "dark"), (1400, "light")):
            seen[f"watch_{width}"] = await watch_a_run(new_tab, folder, width, scheme)
        tab = await new_tab()  # the same checks on a page that fails all of them
        (folder / "bad.html").write_text(
            "<script>console.error('a'); setTimeout(() => missing(), 0)</script><img src='http://127.0.0.1:9/x.png'>"
        )
        seen["bad"] = await visit(tab, folder / "bad.html", {"wait": "new Promise((done) => setTimeout(done, 300))"})
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, Visit]:
    return asyncio.run(visit_all(tmp_path_factory.mktemp("reports")))


PAGES = ["three", "narrow", "one", "narrow_dark", "single_step", "odd"]
KEYBOARD = ["three", "narrow_dark"]
WATCHED = ["watch_400", "watch_1400"]


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


@pytest.mark.parametrize("page", WATCHED)
def test_the_live_page_asks_only_the_server_that_it_came_from(seen, page):
    assert seen[page].complaints == []
    (origin,) = {"/".join(url.split("/")[:3]) for url in seen[page].requests if not url.startswith("data:")}
    assert origin.startswith("http://127.0.0.1:")
    paths = [url.split("/") for url in seen[page].requests if url.startswith("http")]
    assert len({path[3] for path in paths}) == 1  # the token
    assert {path[4].split("?")[0] for path in paths} == {"", "data", "samples", "sample", "history"}


@pytest.mark.parametrize("page", WATCHED)
def test_the_live_page_follows_the_run_and_keeps_what_the_reader_chose(seen, page):
    facts = seen[page].facts
    assert facts["focus"] == "figure-entropy" and facts["scroll"] >= 600
    assert facts["smoothing"] == "0" and facts["log_kept"] == "true"
    assert facts["overflow"] <= 0 and facts["background"] == (
        "rgb(17, 20, 24)" if page == "watch_400" else "rgb(246, 247, 249)"
    )


@pytest.mark.parametrize("page", [*KEYBOARD, *WATCHED])
def test_every_control_is_reachable_with_the_keyboard(seen, page):
    facts = seen[page].facts
    assert facts["count"] > 20 and facts["reached"] == list(range(facts["count"])), "in the order of the page"
    assert facts["bare"] == [], "the focus is visible"
    assert re.match(r"step \d+", facts["tip"]) and facts["log"] == "true"


@pytest.mark.parametrize("page", [*PAGES, *WATCHED])
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


def test_runs_differ_without_colour(seen):
    assert len(set(seen["three"].facts["dashes"])) == 3


def test_the_header_says_what_was_run(seen):
    about = seen["three"].facts["about"]
    assert "models/qwen" in about and "megatron-dapo 0." in about and "2 ranks" in about and "started" in about
    assert re.search(r"in steps 1–5", seen["three"].facts["summary"]), "the first value says of which steps it is"


def test_the_timeline_has_a_bar_per_phase_and_a_curve_per_engine(seen):
    facts = seen["three"].facts
    assert facts["bars"] == 3 and len(facts["curves"]) == 2
    assert not re.search("NaN|undefined", " ".join(facts["curves"]))


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
    assert seen["three"].facts["fits"] and seen["narrow"].facts["fits"], "a comparison needs no scrolling"
