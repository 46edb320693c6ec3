"""Random programs with predictable results: tasks, actors, streams, gates, cancel, kill, restarts.

A ``Program`` makes its random choices without looking at what the engine returns, so a seed is the
same program on each engine. Beside the engine it runs a model, which knows when a call can run and
what it returns. A call that waits, directly or not, for a gate that is still closed has no outcome
yet; the program never asks for it. If several arguments failed, any of their errors is right.
"""

import asyncio
import gc
import itertools
import os
import random
import re
import threading
import zlib

import miniray
from miniray.errors import ActorDiedError, TaskCancelledError
from tests.conformance.helpers import eventually

LIMIT = 30  # seconds for any one result
LARGE = 150_000  # bytes, which go through shared memory
CANCELLED, DIED = ("cancelled",), ("died",)


def digest(*values):
    """A number made of all ``values``."""
    parts = [zlib.crc32(v) if isinstance(v, bytes) else v for v in values]
    return zlib.crc32(repr(parts).encode())


# -- what the programs run -------------------------------------------------------------------------


@miniray.remote
def combine(*values):
    return digest(*values)


@miniray.remote
def combine_refs(refs):
    return digest(*miniray.get(refs))


@miniray.remote
def fail(tag, *values):
    raise ValueError(f"<{tag}>")


@miniray.remote
def box(*values):
    """Refs that the worker of this task owns."""
    return [miniray.put(value) for value in values]


@miniray.remote
def items(tag, count, fails):
    for i in range(count):
        yield digest(tag, i)
    if fails:
        raise ValueError(f"<{tag}>")


@miniray.remote
def endless():
    for i in itertools.count():
        threading.Event().wait(0.002)
        yield i


class State:
    """Base of all actors here; ``seen`` is in the order of the calls."""

    def __init__(self):
        self.seen = []
        self.lock = threading.Lock()

    def note(self, tag, values):
        with self.lock:
            self.seen.append(digest(tag, *values))
            return self.seen[-1]

    def crash(self):
        os._exit(1)


@miniray.remote
class Sequential(State):
    def apply(self, tag, *values):
        return self.note(tag, values)

    def fail(self, tag, *values):
        self.note(tag, values)
        raise ValueError(f"<{tag}>")

    def items(self, tag, count, fails):
        self.note(tag, ())
        yield from items.__wrapped__(tag, count, fails)

    def read(self):
        return self.seen


@miniray.remote(max_concurrency=3)
class Threaded(Sequential.__wrapped__):
    pass


@miniray.remote
class Async(State):
    async def apply(self, tag, *values):
        await asyncio.sleep(0)
        return self.note(tag, values)

    async def fail(self, tag, *values):
        self.note(tag, values)
        await asyncio.sleep(0)
        raise ValueError(f"<{tag}>")

    async def items(self, tag, count, fails):
        self.note(tag, ())
        for item in items.__wrapped__(tag, count, fails):
            await asyncio.sleep(0)
            yield item

    async def read(self):
        return self.seen


@miniray.remote
class Gates:
    def __init__(self):
        self.gates = {}

    async def wait(self, number):
        await self.gates.setdefault(number, asyncio.Event()).wait()
        return number

    async def open(self, number):
        self.gates.setdefault(number, asyncio.Event()).set()


# -- the model -------------------------------------------------------------------------------------


class Result:
    """A ref and what is known of its outcome: ``allowed`` is empty while it is pending."""

    def __init__(self, ref, dependencies=(), run=None, allowed=()):
        self.ref = ref
        self.dependencies = dependencies
        self.run = run  # returns the outcome, given the values of the dependencies
        self.allowed = set(allowed)
        self.checked = False

    @property
    def pending(self):
        return not self.allowed

    @property
    def value(self):
        """The value; None after an error."""
        return next((outcome[1] for outcome in self.allowed if outcome[0] == "value"), None)

    def settle(self):
        """Find the outcome, if all dependencies have theirs."""
        if self.run is None or any(each.pending for each in self.dependencies):
            return
        failed = [each for each in self.dependencies if each.value is None]
        if failed:
            self.allowed = set().union(*(each.allowed for each in failed))
        else:
            self.allowed = {self.run([each.value for each in self.dependencies])}


class Actor:
    """An actor's handle, its state by the model, and its calls that have no outcome yet."""

    def __init__(self, handle, in_order, restarts):
        self.handle = handle
        self.in_order = in_order
        self.restarts_left = restarts
        self.seen = []
        self.calls = []
        self.dead = False

    def run(self, tag, error):
        def run(values):
            self.seen.append(digest(tag, *values))
            return ("ValueError", str(tag)) if error else ("value", self.seen[-1])

        return run

    def settle(self):
        """Run the calls that can run; in order, up to the first that can't."""
        left = []
        for call in self.calls:
            if call.pending and not (left and self.in_order):
                call.settle()
            if call.pending:
                left.append(call)
        self.calls = left

    def end(self):
        """Fail what is pending: the actor is gone."""
        self.dead = True
        for call in self.calls:
            call.allowed = {DIED}
        self.calls = []


