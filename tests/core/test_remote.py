"""@remote before any engine is involved: what is known about a callable, what is refused."""

import functools
import pickle

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miniray
from miniray.core.remote import ActorClass, CallSpec, ClassSpec, RemoteFunction


def spec_of(function, bound=False):
    return CallSpec.of(function, function.__name__, bound=bound)


# -- CallSpec ------------------------------------------------------------------------------------


def none():
    pass


def two(a, b):
    pass


def optional(a, b=1):
    pass


def variadic(a, *rest):
    pass


def keyword_only(a, *, b):
    pass


def keyword_default(a, *, b=1):
    pass


def keywords(**kw):
    pass


def positional_only(a, /, b):
    pass


@pytest.mark.parametrize(
    ("function", "fits", "does_not"),
    [
        (none, [((), {})], [((1,), {}), ((), {"a": 1})]),
        (
            two,
            [((1, 2), {}), ((1,), {"b": 2}), ((), {"a": 1, "b": 2})],
            [((1,), {}), ((1, 2, 3), {}), ((1, 2), {"b": 2}), ((), {"a": 1, "c": 2})],
        ),
        (optional, [((1,), {}), ((1, 2), {}), ((1,), {"b": None})], [((), {}), ((1, 2, 3), {})]),
        (variadic, [((1,), {}), ((1, 2, 3, 4), {})], [((), {}), ((1,), {"c": 1})]),
        (keyword_only, [((1,), {"b": 2})], [((1,), {}), ((1, 2), {})]),
        (keyword_default, [((1,), {}), ((1,), {"b": 2})], [((1, 2), {}), ((), {"b": 2})]),
        (keywords, [((), {}), ((), {"x": 1, "y": 2})], [((1,), {})]),
        (positional_only, [((1, 2), {}), ((1,), {"b": 2})], [((), {"a": 1, "b": 2})]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_arguments_are_accepted_exactly_when_the_function_accepts_them(function, fits, does_not):
    spec = spec_of(function)
    for args, kwargs in fits:
        function(*args, **kwargs)  # keeps the table itself honest
        spec.check(args, kwargs)
    for args, kwargs in does_not:
        with pytest.raises(TypeError):
            function(*args, **kwargs)
        with pytest.raises(TypeError, match=rf"{function.__name__}\("):
            spec.check(args, kwargs)


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        (none, 0, 0),
        (two, 2, 2),
        (optional, 1, 2),
        (keyword_default, 1, 1),
        (keywords, 0, 0),
        (keyword_only, 0, -1),  # never right without keywords: always bind
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_range_of_calls_with_positional_arguments_only(function, low, high):
    spec = spec_of(function)
    assert (spec.min_positional, spec.max_positional) == (low, high)


@st.composite
def functions(draw):
    """A function with any legal list of parameters, all called a, b, c, ..."""
    names = iter("abcdefgh")
    positional = [next(names) for _ in range(draw(st.integers(0, 3)))]
    optional = [f"{next(names)}=0" for _ in range(draw(st.integers(0, 2)))]
    parts = positional + optional
    if positional and draw(st.booleans()):
        # Not after an optional one: there, with **more, inspect itself is wrong on old Pythons.
        parts.insert(draw(st.integers(1, len(positional))), "/")
    keyword = [
        next(names) + draw(st.sampled_from(["", "=0"])) for _ in range(draw(st.integers(0, 2)))
    ]
    if draw(st.booleans()):
        parts.append("*rest")
    elif keyword:
        parts.append("*")
    parts += keyword
    if draw(st.booleans()):
        parts.append("**more")
    namespace = {}
    exec(f"def function({', '.join(parts)}): pass", namespace)
    return namespace["function"]


@settings(deadline=None)
@given(
    function=functions(),
    count=st.integers(0, 6),
    keywords=st.sets(st.sampled_from("abcdefgh"), max_size=4),
)
def test_any_call_is_judged_as_python_judges_it(function, count, keywords):
    args, kwargs = (1,) * count, dict.fromkeys(keywords, 2)
    try:
        function(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            spec_of(function).check(args, kwargs)
    else:
        spec_of(function).check(args, kwargs)


def test_bound_leaves_self_out():
    class Thing:
        def method(self, x):
            pass

    spec = CallSpec.of(Thing.method, "Thing.method", bound=True)
    spec.check((1,), {})
    with pytest.raises(TypeError, match=r"method\(x\).*\(1, 2\)"):
        spec.check((1, 2), {})


def test_a_callable_without_a_signature_is_not_checked():
    def hidden(a):
        pass

    hidden.__signature__ = "none"  # what inspect meets with some functions written in C
    spec = spec_of(hidden)
    assert spec.signature is None
    spec.check((1, 2, 3), {"anything": 4})


def test_spec_pickles_even_when_defaults_and_annotations_do_not():
    def awkward(a: "no such type", b=(i for i in ())):  # noqa: F722
        pass

    spec = pickle.loads(pickle.dumps(spec_of(awkward)))
    spec.check((1,), {})
    with pytest.raises(TypeError):
        spec.check((), {})


def test_kinds_of_functions_are_told_apart():
    def plain():
        pass

    def generator():
        yield

    async def coroutine():
        pass

    async def async_generator():
        yield

    seen = {
        f.__name__: (spec_of(f).is_generator, spec_of(f).is_async, spec_of(f).num_returns)
        for f in (plain, generator, coroutine, async_generator)
    }
    assert seen == {
        "plain": (False, False, 1),
        "generator": (True, False, "streaming"),
        "coroutine": (False, True, 1),
        "async_generator": (True, True, "streaming"),
    }


def test_method_decorator_sets_num_returns():
    class Thing:
        @miniray.method(num_returns=2)
        def pair(self):
            return 1, 2

    assert ClassSpec(Thing).info.methods["pair"].num_returns == 2


def test_method_decorator_refuses_other_options():
    with pytest.raises(ValueError, match="max_retries"):
        miniray.method(max_retries=1)


# -- ClassSpec -----------------------------------------------------------------------------------


class Base:
    def inherited(self, a):
        pass


class Everything(Base):
    def __init__(self, size, *, seed=0):
        pass

    def own(self, a, b=1):
        pass

    @staticmethod
    def static(a):
        pass

    @classmethod
    def from_class(cls, a):
        pass

    def _private(self):
        pass

    def __call__(self, a):
        pass

    constant = 3


def test_a_class_spec_knows_its_methods_and_nothing_else():
    methods = ClassSpec(Everything).info.methods
    assert set(methods) == {"inherited", "own", "static", "from_class", "_private", "__call__"}


@pytest.mark.parametrize("name", ["inherited", "own", "static", "from_class", "__call__"])
def test_every_kind_of_method_takes_one_argument(name):
    spec = ClassSpec(Everything).info.methods[name]
    assert spec.name == f"Everything.{name}"
    spec.check((1,), {})
    with pytest.raises(TypeError):
        spec.check((), {})


def test_constructor_arguments_are_checked():
    spec = ClassSpec(Everything)
    spec.init.check((3,), {"seed": 1})
    with pytest.raises(TypeError, match=r"Everything\(.*\(seed=1\)"):
        spec.init.check((), {"seed": 1})


def test_a_class_without_constructor_takes_no_arguments():
    with pytest.raises(TypeError):
        ClassSpec(Base).init.check((1,), {})


def test_one_async_method_makes_the_class_async():
    class Mixed:
        def plain(self):
            pass

        async def waiting(self):
            pass

    assert ClassSpec(Mixed).is_async
    assert not ClassSpec(Base).is_async


# -- the decorator -------------------------------------------------------------------------------


def test_a_remote_function_cannot_be_called_directly():
    remote = miniray.remote(two)
    with pytest.raises(TypeError, match=r"two\.remote\(\.\.\.\)"):
        remote(1, 2)
    assert not miniray.is_initialized()


def test_an_actor_class_cannot_be_instantiated_or_inherited_from():
    actor = miniray.remote(Base)
    with pytest.raises(TypeError, match=r"Base\.remote\(\.\.\.\)"):
        actor()
    with pytest.raises(TypeError, match="inherit"):

        class Derived(actor):
            pass


def test_the_wrapped_function_and_class_are_reachable():
    @miniray.remote
    def add(a, b):
        """Sums."""
        return a + b

    assert add.__wrapped__(1, 2) == 3
    assert (add.__name__, add.__doc__) == ("add", "Sums.")
    actor = miniray.remote(Everything)
    assert actor.__wrapped__ is Everything
    assert actor.__name__ == "Everything"


def test_remote_with_options_gives_a_decorator():
    @miniray.remote(num_cpus=2)
    def f():
        pass

    assert isinstance(f, RemoteFunction)
    assert f._options.num_cpus == 2
    actor = miniray.remote(max_restarts=1)(Base)
    assert isinstance(actor, ActorClass)
    assert actor._options.max_restarts == 1


def test_options_give_a_changed_copy():
    f = miniray.remote(num_cpus=2)(two)
    g = f.options(num_returns=2)
    assert (g._options.num_cpus, g._options.num_returns) == (2, 2)
    assert f._options.num_returns is None


@pytest.mark.parametrize("target", [3, "f", None])
def test_only_functions_and_classes_can_be_remote(target):
    with pytest.raises(TypeError, match="function or a class"):
        miniray.remote(target)


def test_remote_needs_something():
    with pytest.raises(TypeError, match=r"@miniray\.remote"):
        miniray.remote()


def test_positional_options_are_refused():
    with pytest.raises(TypeError, match="option=value"):
        miniray.remote(two, num_cpus=1)


@pytest.mark.parametrize("target", [two, Base], ids=["function", "class"])
def test_remote_twice_is_refused(target):
    with pytest.raises(TypeError, match="already"):
        miniray.remote(miniray.remote(target))


def test_a_partial_can_be_remote():
    remote = miniray.remote(functools.partial(two, 1))
    remote._spec.call.check((2,), {})
    with pytest.raises(TypeError):
        remote._spec.call.check((2, 3), {})


def test_wrong_arguments_are_refused_before_an_engine_starts():
    with pytest.raises(TypeError, match=r"two\(a, b\).*\(1\)"):
        miniray.remote(two).remote(1)
    with pytest.raises(TypeError, match=r"Everything\(.*\(\)"):
        miniray.remote(Everything).remote()
    assert not miniray.is_initialized()


def test_remote_objects_travel_with_their_options():
    def local_function(a):
        return a + 1

    class Local:
        pass

    f = miniray.remote(num_cpus=2)(local_function)
    there = pickle.loads(cloudpickle.dumps(f))
    assert there.__wrapped__(1) == 2
    assert there._options == f._options
    c = miniray.remote(max_restarts=4)(Local)
    assert pickle.loads(cloudpickle.dumps(c))._options.max_restarts == 4
