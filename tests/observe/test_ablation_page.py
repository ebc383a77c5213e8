"""ablation.html: its data, and the page in a real browser: switches by pointer and keyboard, bands, effects, 400 and
1400 pixels wide, light and dark, no request. One browser serves all tests."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from browser import BINARY, Tab, chromium
from synthetic_runs import make_run

from megatron_dapo.ablation.designs import effects, variants
from megatron_dapo.ablation.results import make_table, read_curves, render_ablation, write_ablation_page
from megatron_dapo.config import parse_config

SEEDS = 3
HOSTILE = "</script><script>window.hacked = 1</script>"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The grid without one combination. The entropy collapses where clip-higher is off."""
    folder = tmp_path_factory.mktemp("runs")
    curves = {
        (on, seed): read_curves(make_run(folder / f"{on}-{seed}", 24, seed, clip_higher=on))
        for on in (False, True)
        for seed in range(SEEDS)
    }
    config = parse_config({})
    rows = variants(config, "grid")
    runs = {row.folder: {seed: curves["clip_higher" in row.changes, seed] for seed in range(SEEDS)} for row in rows}
    runs["token_loss"] = {}
    return make_table(f"arithmetic {HOSTILE}", "grid", rows, effects("grid", config), runs, 16 * SEEDS, 100.0)


def test_the_page_is_one_file_without_the_runs(table):
    page = render_ablation(table)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert "runs" not in data and len(data["combinations"]) == 16
    assert data["panels"] == ["reward", "accuracy", "held_out", "entropy", "length", "yield"]
    assert not re.search(r'(src|href)="(?!data:)', page) and "default-src 'none'" in page


FACTS = """({
  hacked: String(window.hacked), title: document.querySelector("h1").textContent,
  background: getComputedStyle(document.body).backgroundColor,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  pressed: [...document.querySelectorAll(".switch")].map((b) => b.getAttribute("aria-pressed")),
  chosen: document.querySelector("#chosen").innerText,
  current: [...document.querySelectorAll("#combinations tr[aria-current=true]")].map((r) => r.dataset.folder),
  panels: Object.fromEntries([...document.querySelectorAll("figure")].map((f) => [f.id, {
    line: [...f.querySelectorAll("path.line")].map((p) => p.getAttribute("d")),
    band: [...f.querySelectorAll("path.band")].map((p) => p.getAttribute("d")),
    others: f.querySelectorAll(".others path").length,
    ticks: [...f.querySelectorAll(".grid text")].map((t) => t.textContent),
    width: f.querySelector("svg").getBoundingClientRect().width,
  }])),
  effects: Object.fromEntries([...document.querySelectorAll("#effects tbody tr")]
    .map((r) => [r.cells[0].firstChild.textContent, r.innerText])),
})"""


# Presses the switches one at a time so that all 16 combinations are passed (Gray code), starting with clip-higher off.
# It ends with all switches on.
EVERY_COMBINATION = """
(() => {
  const buttons = [...document.querySelectorAll(".switch")], found = [];
  for (const press of [1, 2, 1, 3, 1, 2, 1, 0, 1, 2, 1, 3, 1, 2, 1, null]) {
    const current = document.querySelector("#combinations tr[aria-current=true]");
    const ids = ["reward", "accuracy", "held_out", "entropy", "length", "yield"];
    const count = (id, what) => document.querySelectorAll(`#figure-${id} ${what}`).length;
    found.push({
      on: buttons.filter((b) => b.getAttribute("aria-pressed") === "true").map((b) => b.dataset.switch),
      folder: current.dataset.folder,
      name: document.querySelector("#chosen").innerText,
      drawn: ids.map((id) => [count(id, "path.line"), count(id, "path.band"), count(id, ".others path")]),
    });
    if (press !== null) buttons[press].click();
  }
  return found;
})()"""


async def visit(page: Path) -> dict:
    seen = {}
    async with chromium() as new_tab:
        tab: Tab = await new_tab()
        await tab.open(page, width=1400)
        seen["full"] = await tab.evaluate(FACTS)
        await tab.evaluate("document.querySelector('[data-switch=clip_higher]').click()")
        seen["without_clip"] = await tab.evaluate(FACTS)
        seen["by_switches"] = await tab.evaluate(EVERY_COMBINATION)
        await tab.evaluate("document.querySelector('[data-switch=clip_higher]').click()")
        await tab.focus_start()
        reached = []
        for key in ("Tab", "Tab", " ", "Tab", "Tab", "Enter"):  # dynamic sampling off, overlong off: token_loss alone
            await tab.press(key)
            reached.append(await tab.evaluate("document.activeElement.dataset.switch || ''"))
        seen["reached"] = reached
        seen["missing"] = await tab.evaluate(FACTS)
        await tab.evaluate("document.querySelector('tr[data-folder=none] button').click()")
        seen["none"] = await tab.evaluate(FACTS)
        await tab.evaluate("document.querySelector('#figure-entropy svg').focus()")
        await tab.press("ArrowRight")
        seen["tip"] = await tab.evaluate("document.querySelector('#figure-entropy .tip').innerText")
        await tab.evaluate("document.getElementById('theme').click()")
        seen["switched"] = await tab.evaluate(FACTS)
        narrow: Tab = await new_tab()
        await narrow.open(page, width=400, height=800, scheme="dark")
        seen["narrow"] = await narrow.evaluate(FACTS)
        seen["complaints"] = tab.complaints + narrow.complaints
        seen["requests"] = tab.requests + narrow.requests
    return seen


