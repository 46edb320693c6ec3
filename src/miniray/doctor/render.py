"""A diagnosis as text of 80 columns, for a tired person at 3 a.m."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from miniray.counting import format_epoch
from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import Finding, Severity, named, numbers, plural, size
from miniray.doctor.model import RankRecord, Site
from miniray.doctor.sites import is_users, short
from miniray.doctor.stacks import main_stack

if TYPE_CHECKING:
    from rich.table import Table

    from miniray.doctor.diagnose import Diagnosis

_STYLES = {
    Severity.FAILED: "bold red",
    Severity.STUCK: "bold red",
    Severity.WRONG: "bold yellow",
    Severity.SLOW: "yellow",
    Severity.NOTE: "dim",
}
_PHASES = {
    "DDP.backward": "backward",
    "DDP.forward": "forward",
    "DDP.__init__": "DDP init",
    "init_process_group": "init",
}
_COLUMNS = ("rank", "state", "phase", "since", "samples", "loss", "memory")
#: What a narrow terminal does without, in this order.
_GIVE_WAY = ("samples", "since", "loss", "phase")
_LEAST_PHASE = 8
_BOOTSTRAP = "miniray/doctor/bootstrap.py"
_MOST_FRAMES = 12
_MOST_STACKS = 3
_MOST_RANKS = 16


def text(diagnosis: Diagnosis, width: int = 80, color: bool = False) -> str:
    """Verdict, ranks, findings, stacks: in the order one wants to read them."""
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=color, no_color=not color, highlight=False
    )
    worst = diagnosis.findings[0].severity if diagnosis.findings else None
    style = _STYLES[worst] if worst is not None else "bold green"
    console.print(Text(wrapped(diagnosis.verdict, width), style=style))
    if diagnosis.readable:
        console.print()
        console.print(Text(facts_line(diagnosis.case, width), style="dim"))
        console.print(rank_table(diagnosis.case, width))
        for line in gpu_lines(diagnosis.case):
            console.print(Text(wrapped(line, width), style="dim"))
    for number, finding in enumerate(diagnosis.findings):
        console.print()
        if number:  # the first one's title is the verdict
            console.print(Text(wrapped(_heading(finding), width), style=_STYLES[finding.severity]))
        console.print(Text("\n".join(finding_lines(finding, width))), end="\n")
    shown = list(stack_lines(diagnosis))
    if shown:
        console.print()
        console.print(Text("\n".join(line[:width] for line in shown)))
    for note in diagnosis.notes:
        console.print()
        console.print(Text(wrapped(f"NOTE: {note.title}", width)))
        console.print(Text("\n".join(finding_lines(note, width)), style="dim"))
    for file, why in diagnosis.run.damaged.items():
        if diagnosis.readable:
            console.print(Text(wrapped(f"could not be read: {file}: {why}", width)))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def wrapped(line: str, width: int, indent: str = "") -> str:
    return textwrap.fill(
        line,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )


def _heading(finding: Finding) -> str:
    return f"{finding.severity.word}: {finding.title}"


def finding_lines(finding: Finding, width: int) -> Iterator[str]:
    """Evidence, cause and fix."""
    for line in finding.evidence:
        yield wrapped(line, width, "  · ").replace("\n  ·   ", "\n      ")
    if finding.cause:
        yield wrapped(f"cause: {finding.cause}", width, "  ")
    if finding.fix:
        yield wrapped(f"fix:   {finding.fix}", width, "  ")


# -- the ranks ------------------------------------------------------------------------------------


def facts_line(case: Case, width: int = 80) -> str:
    """Return the line of P6: available, initialized, backend, world size, launcher."""
    records = [facts.record for facts in case]
    if not records:
        return "no ranks"
    said = {distributed(record) for record in records}
    launchers = sorted({record.launcher for record in records if record.launcher})
    if len(launchers) > 1:  # the process that starts the others was started by nobody
        launchers = [launcher for launcher in launchers if launcher != "none"]
    hosts = {record.host for record in records}
    where = plural(len(hosts), "host")
    text_ = (
        said.pop()
        if len(said) == 1
        else "; ".join(f"rank {r.rank}: {distributed(r)}" for r in records[:4])
    )
    launched = f", launched by {', '.join(launchers)}" if launchers else ""
    return textwrap.fill(f"torch.distributed: {text_}{launched}, {where}", width)


def distributed(record: RankRecord) -> str:
    if record.initialised:
        return f"available, initialized, {record.backend}, world size {record.group_size}"
    if record.distributed_available is False:
        return "not available in this torch"
    if record.distributed_available is None:
        return "not loaded"
    if record.group_size > 0:
        return f"available, was initialized ({record.backend}, world size {record.group_size})"
    if record.phase.name == "init":
        return "available, not initialized yet (in init_process_group)"
    alone = " (single process)" if record.world_size == 1 else ""
    return f"available, not initialized{alone}"


def step_line(record: RankRecord, epochs: int | None = None) -> str:
    """P5's line: ``[Rank 2/4] Step 100, Batch size: 8``; ``Epoch 3 of 5`` where no steps are known.

    ``epochs`` is the number of epochs at the end of the run, if it is known.
    """
    if record.in_epochs:
        return f"{record.label} {format_epoch(record.epoch, epochs).capitalize()}"
    # A loop without a loader says nothing of its batches, which is not that they are empty.
    size_ = record.batch_size if record.batch_size or record.batches or record.samples else "?"
    return f"{record.label} Step {record.global_step}, Batch size: {size_}"


def rank_table(case: Case, width: int = 80) -> Table:
    """One line a rank; of many, the ones in trouble first."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    chosen = _chosen(case)
    rows = [(_row(facts, case.run.epochs), _row_style(facts)) for facts in chosen]
    for rank in case.never_started[:4]:
        label = f"[Rank {rank}/{case.run.world_size}]"
        rows.append(((label, "missing", "never started", "", "", "", ""), ""))
    left = len(case.ranks) - len(chosen)
    if left:
        rows.append(((f"… and {plural(left, 'rank')} more", "", "", "", "", "", ""), ""))
    widths = _widths([cells for cells, _ in rows], width)
    for index, (name, least) in enumerate(zip(_COLUMNS, widths, strict=True)):
        justify: Any = "right" if index > 2 else "left"
        if least:
            table.add_column(name, justify=justify, no_wrap=True, width=least)
    for cells, style in rows:
        shown = [Text(cell) for cell, least in zip(cells, widths, strict=True) if least]
        table.add_row(*shown, style=style)
    return table


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Of each column; 0 for one that is empty.

    Where a line is too long the samples are left out, then the phase gets shorter, then others go.
    """
    widths = []
    for index, name in enumerate(_COLUMNS):
        longest = max((len(row[index]) for row in rows), default=0)
        widths.append(max(longest, len(name)) if longest or not rows else 0)

    def excess() -> int:
        return sum(widths) + sum(map(bool, widths)) - 1 - width

    phase = _COLUMNS.index("phase")
    for name in _GIVE_WAY:
        if excess() > 0:
            widths[_COLUMNS.index(name)] = 0
        widths[phase] = min(widths[phase], max(_LEAST_PHASE, widths[phase] - max(0, excess())))
    return widths


def _chosen(case: Case) -> Sequence[Facts]:
    every = list(case)
    if len(every) <= _MOST_RANKS:
        return every
    order = sorted(every, key=lambda f: (f.state in ("running", "waiting", "finished"), -f.idle))
    return sorted(order[:_MOST_RANKS], key=lambda f: f.rank)


def _row(facts: Facts, epochs: int | None) -> tuple[str, ...]:
    record = facts.record
    phase, since = record.phase.name or "start", record.phase.since
    if facts.wait is not None:
        phase, since = _PHASES.get(facts.wait.name, facts.wait.name), facts.wait.since
    elif record.section is not None:
        phase, since = record.section.name, record.section.since
    age = _age(max(0.0, facts.until - since))
    loss = "" if record.loss is None else _number(record.loss)
    samples = _count(record.samples)
    if record.in_epochs:
        phase, age = ("", "") if phase == "start" else (phase, age)
        samples = samples if record.samples else ""
    return step_line(record, epochs), facts.state, phase[:20], age, samples, loss, size(record.rss)


def _count(value: int) -> str:
    if value < 1_000_000:
        return str(value)
    return f"{value / 1e6:.1f}M" if value < 1e9 else f"{value / 1e9:.1f}G"


def _row_style(facts: Facts) -> str:
    if facts.state in ("failed", "died", "gone", "stopped", "silent"):
        return "red"
    return ""


def _age(value: float) -> str:
    if value < 100:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.0f} h"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)


# -- stacks ---------------------------------------------------------------------------------------


def stack_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Stacks of the ranks that matter, identical ones once. Healthy runs show none."""
    if not diagnosis.findings or not diagnosis.findings[0].severity.ends_run:
        return
    guilty = diagnosis.findings[0].ranks
    groups: dict[tuple[Site, ...], list[int]] = {}
    for rank, threads in sorted(diagnosis.stacks.items()):
        frames = main_stack(threads)
        if frames:
            groups.setdefault(frames, []).append(rank)
    order = sorted(groups.items(), key=lambda item: (not set(item[1]) & set(guilty), item[1]))
    for index, (frames, ranks) in enumerate(order[:_MOST_STACKS]):
        if index:
            yield ""
        yield f"stack of {named(ranks)} (innermost first):"
        for line in frame_lines(frames):
            yield f"  {line}"


