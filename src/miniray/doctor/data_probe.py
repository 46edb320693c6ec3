"""What ``miniray doctor data`` runs in each rank: the script, up to the moment it would train.

The script runs unchanged until it starts to iterate its first DataLoader, of torch or of
``miniray.data``. There this loader and all torch loaders created so far are described, the
description is written to the run directory, and the process ends. Nothing is trained or written by
the script's loop. Only sample 0 of each torch dataset is loaded, to find out whether ranks have the
same data or a part each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import linecache
import os
import pickle
import random
import re
import runpy
import sys
import weakref
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miniray import import_hooks
from miniray.doctor import (
    dataset_check,
    dataset_shares,
    loader_facts,
    recorder,
    runfile,
    sites,
)
from miniray.doctor.handles import find_handles
from miniray.doctor.model import SamplePass, Site, site_from

_loaders: list[Any] = []


def probe_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "ranks" / f"{rank}.data.json"


def main() -> None:
    arguments = sys.argv[1:]
    sys.argv = arguments
    _install()
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    runpy.run_path(arguments[0], run_name="__main__")


def _install() -> None:
    from torch.utils.data import DataLoader

    make, iterate = DataLoader.__init__, DataLoader.__iter__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._miniray_made_at = sites.here()
        _loaders.append(weakref.ref(self))

    def first(self: Any) -> Any:
        site = sites.here()
        if recorder.current() is None or _only_looks(site):
            # A loader worker is forked, and none of the ranks.
            return iterate(self)
        _leave(self, site)
        raise SystemExit(0)

    DataLoader.__init__ = init
    DataLoader.__iter__ = first
    import_hooks.when_imported(
        "miniray.data.observers", lambda module: module.observers.append(_RowsProbe(module))
    )


class _RowsProbe:
    """Ends the process at the first pass over a loader of ``miniray.data``."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def on_pass_start(self, loader: Any, epoch: int) -> None:
        site = sites.here()
        current = recorder.current()
        if current is None or _only_looks(site):
            return
        described = self._module.describe(loader)
        rows = len(loader.dataset)
        ids = self._module.list_row_ids(loader, range(min(rows, dataset_shares.MOST_IDS)))
        found = _describe_rows(described, dataset_shares.Taken(ids, rows), site)
        _write([found, *describe_loaders(_list_loaders())])
        raise SystemExit(0)

    def on_batch(self, loader: Any, row_ids: Sequence[int], num_rows: int) -> None:
        """Batches of loops that only look at the first one aren't recorded."""

    def on_pass_end(self, loader: Any) -> None:
        """See ``on_batch``."""


def _describe_rows(
    described: Mapping[str, Any], taken: dataset_shares.Taken, site: str
) -> dict[str, Any]:
    setup = dataset_shares.Setup(
        length=described["rows"],
        world_size=described["world_size"] or 0,
        batch_size=described["batch_size"],
        drop_last=described["drop_last"],
        sampler=loader_facts.MINIRAY_DATA,
        distributed=described["world_size"] is not None,
        shuffle=described["is_shuffled"],
    )
    return {
        **_to_dict(setup, taken, site),
        "iterated": True,
        "epoch_set": True,  # Epochs advance without a call.
        "handles": [],
        "whole": (described["rows"], described["fingerprint"] or ""),
    }


def _only_looks(site: str) -> bool:
    """Whether the line takes one batch, to see what they are like: the loop is still to come."""
    line = linecache.getline(*site_from(site)[:2])
    return re.search(r"\bnext\(\s*iter\(", line) is not None


def _list_loaders() -> list[Any]:
    return [loader for reference in _loaders if (loader := reference()) is not None]


def _leave(iterated: Any, site: str) -> None:
    """Write down what every loader would give, the iterated one first."""
    others = [loader for loader in _list_loaders() if loader is not iterated]
    _write(describe_all([iterated, *others], site))


def _write(found: list[dict[str, Any]]) -> None:
    current = recorder.current()
    assert current is not None
    runfile.replace_text(probe_file(current.run_dir, current.rank), json.dumps(found))


def describe_all(loaders: Sequence[Any], site: str) -> list[dict[str, Any]]:
    """What each would give; ``site`` is where the first of them is iterated."""
    return describe_loaders(loaders[1:], (loaders[0], _describe(loaders[0], site)))


