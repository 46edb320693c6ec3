"""Render the sections that show the time, the samples and the memory that each rank used."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from miniray.doctor import layout, samples
from miniray.doctor.facts import gather
from miniray.doctor.findings import plural, seconds, size
from miniray.doctor.model import Loader, RankRecord, SamplePass
from miniray.doctor.waiting import wait_of
from miniray.report.charts import render_chart
from miniray.report.html import Markup, bar, collapsible, render_terminal_line, section, table, tag
from miniray.report.run import Run
from miniray.report.series import Curve, get_field_points
from miniray.report.storage import measure_storage
from miniray.runs import files

_MOST_BARS = 64
_SLIM = 16  #: maximum number of bars that are drawn with full height
_MOST_PAIRS = 12  #: maximum number of ranks in the table of overlaps, which has a cell per pair
_PHASES = {
    "start": "before the first step",
    "data": "waiting for data",
    "compute": "forward, optimizer, user code",
    "backward": "backward",
    "collective": "collectives and barriers",
    "other": "outside steps: evaluation, sync, checkpoints, waiting for the driver",
}
#: Category for the time of a step that never ended, by the phase in which the rank was.
_BUCKET_OF_PHASE = {
    "data": "data",
    "compute": "compute",
    "forward": "compute",
    "backward": "backward",
    "optimizer": "compute",
}


def render_time(run: Run) -> Markup:
    """Return the section that shows the time per phase of each rank and the time per epoch."""
    bars = _render_phases(run)
    shown, title = bars, "Time by phase and rank" if bars else "Time"
    epochs = get_field_points(run.epochs, "seconds")
    if len(epochs) > 1:
        curve = Curve("seconds", epochs)
        drawn = render_chart(
            f"Seconds per {run.unit}", [curve], run.axis, y_label="seconds", from_zero=True
        )
        split = tag("div", tag("div", *bars), drawn, cls="split")
        shown = [split if bars else tag("div", drawn, cls="charts")]
    return section("time", title, *shown)


def _render_phases(run: Run) -> list[Markup]:
    """Return a bar for each rank, or an empty list if no rank has recorded any steps."""
    spent = [(rank, get_phase_seconds(rank, run.ended)) for rank in run.record]
    spent = [(rank, parts) for rank, parts in spent if sum(parts.values()) > 0]
    if not any(rank.total.count for rank, _ in spent):
        return []
    total = max(sum(parts.values()) for _, parts in spent)
    inside = [
        _render_legend([name for name in _PHASES if any(p[name] > 0 for _, p in spent)]),
        _group_bars([_render_time_bar(rank, parts, total) for rank, parts in spent[:_MOST_BARS]]),
    ]
    if len(spent) > _MOST_BARS:
        left = plural(len(spent) - _MOST_BARS, "rank")
        inside.append(tag("p", f"… and {left} more in the table", cls="soft"))
    rows = [
        [f"rank {rank.rank}", *parts.values(), _get_step_ms(rank), float(rank.cpu_seconds)]
        for rank, parts in spent
    ]
    head = ["", *_PHASES, "ms per step", "CPU s"]
    return [*inside, collapsible("Show seconds", table(head, rows))]


def get_phase_seconds(rank: RankRecord, over: float | None) -> dict[str, float]:
    """Return the number of seconds that a rank spent in each phase.

    Step times are recorded from the end of the first step onward, and the remaining time is counted
    as time outside of steps. ``over`` is the time at which the run ended. Later times aren't
    counted, even if the workers keep running.
    """
    total = rank.total
    end = rank.exit.at if rank.exit is not None and rank.exit.at else rank.heartbeat
    end = end if over is None else min(end, over)
    life = max(0.0, max(end, total.ended) - rank.attached)
    begun = _get_first_step_start(rank)
    start = life if begun is None else min(life, max(0.0, begun - rank.attached))
    inside = total.data + total.compute + total.backward + total.collective
    parts = {
        "start": start,
        "data": total.data,
        "compute": total.compute,
        "backward": total.backward,
        "collective": total.collective,
        "other": max(0.0, life - start - inside),
    }
    kind, since = _find_open_phase(rank, over is not None)
    last = min(parts["other"], max(0.0, end - since))
    parts["other"] -= last
    parts[kind] += last
    return parts


def _find_open_phase(rank: RankRecord, over: bool) -> tuple[str, float]:
    """Return the last phase of a rank and the time at which this phase started.

    The recorded step times don't include this phase. If a rank has finished its work, it only
    waits to be terminated, and the phase is ``"other"``.
    """
    wait = wait_of(rank)
    if wait is not None:
        return "collective", wait.since
    done = over if rank.exit is None else not rank.exit.failed
    return "other" if done else _BUCKET_OF_PHASE.get(rank.phase.name, "other"), rank.phase.since


def _get_first_step_start(rank: RankRecord) -> float | None:
    """Return the start time of the first step in the current attempt of a rank."""
    if not rank.steps:
        return None
    return rank.steps[0].ended - rank.steps[0].seconds


def _get_step_ms(rank: RankRecord) -> float | None:
    return 1000 * rank.total.seconds / rank.total.count if rank.total.count else None


def _render_time_bar(rank: RankRecord, parts: dict[str, float], total: float) -> Markup:
    pieces = [
        (f"p-{name}", value, f"{_PHASES[name]}: {seconds(value)}", f"{value:.3g} s")
        for name, value in parts.items()
    ]
    life = seconds(sum(parts.values()))
    return tag("div", tag("span", f"rank {rank.rank}"), bar(pieces, total), tag("span", life),
               cls="rank")  # fmt: skip


def _group_bars(rows: Sequence[Markup]) -> Markup:
    return tag("div", *rows, cls="slim-bars" if len(rows) > _SLIM else None)


def _render_legend(names: Sequence[str]) -> Markup:
    keys = [tag("span", Markup(f'<i class="p-{name}"></i>'), _PHASES[name]) for name in names]
    return tag("div", *keys, cls="keys")


# -- rows -----------------------------------------------------------------------------------------


def render_data(run: Run) -> Markup:
    """Return the section that shows how many samples each rank used.

    The section also shows how much of the dataset the last pass covered, and how many samples the
    ranks have in common.
    """
    seen = [rank for rank in run.record if rank.samples]
    if not seen:
        return Markup()
    inside: list[Markup] = []
    counts = {rank.samples for rank in seen}
    if len(seen) > 4 and len(counts) == 1:
        inside.append(tag("p", f"{seen[0].samples:,} samples on each of {len(seen)} ranks"))
    else:
        inside.append(
            _group_bars([_render_sample_bar(rank, max(counts)) for rank in seen[:_MOST_BARS]])
        )
    inside += _render_coverage(seen)
    loaders = [
        [f"rank {r.rank}", ld.dataset, ld.length, ld.batch_size, ld.sampler, ld.num_workers,
         ld.set_epoch_calls, ld.finished, str(ld.site) if ld.site.file else None]
        for r in seen for ld in _distinct_loaders(r)
    ]  # fmt: skip
    if loaders:
        head = [
            "",
            "dataset",
            "rows",
            "batch size",
            "sampler",
            "workers",
            "set_epoch",
            "passes",
            "location",
        ]
        inside.append(collapsible("Show loaders", table(head, loaders, texts=(0, 1, 4, 8))))
    return section(
        "data", "Data", *inside, note="Number of samples that each rank used in all epochs"
    )


def _render_sample_bar(rank: RankRecord, most: int) -> Markup:
    text = f"{rank.samples:,}"
    drawn = bar([("p-rows", rank.samples, f"{text} samples", text)], most)
    batches = plural(rank.batches, "batch") if rank.batches else ""
    return tag("div", tag("span", f"rank {rank.rank}"), drawn, tag("span", batches), cls="rank")


def _distinct_loaders(rank: RankRecord) -> Iterator[Loader]:
    """Yield the distinct loaders of a rank.

    A trainer may create a new loader in each epoch, and such duplicates are omitted.
    """
    known = set()
    for loader in rank.loaders:
        kind = (loader.dataset, loader.length, loader.batch_size, loader.sampler, loader.site)
        if kind not in known:
            known.add(kind)
            yield loader


def _render_coverage(seen: Sequence[RankRecord]) -> Iterator[Markup]:
    """Yield the coverage and the overlaps of the last pass over the data.

    Only passes that all ranks have completed are considered.
    """
    passes = [{(p.loader, p.epoch): p for p in rank.passes if p.count} for rank in seen]
    common = set(passes[0]).intersection(*passes[1:]) if passes else set()
    trained = {
        key for key in common
        if key[0] < 0 or any(ld.index == key[0] and ld.trained for ld in seen[0].loaders)
    }  # fmt: skip
    if not trained:
        return
    key = max(trained, key=lambda key: (key[1], -key[0]))
    chosen = [found[key] for found in passes]
    length = next((ld.length for ld in seen[0].loaders if ld.index == key[0]), None)
    yield tag("h3", "Last pass over the data")
    yield tag("p", format_coverage(chosen, length))
    if 1 < len(chosen) <= _MOST_PAIRS:
        yield _render_overlaps(seen, chosen)


def format_coverage(passes: Sequence[SamplePass], length: int | None) -> str:
    count = sum(given.count for given in passes)
    if not all(given.is_exact for given in passes):
        return f"{count:,} samples, at least {samples.count_distinct(*passes):,} distinct"
    distinct = samples.count_distinct(*passes)
    text = f"{count:,} samples, {distinct:,} distinct"
    if length:
        text += f" ({distinct / length:.1%} of {length:,} rows)"
    duplicates = count - distinct
    return f"{text}, {plural(duplicates, 'duplicate') if duplicates else 'no duplicates'}"


def _render_overlaps(seen: Sequence[RankRecord], passes: Sequence[SamplePass]) -> Markup:
    shares = {
        (i, j): samples.overlap(passes[i], passes[j])
        for i, j in itertools.combinations(range(len(passes)), 2)
    }
    rows = []
    for i, rank in enumerate(seen):
        cells = [
            tag("td", "·", cls="soft")
            if i == j
            else _render_overlap_cell(shares[min(i, j), max(i, j)])
            for j in range(len(seen))
        ]
        rows.append(tag("tr", tag("td", f"rank {rank.rank}", cls="s"), *cells))
    exact = all(given.is_exact for given in passes)
    head = "overlap" if exact else f"overlap of the first {layout.PASS_IDS:,}"
    top = tag("tr", tag("th", head, cls="s"), *(tag("th", str(rank.rank)) for rank in seen))
    return tag("div", tag("table", top, *rows, cls="heat", style="min-width:0"), cls="wide")


def _render_overlap_cell(share: float) -> Markup:
    strength = 0 if share < 0.005 else 12 + round(60 * share)
    style = f"background:color-mix(in srgb,var(--bad) {strength}%,transparent)"
    return tag("td", f"{share:.0%}", style=style)


# -- memory, the table ----------------------------------------------------------------------------


def render_memory(run: Run) -> Markup:
    """Return the section that shows the memory of each rank, and the storage that the run uses."""
    found = []
    for rank in run.record:
        points = rank.notes.get("memory")
        if isinstance(points, list) and len(points) > 1:
            line = [(float(p[0]), p[2] / 1e6) for p in points if len(p) == 3]
            found.append(Curve(f"rank {rank.rank}", line))
    rows = [
        [f"rank {r.rank}", size(r.peak_rss), size(r.rss), _format_gpu_memory(r)]
        for r in run.record
        if r.peak_rss
    ]
    drawn = render_chart("Resident memory", found, "seconds", y_label="MB") if found else ""
    shown = table(["", "peak", "last", "GPU (torch)"], rows) if rows else ""
    return section(
        "memory",
        "Memory and disk",
        tag("div", drawn, shown, cls="charts") if rows else "",
        _render_storage(run),
    )


def _render_storage(run: Run) -> Markup:
    """Return a table of the memory and the disk space that other parts of the run use."""
    rows = [
        [use.part, use.place, size(use.nbytes), use.details or None]
        for use in measure_storage(run.record, run.events)
    ]
    return table(["", "place", "used", "details"], rows, texts=(0, 1, 3)) if rows else Markup()


def _format_gpu_memory(rank: RankRecord) -> str | None:
    if rank.gpu is None:
        return None
    return f"{size(rank.gpu.process_memory)} of {size(rank.gpu.memory_total)}"


def render_ranks(run: Run) -> Markup:
    """Return the section with a table of all ranks and the last lines of their logs.

    The logs of failed ranks are shown. If no rank failed, the log of the first rank is shown.
    """
    head = ["", "state", "epoch", "step", "samples", "loss", "last phase", "restarts",
            "peak memory",             "process"]  # fmt: skip
    rows: list[list[Any]] = []
    every = list(gather(run.record))
    over = run.state not in ("running", "unknown")
    for facts in every:
        rank = facts.record
        state = tag("b", facts.state, cls="bad") if facts.failed else facts.state
        if over and rank.alive:
            state = "idle"  # the driver keeps the rank for the next call of train()
        loss = None if rank.loss is None else float(rank.loss)
        phase = rank.section.name if rank.section is not None else rank.phase.name
        epoch = None if rank.epoch < 0 else run.number_epoch({"epoch": rank.epoch})["epoch"]
        place = [None, epoch] if run.has_steps_as_epochs else [epoch, rank.global_step or None]
        rows.append([f"rank {rank.rank}", state, *place,
                     rank.samples or None, loss, phase or None, rank.attempt or None,
                     size(rank.peak_rss), f"{rank.host}:{rank.pid}"])  # fmt: skip
    nothing = [tag("b", "no record", cls="bad"), *[None] * (len(head) - 2)]
    rows += [[f"rank {number}", *nothing] for number in run.record.missing[:16] if every]
    if not rows:
        return Markup()
    logs = []
    for facts in [facts for facts in every if facts.failed][:4] or every[:1]:
        lines = files.read_last_lines(run.path / "ranks" / f"{facts.rank}.log", 4000)
        text = "\n".join(
            render_terminal_line(line.decode(errors="replace")) for line in lines
        ).rstrip()
        if text:
            logs.append(collapsible(f"Last log lines of rank {facts.rank}", tag("pre", text)))
    return section("ranks", "Ranks", table(head, rows, texts=(0, 1, 6, 9)), *logs)
