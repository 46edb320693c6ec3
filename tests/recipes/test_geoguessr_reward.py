r"""Distances and rewards by hand.

A degree of a great circle is 6371.0088 km x pi / 180 = 111.1951 km; half of one is 20015.11 km.
"""

import math

import numpy as np
import pytest

DEGREE = 111.19508
HALF = 20015.1144


@pytest.mark.parametrize(
    ("one", "other", "km"),
    [
        ((0, 0), (0, 0), 0),
        ((0, 0), (0, 1), DEGREE),
        ((0, 0), (1, 0), DEGREE),
        ((60, 0), (60, 180), 60 * DEGREE),  # over the pole, not along the parallel
        ((0, 179.5), (0, -179.5), DEGREE),  # across the date line
        ((0, 180), (0, -180), 0),
        ((0, 0), (0, 180), HALF),
        ((90, 0), (-90, 77), HALF),
        ((37.5, -20), (-37.5, 160), HALF),  # antipodes
        ((90, 0), (90, 123), 0),  # a pole has every longitude
        ((0, 0), (45, 90), HALF / 2),  # a quarter of the way around
    ],
)
def test_distance(one, other, km):
    from reward import great_circle_km

    assert great_circle_km(*one, *other) == pytest.approx(km, abs=0.001)
    assert great_circle_km(*other, *one) == pytest.approx(km, abs=0.001)


def test_a_metre_keeps_its_digits():
    from reward import great_circle_km

    # 1e-5 degrees are 1.112 m; the cosine formula would give 0 or 1.3.
    assert great_circle_km(48.0, 2.0, 48.00001, 2.0) == pytest.approx(0.001111951, rel=1e-5)


def test_arrays():
    from reward import great_circle_km

    found = great_circle_km(np.zeros(3), np.zeros(3), np.zeros(3), np.array([0, 1, 180]))
    assert found == pytest.approx([0, DEGREE, HALF], abs=0.001)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (r"It is Paris: \boxed{48.86, 2.35}", (48.86, 2.35)),
        (r"\boxed{-33.9,151}", (-33.9, 151)),
        (r"\boxed{ ( +12.5 , -.5 ) }", (12.5, -0.5)),
        (r"\boxed {48.86°, 2.35°}", (48.86, 2.35)),
        (r"first \boxed{1, 1}, no: \boxed{2, 2}", (2, 2)),
        (r"\boxed{90, -180}", (90, -180)),
        ("48.86, 2.35", None),
        ("", None),
        (r"\boxed{}", None),
        (r"\boxed{48.86}", None),
        (r"\boxed{48.86, 2.35, 1}", None),
        (r"\boxed{Paris, France}", None),
        (r"\boxed{nan, 2}", None),
        (r"\boxed{inf, 2}", None),
        (r"\boxed{90.01, 0}", None),
        (r"\boxed{0, 180.5}", None),
        (r"\boxed{48.86, 2.35", None),
        (r"\boxed{1, 1} \boxed{lost}", None),  # its last word is no answer
        (r"\boxed{48,86, 2,35}", None),
        (r"\boxed{" + "9" * 400 + ", 0}", None),
    ],
)
def test_answers(text, place):
    from reward import parse_answer

    assert parse_answer(text) == place


def test_reward():
    from reward import reward

    truth = {"lat": 0.0, "lon": 0.0}
    assert reward(r"\boxed{0, 0}", truth) == 1.0
    assert reward(r"\boxed{0, 1}", truth) == pytest.approx(math.exp(-DEGREE / 1492.7), rel=1e-6)
    assert reward(r"\boxed{0, 180}", truth) == pytest.approx(1.50e-6, rel=0.01)  # exp(-13.409)
    assert reward(r"\boxed{0, 1}", truth, scale_km=DEGREE) == pytest.approx(math.exp(-1), rel=1e-6)
    assert reward("somewhere", truth) == 0.0


def test_accuracy():
    from reward import accuracy

    found = accuracy([0.5, 1, 24, 199, 751, math.inf, 3000, 2500])
    assert found == {
        "acc@1km": 2 / 8,
        "acc@25km": 3 / 8,
        "acc@200km": 4 / 8,
        "acc@750km": 4 / 8,
        "acc@2500km": 6 / 8,
    }
    with pytest.raises(ValueError, match="no guesses"):
        accuracy([])


def test_as_verl_calls_it():
    from reward import compute_score

    truth = {"lat": 0.0, "lon": 0.0}
    found = compute_score("geoguessr", r"\boxed{0, 1}", truth, extra_info={"index": 3})
    assert found["score"] == pytest.approx(math.exp(-DEGREE / 1492.7), rel=1e-6)
    assert (found["answered"], found["acc@25km"], found["acc@200km"]) == (1.0, 0.0, 1.0)
    nothing = compute_score("geoguessr", "?", truth)
    assert set(nothing) == set(found)
    assert set(nothing.values()) == {0.0}
