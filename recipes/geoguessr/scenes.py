"""Pictures of made-up places whose look tells where they were taken.

Nothing in a picture gives the place away by itself, everything together does:

- latitude: colour of the ground (rain forest, desert, fields, snow), kind of trees, roofs, the
  sun's height and the season; shadows fall to the right in the north, to the left in the south;
- longitude: hue of the walls and direction of the furrows. Both come round to themselves after a
  full turn, so there is no seam at the date line;
- both: the line of the hills; and close to some towns a sign that is theirs alone.

Weather, season, light, position and number of things are chance. A picture is a function of the
place and the random generator, to the byte.
"""

from __future__ import annotations

import colorsys
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

HEIGHT, WIDTH = 240, 320
_HORIZON = 110  # row where the ground begins
_QUALITY = 88

#: Towns with a sign of their own. Coordinates to a hundredth of a degree.
LANDMARKS: dict[str, tuple[float, float]] = {
    "Anchorage": (61.22, -149.90),
    "Auckland": (-36.85, 174.76),
    "Beijing": (39.90, 116.41),
    "Bogota": (4.71, -74.07),
    "Buenos Aires": (-34.60, -58.38),
    "Cairo": (30.04, 31.24),
    "Cape Town": (-33.92, 18.42),
    "Chicago": (41.88, -87.63),
    "Delhi": (28.61, 77.21),
    "Honolulu": (21.31, -157.86),
    "Lagos": (6.52, 3.38),
    "Lima": (-12.05, -77.04),
    "Mexico City": (19.43, -99.13),
    "Moscow": (55.76, 37.62),
    "Nairobi": (-1.29, 36.82),
    "Nuuk": (64.18, -51.74),
    "Paris": (48.86, 2.35),
    "Perth": (-31.95, 115.86),
    "Reykjavik": (64.15, -21.94),
    "San Francisco": (37.77, -122.42),
    "Singapore": (1.35, 103.82),
    "Sydney": (-33.87, 151.21),
    "Tokyo": (35.68, 139.65),
    "Ushuaia": (-54.80, -68.30),
}
_NAMES = list(LANDMARKS)

_ROWS, _COLUMNS = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32)
_BELOW = _ROWS[_HORIZON:]
_ACROSS = _COLUMNS[_HORIZON:]
_SNOW = np.array([232, 236, 243], np.float32)


@dataclass(frozen=True)
class Place:
    lat: float
    lon: float
    month: int
    landmark: str | None


def sample_place(rng: np.random.Generator) -> Place:
    """Evenly over the globe up to 80 degrees; one in seven within a hundred km or so of a town."""
    month = int(rng.integers(1, 13))
    if rng.random() < 1 / 7:
        name = _NAMES[rng.integers(len(_NAMES))]
        lat, lon = LANDMARKS[name]
        north, east = rng.normal(0, 0.5, size=2)
        return Place(_round(lat + north), _round(_wrap(lon + east)), month, name)
    lat = np.degrees(np.arcsin(rng.uniform(-0.985, 0.985)))
    return Place(_round(lat), _round(rng.uniform(-180, 180)), month, None)


def _round(degrees: float) -> float:
    return round(float(degrees), 5)  # a metre


def _wrap(lon: float) -> float:
    return (lon + 180) % 360 - 180


def render(place: Place, rng: np.random.Generator) -> np.ndarray:
    """The picture as uint8, height x width x 3."""
    warmth, wetness = _climate(place)
    light = rng.uniform(0.85, 1.1)
    picture = np.empty((HEIGHT, WIDTH, 3), np.float32)
    _draw_sky(picture, place, rng)
    _draw_hills(picture, place, warmth, rng)
    _draw_ground(picture, place, warmth, wetness, rng)
    _draw_houses(picture, place, warmth, rng)
    _draw_trees(picture, warmth, wetness, rng)
    if place.landmark is not None:
        _draw_sign(picture, _NAMES.index(place.landmark), rng)
    picture *= light
    picture += rng.standard_normal((HEIGHT, WIDTH, 1), dtype=np.float32) * 9  # film grain
    return np.clip(picture, 0, 255).astype(np.uint8)


