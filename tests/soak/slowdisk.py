"""A disk that can be made slow: ``slow:///path`` is the file ``/path``, read with delays.

While the file named by ``SLOW`` in the environment exists, every read waits as long as it says
(seconds). Data goes the way it goes for any other fsspec address; nothing in miniray knows.
"""

import io
import os
import time

import fsspec
from fsspec.implementations.local import LocalFileSystem

SLOW = "MINIRAY_SOAK_SLOW"


def delay():
    try:
        with open(os.environ[SLOW]) as file:
            return float(file.read() or 0)
    except (KeyError, FileNotFoundError):
        return 0.0


class SlowFile(io.FileIO):
    @property
    def size(self):
        return os.fstat(self.fileno()).st_size

    def readinto(self, buffer):
        time.sleep(delay())
        return super().readinto(buffer)

    def read(self, size=-1):
        time.sleep(delay())
        return super().read(size)


class SlowDisk(LocalFileSystem):
    protocol = "slow"

    def _open(self, path, mode="rb", **kwargs):
        return SlowFile(self._strip_protocol(path), mode.replace("b", ""))


fsspec.register_implementation("slow", SlowDisk, clobber=True)
