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

OURS = "#d55e00"
COLOURS = {
    "microsdpa": OURS,
    "torch CUDNN": "#0072b2",
    "cuDNN": "#0072b2",
    "flash-attn": "#009e73",
    "torch FLASH": "#56b4e9",
    "torch EFFICIENT": "#b8860b",
    "torch flex": "#cc79a7",
    "torch MATH": "#999999",
    "torch": "#6b7785",
    "Triton": "#882255",
    "SageAttention": "#44aa99",
    "xformers": "#ddaa33",
    "FlashInfer": "#aa4499",
}
"""Of each library, by what its names begin with: colours of Okabe and Ito, and of Tol, for colour-blind readers."""
FURTHER = ("#661100", "#117733", "#888800", "#332288")
WIDTH = 4.9
"""Inches of every plot, at 72 points: letters of 10 points keep 9 on a phone of 400 pixels."""
WIDEST = 640
"""Pixels that a drawing takes at most."""
LOOK = 3
"""Counts changes of how plots look: drawn files of an older look are stale."""
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


def colour_of(name: str) -> str:
    """The colour of an implementation, the same in every plot: its library's."""
    known = max((one for one in COLOURS if name.startswith(one)), key=len, default="")
    return COLOURS[known] if known else FURTHER[sum(name.encode()) % len(FURTHER)]


def new_figure(height: float, panels: int = 1) -> tuple[Any, Any]:
    """(figure, axes), without a background and one panel below the other; `height` in inches."""
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
    figure, axes = pyplot.subplots(panels, 1, figsize=(WIDTH, height), squeeze=False, layout="constrained")
    figure.patch.set_alpha(0)
    for axis in axes.flat:
        axis.patch.set_alpha(0)
    return figure, axes.ravel()


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
    return Plot(
        name, title, caption, drawn.replace("<svg", f'<svg width="{WIDEST}"{label}', 1).strip(), digest=digest(data)
    )


def digest(data: object) -> str:
    """Digest of the numbers and names that a plot shows."""
    return hashlib.sha256(json.dumps([LOOK, data], sort_keys=True).encode()).hexdigest()[:16]
