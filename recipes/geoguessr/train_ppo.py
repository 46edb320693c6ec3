r"""Train a vision-language model with GRPO or PPO to locate photos.

    python recipes/geoguessr/train_ppo.py [--algorithm ppo] [--workers 2] [--steps 80] [--quick]

The policy starts with random weights. A supervised warm-up teaches it the format of an answer. Then
it learns from a reward that decreases with the distance. Each worker reads its own rows, and the
driver receives only numbers. The run directory contains plots (``geoguessr.png``), results
(``geoguessr.json``), metrics and checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import make_data
import numpy as np
import plots
from place_worker import PlaceLoader, PlaceWorker, place_reward
from policy import ANSWER_TOKENS, SIZES, PlacePolicy

from miniray.limits import cpu_count
from miniray.rl import GRPOConfig, GRPOTrainer, KLPenalty, PPOConfig, PPOTrainer, Sampling, pool
from miniray.train import Checkpoint
from miniray.train.run.progress import Steps

EVALUATIONS = 10  # in a run


class WarmUp:
    """Before the first step of a new run: guesses, supervised steps, guesses."""

    worker_class = PlaceWorker

    def on_train_start(self: Any, warm_up: int = 0, warm_up_lr: float = 1e-3) -> None:
        super().on_train_start()
        self.guesses: dict[str, np.ndarray] = {}
        self.start: float | None = None  # mean reward on held-out rows before the first step
        if self.epoch:  # resumed from a checkpoint
            return
        self.guesses["untrained"] = self.guess()
        if warm_up:
            self.say(f"Warm-up: {warm_up} supervised steps on correct answers.")
        with Steps(warm_up, "warm-up", "steps", enabled=self.options.progress) as bar:
            for step in range(warm_up):
                told = pool(self.call_workers("warm_up", step, warm_up, warm_up_lr))
                bar.advance(note=f"loss={told['loss'][0] / told['loss'][1]:.3f}")
        if warm_up:
            self.guesses["warm-up"] = self.guess()
            self.start = self.evaluate()["reward"]
            self.say(f"Held-out reward after the warm-up: {self.start:.3f}")
        self.say("Training on sampled answers, with the distance reward.")

    def on_epoch_end(self: Any, epoch: int, result: dict[str, Any]) -> None:
        super().on_epoch_end(epoch, result)
        if "val_reward" in result:
            self.say(f"Held-out reward after step {epoch + 1}: {result['val_reward']:.3f}")

    def say(self: Any, text: str) -> None:
        if self.options.progress:
            click.echo(text, err=True)

    def guess(self: Any) -> np.ndarray:
        """Return the most likely answer of the current policy for each held-out row."""
        count = self.num_workers
        made = self._group.call("guess", lambda i: (i, count), {})
        return np.array([line for part in made for line in part])


class PlaceGRPO(WarmUp, GRPOTrainer):
    pass


class PlacePPO(WarmUp, PPOTrainer):
    pass


def find_data(folder: Path, rows: int, test_rows: int) -> dict[str, list[str]]:
    """Return the files of each split. Create them first if the directory doesn't exist."""
    if not folder.exists():
        click.echo(
            f"Creating {rows:,} training rows and {test_rows:,} held-out rows in {folder}.",
            err=True,
        )
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        processes = 1 if rows + test_rows < 200 else None
        try:
            make_data.write_set(
                unfinished, rows, test_rows, rows_per_group=64, processes=processes, progress=True
            )
        except BaseException:  # Ctrl-C or a full disk: delete the incomplete files
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        unfinished.rename(folder)
    found = {
        split: sorted(map(str, folder.glob(f"{split}-*.parquet"))) for split in make_data.SPLITS
    }
    missing = [split for split, files in found.items() if not files]
    if missing:
        raise click.ClickException(
            f"{folder} contains no {missing[0]}-*.parquet. Create it with make_data.py."
        )
    return found


def make_trainer(
    files: dict[str, list[str]],
    *,
    algorithm: str,
    size: str,
    steps: int,
    workers: int,
    prompts: int,
    rollouts: int,
    lr: float,
    seed: int,
    device: str = "auto",
    precision: str = "fp32",
    micro_batch_tokens: int = 16_384,
    **options: Any,
) -> PlaceGRPO | PlacePPO:
    """Create the trainer without starting anything."""
    ppo, several_gpus = algorithm == "ppo", device == "cuda" and workers > 1
    settings: dict[str, Any] = {
        "prompts_per_step": prompts,
        "rollouts": rollouts,
        "mini_batches": 2,
        "epochs": 2 if ppo else 1,
        "lr": lr,
        "micro_batch_tokens": micro_batch_tokens,
        "kl": KLPenalty(0),  # nothing worth staying near: the warm-up is short
    }
    sampling = Sampling(max_new_tokens=ANSWER_TOKENS, batch_tokens=16 * micro_batch_tokens)
    options.setdefault("eval_sampling", sampling)  # what is trained for; guesses are the likeliest
    # A few threads keep up with any step; more of them would only take the GIL from it.
    decode_workers = min(4, cpu_count() // workers - 1)
    loader = partial(
        PlaceLoader, batch=prompts, side=SIZES[size].side, decode_workers=max(0, decode_workers)
    )
    kind = PlacePPO if ppo else PlaceGRPO
    return kind(
        partial(PlacePolicy, SIZES[size], seed=seed, value_head=ppo),
        place_reward,
        loader(files["train"], seed=seed),
        config=PPOConfig(lam=0.95, **settings) if ppo else GRPOConfig(**settings),
        sampling=sampling,
        eval_data=loader(files["test"]),
        eval_interval=max(1, steps // EVALUATIONS),
        num_workers=workers,
        reward_timeout=None,  # arithmetic: it cannot hang
        device=device,
        precision=precision,
        group_backend="nccl" if several_gpus else "gloo",
        seed=seed,
        **options,
    )


@click.command(help=__doc__.replace("\n    python", "\n\n\b\n    python"))
@click.option("--algorithm", type=click.Choice(["grpo", "ppo"]), default="grpo", show_default=True,
              help="RL algorithm.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=80, show_default=True,
              help="Number of RL steps.")  # fmt: skip
@click.option("--warm-up", type=click.IntRange(0), default=250, show_default=True,
              help="Number of supervised steps before RL.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True,
              help="Number of workers.")  # fmt: skip
@click.option("--prompts", type=click.IntRange(1), default=64, show_default=True,
              help="Prompts per step, over all workers.")  # fmt: skip
@click.option("--rollouts", type=click.IntRange(1), default=8, show_default=True,
              help="Responses per prompt.")  # fmt: skip
@click.option("--lr", type=click.FloatRange(0), default=5e-4, show_default=True,
              help="Learning rate of RL.")  # fmt: skip
@click.option("--warm-up-lr", type=click.FloatRange(0), default=1e-3, show_default=True,
              help="Learning rate of the warm-up.")  # fmt: skip
@click.option("--size", type=click.Choice(list(SIZES)), default="small", show_default=True,
              help="Size of the model.")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
              show_default=True, help="Device of the workers.")  # fmt: skip
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True,
              help="Precision of forward and backward.")  # fmt: skip
