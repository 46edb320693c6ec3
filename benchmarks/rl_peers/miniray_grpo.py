"""GRPO with miniray."""

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

from miniray.rl import GRPOConfig, GRPOTrainer, KLPenalty, Sampling


class Trainer(GRPOTrainer):
    def on_epoch_end(self, epoch, result):
        step_done(result["counts"]["tokens"])


if __name__ == "__main__":
    with Trainer(
        make_model,
        lambda row, response: score(response),
        make_rows(),
        tokenizer=make_tokenizer,
        config=GRPOConfig(
            prompts_per_step=PROMPTS_PER_STEP, rollouts=ROLLOUTS, lr=LR, kl=KLPenalty(KL)
        ),
        sampling=Sampling(max_new_tokens=NEW_TOKENS),
        num_workers=WORKERS,
        resources_per_worker={"num_cpus": 2 // WORKERS},
        seed=0,
        progress=False,
    ) as trainer:
        trainer.train(steps=STEPS)