def describe_loaders(
    loaders: Sequence[Any], *described: tuple[Any, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Describe torch loaders that aren't iterated, after those that are described already."""
    known = list(described)
    for loader in loaders:
        with contextlib.suppress(TypeError):  # of one that is not trained with: it tells nothing
            known.append((loader, _describe(loader, "")))
    # Last of all: to load a sample may open files, and sets the seeds that samplers draw from.
    for loader, found in known:
        found["whole"] = _whole_of(loader)
    return [found for _, found in known]


def _describe(loader: Any, site: str) -> dict[str, Any]:
    sampler = dataset_shares.sampler_of(loader)
    taken = dataset_shares.Taken([], 0)
    watched = loader_facts.Watched(loader, {})
    if sampler is not None:
        taken = dataset_shares.taken_from(sampler)
        if watched.renames and (ids := loader_facts.ids_of(watched, taken.ids)) is not None:
            taken = dataclasses.replace(taken, ids=ids)
    made = getattr(loader, "_miniray_made_at", "")
    return {
        **_to_dict(dataset_shares.setup_of(loader, sampler, 0), taken, site or made),
        "iterated": bool(site),
        "epoch_set": bool(getattr(sampler, "_miniray_set_epoch", 0)),
        "handles": [str(handle) for handle in find_handles(loader.dataset) if not handle.forks],
    }


def _to_dict(setup: dataset_shares.Setup, taken: dataset_shares.Taken, site: str) -> dict[str, Any]:
    given = dataset_shares.pass_of(taken)
    return {
        **dataclasses.asdict(setup),
        "site": list(site_from(site)),
        "count": given.count,
        "batches": taken.batches,
        "ids": list(given.ids),
    }


def _whole_of(loader: Any) -> tuple[int | None, str]:
    """By what ranks that have one dataset in common are told: its length, and that of sample 0.

    "" for a sample that cannot be compared: there is none, or it is another one each time. Where
    the dataset itself says which samples it has, nothing is left to be compared.
    """
    whole = loader_facts.unwrapped(loader.dataset)[1]
    if hasattr(whole, "miniray_sample_ids"):
        return None, "named"
    length = loader_facts.length_of(whole)
    if not loader_facts.has_ids(loader):
        return length, ""
    try:
        first, again = _checksum_of_first(whole), _checksum_of_first(whole)
    except Exception:  # the user's code: this look may fail where training would not
        return length, ""
    return length, first if first == again else ""


def _checksum_of_first(dataset: Any) -> str:
    """Of sample 0, augmented by the same chance on all ranks."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)

    class Contents(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return NotImplemented
            flat = value.detach().reshape(-1).contiguous()  # how torch does it has addresses in it
            return bytes, (flat.view(torch.uint8).numpy().tobytes(),)

    pickled = io.BytesIO()
    Contents(pickled).dump(dataset[0])
    return f"{zlib.crc32(pickled.getbuffer()):08x}"


def read(run_dir: Path, world_size: int) -> list[dataset_check.DataReport]:
    """A report for each loader, from what the ranks left. Empty where no rank came to a loader."""
    left: dict[int, list[dict[str, Any]]] = {}
    for rank in range(world_size):
        path = probe_file(run_dir, rank)
        if path.exists():
            left[rank] = json.loads(path.read_text(encoding="utf-8"))
    reports = []
    for index in range(max((len(found) for found in left.values()), default=0)):
        ranks = {rank: found[index] for rank, found in left.items() if len(found) > index}
        first = next(iter(ranks.values()))
        site = Site(*first["site"])
        where = f"{'iterated' if first['iterated'] else 'made'} at {site}"
        lengths = {said["whole"][0] for said in ranks.values()}
        firsts = {said["whole"][1] for said in ranks.values()}
        said = {
            **first,
            "world_size": world_size,
            "where": where,
            "compared": "" not in firsts,
            "own": len(lengths) > 1 or len(firsts - {""}) > 1,
        }
        names = [field.name for field in dataclasses.fields(dataset_shares.Setup)]
        setup = dataset_shares.Setup(**{name: said[name] for name in names})
        shares = []
        for rank, said in ranks.items() if setup.sampler else ():
            given = SamplePass(0, 0, said["count"], tuple(said["ids"]))
            size, drop_last, batches = said["batch_size"], said["drop_last"], said["batches"]
            shares.append(dataset_shares.share(rank, given, size, drop_last, batches))
        handles = sorted({handle for said in ranks.values() for handle in said["handles"]})
        reports.append(dataset_check.report(setup, shares, handles))
    return reports


if __name__ == "__main__":
    main()