@pytest.fixture(scope="module")
def seen(table, tmp_path_factory):
    if BINARY is None:
        pytest.skip("no chromium is installed (Debian: apt-get install chromium)")
    page = tmp_path_factory.mktemp("page") / "ablation.html"
    write_ablation_page(table, page)
    return asyncio.run(visit(page))


def test_no_error_and_no_request_but_the_page_itself(seen):
    assert seen["complaints"] == []
    assert all(url.startswith(("file://", "data:")) for url in seen["requests"])
    assert seen["full"]["hacked"] == "undefined" and HOSTILE in seen["full"]["title"]


def test_the_chosen_combination_has_a_line_and_a_band_over_the_others(seen):
    full = seen["full"]
    assert full["pressed"] == ["true"] * 4 and full["chosen"].startswith("full DAPO · 3 seeds · held-out score")
    for name in ("reward", "accuracy", "held_out", "entropy", "length", "yield"):
        panel = full["panels"][f"figure-{name}"]
        assert len(panel["line"]) == len(panel["band"]) == 1 and panel["others"] == 14, name
        assert "NaN" not in panel["line"][0] + panel["band"][0] and panel["width"] > 300


def test_a_switch_changes_the_curve_and_keeps_the_axes(seen):
    before, after = (seen[name]["panels"]["figure-entropy"] for name in ("full", "without_clip"))
    assert seen["without_clip"]["pressed"] == ["false", "true", "true", "true"]
    assert seen["without_clip"]["current"] == ["dynamic_sampling+token_loss+overlong"]
    assert before["line"] != after["line"] and before["band"] != after["band"]
    assert before["ticks"] == after["ticks"]


def test_the_switches_reach_all_16_combinations_and_each_has_its_curves_among_the_others(seen, table):
    """The combination that the switches name is the one that is shown, in all six panels."""
    found = seen["by_switches"]
    names = {row["folder"]: row["name"] for row in table["combinations"]}
    assert {step["folder"] for step in found} == set(names) and len(found) == 16
    for step in found:
        assert step["folder"] == ("+".join(step["on"]) or "none") and step["name"].startswith(names[step["folder"]])
        without_runs = step["folder"] == "token_loss"
        assert step["drawn"] == [[0, 0, 15] if without_runs else [1, 1, 14]] * 6, step["folder"]


def test_switches_work_with_the_keyboard_and_a_combination_without_runs_is_said_to_have_none(seen):
    assert seen["reached"][:5] == ["clip_higher", "dynamic_sampling", "dynamic_sampling", "token_loss", "overlong"]
    assert seen["missing"]["pressed"] == ["false", "false", "true", "false"]
    assert seen["missing"]["chosen"] == "token-level loss: no run has finished yet."
    assert seen["missing"]["panels"]["figure-entropy"]["line"] == []
    assert seen["none"]["chosen"].startswith("naive GRPO") and seen["none"]["pressed"] == ["false"] * 4
    assert "step 1" in seen["tip"] and "[" in seen["tip"], "the value with its interval"


def test_effects_have_intervals_and_say_when_none_is_visible(seen, table):
    row = seen["full"]["effects"]["Entropy"]
    assert row.count("no visible effect") == 3, "only clip-higher changes the synthetic runs"
    clip = table["effects"][0]["measures"]["entropy"]
    assert (clip["verdict"], clip["pairs"]) == ("higher", 7), "one combination has no run"
    assert f"+{clip['mean']:.3f}"[:5] in row


def test_light_dark_wide_and_narrow(seen):
    assert (seen["full"]["background"], seen["narrow"]["background"]) == ("rgb(246, 247, 249)", "rgb(17, 20, 24)")
    assert seen["switched"]["background"] == "rgb(17, 20, 24)"
    assert max(seen[name]["overflow"] for name in ("full", "narrow")) <= 0, "nothing is wider than the window"
