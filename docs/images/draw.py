"""Draws the diagrams of the documentation; ``python docs/images/draw.py`` writes them beside it.

Boxes bring their own light background and everything else is of middle brightness, so a diagram is
readable on a light and on a dark page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

INK, GREY = "#12303a", "#7b8594"
#: Fill and border: workers, drivers, data, what is on disk.
KINDS = {
    "worker": ("#dff3ef", "#1f9e8f"),
    "driver": ("#e8ecf7", "#6f7fb5"),
    "data": ("#fdf1dc", "#d09a3a"),
    "disk": ("#f3e9f7", "#a277b5"),
}
FONT = "font-family='system-ui, -apple-system, Segoe UI, sans-serif'"
HEADS = (
    "<defs>"
    f"<marker id='e' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' "
    f"orient='auto'><path d='M0 0 L10 5 L0 10 z' fill='{GREY}'/></marker>"
    f"<marker id='s' viewBox='0 0 10 10' refX='1' refY='5' markerWidth='7' markerHeight='7' "
    f"orient='auto'><path d='M10 0 L0 5 L10 10 z' fill='{GREY}'/></marker>"
    "</defs>"
)


def box(x: float, y: float, width: float, height: float, lines: list[str], kind: str) -> str:
    """A box with a title and further lines."""
    fill, stroke = KINDS[kind]
    parts = [
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='8' fill='{fill}' "
        f"stroke='{stroke}' stroke-width='1.5'/>"
    ]
    top = y + height / 2 - (len(lines) - 1) * 9 + 4
    for number, line in enumerate(lines):
        style = "font-size='13' font-weight='600'" if number == 0 else "font-size='11.5'"
        parts.append(
            f"<text x='{x + width / 2}' y='{top + 18 * number}' text-anchor='middle' {style} "
            f"fill='{INK}'>{escape(line)}</text>"
        )
    return "\n".join(parts)


def label(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return (
        f"<text x='{x}' y='{y}' text-anchor='{anchor}' font-size='12' fill='{GREY}'>"
        f"{escape(words)}</text>"
    )


def arrow(points: str, *, both: bool = False, dashed: bool = False) -> str:
    """A line through ``x,y x,y ...`` with a head at its end."""
    more = " marker-start='url(#s)'" if both else ""
    more += " stroke-dasharray='5 4'" if dashed else ""
    return (
        f"<polyline points='{points}' fill='none' stroke='{GREY}' stroke-width='1.6' "
        f"marker-end='url(#e)'{more}/>"
    )


def overview() -> list[str]:
    parts = [
        box(250, 14, 330, 56,
            ["your script: trainer.train(epochs=50)", "epoch loop, hooks, callbacks: numbers only"],
            "driver"),
        label(655, 100, "calls, and dicts of numbers back"),
    ]  # fmt: skip
    for number in range(4):
        left = 20 + 160 * number
        parts += [
            arrow(f"{355 + 40 * number},72 {left + 70},120", both=True),
            box(left, 122, 140, 72, [f"worker {number}", "its own process", "model, optimizer"],
                "worker"),
            arrow(f"{left + 70},262 {left + 70},198"),
        ]  # fmt: skip
    parts += [
        box(708, 122, 146, 72, ["parameter server", "eleven strategies", "in shared memory"],
            "worker"),
        arrow("642,148 706,148"),
        arrow("706,172 642,172"),
        label(674, 140, "weights"),
        label(674, 189, "mean"),
        box(20, 264, 620, 44,
            ["parquet files: every worker reads its own rows, each row exactly once"], "data"),
        box(20, 336, 620, 58,
            ["runs/NAME/", "run.json · metrics.jsonl · ranks/*.box · ranks/*.log · checkpoints/"],
            "disk"),
        arrow("20,158 8,158 8,365 17,365"),
        arrow("642,365 706,365"),
        box(708, 322, 146, 86, ["doctor · top", "report · dashboard", "resume", "read only this"],
            "disk"),
        label(430, 426, "inline (for a debugger)  ·  local (this machine, the default)  ·  "
              "ray (a cluster): one argument, the same script"),
    ]  # fmt: skip
    return parts


def engine() -> list[str]:
    parts = [
        box(20, 20, 200, 64, ["driver", "your script, control plane"], "driver"),
        box(20, 150, 200, 58, ["zygote", "one thread, imports loaded"], "data"),
        arrow("120,86 120,148", both=True),
        label(132, 122, "socket pair", "start"),
        arrow("222,44 418,44"),
        label(320, 34, "calls, caller to callee"),
        label(308, 262, "fork (dashed)"),
    ]
    for number, words in enumerate((["actor"], ["actor"], ["pool worker"])):
        top = 20 + 96 * number
        parts.append(arrow(f"222,180 418,{top + 40}", dashed=True))
        parts.append(box(420, top, 180, 62, [*words, "a process of its own"], "worker"))
        parts.append(arrow(f"602,{top + 31} 682,147", both=True))
    parts += [
        arrow("510,84 510,114", both=True),
        arrow("510,180 510,210", both=True),
        label(502, 104, "calls, directly", "end"),
        label(502, 200, "calls, directly", "end"),
        box(684, 92, 170, 110,
            ["shared memory", "segments have no name:", "nothing in /dev/shm,",
             "freed by the kernel", "with the last process"], "disk"),
    ]  # fmt: skip
    return parts


def training_run() -> list[str]:
    return [
        box(20, 20, 250, 64, ["driver: BaseTrainer.train", "epoch loop, hooks, callbacks"],
            "driver"),
        box(20, 190, 250, 64, ["workers 0 … n−1", "train_epoch on their shard"], "worker"),
        arrow("90,86 90,188"),
        label(82, 142, "calls", "end"),
        arrow("200,188 200,86"),
        label(208, 142, "dicts of numbers", "start"),
        box(430, 190, 190, 64, ["parameter server", "combines in blocks"], "worker"),
        arrow("272,212 428,212"),
        label(350, 204, "weights, read in place"),
        arrow("428,236 272,236"),
        label(350, 254, "one copy, mapped by all"),
        box(430, 14, 410, 76,
            ["run directory", "run.json · metrics.jsonl · events.jsonl",
             "checkpoints/ (whole or not there) · ranks/*.box"], "disk"),
        arrow("272,50 428,50"),
        arrow("145,256 145,286 640,286 640,93"),
        label(390, 280, "black box and log of each rank"),
        box(680, 150, 160, 64, ["doctor, top,", "report, dashboard"], "disk"),
        arrow("760,93 760,148"),
    ]  # fmt: skip


DIAGRAMS = {
    "overview": (overview, 434, "Your script, its workers, and the run directory every tool reads"),
    "engine": (engine, 290, "Processes of the local engine, and the memory they share"),
    "training-run": (training_run, 300, "A training run: who sends what to whom"),
}


def main() -> None:
    for name, (draw, height, title) in DIAGRAMS.items():
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 860 {height}' {FONT} "
            f"role='img' aria-label='{escape(title)}'>"
        )
        parts = [head, f"<title>{escape(title)}</title>", HEADS, *draw(), "</svg>"]
        Path(__file__).with_name(f"{name}.svg").write_text("\n".join(parts) + "\n", "utf-8")


if __name__ == "__main__":
    main()
