"""Makes a demo for `megatron-dapo watch --demo NAME` from a finished run.

    python tools/make_demo.py runs/gsm8k megatron_dapo/observe/demo/gsm8k

Copies the metrics with six digits, config.yaml, environment.json, and two responses per prompt of some steps: as many
as fit into 600 kB. Stops if a file names a place on this machine other than /dev/shm, which is a default:
`--rename /data/models/=models/`.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from megatron_dapo.observe.metrics_file import Record
from megatron_dapo.observe.report import spread
from megatron_dapo.observe.transcripts import recorded_steps

MOST_BYTES = 600_000
STEPS = 12  # with samples
PER_PROMPT = 2  # responses; the file has right and wrong ones in turn
LOCAL = re.compile(r"""(?:^|[\s'"=])(/(?!dev/shm\s)[^\s'"]+)|(?:https?|tcp)://(?!127\.0\.0\.1|localhost)[^\s'"]+""")


def short_metrics(text: str) -> str:
    records = [Record.from_line(line) for line in text.splitlines()]
    return "".join(
        Record(r.step, r.kind, {name: float(f"{value:.6g}") for name, value in r.metrics.items()}).to_line()
        for r in records
    )


def short_samples(text: str, most: int) -> str:
    """The first responses of each prompt, up to `most` bytes, with the results of these prompts."""
    first, *lines = text.splitlines()
    head, taken = json.loads(first), list[str]()
    results, counts = dict[str, object](), dict[str, int]()
    for line in lines:
        name = json.loads(line)["prompt_id"]
        counts[name] = counts.get(name, 0) + 1
        shown = results | {name: head["prompts"].get(name)}
        found = "\n".join([json.dumps(head | {"prompts": shown}), *taken, line]) + "\n"
        if counts[name] <= PER_PROMPT and len(found.encode()) <= most:
            results = shown
            taken.append(line)
    return "\n".join([json.dumps(head | {"prompts": results}), *taken]) + "\n"


def make_demo(run: Path, target: Path, renames: list[str]) -> int:
    """Returns the size in bytes."""
    texts = {name: (run / name).read_text() for name in ("config.yaml", "environment.json")}
    for old, new in (rename.split("=", 1) for rename in renames):
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    if local := [match[0].strip() for text in texts.values() for match in LOCAL.finditer(text)]:
        raise SystemExit(f"{run} names places on this machine; use --rename for {', '.join(sorted(set(local)))}")
    texts["metrics.jsonl"] = short_metrics((run / "metrics.jsonl").read_text())
    left = MOST_BYTES - sum(len(text.encode()) for text in texts.values())
    if left < 0:
        raise SystemExit(f"{run}: {MOST_BYTES - left} bytes without samples; at most {MOST_BYTES} are allowed")
    steps = spread(recorded_steps(run / "samples"), STEPS)
    for step in steps:
        name = f"samples/step_{step:06d}.jsonl"
        texts[name] = short_samples((run / name).read_text(), left // len(steps))
    for name, text in texts.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)
    return sum(len(text.encode()) for text in texts.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help="in the settings")
    args = parser.parse_args()
    print(f"{args.target}: {make_demo(args.run, args.target, args.rename) / 1000:.0f} kB")
