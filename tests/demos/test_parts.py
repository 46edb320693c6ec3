"""The parts of the demo that have an answer one can work out by hand."""

import xml.etree.ElementTree as ET

import pytest

from miniray.demos import chart
from miniray.demos.monte_carlo import Tally, _thinned


def test_estimate_and_error():
    tally = Tally()
    tally.add(points=60, hits=50, seconds=1.0)
    tally.add(points=40, hits=30, seconds=0.5)
    assert tally.estimate == pytest.approx(3.2)  # 4 × 80 / 100
    assert tally.error == pytest.approx(0.16)  # 4 × √(0.8 × 0.2 / 100)
    assert (tally.batches, tally.seconds) == (2, 1.5)


@pytest.mark.parametrize("length", [1, 199, 200, 201, 5000])
def test_thinning_keeps_both_ends_and_the_order(length):
    thin = _thinned(list(range(length)))
    assert len(thin) <= 200
    assert (thin[0], thin[-1]) == (0, length - 1)
    assert thin == sorted(set(thin))


@pytest.mark.parametrize(
    ("low", "high", "steps"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (3.1, 3.2, [3.1, 3.12, 3.14, 3.16, 3.18, 3.2]),
        (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_axis_steps_are_round_numbers(low, high, steps):
    assert chart._round_steps(low, high, 5) == pytest.approx(steps)


def test_the_axis_of_samples_marks_powers_of_ten():
    assert chart._decades(2.5, 5.1) == [3, 4, 5]
    assert chart._decades(2.0, 2.5) == [2.0, 2.5]


@pytest.mark.parametrize(
    ("log", "text"), [(2, "100"), (3, "1k"), (4, "10k"), (6, "1M"), (9, "1G"), (10, "10G")]
)
def test_large_numbers_are_shortened(log, text):
    assert chart._short(log) == text


def test_the_chart_is_wellformed_and_puts_points_where_they_belong():
    svg = ET.fromstring(chart.convergence([(10, 1.0, 0.5), (100, 3.0, 0.5)], truth=2.0))
    x = [p.split(",")[0] for p in svg.find("polyline").get("points").split()]
    y = [float(p.split(",")[1]) for p in svg.find("polyline").get("points").split()]
    assert x == ["76.0", "744.0"]  # the left and right edge of the drawing area
    truth = float(svg.find("line[@class='truth']").get("y1"))
    assert truth == pytest.approx((14 + 276) / 2)  # the middle of its height
    assert y[0] - truth == pytest.approx(truth - y[1])
    assert y[1] < y[0]  # larger values are higher up


def test_the_chart_copes_with_one_point_without_error():
    svg = ET.fromstring(chart.convergence([(5, 4.0, 0.0)], truth=4.0))
    assert svg.find("polyline") is not None


def test_text_in_the_page_is_escaped():
    page = chart.page("<t>", "a & b", "<svg/>", "c", [["<h>"], ["<i>"]], {"<k>": "<v>"})
    assert "&lt;t&gt;" in page
    assert "a &amp; b" in page
    for raw in ("<t>", "<h>", "<i>", "<k>", "<v>"):
        assert raw not in page
