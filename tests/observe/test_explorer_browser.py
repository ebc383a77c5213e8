"""The sample explorer, zooming and the list of runs in a real browser: 5 000 steps of 512 samples, 400 and 1400 pixels
wide, light and dark. `PYTHONPATH=tests/support python tests/observe/test_explorer_browser.py FOLDER` takes screenshots
for the docs and prints the times of the first paint, and of the first paint with curves."""

import asyncio
import json
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import BINARY, Tab, chromium
from synthetic_runs import make_many_samples, make_run

from megatron_dapo.observe.watch import make_server

pytestmark = pytest.mark.skipif(BINARY is None, reason="no chromium is installed (Debian: apt-get install chromium)")
STEPS, PROMPTS, RESPONSES = 5000, 64, 8
VIEWS = {"dark": 400, "light": 1400}
SET = "(s, v) => { const n = document.querySelector(s); n.value = v; n.dispatchEvent(new Event('change')); }"
NOTE = "document.querySelector('#samples small[role=status]').textContent"
TURN = "document.querySelector('#samples small[role=status]').dataset.turn"
SHOWN = "(document.querySelector('#samples .detail .muted')?.textContent || '')"
SPANS = "[...document.querySelectorAll('#samples .token')].map((n) => [n.style.background, n.className, n.title])"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
AXIS = "[...document.querySelectorAll('#figure-reward .grid text')].map((n) => n.textContent)"
# In milliseconds, as the browser's own time of the first paint: when the frame with the first curves has been painted.
CURVES = """new MutationObserver((_, observer) => {
  if (!document.querySelector('#figure-reward path.line')) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.curvesPainted = performance.now(); }));
}).observe(document, { childList: true, subtree: true });"""
POINTS = "document.querySelectorAll('#figure-%s path.raw').length"


