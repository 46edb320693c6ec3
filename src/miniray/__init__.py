"""miniray: Ray's actor API on one machine with nothing to start, and training on top of it.

The engine is loaded when a name of it is used: ``miniray.data`` and others need nothing of it, and
are there sooner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray import lazy

if TYPE_CHECKING:
    from miniray import errors
    from miniray.core.engine import RuntimeContext
    from miniray.core.refs import ObjectRef, ObjectRefGenerator
    from miniray.core.remote import Actor, ActorClass, ActorHandle, RemoteFunction, method, remote
    from miniray.core.session import (
        available_resources,
        cancel,
        cluster_resources,
        get,
        get_actor,
        get_gpu_ids,
        get_runtime_context,
        init,
        is_initialized,
        kill,
        nodes,
        put,
        shutdown,
        wait,
    )

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "ActorClass",
    "ActorHandle",
    "ObjectRef",
    "ObjectRefGenerator",
    "RemoteFunction",
    "RuntimeContext",
    "__version__",
    "available_resources",
    "cancel",
    "cluster_resources",
    "errors",
    "get",
    "get_actor",
    "get_gpu_ids",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "method",
    "nodes",
    "put",
    "remote",
    "shutdown",
    "wait",
]

_WHERE = {
    **dict.fromkeys(__all__, ".core.session"),
    **dict.fromkeys(("Actor", "ActorClass", "ActorHandle", "RemoteFunction"), ".core.remote"),
    **dict.fromkeys(("method", "remote"), ".core.remote"),
    **dict.fromkeys(("ObjectRef", "ObjectRefGenerator"), ".core.refs"),
    "RuntimeContext": ".core.engine",
    "errors": ".errors",
}

__getattr__, __dir__ = lazy.names(__name__, _WHERE)