@click.option("--micro-batch-tokens", type=click.IntRange(1), default=16_384, show_default=True,
              help="Maximum number of tokens per microbatch.")  # fmt: skip
@click.option("--backend", type=click.Choice(["local", "ray", "inline"]), default="local",
              show_default=True, help="Engine that runs the workers.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
              help="Seed of the model and the samples.")  # fmt: skip
@click.option("--data", type=click.Path(path_type=Path, file_okay=False),
              help="Directory of the rows, created if missing.  [default: by --rows]")  # fmt: skip
@click.option("--rows", type=click.IntRange(1), default=4000, show_default=True,
              help="Number of training rows to create.")  # fmt: skip
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False),
              help="Run directory.  [default: runs/geoguessr-DATE-TIME]")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
              help="Also write geoguessr.json to this file.")  # fmt: skip
@click.option(
    "--resume", is_flag=True, help="Resume the run in --run-dir, up to a total of --steps steps."
)
@click.option("--quick", is_flag=True, help="Use few rows and steps, to test the setup.")
@click.option("--progress/--no-progress", default=True, help="Show or hide progress.")
def main(
    steps: int,
    warm_up: int,
    warm_up_lr: float,
    data: Path | None,
    rows: int,
    run_dir: Path | None,
    out: Path | None,
    resume: bool,
    quick: bool,
    prompts: int,
    **options: Any,
) -> None:
    if resume and run_dir is None:
        raise click.UsageError("--resume requires --run-dir.")
    test_rows = max(16, rows // 16)
    if quick:
        rows, test_rows = 64, 8
        prompts, options["rollouts"] = max(4, options["workers"]), 2
        steps, warm_up = min(steps, 3), min(warm_up, 3)
    data = data or Path("runs") / f"geoguessr-data-{rows}-{test_rows}"
    files = find_data(data, rows, test_rows)
    run_dir = run_dir or Path("runs") / time.strftime("geoguessr-%Y%m%d-%H%M%S")
    parameters = count_parameters(options["size"])
    click.echo(
        f"Policy: {parameters / 1e6:.1f} M parameters on {options['workers']} workers\n"
        f"Run:    {run_dir} (watch it with miniray dashboard or miniray top {run_dir})"
    )
    with make_trainer(
        files,
        steps=steps,
        prompts=prompts,
        run_dir=run_dir,
        callbacks=[Checkpoint(every=max(1, steps // 2))],
        resume=resume,
        **options,
    ) as trainer:
        result = trainer.train(steps=steps, warm_up=warm_up, warm_up_lr=warm_up_lr)
        trainer.guesses[options["algorithm"].upper()] = trainer.guess()
    rewards = [line["val_reward"] for line in result.history if "val_reward" in line]
    if trainer.start is not None:
        rewards.insert(0, trainer.start)
    change = " -> ".join(f"{reward:.3f}" for reward in (rewards[0], rewards[-1]))
    click.echo(
        f"\nHeld-out reward of sampled answers: {change}\nMost likely answers on held-out rows:"
    )
    click.echo(plots.table(trainer.guesses))
    told = plots.speed(result.history)
    click.echo(plots.shown(told))
    figures = {
        "settings": {
            "steps": steps,
            "warm_up": warm_up,
            "warm_up_lr": warm_up_lr,
            "prompts": prompts,
            **options,
        },
        "parameters": parameters,
        "on": machine(),
        "reward": rewards,
        "likeliest": {state: plots.scores(made) for state, made in trainer.guesses.items()},
        "speed": told,
        "seconds": [line["seconds"] for line in result.history],
    }
    for path in (run_dir / "geoguessr.json", *([out] if out is not None else [])):
        path.write_text(json.dumps(figures, indent=1))
    picture = run_dir / "geoguessr.png"
    plots.draw(result.history, trainer.guesses, picture, trainer.start)
    click.echo(f"Plots:  {picture}\nReport: {run_dir / 'report.html'}")


def machine() -> dict[str, str]:
    """Return what, besides the seed, determines the exact numbers of a run."""
    import torch

    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def count_parameters(size: str) -> int:
    import torch

    with torch.device("meta"):  # shapes only
        return sum(p.numel() for p in PlacePolicy(SIZES[size]).parameters())


if __name__ == "__main__":
    main()