class Program:
    def __init__(self, seed, *, concurrent=True, processes=True, cancel_behind=True):
        self.random = random.Random(seed)
        self.tags = itertools.count(1)
        self.results = []
        self.actors = []
        self.closed = {}  # results by the number of their gate
        self.gates = Gates.remote() if concurrent else None
        self.cancel_behind = cancel_behind
        self.history = []
        steps = {
            self.put: 2, self.task: 4, self.failing_task: 1, self.boxes: 1, self.stream: 2,
            self.create: 2, self.call: 8, self.read: 1, self.check: 4, self.wait: 1, self.drop: 2,
            self.kill: 1,
        }  # fmt: skip
        if concurrent:
            steps |= {self.gate: 3, self.open: 2, self.cancel: 2, self.cancel_stream: 0.5}
        if processes:
            steps |= {self.crash: 1}
        self.steps = steps

    def run(self, length):
        """Run ``length`` random steps and then check all results; raise if one is wrong."""
        for step in self.random.choices(list(self.steps), list(self.steps.values()), k=length):
            self.history.append(step.__name__)
            step()
            self.settle()
        for number in list(self.closed):
            self.open_gate(number)
            self.settle()
        for result in self.results:
            self.compare(result)
        for actor in self.actors:
            self.compare_state(actor)

    def settle(self):
        """Find all outcomes that are determined now."""
        count = None
        while count != (count := sum(result.pending for result in self.results)):
            for actor in self.actors:
                actor.settle()
            for result in self.results:
                if result.pending:
                    result.settle() if not self.actor_of(result) else None

    def actor_of(self, result):
        return next((actor for actor in self.actors if result in actor.calls), None)

    # -- choices ---------------------------------------------------------------------------------

    def choose(self, candidates):
        """One of ``candidates``, the same on each engine; None if there are none."""
        candidates = list(candidates)
        return self.random.choice(candidates) if candidates else None

    def arguments(self, most=3):
        count = min(len(self.results), self.random.randint(0, most))
        return self.random.sample(self.results, count)

    def add(self, *args, **kwargs):
        result = Result(*args, **kwargs)
        self.results.append(result)
        return result

    # -- steps -----------------------------------------------------------------------------------

    def put(self):
        tag = next(self.tags)
        value = bytes([tag % 256]) * LARGE if self.random.random() < 0.2 else tag
        self.add(miniray.put(value), allowed=[("value", value)])

    def task(self):
        args = self.arguments()
        if self.random.random() < 0.3:  # refs inside a list: the task itself waits for them
            args = [each for each in args if each.value is not None]
            ref = combine_refs.remote([each.ref for each in args])
        else:
            ref = combine.remote(*[each.ref for each in args])
        self.add(ref, args, lambda values: ("value", digest(*values)))

    def failing_task(self):
        args, tag = self.arguments(), next(self.tags)
        ref = fail.remote(tag, *[each.ref for each in args])
        self.add(ref, args, lambda values: ("ValueError", str(tag)))

    def boxes(self):
        args = [each for each in self.arguments() if each.value is not None]
        refs = miniray.get(box.remote(*[each.ref for each in args]), timeout=LIMIT)
        for ref, each in zip(refs, args, strict=True):
            self.add(ref, allowed=each.allowed)

    def stream(self):
        tag, count, fails = next(self.tags), self.random.randint(0, 4), self.random.random() < 0.3
        actor = self.choose([None, *(a for a in self.actors if not (a.calls or a.dead))])
        generator = (items if actor is None else actor.handle.items).remote(tag, count, fails)
        outcomes = [("value", digest(tag, i)) for i in range(count)]
        outcomes += [("ValueError", str(tag))] * fails
        if actor is not None:
            actor.seen.append(digest(tag))
        wanted = self.random.randint(0, len(outcomes) + 1)  # one more: up to its end
        for outcome, ref in zip(outcomes, itertools.islice(generator, wanted), strict=False):
            self.compare(self.add(ref, allowed=[outcome]))
        if wanted > len(outcomes):
            assert next(generator, None) is None
        elif actor is not None:
            for _ in generator:  # so that nothing of it is left to run when the actor is killed
                pass

    def cancel_stream(self):
        generator = endless.remote()
        assert miniray.get(next(generator), timeout=LIMIT) == 0
        miniray.cancel(generator)
        try:
            for ref in generator:
                miniray.get(ref, timeout=LIMIT)
        except TaskCancelledError:
            return
        raise AssertionError("the stream ended without an error")

    def create(self):
        if len(self.actors) < 5:
            cls = self.random.choice([Sequential, Threaded, Async])
            restarts = self.random.choice([0, 1, 2])
            handle = cls.options(max_restarts=restarts).remote()
            self.actors.append(Actor(handle, cls is Sequential, restarts))

    def call(self):
        actor = self.choose(self.actors)
        if actor is None:
            return
        args, tag, error = self.arguments(), next(self.tags), self.random.random() < 0.2
        method = actor.handle.fail if error else actor.handle.apply
        result = self.add(method.remote(tag, *[a.ref for a in args]), args, actor.run(tag, error))
        if actor.dead:
            result.allowed = {DIED}
        else:
            actor.calls.append(result)

    def read(self):
        actor = self.choose(self.actors)
        if actor is not None:
            self.compare_state(actor)

    def compare_state(self, actor):
        """Compare what the actor has seen, unless calls are pending or it is dead."""
        if actor.calls or actor.dead:
            return
        self.compare_all()
        seen = miniray.get(actor.handle.read.remote(), timeout=LIMIT)
        assert (seen if actor.in_order else sorted(seen)) == (
            actor.seen if actor.in_order else sorted(actor.seen)
        )

    def check(self):
        result = self.choose(each for each in self.results if not each.pending)
        if result is not None:
            self.compare(result)
            if self.random.random() < 0.2:
                miniray.cancel(result.ref)  # it is done: this changes nothing
                self.compare(result)

    def wait(self):
        some = self.arguments(6)
        done = [each.ref for each in some if not each.pending]
        if done:
            refs = [each.ref for each in some]
            ready, rest = miniray.wait(refs, num_returns=len(done), timeout=LIMIT)
            assert ready == done
            assert rest == [ref for ref in refs if ref not in done]

    def drop(self):
        """Forget a ref that nothing in the model needs; its call may still be running."""
        needed = {each for result in self.results for each in result.dependencies}
        result = self.choose(
            each for each in self.results if not each.pending and each not in needed
        )
        if result is not None and result.checked:
            self.results.remove(result)
            if self.random.random() < 0.2:
                gc.collect()

    def gate(self):
        number = next(self.tags)
        self.closed[number] = self.add(self.gates.wait.remote(number))

    def open(self):
        number = self.choose(self.closed)
        if number is not None:
            self.open_gate(number)

    def open_gate(self, number):
        result = self.closed.pop(number)
        if result.pending:
            self.gates.open.remote(number)
            result.allowed = {("value", number)}

    def cancel(self):
        """Cancel a call that waits: at a gate, for an argument, or behind one that does."""
        calls = []
        for actor in self.actors:
            only_first = actor.in_order and not self.cancel_behind
            calls += actor.calls[:1] if only_first else actor.calls
        result = self.choose(each for each in [*calls, *self.closed.values()] if each.pending)
        if result is not None:
            miniray.cancel(result.ref)
            result.allowed = {CANCELLED}

    def kill(self):
        actor = self.choose(actor for actor in self.actors if not actor.dead)
        if actor is not None:
            self.compare_all()
            miniray.kill(actor.handle)
            actor.end()

    def crash(self):
        """Crash an actor; if it restarts, its state is lost, but calls that wait are sent to it."""
        actor = self.choose(a for a in self.actors if not (a.dead or (a.in_order and a.calls)))
        if actor is None:
            return
        self.compare_all()
        self.compare(self.add(actor.handle.crash.remote(), allowed=[DIED]))
        actor.seen = []
        if actor.restarts_left:
            actor.restarts_left -= 1
            assert eventually(lambda: state_of(actor)) == [[]]
        else:
            actor.end()

    # -- comparing -------------------------------------------------------------------------------

    def compare_all(self):
        """Wait for everything that has an outcome, so that nothing is in flight."""
        for result in self.results:
            if not (result.pending or result.checked):
                self.compare(result)

    def compare(self, result):
        outcome = outcome_of(result.ref)
        assert outcome in errors_of(result) | result.allowed, (
            f"step {len(self.history)}: {outcome}, not one of {result.allowed}"
        )
        result.checked = True


def state_of(actor):
    """A list with what the actor has seen; none while Ray restarts it, where calls fail."""
    try:
        return [miniray.get(actor.handle.read.remote(), timeout=LIMIT)]
    except ActorDiedError:
        return []


def errors_of(result):
    """All errors that a call of a dead actor may raise: those of its arguments may come first."""
    if DIED not in result.allowed:
        return set()
    errors = [each.allowed | errors_of(each) for each in result.dependencies if each.value is None]
    return {DIED}.union(*errors)


def outcome_of(ref):
    """("value", value) or an error, the same for each engine."""
    try:
        return ("value", miniray.get(ref, timeout=LIMIT))
    except TaskCancelledError:
        return CANCELLED
    except ActorDiedError:
        return DIED
    except ValueError as error:
        return ("ValueError", re.search(r"<(\d+)>", str(error))[1])
