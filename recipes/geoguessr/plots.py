"""What a run ends with: a table, its speed, and a picture of reward, accuracy and guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import reward as scoring

#: State of the policy ("untrained", "warm-up", ...) to its guesses: rows of lat, lon, true lat, lon
Guesses = Mapping[str, np.ndarray]
_COLOURS = ("#c8c8c8", "#7fa6d6", "#d1495b")


def distances(guesses: np.ndarray) -> np.ndarray:
    """Kilometres from each guess to the truth; infinite where there was no answer."""
    km = scoring.great_circle_km(*guesses.T)
    return np.where(np.isnan(km), np.inf, km)


def scores(guesses: np.ndarray) -> dict[str, float]:
    """Mean reward, share of answers that can be read, and accuracy at each distance."""
    km = distances(guesses)
    return {
        "reward": float(np.mean(np.exp(-km / scoring.SCALE_KM))),
        "answered": float(np.mean(np.isfinite(km))),
        **scoring.accuracy(km),
    }


def table(guesses: Guesses) -> str:
    """A line for each state of the policy."""
    made = {name: scores(part) for name, part in guesses.items()}
    names = list(next(iter(made.values())))
    widths = [max(7, len(name)) + 1 for name in names]
    lines = [
        " " * 10 + "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    ]
    for state, values in made.items():
        shown = (
            f"{values[name]:{width}.3f}" if name == "reward" else f"{values[name]:{width}.1%}"
            for name, width in zip(names, widths, strict=True)
        )
        lines.append(f"{state:10}" + "".join(shown))
    return "\n".join(lines)


def speed(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens a second, and where a step's time goes; the first step is left out if it can be.

    ``data`` is the wait for the loader and the handing over of pictures to the model's device; the
    second happens in rollouts and updates, so it is taken off none of these.
    """
    lines = history[1:] or history

    def mean(name: str) -> float:
        return float(np.mean([line["timing"][name] for line in lines]))

    seconds = {
        "rollout": mean("rollout"),
        "reward": mean("reward"),
        "log-probs and update": mean("log_prob") + mean("update"),
    }
    waited = mean("data")
    whole = sum(seconds.values()) + waited
    seconds["data"] = waited + float(np.mean([line["picture_seconds"] for line in lines]))
    told: dict[str, Any] = {
        "tokens_per_second": float(np.mean([line["tokens_per_second"] for line in lines])),
        "step_seconds": whole,
        "shares": {name: value / whole for name, value in seconds.items()},
    }
    if "gpu_gb" in lines[-1]:
        told["gpu_gb"] = max(line["gpu_gb"] for line in lines)
    return told


def shown(told: Mapping[str, Any]) -> str:
    """``speed`` in a line."""
    shares = ", ".join(f"{name} {share:.1%}" for name, share in told["shares"].items())
    memory = f"; GPU memory {told['gpu_gb']:.1f} GB" if "gpu_gb" in told else ""
    return (
        f"{told['tokens_per_second']:,.0f} tokens/s sampled; a step takes "
        f"{told['step_seconds']:.2f} s:\n  {shares}{memory}"
    )


def draw(
    history: Sequence[Mapping[str, Any]],
    guesses: Guesses,
    path: Path,
    start: float | None = None,
) -> None:
    """Write the picture; ``start`` is the held-out reward before the first step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 10), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.5))
    _reward(figure.add_subplot(grid[0, 0]), history, start)
    _accuracy(figure.add_subplot(grid[0, 1]), guesses)
    last = list(guesses)[-1]
    _map(figure.add_subplot(grid[1, :]), guesses[last], f"guesses and truth, {last}")
    figure.savefig(path, dpi=110)


def _reward(axes: Any, history: Sequence[Mapping[str, Any]], start: float | None) -> None:
    steps = [line["epoch"] + 1 for line in history]
    axes.plot(steps, [line["reward"] for line in history], color="#b0b0b0", label="training rows")
    held_out = [(line["epoch"] + 1, line["val_reward"]) for line in history if "val_reward" in line]
    if start is not None:
        held_out.insert(0, (0, start))
    x, y = [step for step, _ in held_out], [reward for _, reward in held_out]
    axes.plot(x, y, "o-", color=_COLOURS[2], label="held-out rows")
    axes.set(xlabel="step", ylabel="mean reward", title="reward of sampled answers", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()


def _accuracy(axes: Any, guesses: Guesses) -> None:
    limits = scoring.WITHIN_KM
    width = 0.8 / len(guesses)
    for i, (state, made) in enumerate(guesses.items()):
        shares = [100 * share for share in scoring.accuracy(distances(made)).values()]
        at = np.arange(len(limits)) + (i - (len(guesses) - 1) / 2) * width
        bars = axes.bar(at, shares, width, label=state, color=_COLOURS[i % len(_COLOURS)])
        axes.bar_label(bars, [f"{share:.0f}" for share in shares], fontsize=8)
    axes.set_xticks(range(len(limits)), [f"{limit:,} km" for limit in limits])
    axes.set(ylabel="% of held-out rows", title="likeliest answers within", ylim=(0, 100))
    axes.legend(loc="upper left")


def _map(axes: Any, guesses: np.ndarray, title: str, lines: int = 200) -> None:
    """Latitude and longitude as they are, with a graticule; a line from each guess to the truth."""
    axes.set(xlim=(-180, 180), ylim=(-90, 90), aspect="equal", title=title)
    axes.set_xticks(range(-180, 181, 30), [_degrees(x, "EW") for x in range(-180, 181, 30)])
    axes.set_yticks(range(-90, 91, 30), [_degrees(y, "NS") for y in range(-90, 91, 30)])
    axes.grid(color="#d8d8d8", linewidth=0.6)
    axes.axhline(0, color="#b0b0b0", linewidth=0.9)
    known = guesses[np.isfinite(distances(guesses))]
    for lat, lon, true_lat, true_lon in known[:lines]:
        # The short way round; what crosses the date line goes on at the other edge.
        to = true_lon - 360 * round((true_lon - lon) / 360)
        for shift in {0, 360 * round((true_lon - to) / 360)}:
            ends = [lon + shift, to + shift]
            axes.plot(ends, [lat, true_lat], color="#9aa7b5", linewidth=0.5, zorder=1)
    axes.scatter(*guesses[:, [3, 2]].T, s=16, color="#2a6f97", label="truth", zorder=3)
    axes.scatter(*known[:, [1, 0]].T, s=20, color=_COLOURS[2], marker="x", label="guess", zorder=2)
    axes.legend(loc="lower left")


def _degrees(value: int, letters: str) -> str:
    letter = "" if value % 180 == 0 else letters[value < 0]
    return f"{abs(value)}°{letter}"
