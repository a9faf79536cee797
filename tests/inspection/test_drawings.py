"""The figure of the report: what is written on it, where it is, and in which colour."""

from xml.etree import ElementTree

from moe.inspection.figures import draw_experts_by_domain


def test_experts_are_ordered_by_the_kind_that_they_prefer():
    shares = [[0.25, 0.0, 0.75], [1.0, 0.0, 0.0], [0.0, 0.9, 0.1], [0.0, 0.0, 0.0]]
    svg = draw_experts_by_domain(
        shares, ["Czech", "<b>", "Thai"], [5, 7, 11], ["Slavic", "Slavic", "Tai"]
    )
    root = ElementTree.fromstring(svg)
    words = [text.text for text in root if text.tag.endswith("text")]
    assert words == ["Czech", "5", "<b>", "7", "Slavic", "Thai", "11", "Tai", "2", "4", "3", "1"]
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
