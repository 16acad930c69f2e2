"""Panels of curves as SVG; tests/train/records/test_curves.py has those of runs."""

from xml.etree import ElementTree

from tk.core.line_chart import COLOURS, Curve, Panel, draw_panels

SVG = "{http://www.w3.org/2000/svg}"


def test_panels_stand_two_beside_each_other_with_their_curves() -> None:
    panels = [Panel("a < b", (Curve([(0, 0), (1, 2)]), Curve([(0, 1)], 1, True))), Panel("none", ()), Panel("c", ())]
    root = ElementTree.fromstring(draw_panels(panels, ("first", "second")))
    groups = root.findall(f"{SVG}g")
    assert [group.get("transform") for group in groups] == ["translate(0 44)", "translate(520 44)", "translate(0 354)"]
    assert root.get("height") == "664"
    solid, dashed = groups[0].findall(f"{SVG}polyline")
    assert (solid.get("stroke"), solid.get("stroke-dasharray")) == (COLOURS[0], None)
    assert (dashed.get("stroke"), dashed.get("stroke-dasharray")) == (COLOURS[1], "6 4")
    assert next(text.text for text in groups[0].findall(f"{SVG}text")) == "a < b"
    assert "nothing recorded" in {text.text for text in groups[1].findall(f"{SVG}text")}