def encode(picture: np.ndarray) -> bytes:
    """JPEG of about 30 KB."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()


def _climate(place: Place) -> tuple[float, float]:
    """(mean temperature of the month in Celsius, wetness from 0 to 1), roughly as on Earth."""
    away = abs(place.lat)
    summer = np.cos(2 * np.pi * (place.month - 7) / 12) * (1 if place.lat >= 0 else -1)
    warmth = 29 - 0.0085 * away**2 + 0.22 * away * summer
    wetness = 0.15 + 0.85 * np.exp(-((away / 14) ** 2)) + 0.6 * np.exp(-(((away - 52) / 14) ** 2))
    return float(warmth), float(min(wetness, 1.0))


def _sun_height(place: Place) -> float:
    """Degrees above the horizon at noon in the middle of the month; below 0 in polar night."""
    tilt = 23.44 * np.sin(2 * np.pi * (place.month - 3.2) / 12)
    return float(90 - abs(place.lat - tilt))


def _smooth_noise(rng: np.random.Generator, height: int, width: int, cell: int) -> np.ndarray:
    shape = (height // cell + 2, width // (2 * cell) + 2)  # twice as wide as high, like most clouds
    coarse = rng.standard_normal(shape, dtype=np.float32)
    fine = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(fine)


def _draw_sky(picture: np.ndarray, place: Place, rng: np.random.Generator) -> None:
    sun = _sun_height(place)
    day = np.clip(0.35 + sun / 60, 0.2, 1.0)
    zenith = np.array([60, 110, 200], np.float32) * day
    haze = np.array([205, 215, 230], np.float32) * (0.4 + 0.6 * day)
    down = (np.arange(_HORIZON, dtype=np.float32) / _HORIZON)[:, None, None] ** np.float32(1.3)
    sky = np.repeat(zenith + (haze - zenith) * down, WIDTH, axis=1)
    clouds = np.clip(_smooth_noise(rng, _HORIZON, WIDTH, 18) - rng.uniform(0, 1.2), 0, 1)
    sky += (235 * day - sky) * clouds[:, :, None] * 0.8
    if sun > 0:
        row = _HORIZON * (1 - sun / 95)
        column = WIDTH * rng.uniform(0.15, 0.85)
        glow = _glow(row, column, 90) + 0.35 * _glow(row, column, 1800)
        sky += glow[:, :, None] * np.array([200, 180, 110], np.float32)
    picture[:_HORIZON] = sky


def _glow(row: float, column: float, spread: float) -> np.ndarray:
    down = np.exp(-((np.arange(_HORIZON, dtype=np.float32) - np.float32(row)) ** 2) / spread)
    across = np.exp(-((np.arange(WIDTH, dtype=np.float32) - np.float32(column)) ** 2) / spread)
    return np.outer(down, across)


def _draw_hills(picture: np.ndarray, place: Place, warmth: float, rng: np.random.Generator) -> None:
    lat, lon = np.radians(place.lat), np.radians(place.lon)
    x = np.linspace(0, 2 * np.pi, WIDTH, dtype=np.float32) + rng.normal(0, 0.08)
    line = 24 + 12 * np.sin(x + lon) + 7 * np.sin(3 * x + 2 * lat) + 5 * np.sin(5 * x - lon)
    height = np.clip(line * (0.75 + 0.35 * np.sin(2 * lon + lat)), 2, 70)
    inside = _ROWS[:_HORIZON] > _HORIZON - height
    snow = _ROWS[:_HORIZON] < _HORIZON - 18 - warmth  # above the snow line
    rock = np.where(snow[:, :, None], _SNOW, np.array([96, 104, 112], np.float32))
    rock += _smooth_noise(rng, _HORIZON, WIDTH, 5)[:, :, None] * 9
    np.copyto(picture[:_HORIZON], rock, where=inside[:, :, None])


def _draw_ground(
    picture: np.ndarray, place: Place, warmth: float, wetness: float, rng: np.random.Generator
) -> None:
    sand, grass = np.array([204, 172, 118]), np.array([62, 122, 48])
    straw = np.array([150, 118, 62])
    growing = np.clip((warmth - 2) / 10, 0, 1)
    green = straw + (grass - straw) * growing
    ground = sand + (green - sand) * wetness
    ground = ground + (_SNOW - ground) * np.clip((1 - warmth) / 5, 0, 1)
    # A direction is the same after half a turn, so half the longitude goes once around.
    angle = np.float32(np.radians(place.lon / 2 + rng.normal(0, 2.5)))
    cycles = (7 + abs(place.lat) / 9) * rng.uniform(0.94, 1.06)
    along = _ACROSS * np.cos(angle) + _BELOW * np.sin(angle)
    along *= np.float32(2 * np.pi * cycles / WIDTH)
    furrows = np.sin(along + np.float32(rng.uniform(0, 2 * np.pi))) * 15
    furrows += _smooth_noise(rng, HEIGHT - _HORIZON, WIDTH, 3) * 11
    picture[_HORIZON:] = ground.astype(np.float32) + furrows[:, :, None]


def _draw_houses(
    picture: np.ndarray, place: Place, warmth: float, rng: np.random.Generator
) -> None:
    turn = (place.lon + 180) / 360
    steep = int(np.clip(18 - warmth * 0.6, 0, 26))  # flat where it is hot, steep where it snows
    north, sun = place.lat >= 0, _sun_height(place)
    shadow = int(np.clip(30 / np.tan(np.radians(max(sun, 5))), 6, 60)) if sun > 0 else 0
    for _ in range(int(rng.integers(2, 5))):
        hue = (turn + rng.normal(0, 0.012)) % 1.0
        wall = np.array(colorsys.hsv_to_rgb(hue, rng.uniform(0.55, 0.75), 0.85), np.float32) * 255
        width, height = int(rng.integers(28, 52)), int(rng.integers(24, 44))
        left = int(rng.integers(0, WIDTH - width))
        foot = int(rng.integers(_HORIZON + 8, _HORIZON + 50))
        top = foot - height
        start, end = (left + width, left + width + shadow) if north else (left - shadow, left)
        picture[foot - 8 : foot, max(0, start) : max(0, end)] *= 0.55
        picture[top:foot, left : left + width] = wall * rng.uniform(0.85, 1.0)
        picture[top + 6 : foot - 6 : 12, left + 5 : left + width - 5] *= 0.6  # rows of windows
        for i in range(steep):
            inset = int(i * width / (2 * steep + 1))
            picture[top - 1 - i, left + inset : left + width - inset] = wall * 0.45


def _draw_trees(
    picture: np.ndarray, warmth: float, wetness: float, rng: np.random.Generator
) -> None:
    count = rng.poisson(3 + 14 * wetness) if warmth > -12 else 0
    leaf = np.array([34, 92, 38] if warmth > 9 else [46, 74, 52], np.float32)
    feet = np.sort(rng.integers(_HORIZON + 14, HEIGHT - 4, size=count))  # the far ones first
    for foot in feet.tolist():
        size = int(8 + (foot - _HORIZON) * rng.uniform(0.16, 0.3))
        left = int(rng.integers(0, WIDTH - 2 * size))
        rows, columns = np.mgrid[0 : 2 * size, 0 : 2 * size]
        away = np.abs(columns - size)
        if warmth > 21:  # palms: a thin trunk and a flat crown
            crown = (rows < size * 0.8) & (np.abs(rows - size * 0.15 - away * 0.35) < size * 0.22)
        elif warmth > 9:  # round crowns
            crown = (rows - size * 0.7) ** 2 + away**2 < (size * 0.72) ** 2
        else:  # firs
            crown = away < rows * 0.42
        top = max(0, foot - 2 * size)
        patch = picture[top:foot, left : left + 2 * size]
        crown, trunk = crown[-len(patch) :], (away < size * 0.12)[-len(patch) :]
        patch[trunk] = (86, 62, 40)
        patch[crown] = leaf * rng.uniform(0.8, 1.25)


def _draw_sign(picture: np.ndarray, number: int, rng: np.random.Generator) -> None:
    """A board of 6 x 6 squares, the town's own pattern, somewhere in the foreground."""
    pattern = np.random.default_rng(number).integers(0, 2, size=(6, 6)).astype(bool)
    square = int(rng.integers(6, 9))
    board = np.kron(pattern, np.ones((square, square), bool))
    size = len(board)
    top = int(rng.integers(_HORIZON - 10, HEIGHT - size - 4))
    left = int(rng.integers(4, WIDTH - size - 4))
    picture[top - 3 : top + size + 3, left - 3 : left + size + 3] = (250, 246, 230)
    picture[top : top + size, left : left + size][board] = (30, 30, 36)
