"""``miniray run``: starts the ranks, watches them, and says what is wrong when something is.

A run ends in one of these ways, and in each of them nothing is left running:

- every rank exits with 0: so does the run. What was wrong with it all the same is said in a line.
- a rank fails: the others get a few seconds to end by themselves, for their last words; then the
  diagnosis names the first cause, and the run exits as that rank did.
- nothing moves for ``hang_timeout`` seconds, or the ranks call collectives that cannot match: the
  diagnosis is made while everybody is still there, every rank is ended, and the run exits with 1.
  Where nothing moves and the diagnosis finds nobody stuck, the run goes on and is watched further.
- on several machines: whatever ends it on one of them ends it on all. Machine 0 has the diagnosis.
- Ctrl-C, SIGTERM: the ranks get the same signal, then SIGKILL. SIGKILL of the launcher: the kernel
  kills the ranks.

With ``max_restarts`` the second and the third way start all ranks again, that many times.
"""

from __future__ import annotations

import math
import random
import secrets
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from miniray.doctor import processes, recorder, runfile
from miniray.doctor.findings import plural
from miniray.doctor.launch_mirror import Mirror
from miniray.doctor.launch_options import (
    Options,
    environment,
    master_port,
    say,
    say_at_length,
)
from miniray.doctor.launch_ranks import Output, Ranks, end_orphans
from miniray.doctor.launch_watch import Watch, diverged
from miniray.doctor.mirror_wire import TOKEN_VARIABLE
from miniray.doctor.verdict import Judgement, judge
from miniray.errors import MinirayError

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 3.0  # for the other ranks when one has failed
_DIVERGENCE_SECONDS = 2.0  # between two comparisons of the ranks' collectives, while some wait
_TELL_SECONDS = 0.5  # between two words to the launchers of other machines
_AFTER_THE_END = 15.0  # at most, for ranks that wait while another has finished


def launch(options: Options) -> int:
    """Run what was checked and has a run directory; the exit status for the command line."""
    processes.adopt_orphans()
    return _Launch(options).run()


