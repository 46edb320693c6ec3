"""Aggregation, with numbers worked out by hand."""

import fractions
import itertools
import math

import numpy as np
import pytest
import torch

from miniray.train import aggregate


def test_numbers_are_averaged_whatever_their_kind():
    results = [
        {"loss": 1, "acc": 0.5, "ok": True},
        {"loss": np.float32(2.0), "acc": torch.tensor(0.25), "ok": False},
        {"loss": np.array(6), "acc": torch.tensor(0.75, dtype=torch.bfloat16), "ok": True},
    ]
    found = aggregate(results)
    assert found == {"loss": 3.0, "acc": 0.5, "ok": 2 / 3}
    assert all(type(value) is float for value in found.values())


def test_with_num_samples_means_are_weighted_and_it_is_summed():
    results = [{"loss": 1.0, "num_samples": 30}, {"loss": 5.0, "num_samples": 10}]
    assert aggregate(results) == {"loss": 2.0, "num_samples": 40}  # (30*1 + 10*5) / 40
    assert type(aggregate(results)["num_samples"]) is int


def test_one_worker_is_its_own_mean():
    assert aggregate([{"loss": 0.1, "name": "a"}]) == {"loss": 0.1, "name": "a"}


def test_a_worker_without_samples_has_no_part_in_means():
    results = [{"loss": 2.0, "num_samples": 4}, {"loss": math.nan, "num_samples": 0}]
    assert aggregate(results) == {"loss": 2.0, "num_samples": 4, "nonfinite": {"loss": [1]}}


def test_where_nobody_had_samples_all_count_the_same():
    results = [{"loss": 2.0, "num_samples": 0}, {"loss": 4.0, "num_samples": 0}]
    assert aggregate(results) == {"loss": 3.0, "num_samples": 0}


def test_a_field_of_some_workers_is_named():
    results = [{"loss": 1.0, "d": 2.0}, {"loss": 3.0}, {"loss": 5.0, "d": 6.0}]
    assert aggregate(results) == {"loss": 3.0, "d": 4.0, "partial": {"d": [0, 2]}}


def test_a_field_of_some_workers_is_weighted_by_their_samples():
    results = [
        {"d": 2.0, "num_samples": 1},
        {"num_samples": 100},
        {"d": 6.0, "num_samples": 3},
    ]
    assert aggregate(results) == {"d": 5.0, "num_samples": 104, "partial": {"d": [0, 2]}}


def test_num_samples_of_some_workers_weighs_nothing_and_is_named():
    results = [{"loss": 1.0, "num_samples": 9}, {"loss": 3.0}]
    assert aggregate(results) == {"loss": 2.0, "num_samples": 9, "partial": {"num_samples": [0]}}


def test_nan_and_infinity_show_and_are_named():
    results = [{"loss": 1.0, "x": math.inf}, {"loss": 2.0, "x": 1.0}, {"loss": math.nan, "x": 1.0}]
    found = aggregate(results)
    assert math.isnan(found["loss"])
    assert found["x"] == math.inf
    assert found["nonfinite"] == {"loss": [2], "x": [0]}


def test_infinities_of_both_signs_are_nan():
    found = aggregate([{"x": math.inf}, {"x": -math.inf}])
    assert math.isnan(found["x"])
    assert found["nonfinite"] == {"x": [0, 1]}


def test_other_fields_are_kept_if_equal_and_listed_if_not():
    results = [
        {"device": "cpu", "host": "a", "shape": (1, 2), "array": np.arange(2), "none": None},
        {"device": "cpu", "host": "b", "shape": (1, 2), "array": np.arange(2), "none": None},
    ]
    found = aggregate(results)
    assert found["device"] == "cpu"
    assert found["host"] == ["a", "b"]
    assert found["shape"] == (1, 2)
    assert found["array"].tolist() == [0, 1]
    assert found["none"] is None


def test_arrays_that_differ_are_listed():
    for one, other in [
        (np.zeros(2), np.ones(2)),
        (np.zeros(2), np.zeros(3)),
        (torch.zeros(2), torch.zeros(2, 2)),
        ([np.zeros(2)], [np.zeros(2)]),  # comparing these is ambiguous: both are shown
    ]:
        found = aggregate([{"a": one}, {"a": other}])["a"]
        assert found[0] is one
        assert found[1] is other


def test_a_field_that_is_a_number_on_some_and_not_on_others_is_listed():
    assert aggregate([{"x": 1}, {"x": "n/a"}]) == {"x": [1, "n/a"]}


def test_the_order_of_workers_changes_no_bit():
    values = [0.1, 1e16, -1e16, 3.3, 1e-9]
    found = {aggregate([{"x": v} for v in order])["x"] for order in itertools.permutations(values)}
    exact = float(sum(map(fractions.Fraction, values)))
    assert found == {exact / 5}


def test_numbers_at_the_end_of_the_range():
    assert aggregate([{"x": 1.5e308}, {"x": 1.5e308}])["x"] == pytest.approx(1.5e308)
    assert aggregate([{"x": 10**400}, {"x": 1}]) == {"x": math.inf, "nonfinite": {"x": [0]}}


@pytest.mark.parametrize("bad", [None, 0.5, [1]])
def test_a_result_that_is_no_dict_names_the_worker(bad, raises):
    with raises(TypeError):
        aggregate([{"loss": 1.0}, bad])


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, "many", None])
def test_num_samples_is_a_number_of_samples(bad):
    with pytest.raises(ValueError, match=r"worker 1\b.*num_samples"):
        aggregate([{"num_samples": 1}, {"num_samples": bad}])


def test_names_are_texts_and_two_are_taken(raises):
    with raises(TypeError):
        aggregate([{3: 1}])
    for name in ("partial", "nonfinite"):
        with pytest.raises(ValueError, match=rf"worker 0\b.*'{name}'"):
            aggregate([{name: 1}])


def test_no_results_at_all(raises):
    with raises(ValueError):
        aggregate([])