def frame_lines(frames: Sequence[Site]) -> Iterator[str]:
    """``train.py:80 main``, a line a frame that matters; "…" for those left out."""
    for frame in _shortened(frames):
        yield f"{short(frame)}:{frame.line} {frame.function}" if frame.file else "…"


def _shortened(frames: Sequence[Site]) -> Iterator[Site]:
    """The user's own lines, and of others' the two innermost; ours are of no interest."""
    skipped = False
    shown = 0
    for frame in frames:
        if shown >= _MOST_FRAMES or "runpy" in frame.file or frame.file.endswith(_BOOTSTRAP):
            break  # below this is what started the script
        if is_users(frame.file) or (shown < 2 and "/miniray/doctor/" not in frame.file):
            shown += 1
            skipped = False
            yield frame
        elif not skipped and shown:
            skipped = True
            yield Site("", 0, "")


# -- GPUs ----------------------------------------------------------------------------------------


def gpu_lines(case: Case) -> Iterator[str]:
    """P9: utilisation and memory of each GPU, and which ranks are on it."""
    by_gpu: dict[tuple[str, int], list[Facts]] = {}
    for facts in case:
        if facts.record.gpu is not None:
            by_gpu.setdefault((facts.record.host, facts.record.gpu.index), []).append(facts)
    for (_, index), ranks in sorted(by_gpu.items()):
        gpu = ranks[0].record.gpu
        assert gpu is not None
        yield (
            f"GPU {index} ({gpu.name}): {gpu.utilisation} % used, {size(gpu.memory_used)} of "
            f"{size(gpu.memory_total)}, {gpu.power:.0f} W, rank{'s' * (len(ranks) > 1)} "
            f"{numbers(f.rank for f in ranks)}"
        )
