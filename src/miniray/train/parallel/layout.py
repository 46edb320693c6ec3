"""Which rank does what: copies of the model × stages × shards of a layer, in this order.

Rank ``r`` of a layout of d copies, p stages and t shards is shard ``r % t`` of the stages that
place ``r // t % p`` holds, of copy ``r // (t · p)``. So shards of one layer are neighbours, who
talk most, and copies are farthest apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from miniray.checks import whole

DIMENSIONS = ("data", "pipeline", "tensor")


class Place(NamedTuple):
    """Where a rank stands in the layout."""

    data: int
    pipeline: int
    tensor: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many copies of the model, places in the pipeline, and shards of each layer there are."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def sizes(self) -> dict[str, int]:
        return {"data": self.data, "pipeline": self.pipeline, "tensor": self.tensor}

    def place(self, rank: int) -> Place:
        return Place(
            rank // (self.pipeline * self.tensor),
            rank // self.tensor % self.pipeline,
            rank % self.tensor,
        )

    def rank(self, data: int, pipeline: int, tensor: int) -> int:
        return (data * self.pipeline + pipeline) * self.tensor + tensor

    def copy_ranks(self, data: int) -> list[int]:
        """The ranks that hold one copy of the model together."""
        size = self.pipeline * self.tensor
        return list(range(data * size, (data + 1) * size))


def read_layout(parallel: Mapping[str, Any] | None, num_workers: int, default: str) -> Layout:
    """The layout that ``parallel`` means; without it all workers go into ``default``.

    ``ValueError`` where the product is not the number of workers, saying what would fit.
    """
    if parallel is None:
        return Layout(**{default: num_workers})
    if not isinstance(parallel, Mapping):
        raise ValueError(f'parallel= must be a dict like {{"data": 2}}, not {parallel!r}')
    unknown = [name for name in parallel if name not in DIMENSIONS]
    if unknown:
        known = ", ".join(map(repr, DIMENSIONS))
        raise ValueError(f"parallel= knows {known}, not {', '.join(map(repr, unknown))}")
    sizes = {name: whole(f"parallel[{name!r}]", n, 1) for name, n in parallel.items()}
    layout = Layout(**sizes)
    if layout.world_size != num_workers:
        told = " × ".join(f"{name} {size}" for name, size in parallel.items())
        raise ValueError(
            f"parallel={dict(parallel)} takes {layout.world_size} workers ({told}), and "
            f"num_workers is {num_workers}; pass num_workers={layout.world_size}"
        )
    return layout
