"""Small files whose rows have ids."""

import itertools

import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write_parquet(path, ids, *, rows=10, payload=20, compression="snappy", **columns):
    """Rows with an ``id`` and ``payload`` bytes that depend on it."""
    ids = list(ids)
    data = pa.array([str(i).encode() * payload for i in ids], pa.binary())
    table = pa.table({"id": pa.array(ids, pa.int64()), "data": data, **columns})
    pq.write_table(table, path, row_group_size=rows, compression=compression)
    return path


@pytest.fixture
def parquet_folder(tmp_path):
    """237 rows in 4 files, in row groups of 10; one file has no rows at all."""
    folder = tmp_path / "data"
    folder.mkdir()
    bounds = [0, 100, 100, 153, 237]
    for number, (a, b) in enumerate(itertools.pairwise(bounds)):
        write_parquet(folder / f"part-{number}.parquet", range(a, b))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIRAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MINIRAY_RUN_SEED", raising=False)
