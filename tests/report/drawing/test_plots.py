"""Axes and drawings: round ticks, everything in its place, markup that is well formed."""

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clipless.report.drawing._plots import Mark, Row, Rule, Series, chart, histograms, rows
from clipless.report.drawing._scale import Axis, around, decades

NUMBERS = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.booleans())
@example([1.0e-178], False)
@example([5e-324], True)
@example([-3e-311, 2e-320], False)
def test_linear_axes_hold_their_values_and_have_few_round_ticks(values, zero):
    axis = around(values, label="x", zero=zero)
    span = axis.high - axis.low
    assert axis.low <= min(values) + 1e-6 * span
    assert axis.high >= max(values) - 1e-6 * span
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 14
    assert ticks == sorted(set(ticks))
    assert len({axis.text(tick) for tick in ticks}) == len(ticks)
    for value in (*values, *ticks):
        assert 0.0 <= axis.place(value) <= 1.0


@given(st.lists(st.floats(min_value=1e-9, max_value=1e9), min_size=1, max_size=8))
def test_logarithmic_axes_hold_their_values(values):
    axis = decades(values, label="x")
    assert axis.low <= min(values) * (1 + 1e-6)
    assert axis.high >= max(values) * (1 - 1e-6)
    assert 2 <= len(axis.ticks()) <= 9
    assert axis.place(0.0) == 0.0  # what has no place on it lies at its end


def test_axes_on_which_nothing_has_a_place_are_refused():
    for low, high, log in ((1, 1, False), (2, 1, False), (0, 1, True), (0, float("inf"), False)):
        with pytest.raises(ValueError, match="axis"):
            Axis(label="x", low=low, high=high, log=log)


def drawings():
    x = Axis(label="step & <unit>", low=0, high=10)
    y = Axis(label="loss", low=0, high=1)
    yield chart(
        title="A <b>", description='"quoted"', x=x, y=y, rules=[Rule(value=0.5, name="a & b")],
        series=[
            Series(name="<one>", points=[(0, 0), (10, 1)], titles=["<a>", "b"]),
            Series(name="two", points=[(5, 0.5)], look=1, kind="points"),
            Series(name="three", points=[(0, 0.2), (10, 0.8)], look=2, kind="steps"),
        ],
    )  # fmt: skip
    yield rows(
        title="rows", description="d", x=x, names=[("a", 0), ("b", 1)],
        rows=[Row(name="x" * 60, marks=[Mark(value=3, look=0, title="<", low=1, high=4)])],
    )  # fmt: skip
    yield rows(title="none", description="d", x=x, rows=[])
    yield histograms(
        title="h", description="d", x=Axis(label="x", low=0.01, high=1, log=True),
        edges=[0.0, 0.001, 0.1, 1.0], first=[1, 2, 3], second=[0, 0, 0], names=("a", "b"),
    )  # fmt: skip


@pytest.mark.parametrize("drawing", list(drawings()), ids=["chart", "rows", "empty", "histograms"])
def test_drawings_are_well_formed(drawing):
    root = ElementTree.fromstring(str(drawing))
    assert root.tag == "svg"
    assert root.find("title") is not None
    assert all(child.tag != "b" for child in root.iter())


def test_points_lie_where_they_should():
    x, y = Axis(label="x", low=0, high=10), Axis(label="y", low=0, high=1)
    series = [Series(name="s", points=[(0, 0), (10, 1), (5, 0.5)], kind="points")]
    root = ElementTree.fromstring(str(chart(title="t", description="d", x=x, y=y, series=series)))
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter("circle")]
    (left, bottom), (right, top), (middle, centre) = circles
    assert left < right
    assert top < bottom
    assert middle == pytest.approx((left + right) / 2, abs=0.11)
    assert centre == pytest.approx((top + bottom) / 2, abs=0.11)


def test_histograms_keep_what_lies_below_the_axis():
    """Nothing is lost: counts below the axis are drawn in its first bin."""
    drawing = histograms(
        title="h", description="d", x=Axis(label="x", low=0.1, high=1, log=True),
        edges=[0.0, 0.05, 0.1, 0.5, 1.0], first=[5, 4, 1, 0], second=[0, 0, 0, 1],
        names=("a", "b"),
    )  # fmt: skip
    root = ElementTree.fromstring(str(drawing))
    outline = next(p for p in root.iter("polyline") if p.get("class") == "line s0")
    heights = {float(point.split(",")[1]) for point in outline.get("points").split()}
    base, top = max(heights), min(heights)
    assert base - top > 50  # ten of ten
