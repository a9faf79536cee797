"""Figures of notebooks: what is written on them, and what is refused."""

import math
import re
from xml.etree import ElementTree

import pytest

from moe import ConfigError
from moe.estimates import Estimate
from moe.inspection.figures import (
    Curve,
    CurvePanel,
    HeatMap,
    IntervalPanel,
    Row,
    draw_curves,
    draw_experts_by_domain,
    draw_heat_maps,
    draw_intervals,
)


def words(drawing):
    """Returns the texts of a figure."""
    root = ElementTree.fromstring(drawing.svg)
    return ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]


def heat_map(num_columns=3, title="encoder 1"):
    columns = [f"c{column}" for column in range(num_columns)]
    texts = [[f"{row}:{column}" for column in range(num_columns)] for row in range(2)]
    values = [[float(column) for column in range(num_columns)], [math.nan] * num_columns]
    return HeatMap(title, ["upper", "lower"], columns, values, texts)


def test_a_heat_map_names_rows_columns_cells_and_colours():
    options = {"label": "lift (1 is even)", "x_label": "expert", "limits": (-1, 2)}
    found = words(draw_heat_maps([heat_map(), heat_map(title="decoder 1")], **options))
    for word in ("upper", "lower", "c0", "c2", "0:0", "1:2", "lift (1 is even)", "expert"):
        assert word in found
    assert found.count("encoder 1") == found.count("decoder 1") == 1


def test_of_many_columns_some_are_named_and_no_cell():
    found = words(draw_heat_maps([heat_map(53)], label="lift", x_label="expert", limits=(-1, 2)))
    named = [word for word in found if re.fullmatch(r"c\d+", word)]
    assert named[:2] == ["c0", "c3"]
    assert not [word for word in found if ":" in word]


def test_experts_are_ordered_by_the_kind_that_they_prefer():
    shares = [[0.25, 0.0, 0.75], [1.0, 0.0, 0.0], [0.0, 0.9, 0.1], [0.0, 0.0, 0.0]]
    drawing = draw_experts_by_domain(shares, ["Czech", "<b>", "Thai"], ["Slavic", "Slavic", "Tai"])
    assert words(drawing) == ["Czech", "<b>", "Slavic", "Thai", "Tai", "2", "4", "3", "1"]
    root = ElementTree.fromstring(drawing.svg)
    cells = [cell for cell in root if cell.tag.endswith("rect")]
    tips = ["".join(cell.itertext()) for cell in cells]
    assert len(cells) == 12
    assert tips[:4] == [
        f"expert {n}: {share} % Czech" for n, share in ((2, 100), (4, 0), (3, 0), (1, 25))
    ]
    coloured = [
        tip for cell, tip in zip(cells, tips, strict=True) if cell.get("fill") != "currentColor"
    ]
    assert all(tip.split()[2] != "0" for tip in coloured)
    assert len(coloured) == 5


def interval_panel(*estimates):
    rows = [Row(f"row {number}", "drop", estimate) for number, estimate in enumerate(estimates)]
    return IntervalPanel("encoder 1", rows, 0.5, "by chance")


@pytest.mark.parametrize("from_zero", [False, True])
def test_unknown_ends_of_an_interval_are_not_drawn(from_zero):
    known = Estimate(0.5, 0.25, 1.0)
    unknown = Estimate(0.5, -math.inf, math.nan)
    drawing = draw_intervals([interval_panel(known, unknown)], label="nats", from_zero=from_zero)
    assert {"row 0", "row 1", "drop", "by chance", "nats", "encoder 1"} <= set(words(drawing))
    assert not re.search(r"\b(inf|nan)\b", drawing.svg)


def test_panels_of_intervals_have_one_scale():
    small = interval_panel(Estimate(0.0, -0.1, 0.1))
    large = interval_panel(Estimate(40.0, 30.0, 50.0))
    found = words(draw_intervals([small, large], label="nats"))
    assert found.count("40") == 2


def test_curves_have_names_and_axes():
    panel = CurvePanel("Entropy", [Curve("encoder 1", [1, 2, 3], [0.1, 0.5, math.nan])])
    drawing = draw_curves([panel], x_label="step", y_label="share", y_limits=(0, 1), log_x=True)
    assert {"Entropy", "encoder 1", "step", "share"} <= set(words(drawing))


def test_the_same_figure_is_the_same_text():
    options = {"label": "lift", "x_label": "expert", "limits": (0, 1)}
    assert draw_heat_maps([heat_map()], **options) == draw_heat_maps([heat_map()], **options)


def test_a_drawing_shows_itself_and_is_saved(tmp_path):
    drawing = draw_intervals([interval_panel(Estimate(0.5, 0.25, 1.0))], label="nats")
    assert drawing._repr_svg_() == drawing.svg
    assert drawing.save(tmp_path / "new/figure.svg").read_text() == drawing.svg
    with pytest.raises(ConfigError, match=r"\.svg"):
        drawing.save(tmp_path / "figure.png")


def test_an_empty_figure_is_refused():
    with pytest.raises(ConfigError, match="at least one panel"):
        draw_curves([], x_label="", y_label="")
    with pytest.raises(ConfigError, match=r"rows of encoder 1 .* estimate"):
        draw_intervals([interval_panel()], label="")
    with pytest.raises(ConfigError, match=r"limits .* smaller one first"):
        draw_heat_maps([heat_map()], label="", x_label="", limits=(1, 1))


def test_figures_take_the_colours_of_their_page():
    interval = interval_panel(Estimate(0.5, 0.25, 1.0))
    maps = draw_heat_maps([heat_map()], label="lift", x_label="expert", limits=(-1, 2))
    for drawing in (maps, draw_intervals([interval], label="nats", from_zero=True)):
        root = ElementTree.fromstring(drawing.svg)
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            is_cell = ":" in "".join(text.itertext())
            assert is_cell or "fill: currentColor" in text.attrib["style"]
        background = re.search(r'id="patch_1">\s*<path[^>]*style="([^"]*)"', drawing.svg)
        assert background is not None
        assert "fill: none" in background[1]


def test_the_whisker_of_a_bar_lies_in_its_middle():
    drawing = draw_intervals(
        [interval_panel(Estimate(0.5, 0.25, 1.0))], label="nats", from_zero=True
    )
    root = ElementTree.fromstring(drawing.svg)
    ys = []
    for kind in ("patch_3", "LineCollection_1"):
        (group,) = [item for item in root.iter() if item.attrib.get("id") == kind]
        (path,) = [item for item in group.iter() if item.tag.endswith("path")][:1]
        heights = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.attrib["d"])]
        ys.append((min(heights) + max(heights)) / 2)
    assert ys[0] == pytest.approx(ys[1], abs=0.01)
