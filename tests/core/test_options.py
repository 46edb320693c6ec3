"""Options: what is accepted where, and what a wrong one is answered with."""

import numpy as np
import pytest

from miniray.core.options import ALLOWED, Options


def test_nothing_said_leaves_the_defaults_of_the_engine():
    options = Options()
    assert (options.num_cpus, options.num_gpus, options.num_returns) == (None, None, None)
    assert (options.max_restarts, options.max_task_retries) == (0, 0)
    assert options.get_if_exists is False
    assert options.env_vars == {}


def test_merged_changes_what_is_named_and_keeps_the_rest():
    base = Options().merged("class", {"num_cpus": 2, "max_restarts": 3})
    changed = base.merged("class", {"num_cpus": 0.5})
    assert (changed.num_cpus, changed.max_restarts) == (0.5, 3)
    assert base.num_cpus == 2


@pytest.mark.parametrize(
    ("kind", "option", "named"),
    [
        ("function", "max_restarts", ["class"]),
        ("function", "max_concurrency", ["class"]),
        ("function", "lifetime", ["class"]),
        ("class", "num_returns", ["method"]),
        ("class", "max_retries", ["function"]),
        ("method", "num_cpus", ["class"]),
        ("method", "num_return", ["num_returns"]),
        ("method", "nonsense", ALLOWED["method"]),
        ("class", "nonsense", ALLOWED["class"]),
    ],
)
def test_misplaced_option_names_where_it_belongs(kind, option, named):
    with pytest.raises(ValueError) as caught:
        Options().merged(kind, {option: 1})
    message = str(caught.value)
    assert repr(option) in message
    assert all(name in message for name in named)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("function", "num_cpus", -1),
        ("function", "num_cpus", "2"),
        ("function", "num_cpus", True),
        ("class", "num_gpus", -0.5),
        ("function", "num_returns", -1),
        ("function", "num_returns", 1.5),
        ("function", "num_returns", "many"),
        ("function", "num_returns", True),
        ("function", "num_returns", "dynamic"),
        ("function", "max_retries", -2),
        ("function", "max_retries", 1.0),
        ("class", "max_restarts", -2),
        ("class", "max_task_retries", "3"),
        ("class", "max_concurrency", 0),
        ("class", "max_concurrency", True),
        ("class", "name", ""),
        ("class", "name", 7),
        ("class", "namespace", ""),
        ("class", "lifetime", "forever"),
        ("class", "runtime_env", {"pip": ["x"]}),
        ("class", "runtime_env", {"env_vars": {"A": 1}}),
        ("class", "runtime_env", {"env_vars": {1: "A"}}),
        ("class", "runtime_env", "A=1"),
        ("class", "runtime_env", {"env_vars": {"A=B": "1"}}),
        ("class", "runtime_env", {"env_vars": {"": "1"}}),
        ("class", "runtime_env", {"env_vars": {"A": "1\0"}}),
        ("class", "num_cpus", float("nan")),
        ("function", "num_gpus", float("nan")),
        ("function", "num_cpus", float("inf")),
        ("class", "num_gpus", 1.5),
        ("class", "get_if_exists", "yes"),
    ],
)
def test_a_bad_value_is_refused_and_the_option_named(kind, option, value):
    changes = {option: value}
    with pytest.raises(ValueError, match=option):
        Options().merged(kind, changes)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("function", "num_cpus", 0),
        ("function", "num_cpus", 0.25),
        ("class", "num_gpus", 1),
        ("function", "num_returns", 0),
        ("function", "num_returns", "streaming"),
        ("function", "max_retries", -1),
        ("class", "max_restarts", -1),
        ("class", "max_concurrency", 1),
        ("method", "num_returns", 3),
        ("class", "name", "server"),
        ("class", "lifetime", None),
    ],
)
def test_a_value_at_the_edge_of_what_is_valid_is_taken(kind, option, value):
    assert getattr(Options().merged(kind, {option: value}), option) == value


@pytest.mark.parametrize(
    ("kind", "option", "value", "kept"),
    [
        ("function", "num_returns", np.int64(2), 2),
        ("function", "num_cpus", np.float32(0.5), 0.5),
        ("class", "max_concurrency", np.uint8(3), 3),
        ("class", "max_restarts", None, 0),
    ],
)
def test_a_value_is_kept_as_pythons_own(kind, option, value, kept):
    found = getattr(Options().merged(kind, {option: value}), option)
    assert found == kept
    assert type(found) is type(kept)


def test_env_vars_are_a_copy():
    given = {"env_vars": {"A": "1"}}
    options = Options().merged("class", {"runtime_env": given})
    options.env_vars["A"] = "2"
    assert options.env_vars == {"A": "1"}


@pytest.mark.parametrize("option", [{"get_if_exists": True}, {"lifetime": "detached"}])
def test_what_is_found_by_name_needs_a_name(option):
    with pytest.raises(ValueError, match="name="):
        Options().merged("class", option)
    Options().merged("class", {"name": "server", **option})


def test_a_name_given_earlier_counts():
    named = Options().merged("class", {"name": "server"})
    assert named.merged("class", {"lifetime": "detached"}).lifetime == "detached"
