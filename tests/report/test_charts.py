"""SVG charts: well-formed, correct coordinates, marks for values that aren't finite."""

import math
import sys
import xml.etree.ElementTree as ET

import pytest

from miniray.report.charts import HEIGHT, LEFT, RIGHT, WIDTH, render_svg, round_ticks
from miniray.report.html import format_number
from miniray.report.series import Curve


def drawn(*curves, **options):
    return ET.fromstring(render_svg(curves, "epoch", "a chart", **options))


def places(svg):
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in svg.iter("polyline")
    ]


def test_line_spans_width_and_larger_values_are_higher():
    ((first, middle, last),) = places(drawn(Curve("a", [(0.0, 1.0), (5.0, 2.0), (10.0, 3.0)])))
    assert (first[0], last[0]) == (LEFT, WIDTH - RIGHT)
    assert middle[0] == pytest.approx((LEFT + WIDTH - RIGHT) / 2)
    assert middle[1] == pytest.approx((first[1] + last[1]) / 2, abs=0.1)
    assert first[1] > last[1]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (3.1411, 3.1422, ["3.1415", "3.142"]),
        (3.1411, 3.1419, ["3.1415"]),
        (0.0, 1.0, ["0", "0.5", "1"]),
    ],
)
def test_tick_labels_have_enough_digits(low, high, labels):
    svg = drawn(Curve("pi", [(0.0, low), (1.0, high)]))
    assert [text.text for text in svg.iter("text") if text.get("class") == "e"] == labels


def test_non_finite_values_are_crosses_and_split_the_line():
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 4.0), (4.0, math.inf), (5.0, 1.0)]
    svg = drawn(Curve("loss", points))
    assert [len(line) for line in places(svg)] == [2]
    assert len(list(svg.iter("circle"))) == 2  # a piece of one point each
    crosses = [path for path in svg.iter("path") if path.get("class") == "x"]
    assert [cross.find("title").text for cross in crosses] == [
        "loss: nan at epoch 2",
        "loss: inf at epoch 4",
    ]


def test_only_nan_draws_frame_with_crosses():
    svg = drawn(Curve("loss", [(0.0, math.nan), (1.0, math.nan)]))
    assert places(svg) == []
    assert sum(path.get("class") == "x" for path in svg.iter("path")) == 2


@pytest.mark.parametrize("points", [[], [(0.0, 0.0)], [(3.0, 5.0), (3.0, 5.0)]])
def test_degenerate_curves_can_be_drawn(points):
    assert drawn(Curve("a", points)).tag == "svg"


@pytest.mark.parametrize("size", [5e-324, 1e300, sys.float_info.max])
def test_extreme_values_fit_into_the_chart(size):
    ((first, last),) = places(drawn(Curve("a", [(0.0, -size), (1.0, size)])))
    assert HEIGHT > first[1] > last[1] > 0


def test_rate_that_starts_near_zero_stays_linear():
    heights = [1e-4, 0.5, 0.75, 1.0]
    (line,) = places(drawn(Curve("accuracy", list(enumerate(heights)))))
    down = [y for _, y in line]
    assert (down[0] - down[1]) / (down[0] - down[3]) == pytest.approx(0.5, abs=0.01)


def test_curve_over_many_powers_of_ten_is_logarithmic():
    ((first, middle, last),) = places(drawn(Curve("a", [(0.0, 1e-4), (1.0, 1e-1), (2.0, 1e2)])))
    assert middle[1] == pytest.approx((first[1] + last[1]) / 2, abs=0.2)


def test_tooltips_contain_values():
    svg = drawn(Curve("a", [(0.0, 1.0), (1.0, 2.0)]), Curve("b", [(1.0, 0.5)]))
    titles = [p.find("title").text for p in svg.iter("path") if p.get("class") == "h"]
    assert titles == ["epoch 0\na 1", "epoch 1\na 2\nb 0.5"]


def test_svg_of_many_points_is_small():
    points = [(float(i), math.sin(i)) for i in range(10_000)]
    curves = [Curve(f"rank {r}", points) for r in range(10)]
    text = render_svg(curves, "step", "loss")
    assert len(text) < 150_000
    assert ET.fromstring(text).get("viewBox") == f"0 0 {WIDTH} {HEIGHT}"


def test_labels_are_escaped():
    assert "<b>" not in render_svg([Curve("<b>", [(0.0, 1.0)])], "<b>", '"<b>')


@pytest.mark.parametrize(
    ("low", "high", "steps"),
    [(0.0, 10.0, [0, 2, 4, 6, 8, 10]), (3.1, 3.2, [3.1, 3.12, 3.14, 3.16, 3.18, 3.2])],
)
def test_ticks_are_round_numbers(low, high, steps):
    assert round_ticks(low, high, 5) == pytest.approx(steps)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.017253, "0.01725"), (1437.0, "1437"), (12345.0, "12.35k"), (2.5e6, "2.5M"),
     (2.5e-7, "2.5e-07"), (-3.0, "-3"), (math.nan, "nan"), (1e20, "1e+20")],
)  # fmt: skip
def test_format_number(value, text):
    assert format_number(value) == text
