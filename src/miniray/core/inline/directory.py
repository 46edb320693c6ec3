"""The living actors of the inline engine, by name and in all."""

from __future__ import annotations

import weakref

from miniray.core.inline.actor import InlineActor


class Directory:
    """Who exists. Holds actors weakly, so a name is free again when the last handle is gone.

    Detached ones are held for the session. Not thread-safe: the engine locks.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[InlineActor] = weakref.WeakSet()
        self._named: weakref.WeakValueDictionary[tuple[str, str], InlineActor]
        self._named = weakref.WeakValueDictionary()
        self._detached: set[InlineActor] = set()

    def taken_by(self, actor: InlineActor) -> InlineActor | None:
        """Who has the name that ``actor`` wants; ``ValueError`` unless it asks for that one."""
        existing = None if actor.key is None else self._named.get(actor.key)
        if existing is None or actor.options.get_if_exists:
            return existing
        namespace, name = existing.key or ("", "")
        raise ValueError(
            f"an actor named {name!r} exists already in namespace {namespace!r}: use get_actor(), "
            "or get_if_exists=True"
        )

    def add(self, actor: InlineActor) -> None:
        self._all.add(actor)
        if actor.key is not None:
            self._named[actor.key] = actor
        if actor.options.lifetime == "detached":
            self._detached.add(actor)

    def find(self, namespace: str, name: str) -> InlineActor:
        """Raises ``ValueError`` when there is none."""
        actor = self._named.get((namespace, name))
        if actor is not None:
            return actor
        known = sorted(other for space, other in self._named if space == namespace)
        raise ValueError(
            f"there is no actor named {name!r} in namespace {namespace!r}; "
            f"names there: {', '.join(known) or 'none'}"
        )

    def remove(self, actor: InlineActor) -> None:
        self._all.discard(actor)
        self._detached.discard(actor)
        if actor.key is not None and self._named.get(actor.key) is actor:
            del self._named[actor.key]

    def living(self) -> list[InlineActor]:
        return list(self._all)
