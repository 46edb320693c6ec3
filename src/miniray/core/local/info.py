"""What every process of a session knows from birth. Kept apart: it must import in no time."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SessionInfo:
    """One session. ``usage_fd`` is this process's own number for the shared table of memory use."""

    session_id: str
    directory: str
    token: bytes
    namespace: str
    resources: dict[str, float]
    usage_fd: int
    memory_limit: int
    spill_dir: str
    log_dir: str

    def path(self, proc: int) -> str:
        """The socket on which process number ``proc`` listens."""
        return f"{self.directory}/{proc}"
