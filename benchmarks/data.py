"""Compare miniray.data with other data loaders.

    python benchmarks/data.py [--quick] [--only miniray_data,hf_map] [--peer-python PATH]
                              [--layout LAYOUT] [--scratch DIR] [--minutes M] [--json PATH]
                              [--markdown]

20,000 rows of 30 KB JPEG in Parquet files, 4 ranks with a process each, batches of 64, shuffled,
page cache warm. ``--layout`` selects how the files are written: as pandas writes them (one row
group per file), as Hugging Face datasets does (1,000 rows per row group), 3,000 small files, or
plain (no compression, no dictionary; ``recipes/geoguessr/make_data.py``). Every loader is one of
``data_peers/`` and runs under the same measuring code (``data_peers/common.py``), in fresh
processes, taking turns. miniray is copied and compiled first, as pip does when it installs.

- first batch: from the start of the process to the first batch, of the slowest rank.
- rows/s: a whole epoch with its start, all ranks together; as encoded bytes, and decoded with
  Pillow to 224 x 224 RGB. Bare decode: the same images decoded from memory by as many processes.
- USS: memory of the largest rank that it shares with nobody, at its highest. PSS: of all processes.
  Both while it decodes, looked at four times a second.
- resume: the ranks stop after half of their batches, keep their state, and go on in new processes:
  time to the first batch, and what the ranks got in both halves together.

Conversion to a loader's own format, or its cache, is made before and timed apart. Everything is
measured once; then start and raw rows again in turn, as often as ``--repetitions`` and
``--minutes`` allow. Figures are medians; the JSON file has every sample. What is not installed for
``--peer-python`` is reported as such. The peers: datasets torchdata mosaicml-streaming litdata
grain array-record ray[data] verl.
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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import psutil
from common import Line, median

HERE = Path(__file__).resolve().parent
RANKS, BATCH, FILES, SEED = 4, 64, 8, 7
BUDGET_MB = 256  # miniray's default
MB = 1e6


@dataclass(frozen=True)
class Peer:
    title: str
    needs: tuple[str, ...]
    ranks: int = RANKS  # processes; a peer with one of them feeds all ranks from it
    prepares: bool = False
    resumes: bool = True
    raw: bool = True


PEERS: dict[str, Peer] = {
    "miniray_data": Peer("miniray", ("pyarrow", "PIL")),
    "bare_decode": Peer("bare decode", ("pyarrow", "PIL"), resumes=False, raw=False),
    "verl_ranks": Peer("verl RLHFDataset, each rank", ("verl", "torchdata"), prepares=True),
    "verl_controller": Peer("verl, one controller", ("verl", "torchdata"), 1, prepares=True),
    "hf_map": Peer("Hugging Face, map", ("datasets", "torch", "torchdata"), prepares=True),
    "hf_stream": Peer("Hugging Face, streaming", ("datasets",)),
    "mosaic": Peer("Mosaic MDS", ("streaming",), prepares=True),
    "table": Peer("pyarrow table + sampler", ("torch", "pyarrow"), resumes=False),
    "ray_data": Peer("Ray Data", ("ray", "pyarrow"), 1, resumes=False),
    "lit": Peer("LitData", ("litdata",), prepares=True),
    "grain_records": Peer("grain + ArrayRecord", ("grain", "array_record"), prepares=True),
}

Samples = dict[str, Any]

LAYOUTS = ("pandas", "huggingface", "small", "plain")
SMALL_FILES = 3000


def rewrite(files: list[str], folder: Path, layout: str) -> list[str]:
    """Write the rows of plain files as ``layout``, with the defaults of pyarrow's writer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if layout == "plain":
        return files
    found = sorted(map(str, folder.glob("*.parquet")))
    if found:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    if layout == "small":
        table = pa.concat_tables([pq.read_table(path) for path in files])
        count = min(SMALL_FILES, table.num_rows)
        for number in range(count):
            start, stop = (table.num_rows * i // count for i in (number, number + 1))
            part = table.slice(start, stop - start)
            pq.write_table(part, folder / f"train-{number:05}.parquet")
    else:
        size = 1000 if layout == "huggingface" else None
        for path in files:
            pq.write_table(pq.read_table(path), folder / Path(path).name, row_group_size=size)
    return sorted(map(str, folder.glob("*.parquet")))


class LoaderError(RuntimeError):
    """A process of the loader ended without its answer; the text has the end of its output."""


@dataclass
class Bench:
    files: list[str]
    rows: int
    scratch: Path
    peer_python: str

    def python(self, name: str) -> str:
        return sys.executable if name in ("miniray_data", "bare_decode") else self.peer_python

    def missing(self, name: str) -> str | None:
        """What ``name`` needs and its interpreter has not."""
        code = (
            "import importlib.util, sys;"
            "print(*[m for m in sys.argv[1:] if importlib.util.find_spec(m) is None])"
        )
        command = [self.python(name), "-c", code, *PEERS[name].needs]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return found.stdout.strip() or None

    def run(
        self,
        name: str,
        action: str = "measure",
        *,
        decoded: bool = False,
        stop_after: int | None = None,
        resume: bool = False,
        memory: bool = False,
        timeout: float = 600,
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """(answers of the ranks, memory). Whatever happens, no process is left."""
        peer = PEERS[name]
        count = 1 if action == "prepare" else peer.ranks
        controller = name == "verl_controller"
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
                        "files": self.files,
                        "rows": self.rows,
                        "folder": str(self.scratch),
                        "rank": rank,
                        "world_size": 1 if controller else RANKS,
                        "batch_size": BATCH * RANKS if controller else BATCH,
                        "seed": SEED,
                        "decoded": decoded,
                        "started": time.monotonic(),
                        "port": port,
                        "stop_after": stop_after,
                        "resume": resume,
                    }
                    process = subprocess.Popen(
                        [self.python(name), str(HERE / "data_peers/rank.py"), json.dumps(settings)],
                        env=self._environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
                    theirs.close()
                    processes.append(process)
                sampler = MemorySampler([p.pid for p in processes]) if memory else None
                with sampler or contextlib.nullcontext():
                    answers = [
                        answer
                        for part in _collect(channels, action == "measure", timeout)
                        for answer in part
                    ]
                patience = 20.0  # Ray and others tidy up after their last word
                return answers, sampler.highest() if sampler else {}
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
    """Put miniray into ``folder``, with bytecode, as an installed package has it."""
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


class MemorySampler:
    """Looks at the processes and all below them four times a second until it is left."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._uss = self._pss = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def highest(self) -> dict[str, float]:
        return {"uss": self._uss / MB, "pss": self._pss / MB}

    def _sample(self) -> None:
        while not self._done.wait(0.25):
            pss = 0.0
            for pid in self._pids:
                tree = _tree(pid)
                pss += sum(own_pss for _, own_pss in tree.values())
                # Ray's ranks are actors below the one process that was started.
                actors = [uss for title, (uss, _) in tree.items() if "ray::Rank" in title[1]]
                self._uss = max(self._uss, *(actors or [sum(uss for uss, _ in tree.values())]))
            self._pss = max(self._pss, pss)


def _tree(pid: int) -> dict[tuple[int, str], tuple[float, float]]:
    """(USS, PSS) of a process and all below it, by (pid, title)."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                title = " ".join(process.cmdline()[:1])
                found[process.pid, title] = memory_of(process.pid)
    return found


def memory_of(pid: int) -> tuple[float, float]:
    """(USS, PSS) of one process in bytes."""
    uss = pss = 0.0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key == "Pss":
            pss = float(rest.split()[0]) * 1024
        elif key.startswith("Private_"):
            uss += float(rest.split()[0]) * 1024
    return uss, pss


def bare_process() -> float:
    """USS in MB of an interpreter that has imported what decoding images takes."""
    code = "import numpy, PIL.Image; print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        return memory_of(process.pid)[0] / MB
    finally:
        process.kill()
        process.communicate()


def coverage(ids: list[int], rows: int) -> str:
    """What the ranks got together: "exactly once", or how many rows are missing or came twice."""
    counts = Counter(ids)
    missing = rows - len(counts)
    again = sum(counts.values()) - len(counts)
    parts = [f"{missing:,} missing"] * bool(missing) + [f"{again:,} twice"] * bool(again)
    return ", ".join(parts) or "exactly once"


def _first_batch(answers: list[dict[str, Any]]) -> float:
    return max(a["first_batch"] for a in answers if a["first_batch"] is not None)


def _rate(answers: list[dict[str, Any]]) -> float:
    taken = max(a["end"] for a in answers) - min(a["begin"] for a in answers)
    return sum(len(a["ids"]) for a in answers) / taken


def measure_epoch(bench: Bench, name: str, decoded: bool) -> Samples:
    # Nothing but decoding takes long enough for memory to be looked at without disturbing it.
    answers, memory = bench.run(name, decoded=decoded, memory=decoded)
    kind = "decoded" if decoded else "raw"
    return {
        **memory,
        kind: _rate(answers),
        # What a busy machine changes least; processes a loader starts are not in it.
        f"{kind}_cpu_us_a_row": 1e6 * sum(a["cpu"] for a in answers) / bench.rows,
        **({} if decoded else {"first_batch": _first_batch(answers)}),
        "epoch": coverage([i for a in answers for i in a["ids"]], bench.rows),
    }


def measure_resume(bench: Bench, name: str) -> Samples:
    controller = name == "verl_controller"
    share = bench.rows if controller else bench.rows / RANKS
    half = int(share / (BATCH * RANKS if controller else BATCH)) // 2
    before, _ = bench.run(name, stop_after=max(1, half))
    after, _ = bench.run(name, resume=True)
    ids = [i for answer in (*before, *after) for i in answer["ids"]]
    return {
        "resume": _first_batch(after),
        "resume_union": coverage(ids, bench.rows),
    }


def measure(
    bench: Bench, names: list[str], repetitions: int, until: float, say: Callable[[str], None]
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Samples of every loader, and why some have none. Nothing is repeated after ``until``."""
    samples: dict[str, Samples] = {name: {} for name in names}
    failed: dict[str, str] = {}

    def attempt(name: str, what: str, work: Callable[[], Samples]) -> None:
        if name in failed:
            return
        try:
            found = work()
        except LoaderError as error:
            say(f"{what}  {PEERS[name].title}: FAILED, once more\n{error}")
            samples[name].setdefault("failures", []).append(str(error))
            try:
                found = work()
            except LoaderError as again:
                failed[name] = str(again)
                return
        for key, value in found.items():
            samples[name].setdefault(key, []).append(value)
        shown = ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()
        )
        say(f"{what}  {PEERS[name].title}: {shown}")

    def prepare(name: str) -> Samples:
        start = time.monotonic()
        bench.run(name, "prepare")
        return {"prepare": time.monotonic() - start}

    for name in names:
        if PEERS[name].prepares:
            attempt(name, "prepare", lambda name=name: prepare(name))  # type: ignore[misc]
    for name in names:
        if PEERS[name].raw:
            attempt(name, "raw", lambda name=name: measure_epoch(bench, name, False))  # type: ignore[misc]
        if PEERS[name].resumes:
            attempt(name, "resume", lambda name=name: measure_resume(bench, name))  # type: ignore[misc]
        attempt(name, "decoded", lambda name=name: measure_epoch(bench, name, True))  # type: ignore[misc]
    slowest = 0.0
    for repetition in range(2, repetitions + 1):
        for name in reversed(names) if repetition % 2 == 0 else names:
            began = time.monotonic()
            if PEERS[name].raw and began + slowest < until:
                attempt(
                    name, f"raw {repetition}", lambda name=name: measure_epoch(bench, name, False)
                )  # type: ignore[misc]
                slowest = max(slowest, time.monotonic() - began)
    return samples, failed


COLUMNS = [
    "first batch",
    "rows/s raw",
    "rows/s decoded",
    "USS largest rank MB",
    "sum PSS MB",
    "epoch",
    "resume: first batch",
    "resume: union",
    "prepared in",
]


def overview(samples: dict[str, Samples], absent: dict[str, str]) -> list[Line]:
    """A line a loader."""

    def number(of: Samples, key: str, unit: str = "") -> str:
        return common.human(median(of[key]), unit).strip() if of.get(key) else "–"

    def words(of: Samples, key: str) -> str:
        return "; ".join(sorted(set(of[key]))) if of.get(key) else "–"

    lines = []
    for name, of in samples.items():
        cells = [
            number(of, "first_batch", "s"),
            number(of, "raw"),
            number(of, "decoded"),
            number(of, "uss"),
            number(of, "pss"),
            words(of, "epoch"),
            number(of, "resume", "s"),
            words(of, "resume_union") if PEERS[name].resumes else "no state",
            number(of, "prepare", "s"),
        ]
        failures = f" ({len(of['failures'])} runs failed)" if of.get("failures") else ""
        lines.append(Line(PEERS[name].title + failures, cells))
    for name, reason in absent.items():
        lines.append(Line(PEERS[name].title, [reason, *["–"] * (len(COLUMNS) - 1)]))
    return lines


def targets(samples: dict[str, Samples], bare_mb: float) -> list[Line]:
    """miniray against the best of the others, and what is wanted. The last cell is judged."""
    own = samples.get("miniray_data", {})
    others = {n: of for n, of in samples.items() if n not in ("miniray_data", "bare_decode")}

    def best(key: str, more: bool) -> float | None:
        found = [median(of[key]) for of in others.values() if of.get(key)]
        return (max(found) if more else min(found)) if found else None

    lines = []
    for key, title, unit, more, goal, wanted in (
        ("first_batch", "time to first batch", "s", False, 3.0, "under a third of the best"),
        ("resume", "resume at 50 %, first batch", "s", False, 1.0, "first"),
        ("raw", "rows/s raw", "", True, 1.0, "the best"),
        ("uss", "USS of the largest rank", "MB", False, 1.0, "below all"),
    ):
        peer = best(key, more)
        if own.get(key) and peer:
            value = median(own[key])
            ratio = value / peer if more else peer / value
            cells = [common.human(value, unit).strip(), common.human(peer, unit).strip()]
            lines.append(Line(title, [*cells, f"{ratio:.2f}×"], wanted, ratio >= goal))
    bare = samples.get("bare_decode", {}).get("decoded")
    if own.get("decoded") and bare:
        ratio = median(own["decoded"]) / median(bare)
        cells = [f"{median(own['decoded']):,.0f}", f"{median(bare):,.0f}", f"{ratio:.2f}×"]
        lines.append(Line("rows/s decoded, to bare decode", cells, "0.95×", ratio >= 0.95))
    if own.get("uss"):
        over = median(own["uss"]) - bare_mb
        cells = [f"{median(own['uss']):.0f} MB", f"bare {bare_mb:.0f} MB", f"{over:.0f} MB over"]
        wanted = f"at most {BUDGET_MB + 100} over"
        lines.append(Line("USS over a bare process", cells, wanted, over <= BUDGET_MB + 100))
    for key, title in (("epoch", "an epoch"), ("resume_union", "two halves")):
        if own.get(key):
            said = "; ".join(sorted(set(own[key])))
            lines.append(
                Line(f"rows in {title}", ["", "", said], "exactly once", said == "exactly once")
            )
    return lines


@contextlib.contextmanager
def rows_in(
    scratch: Path | None, rows: int, layout: str, say: Callable[[str], None]
) -> Iterator[tuple[Path, list[str]]]:
    """A directory with the rows; made now unless ``scratch`` has them from an earlier run."""
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
                [sys.executable, str(script), str(data), *sizes, "--overwrite"], check=True
            )
            files = sorted(map(str, data.glob("train-*.parquet")))
        files = rewrite(files, folder / f"rows-{rows}-{layout}", layout)
        folder.mkdir(parents=True, exist_ok=True)
        own = tempfile.TemporaryDirectory(prefix="work-", dir=folder, ignore_cleanup_errors=True)
        work = Path(stack.enter_context(own))
        for path in files:
            Path(path).read_bytes()  # warm for the first loader as for the last
        yield work, files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 rows, one repetition")
    parser.add_argument("--only", metavar="PEERS", help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N")
    parser.add_argument("--minutes", type=float, default=float("inf"), metavar="M")
    parser.add_argument("--rows", type=int, default=None, metavar="N")
    parser.add_argument("--layout", choices=LAYOUTS, default="huggingface")
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
    with rows_in(arguments.scratch, rows, arguments.layout, say) as (work, files):
        bench = Bench(files, rows, work, arguments.peer_python)
        install(work / "site")
        absent = {}
        for name in list(names):
            lacks = bench.missing(name)
            if lacks:
                absent[name] = f"not installed ({lacks})"
                names.remove(name)
                say(f"without {PEERS[name].title}: {absent[name]}")
        bare_mb = bare_process()
        samples, failed = measure(bench, names, repetitions, until, say)
    for name, reason in failed.items():
        say(f"failed: {reason}")
        if not samples[name].get("epoch"):
            absent[name] = "failed"
            samples.pop(name)

    loaders, judged = overview(samples, absent), targets(samples, bare_mb)
    for title, columns, lines in (
        (
            f"{rows:,} rows of 30 KB JPEG ({arguments.layout} files), {RANKS} ranks,"
            f" batches of {BATCH}",
            COLUMNS,
            loaders,
        ),
        ("miniray.data", ["miniray", "best of the others", "ratio"], judged),
    ):
        if arguments.markdown:
            print(common.markdown_table(columns, lines))
        else:
            common.print_table(title, columns, lines)
    record = {
        "started": started,
        "finished": common.stamp(),
        "machine": common.machine(),
        "versions": {
            **peer_versions(arguments.peer_python),
            **common.versions("miniray", "pyarrow"),
        },
        "rows": rows,
        "layout": arguments.layout,
        "repetitions": repetitions,
        "bare_process_mb": bare_mb,
        "samples": samples,
        "absent": absent,
        "failed": failed,
        "table": [vars(line) for line in loaders],
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
