"""From a matplotlib figure to an SVG that reads on a light and on a dark page, and what stands in for a missing one."""

from __future__ import annotations

import hashlib
import html
import io
import json
import re
from dataclasses import dataclass
from typing import Any

INK = "#010203"
"""Colour of text and axes while matplotlib draws; the finished SVG has the page's own colour in its place."""

OURS = "#e4572e"
PEER_COLOURS = (
    "#4c8dd6",
    "#2aa198",
    "#9b7ede",
    "#c9a227",
    "#5fad56",
    "#d77fb3",
    "#8c9aa8",
    "#b5651d",
    "#6c7ae0",
    "#3fa7d6",
    "#a0a83c",
    "#c06c84",
    "#7aa874",
    "#b08ea2",
)
STYLE = "svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}"


@dataclass(frozen=True)
class Plot:
    """A finished plot, or the reason why there is none.

    Attributes:
        name: file name without its suffix.
        caption: what it shows, and what it was drawn from.
        svg: the drawing; empty when there is no data.
        missing: why there is no data; empty when there is.
        digest: of the data that was drawn, by which a stored file is told from a stale one.
    """

    name: str
    title: str
    caption: str
    svg: str = ""
    missing: str = ""
    digest: str = ""

    @property
    def file(self) -> str:
        """The SVG as a file of its own, with the colours of light and dark pages and the digest of its data."""
        return self.svg.replace(">", f"><!-- data {self.digest} --><style>{STYLE}</style>", 1) + "\n"


def series_colours(names: list[str]) -> dict[str, str]:
    """A colour for each implementation; microsdpa's stands out and is always the same."""
    peers = [name for name in names if not name.startswith("microsdpa")]
    colours = {name: PEER_COLOURS[index % len(PEER_COLOURS)] for index, name in enumerate(peers)}
    return colours | {name: OURS for name in names if name.startswith("microsdpa")}


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """(figure, axes) without a background; axes are a 2-d array. Sizes in inches at 72 points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "microsdpa",
            "font.family": "sans-serif",
            "font.size": 10,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "grid.color": INK,
            "grid.alpha": 0.15,
            "legend.frameon": False,
        }
    )
    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
    figure.patch.set_alpha(0)
    for axis in axes.flat:
        axis.patch.set_alpha(0)
    return figure, axes


def finish(figure: Any, name: str, title: str, caption: str, data: object) -> Plot:
    """The plot of a figure, which is closed."""
    from matplotlib import pyplot

    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(INK, "currentColor").replace("\n", " ")
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn)
    drawn = re.sub(r'(width|height)="[\d.]+pt"', "", drawn, count=2)
    label = f' role="img" aria-label="{html.escape(title, quote=True)}"'
    return Plot(name, title, caption, drawn.replace("<svg", f"<svg{label}", 1).strip(), digest=digest(data))


def digest(data: object) -> str:
    """Digest of the numbers and names that a plot shows."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
