"""What all figures share: colours, style, and how one becomes SVG text to stand inside a page."""

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Okabe and Ito's colours, which colour-blind people tell apart.
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PINK = "#CC79A7"
GREY = "#666666"
COLOURS = (BLUE, ORANGE, GREEN, PINK, "#56B4E9", "#E69F00", GREY)
"""Of figures with many lines, in this order."""

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "moe",
    "font.family": "sans-serif",
}


def figure_svg(figure: "Figure") -> str:
    """Returns the figure as an <svg> element."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.StringIO()
    with rc_context(STYLE):
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
