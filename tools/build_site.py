"""Builds the documentation site from the markdown files of this repository. Any warning of mkdocs is an error.

    pip install 'megatron-dapo[docs]'
    python tools/build_site.py site        # open site/index.html

The pages keep their paths (README.md, docs/, examples/), so every link that works in the repository works in the site.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*", "examples/**/*", "benchmarks/*.md")
GROUPS = {
    "Start": ["README.md", "docs/tutorial.md", "examples/README.md", "docs/install.md", "docs/algorithms.md"],
    "Use": [
        "docs/concepts.md", "docs/configuration.md", "docs/migration.md", "docs/data.md", "docs/grading.md",
        "docs/rollout.md", "docs/rollouts_of_your_own.md", "docs/conversion.md", "docs/megatron.md",
        "docs/monitoring.md", "docs/diagnosis.md", "docs/runbook.md",
    ],
    "Clusters": [
        "docs/planning.md", "docs/doctor.md", "docs/cluster.md", "docs/torchrun.md", "docs/kubernetes.md",
    ],
    "Project": ["docs/architecture.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/RESULTS.md"],
}  # fmt: skip


def anchor(title: str, separator: str) -> str:
    """GitHub's anchor of a heading, which the links in the pages name."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def copy_pages(target: Path) -> None:
    for pattern in PAGES:
        for path in ROOT.glob(pattern):
            if path.is_file() and "__pycache__" not in path.parts:
                copy = target / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    for page in target.rglob("*.md"):  # mkdocs knows no words after the language of a block, such as ```bash gpu
        page.write_text(re.sub(r"^( *```\w+) .*$", r"\1", page.read_text(), flags=re.M))


def links_outside(target: Path) -> list[str]:
    """Files that pages link to and that are not part of the site, such as source files: they are copied, too."""
    found = []
    for page in target.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#:\s]+)", page.read_text()):
            source = (ROOT / page.relative_to(target).parent / link).resolve()
            if source.is_file() and source.is_relative_to(ROOT) and not (target / source.relative_to(ROOT)).exists():
                found.append(str(source.relative_to(ROOT)))
    return found


def settings(pages: Path, site: Path) -> dict[str, Any]:
    listed = {page for group in GROUPS.values() for page in group}
    others = sorted(str(p.relative_to(pages)) for p in pages.rglob("*.md") if str(p.relative_to(pages)) not in listed)
    nav = [{name: [page for page in group if (pages / page).exists()]} for name, group in GROUPS.items()]
    nav.append({"More": others})
    return {
        "site_name": "megatron-dapo", "docs_dir": str(pages), "site_dir": str(site), "strict": True,
        "use_directory_urls": False, "nav": nav,
        "theme": {"name": "material", "font": False, "features": ["navigation.sections", "toc.follow"],
                  "palette": [{"media": "(prefers-color-scheme: light)", "scheme": "default"},
                              {"media": "(prefers-color-scheme: dark)", "scheme": "slate"}]},
        "extra_javascript": ["https://cdn.jsdelivr.net/npm/mathjax@3/es5/tex-mml-chtml.js"],  # formulas
        "markdown_extensions": ["tables", "fenced_code", {"toc": {"slugify": anchor, "permalink": True}},
                                {"pymdownx.arithmatex": {"generic": True}}],
        "validation": {"links": {"not_found": "warn", "anchors": "warn"}, "nav": {"not_found": "warn"}},
        "plugins": ["search"],
    }  # fmt: skip


def main() -> int:
    if len(sys.argv) != 2:
        raise SystemExit("usage: build_site.py SITE_DIR")
    try:
        from mkdocs.commands.build import build
        from mkdocs.config import load_config
        from mkdocs.exceptions import Abort
    except ImportError:
        raise SystemExit("mkdocs is not installed: pip install 'mkdocs-material>=9.6,<10'") from None
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    site = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder, "pages")
        copy_pages(pages)
        for name in links_outside(pages):
            (pages / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, pages / name)
        config_file = Path(folder, "mkdocs.yml")
        config_file.write_text("site_name: megatron-dapo\n")
        config = load_config(str(config_file), **settings(pages, site))
        try:
            build(config)
        except Abort as error:
            raise SystemExit(f"the site has warnings: {error}") from None
    print(f"{sum(1 for _ in site.rglob('*.html'))} pages in {site}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
