"""Interface of sources, and checks of their arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from miniray.data.locations import Blocks
from miniray.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows of a block: a record batch of an Arrow format, or Python objects.
BlockRows = Any

#: Estimated decoded size of a block.
BLOCK_BYTES = 8_000_000


class LazyRows(Sequence[Any]):
    """Rows that ``read_row`` returns when they are accessed.

    Args:
        read_row: Returns the row at a place.
        places: Places of the rows, such as their numbers.
        nbytes: Memory that the rows take.
    """

    def __init__(
        self, read_row: Callable[[Any], Any], places: Sequence[Any], nbytes: int = 0
    ) -> None:
        self._read_row, self._places, self.nbytes = read_row, places, nbytes

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return LazyRows(self._read_row, self._places[index])
        return self._read_row(self._places[index])


class Source(ABC):
    """Rows of one format. Cheap to create, picklable, opened on first use and again after a fork.

    Attributes:
        kind: Name of the format.
        files: Paths of the files, or a name for data in memory.
        random_access: Whether reading a row costs the same wherever it is. Then no blocks are held.
        is_persistent: Whether ``identify_file`` changes whenever the content may have changed.
    """

    kind: str
    files: Sequence[str]
    random_access = False
    is_persistent = False

    @abstractmethod
    def list_blocks(self) -> Blocks:
        """Return the blocks. Reads only metadata; ``DataError`` names the file."""

    @abstractmethod
    def read_block(self, block: int, columns: Sequence[str] | None = None) -> BlockRows:
        """Read a block, or some of its columns. Thread-safe.

        Raises:
            DataError: The block can't be read. Names the file, the run and its first row.
        """

    @abstractmethod
    def list_columns(self) -> list[str] | None:
        """Return the names of columns, or None if only reading can find out."""

    @abstractmethod
    def compute_fingerprint(self) -> str:
        """Return an identifier of the content that doesn't depend on its location."""

    def name_row(self, block: int, index: int) -> tuple[str, int]:
        """Return the file of a row of a block, and its number in the file."""
        blocks = self.list_blocks()
        return self.files[blocks.file[block]], int(blocks.first_row[block]) + index

    def identify_file(self, file: int) -> str:
        """Return an identifier of a file for data that is cached about it."""
        return f"{self.compute_fingerprint()}-{file}"

    def find_folder(self, file: int) -> str | None:
        """Return the folder of a local file."""
        return None

    def normalize(self, batch: Any) -> Any:
        """Convert a record batch with some rows of a block to the types that users get."""
        return batch

    def encode_block(self, block: int) -> pa.RecordBatch:
        """Read a block as a record batch for the row cache."""
        return self.read_block(block)

    def decode_rows(self, batch: pa.RecordBatch, number: int) -> BlockRows:
        """Convert a record batch of the row cache back; ``number`` is that of its first row."""
        return batch


def parse_bytes(value: Any, name: str = "memory_budget") -> int:
    """Return a number of bytes: ``"256MB"``, ``"1.5 GiB"`` or a number. KB is 1000 bytes."""
    if isinstance(value, str):
        text = value.strip().lower().removesuffix("b")
        is_binary = text.endswith("i")
        text = text.removesuffix("i").strip()
        power = "kmgt".find(text[-1:]) + 1 if text else 0
        try:
            amount = float(text[:-1] if power else text) * (1024 if is_binary else 1000) ** power
        except ValueError:
            raise ValueError(
                f"{name} must be a number of bytes, such as '256MB', not {value!r}"
            ) from None
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number of bytes, such as '256MB', not {value!r}")
    else:
        amount = float(value)
    if not 1 <= amount < 2**62:
        raise ValueError(f"{name} must be a positive number of bytes, not {value!r}")
    return int(amount)


def check_column_list(name: str, columns: Iterable[str] | None) -> list[str] | None:
    """Return the names of columns as a list. A single name and an empty list are errors."""
    if isinstance(columns, (str, bytes)):
        raise ValueError(f"{name} must be a list of names: [{columns!r}]")
    names = None if columns is None else list(columns)
    if names == []:
        raise ValueError(f"{name}=[] selects no column. Leave it out to select all.")
    return names


def select_columns(names: Sequence[str], columns: Sequence[str] | None, owner: str) -> list[str]:
    """Return ``columns``, or all ``names``. Raise ``DataError`` if a column is missing."""
    if columns is None:
        return list(names)
    missing = [name for name in columns if name not in names]
    if missing:
        raise DataError(f"{owner} has no column {missing[0]!r}. It has {', '.join(names)}.")
    return list(columns)
