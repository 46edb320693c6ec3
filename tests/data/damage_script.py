"""Read damaged copies of a file. Prints one line per copy; run in a separate process."""

import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from miniray.data import ArrowDataset, JsonlDataset, ParquetDataset
from miniray.errors import DataError


def damage_randomly(content: bytes, count: int) -> Iterator[bytes]:
    """Overwrite a few bytes, or many, anywhere in the file."""
    for seed in range(count):
        chance, damaged = random.Random(seed), bytearray(content)
        for _ in range(chance.choice((1, 4, 64))):
            damaged[chance.randrange(len(damaged))] = chance.choice((0, 255, chance.randrange(256)))
        yield bytes(damaged)


def damage_footer(content: bytes, step: int) -> Iterator[bytes]:
    """Change each ``step``-th byte of a Parquet footer."""
    length = int.from_bytes(content[-8:-4], "little")
    for at in range(len(content) - 8 - length, len(content) - 8, step):
        for change in (0x01, 0x10):
            yield content[:at] + bytes([content[at] ^ change]) + content[at + 1 :]


def main(path: Path, way: str, number: int) -> None:
    content = path.read_bytes()
    kinds = {".parquet": ParquetDataset, ".jsonl": JsonlDataset, ".arrow": ArrowDataset}
    dataset = kinds[path.suffix]
    copies = {"random": damage_randomly, "footer": damage_footer}[way](content, number)
    for copy, damaged in enumerate(copies):
        path.write_bytes(damaged)
        print(copy, end=" ", flush=True)
        try:
            print("rows", len(list(dataset(path))))
        except DataError as error:
            print("DataError", error.file == str(path))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
