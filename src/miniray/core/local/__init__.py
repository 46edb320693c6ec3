"""The local engine: processes of this machine and shared memory.

``driver`` is the part for the process that starts it, workers begin in ``worker``. Nothing is
imported here, so that neither loads what only the other needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miniray.core.engine import Engine, InitConfig


def start(config: InitConfig) -> Engine:
    """Start the engine in this process, which becomes the driver.

    Raises ``EngineStartError``; nothing is left behind then.
    """
    from miniray.core.local.spawner import Zygote
    from miniray.errors import EngineStartError

    try:
        zygote = Zygote()
    except OSError as error:
        raise EngineStartError(f"cannot start a process: {error}") from error
    try:
        # Only now: the zygote starts up at the same time as this process loads the rest.
        from miniray.core.local import driver

        return driver.start(config, zygote)
    except BaseException as error:
        zygote.close()
        if isinstance(error, OSError):
            raise EngineStartError(f"cannot start the local engine: {error}") from error
        raise
