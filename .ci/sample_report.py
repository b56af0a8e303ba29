"""Adds the page of a recorded search to the site, as `sample-report.html`.

MkDocs calls this while it builds. The search is docs/sample-report.json; docs/frontier.svg, the
picture of the README, is drawn from it, too:

    autofit search benchmarks/workloads.py:small_gpt --device cpu --vram-budget 96MiB \
        --planned-steps 2000 --effort thorough --out docs/sample-report.json
    autofit report docs/sample-report.json --out docs/frontier.svg
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from autofit import load


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Return the site's files with the page among them."""
    page = load(Path(config.docs_dir) / "sample-report.json").to_html()
    files.append(File.generated(config, "sample-report.html", content=page))
    return files
