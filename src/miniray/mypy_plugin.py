"""A plugin for mypy: classes decorated with ``@miniray.remote`` and the methods of their handles.

mypy ignores what a class decorator returns, so it knows nothing of ``C.remote(...)``. With
``plugins = ["miniray.mypy_plugin"]`` in its settings, ``C.remote`` takes what ``C`` takes, and
``handle.method.remote`` what the method takes and gives an ``ObjectRef`` of what it returns.
Classes derived from ``miniray.Actor`` need no plugin.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import ARG_STAR, ARG_STAR2, Argument, Decorator, FuncDef, TypeInfo, Var
from mypy.plugin import AttributeContext, ClassDefContext, Plugin
from mypy.plugins.common import add_method_to_class
from mypy.typeops import bind_self
from mypy.types import AnyType, CallableType, Instance, Parameters, Type, TypeOfAny, get_proper_type

_REMOTE = ("miniray.remote", "miniray.core.remote.remote")
_HANDLE = "miniray.core.refs.ActorHandle"
_CLASS = "miniray.core.remote.ActorClass"
_TYPED = "miniray.core.remote.Actor"
_REF = "miniray.core.refs.ObjectRef"
_REFS = "miniray.core.refs.ObjectRefGenerator"

#: What a method may return: where the type of its items or of its result is among the arguments.
_STREAMS = (
    "typing.Iterator",
    "typing.Generator",
    "typing.AsyncIterator",
    "typing.AsyncGenerator",
)
_COROUTINE = "typing.Coroutine"


class MinirayPlugin(Plugin):
    def get_class_decorator_hook_2(self, fullname: str) -> Callable[[ClassDefContext], bool] | None:
        return _add_remote if fullname in _REMOTE else None

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        name = fullname.removeprefix(f"{_HANDLE}.")
        if name == fullname or name.startswith("_"):
            return None
        return lambda ctx: self._method_of_handle(ctx, name)

    def _method_of_handle(self, ctx: AttributeContext, name: str) -> Type:
        """The type of ``handle.name``."""
        handle, known = get_proper_type(ctx.type), get_proper_type(ctx.default_attr_type)
        if not isinstance(handle, Instance) or not isinstance(known, Instance) or not handle.args:
            return ctx.default_attr_type
        actor = get_proper_type(handle.args[0])
        if not isinstance(actor, Instance):
            return ctx.default_attr_type
        symbol = actor.type.get(name)
        if symbol is None:
            ctx.api.fail(f'Actor "{actor.type.name}" has no method "{name}"', ctx.context)
            return ctx.default_attr_type
        function = symbol.node
        if isinstance(function, Decorator) and not function.decorators:
            function = function.func  # of staticmethod or classmethod, which mypy takes off
        if not isinstance(function, FuncDef) or not isinstance(function.type, CallableType):
            return ctx.default_attr_type  # decorated, or without annotations
        bound = function.type
        if not function.is_static:
            bound = bind_self(function.type, actor, is_classmethod=function.is_class)
        takes = Parameters(bound.arg_types, bound.arg_kinds, bound.arg_names)
        return Instance(known.type, [takes, self._gives(get_proper_type(bound.ret_type))])

    def _gives(self, result: Type) -> Type:
        """What ``.remote(...)`` of a method that returns ``result`` gives."""
        kind, inner = _REF, result
        if isinstance(result, Instance) and result.type.fullname in _STREAMS:
            kind, inner = _REFS, result.args[0]
        elif isinstance(result, Instance) and result.type.fullname == _COROUTINE:
            inner = result.args[2]
        symbol = self.lookup_fully_qualified(kind)
        assert symbol is not None  # where there are handles, there are refs
        assert isinstance(symbol.node, TypeInfo)
        return Instance(symbol.node, [inner])


def _add_remote(ctx: ClassDefContext) -> bool:
    """Give a decorated class its ``remote`` and ``options``."""
    info = ctx.cls.info
    if info.has_base(_TYPED):
        return True
    arguments = _constructor(info)
    own = Instance(info, [AnyType(TypeOfAny.special_form)] * len(info.defn.type_vars))
    handle = ctx.api.named_type(_HANDLE, [own])
    add_method_to_class(ctx.api, ctx.cls, "remote", arguments, handle, is_classmethod=True)
    takes = Parameters(
        [a.type_annotation or AnyType(TypeOfAny.unannotated) for a in arguments],
        [a.kind for a in arguments],
        [a.variable.name if not a.pos_only else None for a in arguments],
    )
    anything = AnyType(TypeOfAny.explicit)
    changes = Argument(Var("changes", anything), anything, None, ARG_STAR2)
    made = ctx.api.named_type(_CLASS, [own, takes])
    add_method_to_class(ctx.api, ctx.cls, "options", [changes], made, is_classmethod=True)
    return True


def _constructor(info: TypeInfo) -> list[Argument]:
    """The arguments of ``C(...)``; anything where that cannot be said."""
    init = info.get_method("__init__")
    if init is None or init.info.fullname == "builtins.object":
        return []
    if not isinstance(init, FuncDef):
        anything = AnyType(TypeOfAny.special_form)
        return [
            Argument(Var("args", anything), anything, None, ARG_STAR),
            Argument(Var("kwargs", anything), anything, None, ARG_STAR2),
        ]
    types: list[Type] = [AnyType(TypeOfAny.unannotated)] * len(init.arguments)
    if isinstance(init.type, CallableType):
        types = list(init.type.arg_types)
    return [
        Argument(Var(a.variable.name, t), t, a.initializer, a.kind, a.pos_only)
        for a, t in list(zip(init.arguments, types, strict=True))[1:]
    ]


def plugin(version: str) -> type[Plugin]:
    """What mypy asks for."""
    return MinirayPlugin
