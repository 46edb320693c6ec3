"""``TorchWorker``: the worker of a torch user, written down to its model and its loss.

::

    @miniray.remote
    class Classifier(TorchWorker):
        def setup(self, lr=1e-3):
            self.model = make_model()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
            self.train_loader = DataLoader(make_data(), batch_size=64, shuffle=True)

        def training_step(self, batch, batch_idx):
            images, labels = batch
            return functional.cross_entropy(self.model(images), labels)

All else a trainer asks of a worker is here, and each part of it may be overridden. torch is
imported when a worker is made, not with this module.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from miniray.ps import to_host
from miniray.train.gpus import find_device
from miniray.train.optimizer_steps import OptimizerOptions, OptimizerSteps, create_ignored_error
from miniray.train.pretrained import SavedFiles, write_model
from miniray.train.workers import torch_utils as parts
from miniray.train.workers.context import BoundAttributes, MetricLog, WorkerContext
from miniray.train.workers.data.batches import count_samples, count_tokens, move_batch
from miniray.train.workers.data.loaders import (
    check_not_started,
    create_eval_loader,
    load_loader_state,
    shard_loader,
)
from miniray.train.workers.group import filter_kwargs

if TYPE_CHECKING:
    from typing_extensions import Self

    from miniray.train.steps import StepOptions


class TorchWorker:
    """Base class of workers that train a torch model.

    Subclasses implement ``training_step``, and set ``model``, ``optimizer`` and the loaders in
    ``setup``. The trainer sets the attributes from ``rank`` on before ``setup``, unless the class
    defines them itself.

    Attributes:
        model: A module. To train several models, use a ``torch.nn.ModuleDict``.
        optimizer: The optimizer of the model. Additional optimizers and learning rate schedulers
            can be attributes of any name and are saved as well. A scheduler named ``scheduler`` is
            stepped after every epoch, or after every step if ``scheduler_interval = "step"``. A
            ``ReduceLROnPlateau`` receives the worker's mean loss.
        train_loader: A ``DataLoader`` over the complete training data. Each worker trains on its
            own rows. Unless the worker implements ``load_data_shard``, the loader must use a
            dataset with a length, shuffled or in order.
        val_loader: The same for ``evaluate()`` without data. Optional.
        rank, world_size, device: Index of the worker, number of workers, and the worker's GPU or
            ``"cpu"``.
        global_step: Completed steps of the run.
        epochs, total_steps: Length of the run. With ``train(epochs=...)``, ``total_steps`` is None
            in ``setup``, and always if the loader has no length.
        log: ``self.log(name, value)`` in ``training_step`` and ``validation_step`` adds a metric: a
            mean over the batch, or a pair of a sum and a count.

    A subclass can implement ``configure_scheduler(optimizer, total_steps)``, which returns
    ``scheduler``. It is stepped after every step, unless the class sets
    ``scheduler_interval = "epoch"``.

    If ``model``, ``optimizer`` or a loader is missing, ``TypeError`` names it before training
    starts. If the trainer reserved a GPU for the worker, the model is moved to it. Batches are
    moved to the device of the model, including tensors inside tuples, lists and dicts.
    """

    model: Any
    optimizer: Any
    train_loader: Any
    rank: int
    world_size: int
    device: str
    global_step: int
    epochs: int | None
    total_steps: int | None
    log: MetricLog
    _is_placed = False  # other classes, which may use these methods, place their models
    _step_options = OptimizerOptions()
    _steps: OptimizerSteps | None = None
    _limits: StepOptions | None = None
    _attributes: BoundAttributes

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        context = WorkerContext.from_environment()
        context.bind(worker)  # before the subclass's __init__, which needn't call this one's
        worker._attributes = BoundAttributes.of(worker, context)
        return worker

    def __init__(self, worker_id: int = 0, **kwargs: Any) -> None:
        self.worker_id = worker_id
        given = {"worker_id": worker_id, **kwargs}
        self.setup(**filter_kwargs(inspect.signature(self.setup), given))

    def setup(self) -> None:
        """Create the model, the optimizer and the loaders.

        ``setup`` receives ``worker_id`` and the keyword arguments of ``train()`` that its signature
        accepts. Subclasses can implement ``__init__`` instead.
        """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a batch, or a dict with ``loss`` and other means over the batch.

        The parameter ``batch_idx`` is optional.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement training_step(self, batch, batch_idx), which "
            "returns the loss, or train_epoch(self, epoch)"
        )

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return metrics of a batch for ``evaluate``. A value may be a pair ``(sum, count)``.

        By default, call ``training_step`` without gradients.
        """
        return parts.step_of(self.training_step)(batch, batch_idx)

    def optimize(self, loss: Any) -> None:
        """Take an optimizer step for the loss of a batch. Override it to train differently.

        It isn't called with ``accumulate``, ``precision`` or ``clip_norm`` of the trainer.
        """
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    # -- what trainers call -----------------------------------------------------------------------

    def set_step_options(self, options: OptimizerOptions) -> None:
        """Set how ``train_epoch`` takes optimizer steps."""
        cls = type(self)
        if any(
            getattr(cls, name) is not getattr(TorchWorker, name)
            for name in ("train_epoch", "train_steps", "optimize")
        ):
            raise create_ignored_error(options, cls.__name__)
        self._step_options = options

    def _set_limits(self, options: StepOptions) -> None:
        """Set how many batches are used in an epoch and in an evaluation."""
        if not uses_training_step(type(self)):
            raise options.create_limits_error(type(self).__name__)
        self._limits = options
        self._get_progress().set_limit(options.train_limit, options.overfits)

    def _prepare_steps(self, first_step: int, epochs: int | None, total_steps: int | None) -> None:
        """Create the scheduler that depends on the length of the run; see ``_set_length``."""
        self._set_length(first_step, epochs, total_steps)
        parts.configure_scheduler(self, total_steps)

    def _set_length(self, first_step: int, epochs: int | None, total_steps: int | None) -> None:
        """Set the fields of ``RunLength``."""
        self._get_progress().first_step = first_step
        self._attributes.update(epochs=epochs, total_steps=total_steps)

    def load_data_shard(self, shard_id: int, num_shards: int, data: Any = None) -> None:
        """Train on ``data`` or on a shard of ``train_loader``.

        ``data`` is a loader that the trainer has sharded (``data=``). Without it, keep the rows
        ``shard_id``, ``shard_id + num_shards``, … of ``train_loader``. A worker that implements
        ``train_epoch`` and has no loader isn't changed.
        """
        if data is not None:
            self.train_loader = data
            return
        own_loop = not trains_steps(type(self))
        if own_loop and not hasattr(self, "train_loader"):
            return
        loader = self._part("train_loader")
        check_not_started(loader, "self.train_loader", num_shards)
        self.train_loader = shard_loader(loader, shard_id, num_shards)

    def train_epoch(self, epoch: int) -> dict[str, Any]:
        """Train on every batch, and return means over the samples and ``num_samples``."""
        result = self.train_steps(epoch)
        del result["num_steps"]
        return result

    def train_steps(self, epoch: int, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """Train the steps ``start`` to ``stop - 1`` of an epoch, or all that are left.

        ``DataParallelTrainer`` calls it several times per epoch, and logs, evaluates, saves or
        stops in between. The weights are the same as after one call of ``train_epoch``.

        Returns:
            The means over the samples of the epoch so far, ``num_samples``, and ``num_steps``, the
            completed steps of the epoch. It is less than ``stop`` if the epoch has ended.
        """
        model, loader = self._part("model"), self._part("train_loader")
        self._part("optimizer")
        model.train()
        steps, progress, log = self._get_steps(), self._get_progress(), MetricLog.find(self)
        progress.open(loader, epoch, start, steps.accumulate)
        was_complete = progress.is_complete
        device, step = parts.device_of(model), parts.step_of(self.training_step)
        for first, window in progress.iter_steps(stop):
            self._attributes.update(global_step=progress.global_step)
            steps.start_step()
            batches = steps.weigh_batches(window)
            for batch_idx, (batch, weight, is_last) in enumerate(batches, first):
                batch = move_batch(batch, device)
                with steps.autocast():
                    values = parts.as_dict(step(batch, batch_idx), "training_step")
                steps.train_on(values["loss"], weight, is_last)
                values = {**log.take(), **values}
                progress.add(values, count_samples(batch), count_tokens(batch))
        self._attributes.update(global_step=progress.global_step)
        result = progress.means.means()
        if progress.is_complete and not was_complete:
            steps.end_epoch(result.get("loss"))
        return {**result, "num_steps": progress.step}

    def _has_own_loop(self) -> bool:
        """Return whether a subclass trains epochs in its own way, not with ``train_steps``."""
        return not trains_steps(type(self))

    def _get_progress(self) -> Any:
        """Return the position in the epoch. ``__init__`` of a subclass may not call this one."""
        from miniray.train.workers.data.worker_epoch import WorkerEpoch

        return vars(self).setdefault("_progress", WorkerEpoch())

    def count_steps(self, epoch: int, start: int = 0) -> int | None:
        """Return the steps of an epoch whose next step is ``start``; None if they aren't known."""
        loader, accumulate = self._part("train_loader"), self._get_steps().accumulate
        count: int | None = self._get_progress().count_steps(loader, epoch, start, accumulate)
        return count

    def _count_equal_epochs(self) -> int | None:
        """Return the number of steps of each epoch; None if it isn't known or differs."""
        dataset = getattr(self._part("train_loader"), "dataset", None)
        is_equal = getattr(dataset, "has_fixed_shares", True)  # groups of miniray.data have not
        return self.count_steps(self._get_progress().epoch + 1) if is_equal else None

    def take_log(self) -> Any:
        """Return the metrics of the steps since the last call, as a ``LogWindow``."""
        return self._get_progress().take_window(self._get_steps().measure())

    def evaluate(self, data: Any = None, shard_id: int = 0, num_shards: int = 1) -> dict[str, Any]:
        """Return sums and counts over ``data`` (a dataset, rows or columns) or ``val_loader``."""
        if data is not None:
            return self._sum_scores(create_eval_loader(data, getattr(self, "train_loader", None)))
        loader = shard_loader(self._part("val_loader"), shard_id, num_shards)
        limit = None if self._limits is None else self._limits.limit_val_batches
        return self._sum_scores(loader, limit)

    def _check_validation(self, shard_id: int, num_shards: int, max_batches: int) -> None:
        """Validate on a few batches, and discard the scores. No state changes."""
        cls, loader = type(self), getattr(self, "val_loader", None)
        is_default = cls.validation_step is TorchWorker.validation_step  # the first step shows more
        if loader is None or is_default or cls.evaluate is not TorchWorker.evaluate:
            return
        with parts.preserve_state([self._part("model")], loader):
            self._sum_scores(shard_loader(loader, shard_id, num_shards), max_batches)

    def _sum_scores(self, loader: Iterable[Any], most: int | None = None) -> dict[str, Any]:
        """Return sums and counts over at most ``most`` batches."""
        import torch

        model = self._part("model")
        was_training = model.training
        model.eval()
        means, log = parts.Means(), MetricLog.find(self)
        device, step = parts.device_of(model), parts.step_of(self.validation_step)
        try:
            # Training continues with the random numbers it had before.
            with torch.no_grad(), parts.keep_random_state(), self._get_steps().autocast():
                for batch_idx, batch in enumerate(itertools.islice(loader, most)):
                    batch = move_batch(batch, device)
                    values = parts.as_dict(step(batch, batch_idx), "validation_step")
                    means.add({**log.take(), **values}, count_samples(batch))
        finally:
            model.train(was_training)
        return means.sums()

    def get_weights(self) -> dict[str, Any]:
        """Return the parameters and buffers of the model in host memory."""
        weights: dict[str, Any] = to_host(self._part("model").state_dict())
        return weights

    def set_weights(self, weights: dict[str, Any]) -> None:
        """Set the parameters and buffers of the model to the result of ``get_weights``."""
        self._part("model").load_state_dict(weights)

    def _write_pretrained(
        self, directory: str | None, send_files: bool, weights: Any = None
    ) -> SavedFiles:
        """See ``write_model``."""
        return write_model(self, self._part("model"), directory, send_files, weights)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all optimizers. Called by ``LRSchedule``."""
        for optimizer in parts.stateful(self, optimizers_only=True).values():
            for group in optimizer.param_groups:
                group["lr"] = lr

    def get_state(self) -> dict[str, Any]:
        """Return the state of optimizers, schedulers, random numbers and the loader."""
        progress = self._get_progress()
        return {
            "parts": {name: part.state_dict() for name, part in parts.stateful(self).items()},
            "scaler": {} if self._steps is None else self._steps.scaler.state_dict(),
            "random": parts.random_state(),
            "loader": progress.get_loader_state(getattr(self, "train_loader", None)),
            "epoch": progress.state_dict(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state of ``get_state``. Raise ``ValueError`` if the worker has different
        parts.
        """
        mine = parts.stateful(self)
        if set(mine) != set(state["parts"]):
            raise ValueError(
                f"the state has {sorted(state['parts'])}, this {type(self).__name__} has "
                f"{sorted(mine)}"
            )
        for name, part in mine.items():
            part.load_state_dict(state["parts"][name])
        if scaler := state.get("scaler"):
            self._get_steps().scaler.load_state_dict(scaler)
        load_loader_state(getattr(self, "train_loader", None), state["loader"])
        if "epoch" in state:
            self._get_progress().load_state_dict(state["epoch"])
        parts.set_random_state(state["random"])

    def _get_steps(self) -> OptimizerSteps:
        if self._steps is None:
            self._part("model")
            self._steps = OptimizerSteps(self, self._step_options)
        return self._steps

    def _part(self, name: str) -> Any:
        found = getattr(self, name, None)
        if found is None:
            raise TypeError(f"{type(self).__name__}.setup() (or __init__) must set self.{name}")
        if name == "model" and getattr(self, "_is_placed", True) is False:
            self._is_placed = True
            if (device := find_device()) != "cpu":
                found.to(device)
        return found


def trains_steps(worker_class: type) -> bool:
    """Return whether ``train_steps`` of a class trains what its ``train_epoch`` does."""
    train_steps = getattr(worker_class, "train_steps", None)
    if train_steps is not TorchWorker.train_steps:
        return train_steps is not None
    return getattr(worker_class, "train_epoch", None) is TorchWorker.train_epoch


def uses_training_step(worker_class: type) -> bool:
    """Return whether ``TorchWorker`` trains the epochs of a class, with its ``training_step``."""
    train_steps = getattr(worker_class, "train_steps", None)
    return train_steps is TorchWorker.train_steps and trains_steps(worker_class)
