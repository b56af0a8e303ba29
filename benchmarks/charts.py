"""Draws the charts of docs/benchmarks.md from the newest results: `python -m benchmarks.charts`.

Each is an SVG that is light or dark as its reader's system is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from benchmarks.stated_numbers import ROOT, newest

FOLDER = ROOT / "docs" / "charts"
LABELS, PLOT, ROW, TOP = 320, 330, 26, 62
"""Pixels: width of labels and of the plot, height of a row and of the title."""
STYLE = (
    "text{font-family:sans-serif;font-size:13px;fill:#1f2328}.note{fill:#59636e}.bar{fill:#8c959f}"
    ".ours{fill:#0969da}"
    "@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.note{fill:#9198a1}.bar{fill:#656c76}"
    ".ours{fill:#4493f8}}"
)
Bars = Sequence[tuple[str, float, str]]
"""Label, length, and how it is written."""


def drawn(title: str, note: str, bars: Bars) -> str:
    """Return an SVG of horizontal bars; autofit's are of a colour of their own."""
    width, height = LABELS + PLOT + 70, TOP + ROW * len(bars) + 6
    scale = PLOT / max(length for _, length, _ in bars)

    def parts() -> Iterator[str]:
        yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
        yield f"<style>{STYLE}</style><title>{escape(title)}</title>"
        yield f'<text x="8" y="22" font-weight="bold">{escape(title)}</text>'
        yield f'<text class="note" x="8" y="44">{escape(note)}</text>'
        for at, (label, length, written) in enumerate(bars):
            y, kind = TOP + ROW * at, "ours" if label.startswith("autofit") else "bar"
            long = scale * length
            yield f'<text x="{LABELS - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>'
            yield f'<rect class="{kind}" x="{LABELS}" y="{y}" width="{long:.1f}" height="20"/>'
            yield f'<text x="{LABELS + long + 6:.1f}" y="{y + 15}">{escape(written)}</text>'
        yield "</svg>"

    return "\n".join(parts()) + "\n"


def on_a_cpu() -> str:
    """Speeds of real trainings, geometric means over the workloads."""
    told = newest("versus-cpu-summary")
    workloads = [tools for name, tools in told.items() if name != "all"]
    bars = []
    for tool in workloads[0]:
        speeds = [tools.get(tool, {}).get("speed") for tools in workloads]
        if "accumulation by hand" not in tool and all(speeds):
            mean = statistics.geometric_mean(speeds)
            bars.append((tool, mean, f"{mean:.2f}"))
    title = f"Real trainings on two cores of a CPU, {len(workloads)} models"
    bars.sort(key=lambda bar: bar[1])
    return drawn(
        title,
        "Median speed of three seeds beside one plain loop, geometric mean of the models",
        bars,
    )


PICKED = {
    "largest batch that fits, float32": "finder",
    "the same, fastest precision": "by_hand",
    "the expert": "expert",
    "autofit": "mean",
}


def picked(title: str, note: str, kind: str) -> str:
    """What people and autofit pick on worlds of both models."""
    told = newest("simulated-worlds")
    bars = [
        (f"{who}, {model}", found := told[f"{kind}, {name}"][key], f"{found:.2f}")
        for name, model in (("gpt2_small", "GPT-2"), ("resnet50", "ResNet-50"))
        for who, key in PICKED.items()
    ]
    return drawn(title, note, bars)


def predictions() -> str:
    """Errors of required bytes by family of models."""
    families: dict[str, list[float]] = {}
    for training in newest("prediction-accuracy")["trainings"]:
        family = training["name"].partition("_")[0]
        families.setdefault(family, []).append(abs(training["required_error"]))
    bars = [
        (f"{name} ({len(its)} trainings)", max(its), f"{max(its):.1%}")
        for name, its in families.items()
    ]
    title = "Predicted memory of 30 trainings recorded on an H200"
    return drawn(title, "Required bytes, largest error in each family of models", bars)


CHARTS: Mapping[str, Callable[[], str]] = {
    "cpu": on_a_cpu,
    "recorded": lambda: picked(
        "Plans recorded on an H200",
        "Speed of what is picked, as a share of the fastest recorded plan",
        "recorded, both",
    ),
    "simulated": lambda: picked(
        "Simulated cards between L4 and H100, none of them measured",
        "Share of the fastest plan, where compiling is a choice; mean of 100 cards",
        "compiling card, both",
    ),
    "predictions": predictions,
}
"""By the name of the file."""


def main(folder: Path = FOLDER) -> None:
    """Write all."""
    folder.mkdir(exist_ok=True)
    for name, draw in CHARTS.items():
        (folder / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