class _Launch:
    def __init__(self, options: Options) -> None:
        self.options = options
        assert options.run_dir is not None
        self.run_dir = options.run_dir.absolute()
        self.folder = self.run_dir / "ranks"
        if any(self.folder.glob("*.box")):
            raise MinirayError(
                f"{self.run_dir} already contains a run. Choose a different directory."
            )
        runfile.make_private(self.run_dir)
        self.folder.mkdir(exist_ok=True)
        self.run_id = secrets.token_hex(4)
        self._told = 0.0
        self._was_running = True
        self.seed = random.SystemRandom().randrange(2**31)
        self.output = Output()
        self.mirror: Mirror | None = None
        self.judgement: Judgement | None = None  # that nothing will move any more

    def run(self) -> int:
        options = self.options
        runfile.write_run(
            self.run_dir,
            options.world_size,
            "miniray run",
            self.seed,
            command=runfile.mask_arguments(options.command),
            nproc=options.nproc,
            nnodes=options.nnodes,
            hang_timeout=options.hang_timeout,
            max_restarts=options.max_restarts,
        )
        where = "" if options.temporary else f", recorded in {_shown(self.run_dir)}"
        say(f"{plural(options.world_size, 'rank')}{where}")
        before = _take_signals()
        try:
            if options.nnodes > 1:
                self._meet()
            for attempt in range(options.max_restarts + 1):
                code, reason = self._attempt(attempt)
                if code == 0:
                    runfile.finish_run(self.run_dir, "finished")
                    self._second_thoughts()
                    return 0
                if attempt < options.max_restarts:
                    say(f"{reason}; restarting all ranks ({attempt + 1} of "
                        f"{options.max_restarts} restarts)")  # fmt: skip
            runfile.finish_run(self.run_dir, "failed", reason)
            return code
        except (KeyboardInterrupt, _Stopped) as stop:
            number = stop.number if isinstance(stop, _Stopped) else int(signal.SIGINT)
            name = signal.Signals(number).name
            runfile.finish_run(self.run_dir, "interrupted", f"stopped by {name}")
            say(f"stopped by {name}; all ranks have exited")
            return 128 + number
        finally:
            _give_signals_back(before)
            end_orphans()
            self.output.close()
            if self.mirror is not None:
                self.mirror.close()

    def _meet(self) -> None:
        """On several machines: wait for the other launchers, and use the seed of machine 0."""
        options = self.options
        assert options.master_port is not None
        token = options.token
        if not token:  # machine 0 makes it; the others cannot begin without
            token = secrets.token_hex(16)
            say(f"set {TOKEN_VARIABLE}={token} on the other machines and start their launchers")
        self.mirror = Mirror(
            self.folder,
            options.nproc,
            options.node_rank,
            options.nnodes,
            (options.master_addr, options.master_port + 1),
            token,
            say,
        )
        ours = {
            "node_rank": options.node_rank,
            "world_size": options.world_size,
            "seed": self.seed,
            "run_id": self.run_id,
        }
        agreed = self.mirror.meet(ours)
        self.seed, self.run_id = int(agreed["seed"]), str(agreed["run_id"])
        runfile.change_run(self.run_dir, seed=self.seed)

    # -- one attempt ------------------------------------------------------------------------------

    def _attempt(self, attempt: int) -> tuple[int, str]:
        """(exit status, why it is not 0)"""
        for box in self.folder.glob("*.box") if attempt else ():
            recorder.archive(box, attempt - 1)
        with master_port(self.options) as port:
            return self._run_ranks(attempt, port)

    def _run_ranks(self, attempt: int, port: int) -> tuple[int, str]:
        options = self.options
        self.judgement = None
        ranks = Ranks(self.folder, options.world_size, self.output)
        watch: Watch | None = None
        try:
            for local_rank in range(options.nproc):
                command = [sys.executable, "-m", "miniray.doctor.bootstrap", *options.command]
                env = environment(
                    options, local_rank, port, attempt, self.run_id, self.seed, self.run_dir
                )
                ranks.start(command, options.first_rank + local_rank, env)
            pids = {rank.rank: rank.pid for rank in ranks.ranks}
            watch = Watch(pids, self.folder, options.hang_timeout)
            reason = self._watch(ranks, watch)
            if reason:
                self._diagnose(reason)
                if self.mirror is not None:
                    self.mirror.tell(failed=reason)
            ranks.end()
            return _status(ranks, reason), reason
        except (KeyboardInterrupt, _Stopped) as stop:
            number = stop.number if isinstance(stop, _Stopped) else int(signal.SIGINT)
            try:
                ranks.end(number)
            except (KeyboardInterrupt, _Stopped):  # once more: no patience
                ranks.kill()
            raise
        finally:
            ranks.kill()
            if watch is not None:
                watch.close()

    def _watch(self, ranks: Ranks, watch: Watch) -> str:
        """Wait for the end; "" for a good one, else what happened."""
        next_comparison = time.monotonic() + _DIVERGENCE_SECONDS
        next_judgement = 0.0
        suspected = False
        while True:
            ranks.check()
            running = [rank.rank for rank in ranks.running]
            if ranks.failed:
                return self._after_failure(ranks)
            watch.look(running)
            quiet = watch.quiet_seconds(running)
            waiting = watch.waiting(running)
            if self.mirror is not None:
                elsewhere, quiet = self._exchange(self.mirror, quiet, bool(running))
                if elsewhere is not None:
                    return elsewhere
            elif not running:
                return ""
            if quiet > self.options.hang_timeout and time.monotonic() > next_judgement:
                reason = f"no rank has made progress for {quiet:.0f} s"
                judgement = self._judge()
                if judgement.stuck:
                    self.judgement = judgement
                    return reason
                next_judgement = time.monotonic() + self.options.hang_timeout
                say_at_length(f"{reason}, but none is stuck; still waiting ({judgement.verdict})")
            ended = len(running) < len(ranks.ranks)
            if ended and waiting and quiet > min(self.options.hang_timeout, _AFTER_THE_END):
                return f"ranks have waited {quiet:.0f} s for a rank that has finished"
            if time.monotonic() > next_comparison and waiting:
                next_comparison = time.monotonic() + _DIVERGENCE_SECONDS
                if diverged(self.run_dir):
                    if suspected:  # seen twice: not a moment between two events
                        return "the collectives of the ranks don't match"
                    suspected = True
            say_at_length(watch.reminder(running))
            time.sleep(_LOOK_SECONDS)

    def _exchange(self, mirror: Mirror, quiet: float, running: bool) -> tuple[str | None, float]:
        """With other machines: (how the run ended, if it has; for how long nothing moved anywhere).

        Machine 0 decides that nothing moves; the others never see that much quiet.
        """
        now = time.monotonic()
        if now - self._told > _TELL_SECONDS or running != self._was_running:
            self._told, self._was_running = now, running
            mirror.tell(quiet=quiet if running else None)
        heard = mirror.heard()
        failed = next((said["failed"] for said in heard.values() if said.get("failed")), None)
        if failed is not None:
            return str(failed), quiet
        others = [said.get("quiet") for said in heard.values()]
        all_there = len(heard) == self.options.nnodes - 1
        if not running and all_there and all(value is None for value in others):
            return "", quiet
        if mirror.lost:
            return mirror.lost, quiet
        if self.options.node_rank or not all_there:
            return None, 0.0
        return None, min([quiet if running else math.inf, *(v for v in others if v is not None)])

    def _after_failure(self, ranks: Ranks) -> str:
        """A rank failed: the others may end by themselves, and say why, for a few seconds."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while ranks.running and time.monotonic() < deadline:
            ranks.check()
            time.sleep(_LOOK_SECONDS / 2)
        first = ranks.failed[0]
        return f"rank {first.rank} {first.describe_end()}"

    def _diagnose(self, reason: str) -> None:
        """Print what is wrong and keep it in the run directory, while the ranks are still there."""
        say(reason)
        if self.options.node_rank:
            say("the launcher of machine 0 prints the diagnosis")
            return
        judgement = self.judgement or self._judge()
        problem = judgement.keep(self.run_dir)
        print(f"\n{judgement.text}\n", file=sys.stderr, flush=True)
        if not self.options.temporary:
            say(problem or f"diagnosis: {_shown(self.run_dir / 'doctor.txt')}")

    def _second_thoughts(self) -> None:
        """Every rank ended well; what was wrong, or slow, all the same is said."""
        if self.options.node_rank or self.options.temporary:
            return
        judgement = judge(self.run_dir, self.options.hang_timeout)
        if not judgement.healthy:
            say_at_length(judgement.verdict)
            say(f"for details, run miniray doctor {_shown(self.run_dir)}")

    def _judge(self) -> Judgement:
        if self.mirror is not None:
            self.mirror.ask_for_stacks()
        return judge(self.run_dir, self.options.hang_timeout)


def _status(ranks: Ranks, reason: str) -> int:
    if not reason:
        return 0
    first = next(iter(ranks.failed), None)
    if first is None or first.code is None:
        return 1
    return first.code if first.code > 0 else 128 - first.code


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class _Stopped(BaseException):
    """SIGTERM or SIGHUP came; ``KeyboardInterrupt`` stands for SIGINT."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _take_signals() -> dict[int, object]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    return {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}


def _give_signals_back(before: dict[int, object]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
