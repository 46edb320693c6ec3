"""One rank of a split model: everything that happens in the worker's process.

A rank goes through ``prepare`` (rank 0 measures, plans and refuses what cannot be, before anybody
waits for anybody), ``join``, one ``epoch`` after the other, ``leave``. An error leaves the group in
an unknown state: the driver ends all ranks, and the process is not used again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from miniray.core import session
from miniray.doctor import barriers, instrument, recorder
from miniray.errors import PeerLostError
from miniray.train import ddp_data, group
from miniray.train import torch_parts as parts
from miniray.train.ddp_output import marked_output, tame_tqdm
from miniray.train.ddp_rank import is_consequence
from miniray.train.parallel import gradients, planning, state
from miniray.train.parallel.feed import Feed, RandomNumbers
from miniray.train.parallel.job import Job, Plan
from miniray.train.parallel.layers import build_model, read_layers
from miniray.train.parallel.layout import DIMENSIONS
from miniray.train.parallel.pulse import StagePulse
from miniray.train.parallel.stages import PipelineRunner, StepRecord, WholeRunner
from miniray.train.parallel.tensor import apply_plan, check_same
from miniray.train.parallel.timeline import bubble, busy_seconds

__all__ = ["ModelRank"]


class ModelRank:
    """The rank of a worker; see the module."""

    def __init__(self, rank: int, job: Job) -> None:
        self.rank, self.job, self.layout = rank, job, job.layout
        self.place = job.layout.place(rank)
        mine = torch.cuda.is_available() and session.get_gpu_ids()
        self.device = torch.device("cuda:0" if mine else "cpu")
        self.loader: Any = None
        self.loads = self.place.pipeline == self.place.tensor == 0
        self.random = RandomNumbers(job.seed + 1_000_003 * (1 + self.place.data))
        self.pulse: Any = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.runner: Any = None
        self._windows: Any = None
        self._recorder: Any = None
        self._has_boxes = False
        self._open = contextlib.ExitStack()

    # -- before the ranks meet --------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Who this is; and on rank 0 the plan. Raises what is wrong with the user's input."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        gpu = None
        if self.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        if self.loads:
            with self.random():
                self._open_loader()
        plan = None
        if self.rank == 0:
            with self.random():
                plan = planning.make_plan(self.job, self.loader, self._windows, self.device)
        return {"host": socket.gethostname(), "gpu": gpu, "device": self.device.type, "plan": plan}

    def _open_loader(self) -> None:
        loader = planning.make_loader(self.job.data, "data")
        copies = self.layout.data
        if copies > 1 and not isinstance(loader, torch.utils.data.DataLoader):
            raise TypeError(
                f"data= gives a {type(loader).__name__}, which cannot be dealt out to {copies} "
                "copies of the model; pass a torch DataLoader"
            )
        ddp_data.check_loader(loader, "data")
        self.loader, plan = ddp_data.own_share(
            loader,
            self.place.data,
            copies,
            accumulate=1,
            uneven="join",
            seed=self.job.seed,
            sharded=False,
        )
        if plan is not None:
            self._windows = list(plan.windows(self.place.data))
        elif copies > 1:
            raise ValueError(
                "the DataLoader of data= has a sampler of its own: leave it out, and the samples "
                f"are dealt out to the {copies} copies of the model"
            )

    # -- together ---------------------------------------------------------------------------------

    def join(self, spec: Any, plan: Plan, one_machine: bool) -> int | None:
        """Join the group and build this rank's part of the model; returns an epoch's steps."""
        job, layout = self.job, self.layout
        if job.own_process:
            folder = job.run_dir if os.path.isdir(job.run_dir or "") else None
            self._open.enter_context(marked_output(self.rank, layout.world_size, folder))
            self._recorder = self._record(folder)
            self._has_boxes = one_machine and folder is not None
            tame_tqdm(self.rank)
            # On any error it prints the whole schedule of all ranks, hundreds of lines a rank.
            logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
        store = group.join(spec, self.rank)
        self._open.callback(group.leave)
        self.pulse = StagePulse(spec, self.rank, store)
        self._open.callback(self.pulse.close)
        self.pulse.at("building the model")
        self.plan = plan
        sizes = (layout.data, layout.pipeline, layout.tensor)
        self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=DIMENSIONS)
        self.record = StepRecord(self._tell_work, self._tell_wait)
        self._build()
        self._feed = self._make_feed()
        self.pulse.at("idle")
        return None if self._windows is None else len(self._windows)

    def _record(self, run_dir: str | None) -> Any:
        """This process's black box: what it did last is known whatever ends it."""
        if run_dir is None:
            return None
        instrument.install()
        current = recorder.current()
        if current is None:
            current = recorder.start(
                run_dir,
                self.rank,
                self.layout.world_size,
                launcher="miniray",
                attempt=self.job.attempt,
            )
            self._open.callback(recorder.stop)
        return current

    def _build(self) -> None:
        job, plan, layout, place = self.job, self.plan, self.layout, self.place
        if layout.pipeline > 1:
            layers = read_layers(job.model, job.seed)
            modules = layers.stages(
                plan.stages.bounds, plan.stages.mine(place.pipeline), plan.sample
            )
        else:
            modules = {0: planning.whole_model(build_model(job.model, job.seed), job.seed)}
        for module in modules.values():
            module.to(self.device)
        if layout.pipeline > 1:
            ranks = [
                layout.rank(place.data, plan.stages.holder(stage), place.tensor)
                for stage in range(len(plan.stages.sizes))
            ]
            pipeline = self.mesh.get_group("pipeline")
            self.runner = PipelineRunner(
                modules, plan.stages, ranks, pipeline, job.loss, self.device, self.record
            )
        else:
            self.runner = WholeRunner(modules[0], job.microbatches, job.loss, self.record)
        if plan.tensor is not None:
            self._split_tensors()
        self.parameters = [p for m in modules.values() for p in m.parameters() if p.requires_grad]
        self.optimizer = self._make_optimizer()
        if job.lr_scheduler is not None:
            self.scheduler = job.lr_scheduler(self.optimizer)
        # Shards of one layer draw the same numbers: what is not cut must stay the same on all.
        torch.manual_seed(job.seed + 7919 * (place.data * layout.pipeline + place.pipeline))

    def _split_tensors(self) -> None:
        """Cut the weights, and see that the model still computes the same."""
        plan, modules = self.plan.tensor, self.runner.modules
        inputs = parts.moved(self.plan.sample, self.device)
        kept = torch.get_rng_state()
        for module in modules.values():
            module.eval()
        with torch.no_grad():
            before = self.runner.forward(inputs)
            for module in modules.values():
                names = {name for name, _ in module.named_modules()}
                apply_plan(module, plan.within(names), self.mesh["tensor"])
            try:
                after = self.runner.forward(inputs)
            except (RuntimeError, ValueError) as error:
                if is_consequence(error):
                    raise
                raise ValueError(
                    f"the plan does not fit the model: with it, its forward pass fails ({error})\n"
                    f"{plan.table()}"
                ) from error
        if before is not None:
            check_same(before, after, plan)
        torch.set_rng_state(kept)

    def _make_optimizer(self) -> Any:
        optimizer = self.job.optimizer(self.parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "optimizer= must be a function of a list of parameters that returns a torch "
                f"optimizer; it returned a {type(optimizer).__name__}"
            )
        if self.plan.tensor is not None:
            for options in optimizer.param_groups:
                # Their versions for many tensors at once refuse cut and whole ones in one list.
                options["foreach"] = False
        return optimizer

    def _make_feed(self) -> Feed:
        layout, data = self.layout, self.place.data
        copies = [dist.new_group(layout.copy_ranks(d)) for d in range(layout.data)]
        last = (
            0 if layout.pipeline == 1 else self.plan.stages.holder(len(self.plan.stages.sizes) - 1)
        )
        shards = range(layout.tensor)
        return Feed(
            source=layout.rank(data, 0, 0),
            members=layout.copy_ranks(data),
            group=copies[data],
            input_ranks=[layout.rank(data, 0, t) for t in shards],
            target_ranks=[layout.rank(data, last, t) for t in shards],
            device=self.device,
        )

    # -- an epoch ---------------------------------------------------------------------------------

    def epoch(self, epoch: int) -> dict[str, Any]:
        """Train one epoch; what this rank has to say about it."""
        with self._peers_named():
            return self._epoch(epoch)

    @contextlib.contextmanager
    def _peers_named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # the store may be gone: then nobody reads it
                self.pulse.post()
            if is_consequence(error):
                raise PeerLostError(
                    f"rank {self.rank} lost the other ranks at step {self.pulse.step}: {error}"
                ) from error
            raise

    def _epoch(self, epoch: int) -> dict[str, Any]:
        pulse = self.pulse
        pulse.epoch, pulse.step = epoch, -1
        if self._recorder is not None:
            self._recorder.set_epoch(epoch)
            self._recorder.note(steps_before_epoch=self._recorder.step_number)
        pulse.at("starting the loader")
        for module in self.runner.modules.values():
            module.train()
        items = self._items(epoch) if self.loads else None
        self._barrier("before-iteration")
        means, times, spans, began = parts.Means(), [], self.record.spans, 0.0
        for step, (count, inputs, target) in enumerate(self._feed.batches(items)):
            pulse.at("step", step=step)
            loss = self._step(step, count, inputs, target)
            if loss is not None:
                means.add({"loss": loss}, count)
            if count == self.plan.batch_size:
                spans, began = self.record.spans, self.record.began
                times.append((busy_seconds(spans), self.record.wall))
        pulse.at("end of the epoch")
        self._share_buffers()
        self._barrier("epoch-end")
        if self.scheduler is not None:
            self.scheduler.step()
        pulse.at("idle")
        # The first step also connects the ranks and finds out shapes.
        steady = times[1:] or times
        return {
            "means": means.means(),
            "busy": [busy for busy, _ in steady],
            "wall": [wall for _, wall in steady],
            "spans": [tuple(span) for span in spans],  # of the last step with a whole batch
            "began": began,
            "peak_activations": self.record.peak_activations,
        }

    def _items(self, epoch: int) -> Iterator[Any]:
        """This copy's batches; None where only other copies have one."""
        ddp_data.set_epoch(self.loader, epoch)
        batches = self._drawn(self.loader)

        def items() -> Iterator[Any]:
            windows = iter(self._windows) if self._windows is not None else None
            while True:
                if windows is not None:
                    window = next(windows, None)
                    if window is None:
                        return
                    if not window.weights:
                        yield None
                        continue
                self._tell_wait("data")
                batch = next(batches, None)
                if batch is None:
                    return
                yield batch

        return items()

    def _drawn(self, loader: Any) -> Iterator[Any]:
        """The loader's batches, made with random numbers of their own."""
        with self.random():
            batches = iter(loader)  # its processes start here, before anybody waits

        def draw() -> Iterator[Any]:
            while True:
                with self.random():
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

        return draw()

    def _step(self, number: int, count: int, inputs: Any, target: Any) -> Any:
        job, record = self.job, self.record
        self.optimizer.zero_grad(set_to_none=True)
        record.begin(measure_memory=number == 0)
        loss = None
        if count:
            loss = self.runner.train(count, self.plan.batch_size, inputs, target)
        record.end()
        if loss is not None:
            self._check(loss, number)
        self._tell_wait("gradients")
        if self.layout.data > 1:
            data = self.mesh.get_group("data")
            gradients.average_over_copies(self.parameters, count, data, self.device)
        if job.clip_norm is not None:
            gradients.clip(
                self.parameters,
                job.clip_norm,
                self.mesh.get_group("tensor") if self.layout.tensor > 1 else None,
                self.mesh.get_group("pipeline") if self.layout.pipeline > 1 else None,
            )
        self._tell_wait("optimizer")
        self.optimizer.step()
        return loss

    def _check(self, loss: Any, number: int) -> None:
        value = loss.item()
        if self._recorder is not None:
            self._recorder.set_loss(value, "")
        if self.job.on_nonfinite == "error" and value - value != 0:  # NaN and infinities
            raise FloatingPointError(
                f"the loss is {value} on rank {self.rank} at step {number} of epoch "
                f'{self.pulse.epoch}; on_nonfinite="ignore" would train on with it'
            )

    def _share_buffers(self) -> None:
        """Give all copies the first one's buffers (running statistics)."""
        if self.layout.data == 1:
            return
        source = self.layout.rank(0, self.place.pipeline, self.place.tensor)
        for module in self.runner.modules.values():
            for buffer in module.buffers():
                dist.broadcast(buffer, src=source, group=self.mesh.get_group("data"))

    # -- evaluation -------------------------------------------------------------------------------

    def evaluate(self, data: Any) -> dict[str, Any]:
        """Sums and counts over this copy's part of ``data``; nothing where it has no last stage."""
        with self._peers_named():
            self.pulse.at("evaluation")
            for module in self.runner.modules.values():
                module.eval()
            means = parts.Means()
            functions = {"loss": self.job.loss, **self.job.metrics}
            items = self._evaluation_items(data) if self.loads else None
            with torch.no_grad():
                for count, inputs, target in self._feed.batches(items):
                    output = self.runner.forward(inputs)
                    if output is not None:
                        means.add({k: f(output, target) for k, f in functions.items()}, count)
            self.pulse.at("idle")
            return means.sums()

    def _evaluation_items(self, data: Any) -> Iterator[Any]:
        given = self.job.val_data if data is None else data
        loader = planning.make_loader(given, "val_data", self.plan.batch_size)
        if self.layout.data > 1:
            loader = planning.evaluation_share(loader, self.place.data, self.layout.data)
        return self._drawn(loader)

    # -- the small parts --------------------------------------------------------------------------

    def _tell_work(self, what: str) -> None:
        self.pulse.at(what)
        if self._recorder is not None:
            self._recorder.set_section(what, "")

    def _tell_wait(self, what: str) -> None:
        self.pulse.at(what)

    def _barrier(self, name: str) -> None:
        """Wait for all ranks; over the black boxes, which the doctor reads, or over the store."""
        if not self._has_boxes:
            self.pulse.barrier(name)
            return
        self.pulse.at(f"barrier {name!r}")
        barriers.barrier(name, timeout=self.pulse.limit)
        self.pulse.at(f"after barrier {name!r}")

    # -- state ------------------------------------------------------------------------------------

    def weights(self) -> dict[int, dict[str, Any]]:
        """This rank's stages in one piece; nothing where another rank says the same."""
        if self.place.data:
            return {}
        found = state.weights_of(self.runner.modules)
        return {} if self.place.tensor else found

    def load_weights(self, weights: Any) -> None:
        state.load_weights(self.runner.modules, weights)

    def shared_state(self) -> dict[str, Any] | None:
        """The optimizer's state of this rank's weights, and what all ranks share."""
        if self.place.data:
            return None
        found = state.optimizer_state(self.optimizer, self.runner.modules)
        if self.place.tensor:
            return None
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"optimizer": found, "scheduler": scheduler, "seed": self.job.seed}

    def load_shared(self, shared: Any) -> None:
        state.load_optimizer(self.optimizer, self.runner.modules, shared["optimizer"])
        if self.scheduler is not None and shared["scheduler"] is not None:
            self.scheduler.load_state_dict(shared["scheduler"])
        sampler = getattr(self.loader, "batch_sampler", None)
        if isinstance(sampler, ddp_data.PlannedBatches):
            sampler.seed = shared["seed"]

    def own_state(self) -> dict[str, Any]:
        """This rank's random numbers, and where its loader is."""
        loader = None if self.loader is None else parts.loader_state(self.loader)
        return {"random": parts.random_state(), "data": self.random.state, "loader": loader}

    def load_own(self, saved: Any) -> None:
        if self.loader is not None and saved["loader"] is not None:
            parts.load_loader_state(self.loader, saved["loader"])
        self.random.state = saved["data"]
        parts.set_random_state(saved["random"])

    def set_lr(self, lr: float) -> None:
        for options in self.optimizer.param_groups:
            options["lr"] = lr

    def leave(self) -> None:
        """Leave the group and give the process back as it was."""
        self._open.close()


def measured_bubble(results: list[dict[str, Any]]) -> float | None:
    """The mean bubble over an epoch's steps of one copy's workers; None where there was none."""
    steps = min(len(result["wall"]) for result in results)
    found = [
        bubble([r["busy"][i] for r in results], [r["wall"][i] for r in results])
        for i in range(steps)
    ]
    return sum(found) / len(found) if found else None
