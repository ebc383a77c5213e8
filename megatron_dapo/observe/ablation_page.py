"""ablation.html: four switches for DAPO's changes, and the curves of the chosen combination among all others.

One file with the same style, charts and content security policy as the report: it needs no network. The curves and
intervals are those of table.json (launch/ablation_results.py); nothing is computed or simulated in the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dapo import __version__
from megatron_dapo.files import write_atomically
from megatron_dapo.observe.report import fill_page

SWITCHES = (
    ("clip_higher", "clip-higher", ("clip_higher",)),
    ("dynamic_sampling", "dynamic sampling", ("dynamic_sampling",)),
    ("token_loss", "token-level loss", ("token_loss",)),
    ("overlong", "overlong handling", ("overlong_filter", "overlong_penalty")),
)
PANELS = ("reward", "accuracy", "held_out", "entropy", "length", "yield")


def write_ablation_page(table: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_ablation(table).encode())


def render_ablation(table: dict[str, Any]) -> str:
    data = {name: value for name, value in table.items() if name != "runs"}  # the bands are enough for the page
    known = [measure["id"] for measure in table["measures"]]
    data |= {
        "version": __version__,
        "switches": [{"id": name, "label": label, "changes": changes} for name, label, changes in SWITCHES],
        "panels": [name for name in PANELS if name in known],
        "more": [
            name for name in known if name not in PANELS and any(name in c["bands"] for c in data["combinations"])
        ],
    }
    title = f"Ablation: {table['title']}"
    return fill_page(title, ["chart.js", "ablation.js"], ["report.css", "ablation.css"], data)
