"""GRPO with TRL."""

import os

from datasets import Dataset
from shared import (
    KL,
    LR,
    NEW_TOKENS,
    PROMPTS_PER_STEP,
    ROLLOUTS,
    STEPS,
    WORKERS,
    make_model,
    make_rows,
    make_tokenizer,
    score,
    step_done,
)
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

tokens = 0


def reward(completions, completion_ids, **columns):
    global tokens
    tokens = sum(map(len, completion_ids))
    return [score(text) for text in completions]


class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            step_done(tokens * WORKERS)


if __name__ == "__main__":
    model = f"model-{os.environ.get('RANK', '0')}"  # the reference is loaded from there, too
    make_model().save_pretrained(model)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(make_rows()),
        processing_class=make_tokenizer(),
        callbacks=[Steps()],
        args=GRPOConfig(
            output_dir="out",
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=PROMPTS_PER_STEP * ROLLOUTS // WORKERS,
            num_generations=ROLLOUTS,
            steps_per_generation=1,
            max_completion_length=NEW_TOKENS,
            max_steps=STEPS,
            learning_rate=LR,
            beta=KL,
            loss_type="dapo",
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=0,
        ),
    )
    trainer.train()
