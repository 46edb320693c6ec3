"""Curves extracted from metrics, and thinning of their points."""

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miniray.report.series import (
    Curve,
    extract_curves,
    extract_rank_curves,
    find_axis,
    find_unit,
    merge_records,
    sample_evenly,
    thin_points,
)

#: Slow examples on a loaded machine must not fail.
QUICK = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def named(found):
    return {curve.name: (curve.group, curve.points) for curve in found}


def test_held_out_metrics_share_a_chart():
    lines = [{"epoch": 0, "loss": 2, "val_loss": 3, "val_f1": 0.5}, {"epoch": 1, "loss": 1}]
    assert named(extract_curves(lines)) == {
        "loss": ("loss", [(0, 2), (1, 1)]),
        "val_loss": ("loss", [(0, 3)]),
        "val_f1": ("val_f1", [(0, 0.5)]),  # f1 doesn't exist
    }


def test_non_numeric_metric_has_no_curve():
    line = {"epoch": 0, "seconds": 1.0, "num_samples": 8, "synced": True, "note": "x", "loss": 1.0}
    assert list(named(extract_curves([line]))) == ["loss"]


def test_nested_metrics_have_dotted_names():
    lines = [{"step": 10, "reward": {"mean": 0.5}}, {"step": 20, "reward": {"mean": 0.75}}]
    assert named(extract_curves(lines)) == {"reward.mean": ("reward.mean", [(10, 0.5), (20, 0.75)])}
    assert find_axis(lines) == "step"


def test_several_lines_per_epoch_use_step_axis():
    lines = [{"epoch": n // 2, "step": 10 * n, "loss": 4 - n} for n in range(4)]
    assert named(extract_curves(lines))["loss"][1] == [(0, 4), (10, 3), (20, 2), (30, 1)]
    assert find_axis(lines) == "step"
    once = [{"epoch": n, "step": 7, "loss": n} for n in range(3)]  # the number of steps per epoch
    assert named(extract_curves(once))["loss"][1] == [(0, 0), (1, 1), (2, 2)]
    by_ranks = [{"epoch": e, "step": 5, "rank": r, "loss": e} for e in (0, 1) for r in (0, 1)]
    assert find_axis(by_ranks) == "epoch"


def test_global_step_is_the_axis_of_one_line_per_epoch():
    lines = [{"epoch": e, "step": 23 * (e + 1), "loss": 1.0} for e in range(3)]
    assert named(extract_curves(lines))["loss"][1] == [(23, 1), (46, 1), (69, 1)]
    assert (find_axis(lines), find_unit(lines)) == ("step", "epoch")
    means = [{"epoch": e, "step": 2.5 * e, "loss": 1.0} for e in range(3)]  # what workers returned
    assert find_axis(means) == "epoch"


def test_records_of_epochs_and_steps_are_one_history():
    epochs = [
        {"epoch": 0, "step": 20, "loss": 5, "val_loss": 4, "seconds": 1},
        {"epoch": 1, "loss": 3, "val_loss": 2, "seconds": 2},  # the user's train_epoch has no step
    ]
    steps = [
        {"step": 1, "epoch": 0, "loss": 9},
        {"step": 10, "epoch": 0, "val_loss": 6},
        {"step": 20, "epoch": 0, "loss": 7, "val_loss": 4},
        {"step": 40, "epoch": 1, "loss": 1},
    ]
    merged = merge_records(epochs, steps)
    assert named(extract_curves(merged)) == {
        "loss": ("loss", [(1, 9), (20, 7), (40, 1)]),
        "val_loss": ("loss", [(10, 6), (20, 4), (40, 2)]),
    }
    assert [record["step"] for record in merged if "seconds" in record] == [20, 40]
    assert merge_records(epochs, []) == epochs


def test_list_per_rank_becomes_curve_per_rank():
    lines = [{"epoch": 0, "loss": [1.0, 2.0], "sizes": [1, 2, 3]}, {"epoch": 1, "loss": [0.5, 1.5]}]
    found = extract_rank_curves(lines, world_size=2)
    assert list(found) == ["loss"]
    assert [(c.name, c.points) for c in found["loss"]] == [
        ("rank 0", [(0, 1.0), (1, 0.5)]),
        ("rank 1", [(0, 2.0), (1, 1.5)]),
    ]


def test_lines_with_rank_become_curve_per_rank():
    lines = [
        {"step": s, "rank": r, "loss": 10 * r + s, "x": {"y": s}} for s in (0, 1) for r in (1, 0)
    ]
    lines.append({"step": 2, "loss": 7})
    assert named(extract_curves(lines)) == {"loss": ("loss", [(2, 7)])}
    found = extract_rank_curves(lines, world_size=1)
    assert [(c.name, c.points) for c in found["loss"]] == [
        ("rank 0", [(0, 0), (1, 1)]),
        ("rank 1", [(0, 10), (1, 11)]),
    ]
    assert [c.points for c in found["x.y"]] == [[(0, 0), (1, 1)]] * 2


def test_constant_nan_is_not_a_constant_curve():
    assert Curve("loss", [(0.0, 2.0), (1.0, 2.0)]).is_constant
    assert not Curve("loss", [(0.0, math.nan), (1.0, math.nan)]).is_constant


def test_best_value_depends_on_metric_and_is_never_nan():
    points = [(0.0, math.nan), (1.0, 3.0), (2.0, 1.0), (3.0, 2.0)]
    assert Curve("loss", points).best == (2.0, 1.0)
    assert Curve("val_accuracy", points).best == (1.0, 3.0)
    assert Curve("loss", points[:1]).best is None


def test_thinning_keeps_peaks():
    points = [(float(i), 1.0) for i in range(10_000)]
    points[1234], points[7777] = (1234.0, 50.0), (7777.0, -50.0)
    thin = thin_points(points, 400)
    assert len(thin) <= 400
    assert {(1234.0, 50.0), (7777.0, -50.0), points[0], points[-1]} <= set(thin)


@QUICK
@given(st.lists(st.integers(-9, 9), min_size=1, max_size=120), st.integers(4, 20))
def test_thinning_keeps_ends_order_and_extremes(values, most):
    points = [(float(i), float(value)) for i, value in enumerate(values)]
    thin = thin_points(points, most)
    assert len(thin) <= max(most, 4)
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert set(thin) <= set(points)
    heights = [y for _, y in thin]
    assert (min(heights), max(heights)) == (min(values), max(values))


@QUICK
@given(st.lists(st.integers(), min_size=1, max_size=60), st.integers(2, 20))
def test_sample_evenly_keeps_both_ends(values, most):
    found = sample_evenly(values, most)
    assert len(found) == min(len(values), most)
    assert (found[0], found[-1]) == (values[0], values[-1])