@contextmanager
def serving(*folders: Path):
    with make_server(folders, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def make_big_run(folder: Path) -> Path:
    make_run(folder, STEPS, samples_every=0)
    make_many_samples(folder / "samples", STEPS, PROMPTS, RESPONSES)
    return folder


async def drag(tab: Tab, start: float, end: float) -> None:
    """Over the chart of the reward; `start` and `end` are shares of its width."""
    await tab.evaluate("document.querySelector('#figure-reward').scrollIntoView({ block: 'center' })")
    box = await tab.evaluate(
        "(() => { const b = document.querySelector('#figure-reward svg').getBoundingClientRect();"
        " return [b.left, b.top, b.width]; })()"
    )
    for kind, share in (("mousePressed", start), ("mouseMoved", (start + end) / 2), ("mouseReleased", end)):
        await tab.call(
            "Input.dispatchMouseEvent", type=kind, x=box[0] + share * box[2], y=box[1] + 90, button="left", buttons=1,
            clickCount=1,
        )  # fmt: skip


async def explore(tab: Tab) -> dict:
    """What a reader does; each `click` is one action."""
    await tab.until(f"{SHOWN}.includes('sample 0')", 60)
    found = {
        "note": await tab.evaluate(NOTE),
        "asked": [u.split("/")[-1].split("?")[0] for u in tab.requests if u[:4] == "http"],
    }
    found["overflow"] = await tab.evaluate(OVERFLOW)
    await tab.evaluate(f"({SET})('#samples input.step', 2503)")  # click 1: choose a step
    await tab.until(f"{NOTE}.includes('step 2503')", 60)
    await tab.evaluate("document.querySelector('#samples tr[data-place=\"300\"] button').click()")  # click 2
    await tab.until(f"{SHOWN}.includes('sample 300')", 60)
    found["prompt"] = await tab.evaluate("document.querySelector('#samples .question').textContent")
    found["gap"] = await tab.evaluate(SPANS)
    await tab.evaluate(f"({SET})('#samples select[aria-label=\"colour of tokens\"]', 'advantage')")
    found["advantage"] = await tab.evaluate(SPANS)
    await tab.evaluate("document.querySelector('#samples details').open = true")
    await tab.until("document.querySelectorAll('#samples details tbody tr').length > 0", 60)
    found["history"] = await tab.evaluate("document.querySelectorAll('#samples details tbody tr').length")
    for name, selector, value in (
        ("right", "select[aria-label=verdict]", "right"),
        ("positive", "select[aria-label=advantage]", "1"),
        ("hard", "select[aria-label=source]", "hard"),
        ("long", "input[aria-label='min tokens']", "6"),
    ):
        turn = int(await tab.evaluate(TURN))
        await tab.evaluate(f"({SET})(\"#samples {selector}\", '{value}')")
        await tab.until(f"Number({TURN}) === {turn + 1}", 60)
        found[name] = await tab.evaluate(NOTE)
    for selector in ("select[aria-label=verdict]", "select[aria-label=source]", "input[aria-label='min tokens']"):
        await tab.evaluate(f"({SET})(\"#samples {selector}\", '')")
    await tab.evaluate(f"({SET})('#samples input[type=search]', 'what is 37 + 1')")
    await tab.until(f"{NOTE}.startsWith('4 of 8')", 60)
    return found


async def zoom(tab: Tab) -> dict:
    await tab.until("document.querySelectorAll('#figure-reward path.line').length === 1", 60)
    found = {"all": await tab.evaluate(AXIS), "restarts": await tab.evaluate(
        "document.querySelectorAll('#figure-entropy .restart').length")}  # fmt: skip
    found["raw"] = [await tab.evaluate(POINTS % name) for name in ("reward", "lr")]
    await drag(tab, 0.4, 0.6)
    found["range"] = await tab.evaluate("['from', 'to'].map((id) => Number(document.getElementById(id).value))")
    found["zoomed"] = await tab.evaluate(AXIS)
    found["entropy"] = await tab.evaluate(AXIS.replace("reward", "entropy"))
    await tab.evaluate(f"({SET})('#unit', 'hours')")
    found["hours"] = await tab.evaluate(AXIS)
    await tab.evaluate(f"({SET})('#unit', 'tokens')")
    found["tokens"] = await tab.evaluate(AXIS)
    await tab.evaluate(f"({SET})('#unit', 'step')")
    await tab.evaluate(f"({SET})('#from', 4900)")
    found["typed"] = await tab.evaluate(AXIS)
    await tab.evaluate("document.getElementById('all').click()")
    found["again"] = await tab.evaluate(AXIS)
    return found


async def list_runs(tab: Tab) -> dict:
    names = "[...document.querySelectorAll('#runs tbody a')].map((n) => n.textContent)"
    found = {
        "names": await tab.evaluate(names),
        "text": await tab.evaluate("document.querySelector('#runs').innerText"),
    }
    for name in ("up", "down"):
        await tab.evaluate(
            "[...document.querySelectorAll('#runs button')].find((n) => n.textContent === 'run').click()"
        )
        found[name] = await tab.evaluate(names)
    found["overflow"] = await tab.evaluate(OVERFLOW)
    link = "[...document.querySelectorAll('#runs a')].find((n) => n.textContent === 'dapo').href"
    await tab.call("Page.navigate", url=await tab.evaluate(link))
    await asyncio.sleep(0.5)
    await tab.until("document.querySelectorAll('#figure-reward path.line').length === 1", 60)
    return found


async def visit_all(folder: Path, shots: Path | None = None) -> dict:
    run, small = make_big_run(folder / "big"), folder / "small"
    for name, seed in (("dapo", 0), ("grpo", 1)):
        make_run(small / name, 45, seed, clip_higher=not seed)
        (small / name / "logs").mkdir()
        status = {"state": "running", "phases": [], "step": 45, "total": 60, "remaining": 800.0, "updated": time.time()}
        (small / name / "logs" / "status.json").write_text(json.dumps(status))
    (small / "grpo" / "logs" / "warnings.log").write_text(
        "step 40: entropy is 0.1. See docs/diagnosis.md#entropy-collapse\n"
    )
    seen = {}
    async with chromium() as new_tab:
        with serving(run) as url, serving(small) as list_url:
            for scheme, width in VIEWS.items():
                tab = await new_tab()
                await tab.call("Page.addScriptToEvaluateOnNewDocument", source=CURVES)
                await tab.open(url, width=width, height=900, scheme=scheme)
                seen[scheme] = await explore(tab) | await zoom(tab)
                paint = "performance.getEntriesByName('first-contentful-paint').map((e) => e.startTime)"
                seen[scheme]["paint"] = await tab.evaluate(paint)
                seen[scheme]["curves"] = await tab.evaluate("window.curvesPainted")
                if shots:
                    await tab.evaluate("document.querySelector('#samples').scrollIntoView()")
                    await tab.screenshot(shots / f"explorer_{width}_{scheme}.png", full=False)
                other = await new_tab()
                await other.open(list_url, width=width, height=500, scheme=scheme)
                if shots:
                    await other.screenshot(shots / f"runs_{width}_{scheme}.png", full=False)
                seen[scheme]["list"] = await list_runs(other)
                seen[scheme]["complaints"] = tab.complaints + other.complaints
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return asyncio.run(visit_all(tmp_path_factory.mktemp("explorer")))


@pytest.mark.parametrize("view", VIEWS)
def test_any_sample_of_5000_steps_is_two_clicks_away_and_loaded_alone(seen, view):
    found = seen[view]
    assert found["complaints"] == [] and found["overflow"] <= 0 and found["paint"][0] <= found["curves"]
    assert found["note"].startswith(f"{PROMPTS * RESPONSES} of 512 samples of step {STEPS}")
    assert sorted(set(found["asked"])) == ["", "data", "sample", "samples"]
    assert (found["asked"].count("samples"), found["asked"].count("sample")) == (1, 1), "of one step and one sample"
    assert found["prompt"] == "What is 37 + 1?" and found["history"] == STEPS


@pytest.mark.parametrize("view", VIEWS)
def test_tokens_are_coloured_by_what_the_update_read(seen, view):
    gap, advantage = seen[view]["gap"], seen[view]["advantage"]
    assert len(gap) == 5 and len({background for background, _, _ in gap}) > 1
    assert len({background for background, _, _ in advantage}) == 1, "one advantage for the whole sample"
    assert all("ratio 1.105" in title and "log-prob gap" in title for _, _, title in gap)
    assert any("masked" in name for _, name, _ in gap)


@pytest.mark.parametrize("view", VIEWS)
def test_filters_narrow_the_list(seen, view):
    kept = [int(seen[view][name].split()[0]) for name in ("right", "positive", "hard", "long")]
    assert 512 > kept[0] == kept[1] > kept[2] > kept[3] == 0


@pytest.mark.parametrize("view", VIEWS)
def test_dragging_and_typing_zoom_all_charts(seen, view):
    found = seen[view]
    assert found["all"][-1] == "step" and "4000" in found["all"] and found["again"] == found["all"]
    first, last = found["range"]
    assert 1500 < first < 2500 < last < 3500
    assert "4000" not in found["zoomed"] and found["entropy"] != found["all"], "the other charts follow"
    assert found["hours"][-1] == "hours" and "4000" not in found["hours"]
    assert found["tokens"][-1] == "tokens" and any(text.endswith(("M", "G")) for text in found["tokens"])
    assert "4900" in found["typed"]
    assert found["restarts"] == 1 and found["raw"] == [1, 0], "the learning rate is not smoothed"


@pytest.mark.parametrize("view", VIEWS)
def test_the_list_sorts_and_leads_to_each_run(seen, view):
    found = seen[view]["list"]
    assert sorted(found["names"]) == ["dapo", "grpo"] and found["overflow"] <= 0
    assert {tuple(found["up"]), tuple(found["down"])} == {("dapo", "grpo"), ("grpo", "dapo")}
    for text in ("45 / 60", "13.3 min", "entropy-collapse", "algorithm.clip_high", "0.28", "running"):
        assert text in found["text"]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for scheme, found in asyncio.run(visit_all(Path(folder), Path(sys.argv[1]))).items():
            times = found["paint"][0], found["curves"]
            print(f"{VIEWS[scheme]} px, {scheme}: first paint {times[0]:.0f} ms, with curves {times[1]:.0f} ms")
