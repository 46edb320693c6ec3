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
    "Actor": ".core.remote",
    "ActorClass": ".core.remote",
    "ActorHandle": ".core.remote",
    "ObjectRef": ".core.refs",
    "ObjectRefGenerator": ".core.refs",
    "RemoteFunction": ".core.remote",
    "RuntimeContext": ".core.engine",
    "available_resources": ".core.session",
    "cancel": ".core.session",
    "cluster_resources": ".core.session",
    "errors": ".errors",
    "get": ".core.session",
    "get_actor": ".core.session",
    "get_gpu_ids": ".core.session",
    "get_runtime_context": ".core.session",
    "init": ".core.session",
    "is_initialized": ".core.session",
    "kill": ".core.session",
    "method": ".core.remote",
    "nodes": ".core.session",
    "put": ".core.session",
    "remote": ".core.remote",
    "shutdown": ".core.session",
    "wait": ".core.session",
}

__getattr__, __dir__ = lazy.names(__name__, _WHERE)
