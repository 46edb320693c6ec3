"""Compression of what workers push, for servers on other machines. Off unless asked for.

What travels is the *change* since the worker's last pull, in fewer bits: ``bf16`` has half the
bytes of float32, ``int8`` a quarter (one scale for each 4,096 numbers). Rounding is not lost: the
worker keeps the remainder and adds it to its next push (error feedback; Seide et al., "1-Bit
Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., https://arxiv.org/abs/1901.09847).

It applies to ``Client.push`` only. ``pull_weights`` gives full precision, because changes are
relative to it, and ``sync_from_workers`` moves what the workers' ``get_weights`` returns. On one
machine weights travel through shared memory, and compressing them costs more time than it saves.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

import miniray
from miniray.core.remote import ActorHandle
from miniray.ps.leaves import REAL, Array, Source, read
from miniray.ps.weights import Layout

#: Numbers that share a scale in int8.
CHUNK = 4096
CODECS = ("bf16", "int8")


class Compressed:
    """A change of weights in few bits. Made by ``Client``, understood by ``push_weights``."""

    def __init__(self, codec: str, entries: list[Any]) -> None:
        self.codec = codec
        #: For each leaf: encoded numbers, or the value itself where it is not a float.
        self.entries = entries

    def restored(self, base: Any) -> Any:
        """The weights: ``base``, the server's current weights, with the change."""
        if base is None:
            raise ValueError("the first push cannot be compressed: the server has no weights yet")
        layout = Layout(base)
        sources = layout.extract(base, "the server", "the server")
        if len(sources) != len(self.entries):
            raise ValueError(f"{len(self.entries)} compressed entries for {len(sources)} weights")
        values = []
        for leaf, source, entry in zip(layout.leaves, sources, self.entries, strict=True):
            if leaf.role != REAL:
                values.append(entry[0])
                continue
            flat = read(source, 0, leaf.size, leaf.compute) + decode(self.codec, entry, leaf.size)
            if isinstance(source, np.ndarray):
                values.append(layout.shown(leaf, flat.astype(source.dtype)))
            else:
                import torch

                values.append(torch.from_numpy(flat).to(leaf.dtype).reshape(leaf.shape))
        return layout.build(values)


class Client:
    """A worker's end of ``push_weights`` and ``pull_weights``, with the server's compression.

    Without compression it merely forwards. Keep one for the life of the worker: it holds the
    weights pulled last and what rounding has left over.
    """

    def __init__(self, server: ActorHandle[Any], worker_id: Hashable) -> None:
        self._server = server
        self._worker_id = worker_id
        self._codec: str | None = miniray.get(server.get_stats.remote())["compression"]
        self._base: tuple[Layout, list[Source]] | None = None
        self._rest: dict[int, Array] = {}

    def pull(self) -> Any:
        """The server's weights."""
        weights = miniray.get(self._server.pull_weights.remote())
        if self._codec is not None:
            layout = Layout(weights)
            self._base = layout, layout.extract(weights, "the server", "the server")
        return weights

    def push(self, weights: Any) -> int:
        """Hand in weights; returns the server's version. Compressed from the first pull on.

        Raises ``WeightsMismatchError`` for weights that are not like those pulled.
        """
        parcel = weights if self._base is None else self._compressed(weights, *self._base)
        version: int = miniray.get(self._server.push_weights.remote(self._worker_id, parcel))
        return version

    def _compressed(self, weights: Any, layout: Layout, base: list[Source]) -> Compressed:
        assert self._codec is not None
        sources = layout.extract(weights, f"worker {self._worker_id}", "the server")
        entries: list[Any] = []
        for i, (leaf, source) in enumerate(zip(layout.leaves, sources, strict=True)):
            if leaf.role != REAL:
                entries.append((None if leaf.type == "none" else layout.shown(leaf, source),))
                continue
            change = read(source, 0, leaf.size, leaf.compute) - read(
                base[i], 0, leaf.size, leaf.compute
            )
            if i in self._rest:
                change += self._rest[i]
            entry = encode(self._codec, change)
            self._rest[i] = change - decode(self._codec, entry, leaf.size).astype(leaf.compute)
            entries.append(entry)
        return Compressed(self._codec, entries)


def encode(codec: str, numbers: Array) -> tuple[Array, ...]:
    """Numbers in fewer bits. NaN and infinity come out as such, for the server to find."""
    if codec == "bf16":
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        # To the nearest, ties to even; NaN must not be rounded up to infinity.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return (np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16),)
    padded = np.zeros(-(-len(numbers) // CHUNK) * CHUNK, np.float32)
    padded[: len(numbers)] = numbers
    rows = padded.reshape(-1, CHUNK)
    scale = np.abs(rows).max(axis=1, keepdims=True) / 127  # NaN where a number is
    with np.errstate(all="ignore"):
        steps = np.where(scale > 0, np.rint(rows / scale), 0)
    levels = np.where(np.isfinite(steps), steps, 0).astype(np.int8)
    return levels.reshape(-1)[: len(numbers)], scale.reshape(-1).astype(np.float32)


def decode(codec: str, entry: tuple[Array, ...], size: int) -> Array:
    if codec == "bf16":
        wide: Array = entry[0].astype(np.uint32) << 16
        return wide.view(np.float32)
    levels, scale = entry
    factors = np.repeat(scale, CHUNK)[:size]
    # A chunk with NaN or infinity has such a scale, and 0·NaN is NaN.
    with np.errstate(invalid="ignore"):
        numbers: Array = np.multiply(levels, factors, dtype=np.float32)
    return numbers
