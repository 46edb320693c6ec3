"""Anonymous memory of a rank on files written with the defaults of their writers."""

import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

MEASURE = """
    import sys
    import threading

    def read_anonymous_mb():
        with open("/proc/self/status") as file:
            (line,) = (line for line in file if line.startswith("RssAnon"))
        return int(line.split()[1]) / 1000

    from miniray.data import ArrowDataset, DataLoader, ParquetDataset

    peak, done = 0, threading.Event()

    def watch():
        global peak
        while not done.wait(0.005):
            peak = max(peak, read_anonymous_mb())

    threading.Thread(target=watch).start()
    kind = ParquetDataset if sys.argv[1].endswith(".parquet") else ArrowDataset
    shuffle = {"False": False}.get(sys.argv[2], sys.argv[2])
    rows = 0
    try:
        dataset = kind(
            sys.argv[1], shuffle=shuffle, seed=1, memory_budget=sys.argv[3], window_bytes="16MB"
        )
        for batch in DataLoader(dataset, 32):
            rows += len(batch["id"])
    finally:
        done.set()
    print(rows, int(peak))
"""


def measure(path, shuffle, budget):
    """Return the number of rows and the peak of anonymous memory in MB."""
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(path), shuffle, budget]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    rows, megabytes = map(int, done.stdout.split())
    return rows, megabytes


@pytest.fixture(scope="module")
def images():
    """6000 rows of 30 KB, 180 MB."""
    random = np.random.default_rng(0)
    return pa.table({"id": range(6000), "image": [random.bytes(30_000) for _ in range(6000)]})


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["False", "window", "global"])
@pytest.mark.parametrize("form", ["pandas", "hugging face", "small pages", "small files", "stream"])
def test_anonymous_memory_stays_within_budget_and_60_mb(tmp_path, images, form, shuffle):
    """The first pass of a global order includes building the row cache."""
    path = tmp_path / ("x.arrow" if form == "stream" else "x.parquet")
    if form == "pandas":  # one row group
        pq.write_table(images, path)
    elif form == "small files":
        path.mkdir()
        for start in range(0, 6000, 5):
            pq.write_table(images.slice(start, 5), path / f"{start:04}.parquet")
    elif form == "hugging face":
        pq.write_table(images, path, row_group_size=1000)
    elif form == "small pages":
        pq.write_table(images, path, row_group_size=200, write_batch_size=32)
    else:
        with pa.ipc.new_stream(path, images.schema) as writer:
            writer.write_table(images, 200)
    rows, megabytes = measure(path, shuffle, "192MB")
    assert rows == 6000
    assert megabytes <= 192 + 60
    if shuffle == "global":
        assert measure(path, shuffle, "192MB")[1] <= 64


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["False", "window", "global"])
def test_repeated_text_stays_small(tmp_path, shuffle):
    """200 MB of two distinct values."""
    path = tmp_path / "x.parquet"
    table = pa.table({"s": ["a" * 1000, "b" * 1000] * 100_000, "id": range(200_000)})
    pq.write_table(table, path)
    rows, megabytes = measure(path, shuffle, "64MB")
    assert rows == 200_000
    assert megabytes <= 64 + 60
