"""Figures of pages: what is written on them, where it stands, and in which colour."""

import math
import re
from xml.etree import ElementTree

import pytest

from moe.estimates import Estimate
from moe.inspection.figures import draw_curves, draw_experts_by_domain, draw_load, draw_scores

TEXT = "{http://www.w3.org/2000/svg}text"


def words(svg):
    """Returns the texts of a figure."""
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(TEXT)]


def scores(*estimates):
    named = {f"row {number}": estimate for number, estimate in enumerate(estimates)}
    return draw_scores(named, title="accuracy", label="%")


def test_the_load_is_given_over_the_even_one():
    found = words(draw_load(["encoder 1"], [[0.5, 0.25, 0.25, 0.0]]))
    assert {"2.00×", "50.0 %", "1.00×", "25.0 %", "0.00×", "0.0 %", "expert"} <= set(found)
    many = words(draw_load(["encoder 1", "decoder 1"], [[1 / 128] * 128] * 2))
    assert "1.00×" not in many
    assert "load over uniform load (1× = 0.8 % of all requests)" in many
    assert many[many.index("1") + 1] == "8"  # of many columns some are named


def test_a_layer_of_fewer_experts_leaves_columns_empty():
    svg = draw_load(["a", "b"], [[0.75, 0.25], [0.25, 0.25, 0.5]])
    assert words(svg).count("25.0 %") == 3
    assert "nan" not in svg
    assert "of all requests" not in svg


def test_experts_are_ordered_by_the_kind_that_they_prefer():
    shares = [[0.25, 0.0, 0.75], [1.0, 0.0, 0.0], [0.0, 0.9, 0.1], [0.0, 0.0, 0.0]]
    svg = draw_experts_by_domain(shares, ["Czech", "<b>", "Thai"], ["Slavic", "Slavic", "Tai"])
    assert words(svg) == ["Czech", "<b>", "Slavic", "Thai", "Tai", "2", "4", "3", "1"]
    root = ElementTree.fromstring(svg)
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


def test_unknown_ends_of_an_interval_are_not_drawn():
    svg = scores(Estimate(0.5, 0.25, 1.0), Estimate(0.5, -math.inf, math.nan))
    assert {"row 0", "row 1", "accuracy", "%"} <= set(words(svg))
    assert not re.search(r"\b(inf|nan)\b", svg)


def test_the_whisker_of_a_bar_lies_in_its_middle():
    root = ElementTree.fromstring(scores(Estimate(0.5, 0.25, 1.0)))
    ys = []
    for kind in ("patch_3", "LineCollection_1"):
        (group,) = [item for item in root.iter() if item.attrib.get("id") == kind]
        (path,) = [item for item in group.iter() if item.tag.endswith("path")][:1]
        heights = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.attrib["d"])]
        ys.append((min(heights) + max(heights)) / 2)
    assert ys[0] == pytest.approx(ys[1], abs=0.01)


def test_curves_have_names_axes_and_one_legend():
    curve = ("encoder", [1, 2, 3], [0.1, 0.5, math.nan])
    svg = draw_curves({"Entropy": [curve], "Drops": [curve]}, y_label="share", from_zero=True)
    found = words(svg)
    assert {"Entropy", "Drops", "training step", "share"} <= set(found)
    assert found.count("encoder") == 1


def test_figures_take_the_colours_of_their_page_and_are_the_same_text_again():
    for draw in (
        lambda: scores(Estimate(0.5, 0.25, 1.0)),
        lambda: draw_load(["encoder 1"], [[0.5, 0.5]]),
    ):
        svg = draw()
        assert draw() == svg
        for text in ElementTree.fromstring(svg).iter(TEXT):
            is_cell = re.search("[×%]", "".join(text.itertext()))
            assert is_cell or "fill: currentColor" in text.attrib["style"]
        background = re.search(r'id="patch_1">\s*<path[^>]*style="([^"]*)"', svg)
        assert background is not None
        assert "fill: none" in background[1]
