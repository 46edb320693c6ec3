r"""How far a guess is from the truth, and what it earns.

An answer is the last ``\boxed{lat, lon}`` of a text, in degrees. What cannot be read as two finite
numbers, or lies off the globe, earns 0 and counts as wrong at every distance; it never raises,
because a model may write anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

EARTH_RADIUS_KM = 6371.0088  # the mean radius: the sphere nearest to the ellipsoid
SCALE_KM = 1492.7
WITHIN_KM = (1, 25, 200, 750, 2500)

_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_NUMBER = r"([+-]?(?:\d+\.?\d*|\.\d+))\s*°?"
_PAIR = re.compile(rf"\s*\(?\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\)?\s*")


def parse_answer(text: str) -> tuple[float, float] | None:
    r"""(lat, lon) of the last ``\boxed{...}``; None if there is none or it is no place on Earth.

    Only the last box counts: a model that corrects itself means its last word, and one that lists
    many places must not be paid for the best of them.
    """
    boxes = _BOXED.findall(text)
    pair = _PAIR.fullmatch(boxes[-1]) if boxes else None
    if pair is None:
        return None
    lat, lon = float(pair[1]), float(pair[2])
    if not (abs(lat) <= 90 and abs(lon) <= 180):
        return None
    return lat, lon


def great_circle_km(lat1: Any, lon1: Any, lat2: Any, lon2: Any) -> Any:
    """Distance over the sphere; numbers or arrays of degrees.

    The haversine form keeps its digits for points a few metres apart; the clip keeps rounding from
    taking antipodes out of the domain of arcsin.
    """
    phi1, phi2 = np.radians(lat1), np.radians(lat2)
    half_lat = (phi2 - phi1) / 2
    half_lon = np.radians(np.subtract(lon2, lon1)) / 2
    square = np.sin(half_lat) ** 2 + np.cos(phi1) * np.cos(phi2) * np.sin(half_lon) ** 2
    return 2 * EARTH_RADIUS_KM * np.arcsin(np.sqrt(np.clip(square, 0.0, 1.0)))


def distance_km(answer: str, ground_truth: Mapping[str, Any]) -> float:
    """From the guess in ``answer`` to the truth; infinite if there is no guess in it."""
    guess = parse_answer(answer)
    if guess is None:
        return math.inf
    return float(great_circle_km(*guess, float(ground_truth["lat"]), float(ground_truth["lon"])))


def reward(answer: str, ground_truth: Mapping[str, Any], scale_km: float = SCALE_KM) -> float:
    """``exp(-d / scale_km)``: 1 on the spot, 0 without a readable answer."""
    return math.exp(-distance_km(answer, ground_truth) / scale_km)


def accuracy(
    distances_km: Sequence[float] | np.ndarray, within: Iterable[float] = WITHIN_KM
) -> dict[str, float]:
    """Share of guesses within each distance. An empty list has no share and is refused."""
    distances = np.asarray(distances_km, dtype=float)
    if distances.size == 0:
        raise ValueError("accuracy of no guesses: there is nothing to divide by")
    return {f"acc@{limit:g}km": float(np.mean(distances <= limit)) for limit in within}


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Mapping[str, Any],
    extra_info: Mapping[str, Any] | None = None,
    *,
    scale_km: float = SCALE_KM,
    **_: Any,
) -> dict[str, float]:
    """What verl calls as its custom reward function: ``score`` trains, the rest is reported."""
    distance = distance_km(solution_str, ground_truth)
    return {
        "score": math.exp(-distance / scale_km),
        "answered": float(math.isfinite(distance)),
        **{f"acc@{limit:g}km": float(distance <= limit) for limit in WITHIN_KM},
    }
