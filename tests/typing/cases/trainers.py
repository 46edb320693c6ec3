"""Read by type checkers, not run: options of trainers."""

from typing import Any

from miniray.rl import PPOTrainer
from miniray.train import DDPTrainer, ModelParallelTrainer, PipelineParallelTrainer

any_: Any = None

DDPTrainer(2, worker=any_, precision="bf16", name="run", hang_timeout=None, keep_best=("a", "min"))
DDPTrainer(2, worker=any_, precison="bf16")  # error
DDPTrainer(2, worker=any_, precision="bf61")  # error
DDPTrainer(2, worker=any_, on_nonfinite="skip")  # error
PipelineParallelTrainer(2, model=any_, loss=any_, optimizer=any_, data=any_, clip_norm=1.0)
PipelineParallelTrainer(2, model=any_, los=any_)  # error
PipelineParallelTrainer(2, schedule="1f2b")  # error
ModelParallelTrainer(2, model=any_, loss=any_, optimizer=any_, data=any_, max_failures=1)
ModelParallelTrainer(2, max_failure=1)  # error
ModelParallelTrainer(2, split="rows")  # error
PPOTrainer(any_, any_, any_, sync="weights", sync_strategy="momentum", momentum=0.9, seed=1)
PPOTrainer(any_, any_, any_, precison="bf16")  # error
PPOTrainer(any_, any_, any_, sync="gradient")  # error
