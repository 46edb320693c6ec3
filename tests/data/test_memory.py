"""What a rank really holds, as the system counts it."""

import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

MEASURE = """
    import sys
    import psutil
    process = psutil.Process()
    bare = process.memory_full_info().uss
    from miniray.data import ArrowDataset, DataLoader, ParquetDataset

    kind = ParquetDataset if sys.argv[1].endswith(".parquet") else ArrowDataset
    dataset = kind(sys.argv[1], shuffle=True, seed=1, memory_budget=sys.argv[2])
    peak, rows = 0, 0
    for number, batch in enumerate(DataLoader(dataset, 32)):
        rows += len(batch["id"])
        if number % 4 == 0:
            peak = max(peak, process.memory_full_info().uss)
    print(rows, (peak - bare) // 10**6)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "rows_in_a_group"),
    [("parquet", 200), ("parquet", 1000), ("parquet", 6000), ("arrow", 200), ("arrow", 1000)],
)
def test_a_rank_stays_within_its_budget_and_100_megabytes(tmp_path, form, rows_in_a_group):
    """6000 rows of 30 KB, 180 MB, read with a budget of 64 MB.

    Parquet pages are of a megabyte. Arrow's writer makes them of 1024 rows unless told otherwise,
    and two pages that are being decoded come on top of the budget.
    """
    random = np.random.default_rng(0)
    table = pa.table({"id": range(6000), "image": [random.bytes(30_000) for _ in range(6000)]})
    path = tmp_path / f"x.{form}"
    if form == "parquet":
        pq.write_table(table, path, row_group_size=rows_in_a_group, write_batch_size=32)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, rows_in_a_group)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(path), "64MB"],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows, megabytes = map(int, done.stdout.split())
    assert rows == 6000
    assert megabytes <= 164
