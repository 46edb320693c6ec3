"""Random programs have the same results on each engine; see ``programs``."""

import gc

import pytest

from tests.conformance.programs import Program


def run(engine, seed, steps=60):
    has = engine.capabilities
    # After a call in the middle of an actor's queue is canceled, Ray 2.60 keeps the actor waiting
    # for it for 30 s and then fails the calls behind it ("Timed out waiting for seq_no").
    middle = engine.name != "ray"
    program = Program(
        seed, concurrent=has.concurrent, processes=has.processes, cancel_behind=middle
    )
    program.run(steps)
    gc.collect()


@pytest.mark.parametrize("seed", [6, 7, 11])
def test_a_random_program(engine, seed):
    run(engine, seed, 20 if engine.name == "ray" else 60)  # Ray takes a second per actor


@pytest.mark.slow
@pytest.mark.timeout(240)  # 60 steps on Ray, on a busy machine
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_random_programs(engine, seed):
    run(engine, seed)
