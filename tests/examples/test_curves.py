"""examples/curves.py: an image of one run or several, without a gap or a covered axis."""

import importlib.util
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from synthetic_runs import make_run

from megatron_dapo.observe.runs import load_runs

FILE = Path(__file__).parents[2] / "examples" / "curves.py"
spec = importlib.util.spec_from_file_location("curves", FILE)
curves = importlib.util.module_from_spec(spec)
spec.loader.exec_module(curves)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / "one", 40), make_run(folder / "two", 70, seed=1)]


def test_the_image_is_written_also_of_unusual_metrics(runs, tmp_path, monkeypatch, capsys):
    unusual = tmp_path / "unusual"
    unusual.mkdir()
    record = {"step": 1, "kind": "step", "metrics": {"my/own": -1.0, "train/grad_norm": 0.0}}
    (unusual / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    both = tmp_path / "both.png"
    for words, image in (([*runs, "--output", both], both), ([unusual], unusual / "curves.png")):
        monkeypatch.setattr("sys.argv", ["curves.py", *map(str, words)])
        assert curves.main() == 0 and capsys.readouterr().out.strip() == str(image)
        assert image.read_bytes().startswith(b"\x89PNG")
    assert both.stat().st_size > 50_000
    monkeypatch.setattr("sys.argv", ["curves.py", str(tmp_path)])
    assert curves.main() == 2 and "no metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("panels", range(1, 8))
def test_the_panels_fill_their_rows(panels):
    places = curves._places(Figure(), panels)
    cells = [(row, column) for place in places for row in place.rowspan for column in place.colspan]
    rows = -(-panels // 3)
    assert sorted(cells) == [(row, column) for row in range(rows) for column in range(curves.WIDTH)], "each cell once"


def test_no_legend_covers_an_axis(runs):
    loaded = load_runs(runs)
    for shown in (loaded[:1], loaded):
        canvas = curves.draw(shown)
        canvas.canvas.draw()
        legends = [(axis, axis.get_legend()) for axis in canvas.axes if axis.get_legend()]
        assert len(legends) >= 5
        for axis, legend in [*legends, *((None, legend) for legend in canvas.legends)]:
            box = legend.get_window_extent()
            covered = [other.get_title("left") for other in canvas.axes if other.get_window_extent().overlaps(box)]
            assert not covered, f"the legend of {axis and axis.get_title('left')} covers {covered}"
            assert canvas.bbox.count_contains(box.corners()) == 4, "outside of the image"
