"""Compare miniray.data with other loaders on this machine, in one run.

    python benchmarks/data.py [--quick] [--only miniray_data,hf_map] [--peer-python PATH]
                              [--scratch DIR] [--minutes M] [--json PATH] [--markdown]

20,000 rows with a JPEG of 30 KB, batches of 64, shuffled, page cache warm, on 4 ranks and on 2. The
rows are written as pandas writes them (8 files of one row group), as Hugging Face datasets does
(row groups of 100 MB), as 3,000 small files, as one file of one row group, and without compression
and dictionaries (``recipes/geoguessr/make_data.py``). miniray reads each layout in window order and
in global order. Loaders that convert the rows to another format read one layout.

Each rank is a new process. miniray is copied and compiled first, as pip does. All loaders run under
the same measuring code (``data_peers/common.py``):

- first batch: from the start of the process to the first batch, of the slowest rank.
- rows/s: all ranks together, from the start of the epoch to its end.
- CPU: seconds per 1,000 rows after the first batch, of all ranks. Ray's other processes aren't
  included.
- memory: anonymous memory of the largest rank at its peak, in MB.
- resume: ranks stop after half of their batches, and new processes resume from their states, on the
  same number of ranks and on the other one. The rows of both halves together are counted.
- decoded: images per second decoded with Pillow to 224 x 224 RGB. Bare decode: the same images
  from memory, with the same number of processes.

Conversions are made first and timed separately. So is the first start in global order, which
builds miniray's row cache. Each case is measured once, then again in turn, up to ``--repetitions``
times or until ``--minutes`` are over. Figures are medians; the JSON file has every sample. Loaders
that ``--peer-python`` doesn't have are reported as missing. The peers: datasets torchdata
mosaicml-streaming litdata grain array-record ray[data] verl.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import common
from common import Line, median

HERE = Path(__file__).resolve().parent
RANKS, BATCH, FILES, SEED = 4, 64, 8, 7
BUDGET_MB = 256  # miniray's default
SMALL_FILES = 3000
GROUP_BYTES = 100_000_000  # of Hugging Face datasets

LAYOUTS = ("pandas", "huggingface", "small", "giant", "plain")
#: The layout on which loaders are compared.
REFERENCE = "huggingface"


@dataclass(frozen=True)
class Peer:
    title: str
    needs: tuple[str, ...]
    is_controller: bool = False  # one process feeds all ranks, or starts them
    prepares: bool = False
    resumes: tuple[str, ...] = ("same",)  # "same" and "other" number of ranks
    raw: bool = True
    orders: tuple[str, ...] = ("",)
    layouts: tuple[str, ...] = (REFERENCE,)
    ranks: tuple[int, ...] = (RANKS, 2)


FOUND = ("pandas", "huggingface", "small")  # layouts as they are found

PEERS: dict[str, Peer] = {
    "miniray_data": Peer(
        "miniray",
        ("pyarrow", "PIL"),
        resumes=("same", "other"),
        orders=("window", "global"),
        layouts=LAYOUTS,
    ),
    "bare_decode": Peer("bare decode", ("pyarrow", "PIL"), resumes=(), raw=False, ranks=(RANKS,)),
    "bare_loop": Peer("bare pyarrow loop", ("pyarrow",), resumes=(), layouts=LAYOUTS),
    "hf_map": Peer(
        "Hugging Face, map", ("datasets", "torch", "torchdata"), prepares=True, layouts=FOUND
    ),
    "mosaic": Peer("Mosaic MDS", ("streaming",), prepares=True, resumes=("same", "other")),
    "grain_records": Peer("grain + ArrayRecord", ("grain", "array_record"), prepares=True),
    "lit": Peer("LitData", ("litdata",), prepares=True),
    "ray_data": Peer("Ray Data", ("ray", "pyarrow"), is_controller=True, resumes=(), layouts=FOUND),
    "verl_ranks": Peer("verl RLHFDataset, each rank", ("verl", "torchdata"), prepares=True),
    "verl_controller": Peer(
        "verl, one controller",
        ("verl", "torchdata"),
        is_controller=True,
        prepares=True,
        ranks=(RANKS,),
    ),
    "hf_stream": Peer("Hugging Face, streaming", ("datasets",), ranks=(RANKS,)),
    "table": Peer("pyarrow table + sampler", ("torch", "pyarrow"), resumes=(), ranks=(RANKS,)),
}

OWN = ("miniray_data", "bare_decode", "bare_loop")  # run with this interpreter

Samples = dict[str, Any]


class Case(NamedTuple):
    """One loader on one layout."""

    loader: str
    layout: str
    order: str
    ranks: int

    @property
    def key(self) -> str:
        return "/".join([self.loader, self.layout, self.order, str(self.ranks)])


def list_cases(names: Sequence[str]) -> list[Case]:
    """Return the cases of loaders: the reference first, then the other layouts."""
    cases = [
        Case(name, layout, order, ranks)
        for name in names
        for layout in PEERS[name].layouts
        for order in PEERS[name].orders
        for ranks in PEERS[name].ranks
        # Peers that read Parquet files, on 2 ranks only in the reference layout.
        if name in OWN or ranks == RANKS or layout == REFERENCE
    ]
    return sorted(cases, key=lambda case: (case.layout != REFERENCE, case.ranks != RANKS))


def reference(name: str) -> Case:
    return Case(name, REFERENCE, PEERS[name].orders[0], RANKS)


class LoaderError(RuntimeError):
    """A process of the loader ended without its answer; the text has the end of its output."""


@dataclass
class Bench:
    files: dict[str, list[str]]  # by layout
    rows: int
    scratch: Path
    peer_python: str
    timeout: float = 90.0

    def python(self, name: str) -> str:
        return sys.executable if name in OWN else self.peer_python

    def missing(self, name: str) -> str | None:
        """Return the modules that ``name`` needs and its interpreter doesn't have."""
        code = (
            "import importlib.util, sys;"
            "print(*[m for m in sys.argv[1:] if importlib.util.find_spec(m) is None])"
        )
        command = [self.python(name), "-c", code, *PEERS[name].needs]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return found.stdout.strip() or None

    def run(
        self,
        case: Case,
        action: str = "measure",
        *,
        decoded: bool = False,
        stop_after: int | None = None,
        resumed_ranks: int = 0,
    ) -> list[dict[str, Any]]:
        """Return the answers of the ranks. No process is left.

        With ``resumed_ranks``, resume from the states of that number of ranks.
        """
        name, peer = case.loader, PEERS[case.loader]
        count = 1 if action == "prepare" or peer.is_controller else case.ranks
        feeds_all = name == "verl_controller"
        log = self.scratch / f"{name}.log"
        port = _free_port()
        processes: list[subprocess.Popen[bytes]] = []
        channels: list[socket.socket] = []
        patience = 0.0
        with log.open("wb") as output:
            try:
                for rank in range(count):
                    ours, theirs = socket.socketpair()
                    channels.append(ours)
                    settings = {
                        "action": action,
                        "channel": theirs.fileno(),
                        "loader": name,
                        "files": self.files[case.layout],
                        "order": case.order,
                        "rows": self.rows,
                        "folder": str(self.scratch / case.layout),
                        "rank": rank,
                        "world_size": 1 if feeds_all else case.ranks,
                        "batch_size": BATCH * case.ranks if feeds_all else BATCH,
                        "seed": SEED,
                        "decoded": decoded,
                        "started": time.monotonic(),
                        "port": port,
                        "stop_after": stop_after,
                        "resumed_ranks": resumed_ranks,
                    }
                    # Thousands of paths are too long for the command line.
                    file = self.scratch / f"settings-{rank}.json"
                    file.write_text(json.dumps(settings))
                    process = subprocess.Popen(
                        [self.python(name), str(HERE / "data_peers/rank.py"), str(file)],
                        env=self._environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
                    theirs.close()
                    processes.append(process)
                answers = [
                    answer
                    for part in _collect(channels, action == "measure", self.timeout)
                    for answer in part
                ]
                patience = 20.0  # Ray cleans up after its answer
                return answers
            except (OSError, ValueError) as error:
                text = log.read_text(errors="replace")[-1500:]
                raise LoaderError(f"{peer.title}: {error}\n{text}") from error
            finally:
                for channel in channels:
                    channel.close()
                for process in processes:
                    _end(process, patience)

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MINIRAY_", "RAY_"))}
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join([str(self.scratch / "site"), str(HERE)]),
            "MINIRAY_CACHE": str(self.scratch / "miniray-cache"),
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(self.scratch / "hf-home"),
            "HF_DATASETS_CACHE": str(self.scratch / "hf-cache"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TMPDIR": str(self.scratch),
            "GRPC_ENABLE_FORK_SUPPORT": "0",
        }


def install(folder: Path) -> None:
    """Put miniray into ``folder``, with bytecode, like an installed package."""
    sources = shutil.ignore_patterns("__pycache__")
    shutil.copytree(common.ROOT / "src/miniray", folder / "miniray", ignore=sources)
    compileall.compile_dir(folder, quiet=1)


def _collect(channels: list[socket.socket], meets: bool, timeout: float) -> Iterator[Any]:
    """Let all ranks begin together, then read what each has measured."""
    for channel in channels:
        channel.settimeout(timeout)
    if meets:
        for rank, channel in enumerate(channels):
            if channel.recv(1) != b"r":
                raise ValueError(f"process {rank} ended before its first batch")
        for channel in channels:
            channel.sendall(b"g")
    for rank, channel in enumerate(channels):
        with channel.makefile("rb") as answer:
            text = answer.read()
        if not text:
            raise ValueError(f"process {rank} ended without an answer")
        yield json.loads(text)


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- measuring -------------------------------------------------------------------------------------


def coverage(ids: Sequence[int], rows: int) -> str:
    """Return "exactly once", or how many rows are missing or were delivered twice."""
    counts = Counter(ids)
    missing = rows - len(counts)
    again = sum(counts.values()) - len(counts)
    parts = [f"{missing:,} missing"] * bool(missing) + [f"{again:,} twice"] * bool(again)
    return ", ".join(parts) or "exactly once"


def _first_batch(answers: list[dict[str, Any]]) -> float:
    return max(float(a["first_batch"]) for a in answers if a["first_batch"] is not None)


def _ids(answers: list[dict[str, Any]]) -> list[int]:
    return [number for answer in answers for number in answer["ids"]]


def _rate(answers: list[dict[str, Any]]) -> float:
    taken = max(a["end"] for a in answers) - min(a["begin"] for a in answers)
    return len(_ids(answers)) / float(taken)


def _memory(answers: list[dict[str, Any]]) -> float:
    return float(max(answer["anonymous_mb"] for answer in answers))


def measure_epoch(bench: Bench, case: Case) -> Samples:
    answers = bench.run(case)
    rows = sum(max(0, len(a["ids"]) - BATCH) for a in answers)
    return {
        "first_batch": _first_batch(answers),
        "raw": _rate(answers),
        "cpu_s_per_1000": 1000 * sum(a["cpu"] for a in answers) / max(1, rows),
        "anonymous_mb": _memory(answers),
        "epoch": coverage(_ids(answers), bench.rows),
    }


def measure_build(bench: Bench, case: Case) -> Samples:
    """The first start in global order: one rank builds the row cache, the others wait."""
    answers = bench.run(case)
    return {"build_first_batch": _first_batch(answers), "build_anonymous_mb": _memory(answers)}


def measure_decoded(bench: Bench, case: Case) -> Samples:
    answers = bench.run(case, decoded=True)
    return {"decoded": _rate(answers), "decoded_epoch": coverage(_ids(answers), bench.rows)}


def measure_resume(bench: Bench, case: Case) -> Samples:
    """Stop all ranks after half of their batches, then resume in new processes."""
    ranks = 1 if case.loader == "verl_controller" else case.ranks
    size = BATCH * case.ranks // ranks
    half = max(1, bench.rows // ranks // size // 2)
    before = _ids(bench.run(case, stop_after=half))
    found: Samples = {}
    for kind in PEERS[case.loader].resumes:
        other = {RANKS: 2, 2: RANKS}[case.ranks]
        resumed = case if kind == "same" else case._replace(ranks=other)
        after = bench.run(resumed, resumed_ranks=case.ranks)
        union = coverage([*before, *_ids(after)], bench.rows)
        if kind == "same":
            found |= {"resume": _first_batch(after), "resume_union": union}
        else:
            found |= {"resume_other": _first_batch(after), "resume_other_union": union}
    return found


@dataclass
class Session:
    """Samples of all cases, and the reasons for those without any."""

    bench: Bench
    until: float
    say: Callable[[str], None]
    samples: dict[str, Samples] = field(default_factory=dict)
    prepared: set[tuple[str, ...]] = field(default_factory=set)  # (loader, layout)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)  # of a measurement

    def measure(
        self, case: Case, what: str, work: Callable[[Bench, Case], Samples], tries: int = 2
    ) -> None:
        """Measure a case unless the time is over, and once more if that fails."""
        begin = time.monotonic()
        kind = what.split()[0]
        expected = self.seconds.get((case.key, kind), 0.0)
        if case.key in self.failed or begin + expected > self.until:
            return
        samples = self.samples.setdefault(case.key, {})
        try:
            found = work(self.bench, case)
        except LoaderError as error:
            self.say(f"{what} {case.key}: failed\n{error}")
            samples.setdefault("failures", []).append(str(error))
            if tries > 1:
                self.measure(case, what, work, tries - 1)
            elif kind in ("epoch", "prepare"):
                self.failed[case.key] = str(error)
            return
        seconds = self.seconds[case.key, kind] = time.monotonic() - begin
        for key, value in found.items():
            samples.setdefault(key, []).append(value)
        shown = ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()
        )
        self.say(f"{what} {case.key}: {shown} [{seconds:.1f} s]")

    def run(self, names: Sequence[str], repetitions: int) -> None:
        """Measure all cases in the order of their importance, as far as the time suffices."""
        cases = list_cases(names)
        raw = [case for case in cases if PEERS[case.loader].raw]
        own = [case for case in raw if case.loader in OWN]
        others = [case for case in raw if case.loader not in OWN]
        compared = [case for case in others if case == reference(case.loader)]
        rest = [case for case in others if case not in compared]
        for case in own:
            if case[:1] + case[2:] == ("miniray_data", "global", RANKS):
                self.measure(case, "build", measure_build)
            self.measure(case, "epoch", measure_epoch)
        for case in own:
            if PEERS[case.loader].resumes:
                self.measure(case, "resume", measure_resume)
        for _ in range(min(2, repetitions)):
            for name in names:
                if name in ("miniray_data", "bare_decode"):
                    self.measure(reference(name), "decoded", measure_decoded)
        self._run_peers(compared)
        for case in compared:
            if PEERS[case.loader].resumes:
                self.measure(case, "resume", measure_resume)
        for number in range(2, repetitions + 1):
            for case in own:
                self.measure(case, f"epoch {number}", measure_epoch)
            if number == 2:
                self._run_peers(rest)
        for number in range(2, repetitions + 1):
            for case in compared:
                self.measure(case, f"epoch {number}", measure_epoch)

    def _run_peers(self, cases: Sequence[Case]) -> None:
        for case in cases:
            if PEERS[case.loader].prepares and case[:2] not in self.prepared:
                self.prepared.add(case[:2])
                self.measure(case, "prepare", _prepare)
            self.measure(case, "epoch", measure_epoch)


def _prepare(bench: Bench, case: Case) -> Samples:
    begin = time.monotonic()
    bench.run(case, "prepare")
    return {"prepare": time.monotonic() - begin}


# -- tables ----------------------------------------------------------------------------------------

COLUMNS = [
    "first batch",
    "rows/s",
    "CPU s per 1,000 rows",
    "memory MB",
    "epoch",
    "resume: first batch",
    "resume, same ranks",
    "resume, other ranks",
    "prepared in",
]
TARGET_COLUMNS = ["miniray", "bare", "figure"]


def overview(samples: dict[str, Samples], names: dict[str, str]) -> list[Line]:
    """Return a line per case; ``names`` has the reasons for loaders without samples."""

    def number(of: Samples, key: str, unit: str = "") -> str:
        return common.human(median(of[key]), unit).strip() if of.get(key) else "–"

    def words(of: Samples, key: str) -> str:
        return "; ".join(sorted(set(of[key]))) if of.get(key) else "–"

    lines = []
    for key, of in samples.items():
        loader, layout, order, ranks = key.split("/")
        cells = [
            number(of, "first_batch", "s"),
            number(of, "raw"),
            number(of, "cpu_s_per_1000"),
            number(of, "anonymous_mb"),
            words(of, "epoch"),
            number(of, "resume", "s"),
            words(of, "resume_union"),
            words(of, "resume_other_union"),
            number(of, "prepare", "s"),
        ]
        if of.get("epoch"):
            title = ", ".join(filter(None, [PEERS[loader].title, layout, order, f"{ranks} ranks"]))
            lines.append(Line(title, cells))
    for name, reason in names.items():
        lines.append(Line(PEERS[name].title, [reason, *["–"] * (len(COLUMNS) - 1)]))
    return lines


def targets(samples: dict[str, Samples]) -> list[Line]:
    """Return miniray's figures on 4 ranks with those that are wanted. The last cell is judged."""
    lines: list[Line] = []

    def judge(title: str, key: str, of: Samples, wanted: float, unit: str) -> None:
        if of.get(key):
            value = median(of[key])
            cells = ["", "", common.human(value, unit).strip()]
            goal = f"at most {common.human(wanted, unit).strip()}"
            tolerance = 1.15 if unit.startswith(("s", "CPU")) else 1.0
            lines.append(Line(title, cells, goal, value <= wanted * tolerance))

    for layout in LAYOUTS:
        window = samples.get(f"miniray_data/{layout}/window/{RANKS}", {})
        total = samples.get(f"miniray_data/{layout}/global/{RANKS}", {})
        memory = 250 if layout == "giant" else 200
        judge(f"memory, window, {layout}", "anonymous_mb", window, memory, "MB")
        judge(f"memory, global, {layout}", "anonymous_mb", total, 64, "MB")
        judge(f"memory, builder, {layout}", "build_anonymous_mb", total, BUDGET_MB + 60, "MB")
        cpu = 0.050 if layout == "small" else 0.035
        unit = "CPU s per 1,000 rows"
        judge(f"CPU, window, {layout}", "cpu_s_per_1000", window, cpu, unit)
        judge(f"CPU, global, {layout}", "cpu_s_per_1000", total, 0.018, unit)
        judge(f"first batch, window, {layout}", "first_batch", window, 0.60, "s")
        judge(f"first batch, global, {layout}", "first_batch", total, 0.30, "s")
    own = samples.get(reference("miniray_data").key, {})
    bare = samples.get(reference("bare_decode").key, {}).get("decoded")
    if own.get("decoded") and bare:
        ratio = median(own["decoded"]) / median(bare)
        cells = [f"{median(own['decoded']):,.0f}", f"{median(bare):,.0f}", f"{ratio:.2f}×"]
        lines.append(Line("images/s decoded, to bare decode", cells, "0.95×", ratio >= 0.95))
    wrong = [
        f"{key}: {text}"
        for key, of in samples.items()
        for kind in ("epoch", "decoded_epoch", "resume_union", "resume_other_union")
        for text in of.get(kind, [])
        if key.startswith("miniray_data/") and text != "exactly once"
    ]
    said = "; ".join(wrong) or "exactly once"
    lines.append(Line("rows of all epochs and halves", ["", "", said], "exactly once", not wrong))
    return lines


# -- data ------------------------------------------------------------------------------------------


def rewrite(files: list[str], folder: Path, layout: str) -> list[str]:
    """Write the rows of plain files as ``layout``, with the defaults of pyarrow's writer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if layout == "plain":
        return files
    found = sorted(map(str, folder.glob("*.parquet")))
    if found:
        return found
    unfinished = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tables = [pq.read_table(path) for path in files]
    table = pa.concat_tables(tables)
    if layout == "pandas":
        for path, part in zip(files, tables, strict=True):
            pq.write_table(part, unfinished / Path(path).name)
    elif layout == "small":
        count = min(SMALL_FILES, table.num_rows)
        for number in range(count):
            start, stop = (table.num_rows * i // count for i in (number, number + 1))
            part = table.slice(start, stop - start)
            pq.write_table(part, unfinished / f"train-{number:05}.parquet")
    else:
        rows = GROUP_BYTES * table.num_rows // table.nbytes
        size = table.num_rows if layout == "giant" else rows
        pq.write_table(table, unfinished / "train.parquet", row_group_size=size)
    unfinished.replace(folder)
    return sorted(map(str, folder.glob("*.parquet")))


@contextlib.contextmanager
def rows_in(
    scratch: Path | None, rows: int, say: Callable[[str], None]
) -> Iterator[tuple[Path, list[str]]]:
    """Yield a directory to work in and files with the rows, which ``scratch`` keeps for later."""
    with contextlib.ExitStack() as stack:
        folder = scratch or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-data-"))
        )
        data = folder / f"rows-{rows}"
        files = sorted(map(str, data.glob("train-*.parquet")))
        if len(files) != FILES:
            say(f"making {rows:,} rows in {data}")
            script = common.ROOT / "recipes/geoguessr/make_data.py"
            sizes = ["--rows", str(rows), "--rows-per-file", str(rows // FILES), "--test-rows", "0"]
            subprocess.run(
                [sys.executable, str(script), str(data), *sizes, "--overwrite", "--quiet"],
                check=True,
            )
            files = sorted(map(str, data.glob("train-*.parquet")))
        folder.mkdir(parents=True, exist_ok=True)
        own = tempfile.TemporaryDirectory(prefix="work-", dir=folder, ignore_cleanup_errors=True)
        yield Path(stack.enter_context(own)), files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 rows, one repetition")
    parser.add_argument("--only", metavar="PEERS", help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N")
    parser.add_argument("--minutes", type=float, default=float("inf"), metavar="M")
    parser.add_argument("--rows", type=int, default=None, metavar="N")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="keep the rows there")
    parser.add_argument("--json", type=Path, default=common.RESULTS / "data.json", metavar="PATH")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(PEERS)
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        parser.error(f"unknown loaders {', '.join(unknown)}; there are {', '.join(PEERS)}")

    def say(text: str) -> None:
        print(text, flush=True)

    rows = arguments.rows or (2_000 if arguments.quick else 20_000)
    repetitions = 1 if arguments.quick else arguments.repetitions
    started, until = common.stamp(), time.monotonic() + 60 * arguments.minutes
    with rows_in(arguments.scratch, rows, say) as (work, plain):
        files = {}
        for layout in LAYOUTS:
            files[layout] = rewrite(plain, work.parent / f"rows-{rows}-{layout}", layout)
            (work / layout).mkdir()
            for path in files[layout]:
                Path(path).read_bytes()  # so that the page cache is warm for all loaders
        bench = Bench(files, rows, work, arguments.peer_python)
        install(work / "site")
        absent = {}
        for name in list(names):
            lacks = bench.missing(name)
            if lacks:
                absent[name] = f"not installed ({lacks})"
                names.remove(name)
                say(f"without {PEERS[name].title}: {absent[name]}")
        session = Session(bench, until, say)
        session.run(names, repetitions)
    cases = {key: of for key, of in session.samples.items() if of}
    for name in names:
        if reference(name).key in session.failed:
            absent[name] = "failed"

    lines, judged = overview(cases, absent), targets(cases)
    title = f"{rows:,} rows of 30 KB JPEG, batches of {BATCH}"
    for heading, columns, table in (
        (title, COLUMNS, lines),
        ("miniray.data", TARGET_COLUMNS, judged),
    ):
        if arguments.markdown:
            print(common.markdown_table(columns, table))
        else:
            common.print_table(heading, columns, table)
    record = {
        "started": started,
        "finished": common.stamp(),
        "machine": common.machine(),
        "versions": {
            **peer_versions(arguments.peer_python),
            **common.versions("miniray", "pyarrow"),
        },
        "rows": rows,
        "repetitions": repetitions,
        "samples": {name: cases.get(reference(name).key, {}) for name in names},
        "cases": cases,
        "absent": absent,
        "failed": session.failed,
        "columns": COLUMNS,
        "target_columns": TARGET_COLUMNS,
        "table": [vars(line) for line in lines],
        "targets": [vars(line) for line in judged],
    }
    common.write_json(arguments.json, record)
    print(f"all samples: {arguments.json}")


def peer_versions(python: str) -> dict[str, str]:
    packages = (
        *("datasets", "torchdata", "mosaicml-streaming", "litdata", "grain", "array_record"),
        *("ray", "verl", "torch", "pillow"),
    )
    code = (
        f"import sys, json; sys.path.insert(0, {str(HERE)!r});"
        f"import common; print(json.dumps(common.versions(*{packages!r})))"
    )
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(found.stdout)
    return versions


if __name__ == "__main__":
    main()
