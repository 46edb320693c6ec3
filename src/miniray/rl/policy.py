"""Policies: what generates, and says how likely what it generated is.

Any ``torch.nn.Module`` with the methods of ``Policy`` will do. ``CausalLM`` makes one of a language
model with Hugging Face's calling convention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from miniray.rl.batch import Generated, MicroBatch
from miniray.rl.config import Sampling
from miniray.rl.generation import generate, taken_by
from miniray.rl.logprobs import chosen_log_probs
from miniray.rl.sources import Row


@runtime_checkable
class Policy(Protocol):
    """What the trainers ask of a user's class, which must be a ``torch.nn.Module`` too.

    ``values`` is for PPO only. ``encode(row)`` (the prompt's token ids) is optional: with it,
    prompts longer than ``max_prompt_tokens`` are left out before anything is generated. A policy
    that gets log-probs and values out of one pass may have
    ``log_probs_and_values(batch) -> (log_probs(batch), values(batch))``. ``critic_parameters()``
    says which ones ``PPOConfig(critic_lr=...)`` is for.
    """

    def generate(self, rows: Sequence[Row], seeds: Sequence[int], sampling: Sampling) -> Generated:
        """Generate a response for each row. Take all random numbers from the row's seed."""
        ...

    def log_probs(self, batch: MicroBatch) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probs of the response tokens, (sequences, width); also entropies, if wanted."""
        ...


class CausalLM(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A policy from a causal language model and a tokenizer.

    Args:
        model: called as ``model(input_ids=..., attention_mask=..., past_key_values=...,
            use_cache=...)``, and with ``position_ids`` and ``logits_to_keep`` if it takes them;
            returns an object with ``logits`` and ``past_key_values``.
        tokenizer: ``encode(text)`` and ``decode(ids)``; for prompts that are chat messages,
            ``apply_chat_template``. Without one, prompts must be token ids, and the reward function
            gets token ids.
        prompt: the row's field with the prompt, or a function of the row that gives it: a text, a
            list of chat messages, or token ids. Rows without that field may be of ``RLHFDataset``.
        eos_ids: tokens that end a response; the tokenizer's or the model's by default.
        value_head: add a linear layer on the last hidden state, for PPO's ``values``.
        critic: a model of its own for ``values``, instead of the policy's hidden states.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        prompt: str | Callable[[Row], Any] = "prompt",
        eos_ids: Sequence[int] | None = None,
        value_head: bool = False,
        critic: Any = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.critic = critic
        self.tokenizer = tokenizer
        self._prompt = prompt
        self.eos_ids = list(_eos_ids(model, tokenizer) if eos_ids is None else eos_ids)
        self.value_head: torch.nn.Linear | None = None
        if value_head or critic is not None:
            trunk = model if critic is None else critic
            self.value_head = torch.nn.Linear(_hidden_size(trunk), 1)
            # Values begin at 0: early advantages are then the rewards, and not noise.
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)

    # -- prompts and responses ---------------------------------------------------------------------

    def encode(self, row: Row) -> list[int]:
        """The token ids of a row's prompt."""
        if callable(self._prompt):
            prompt = self._prompt(row)
        elif self._prompt in row:
            prompt = row[self._prompt]
        elif "input_ids" in row and "attention_mask" in row:  # padded, by RLHFDataset
            prompt = row["input_ids"][row["attention_mask"] == 1]
        elif "raw_prompt" in row:  # the same with tokenize=False
            prompt = row["raw_prompt"]
        else:
            raise KeyError(
                f"the row has no field {self._prompt!r}; it has {', '.join(map(str, row))}. "
                "CausalLM(..., prompt=...) says which one is the prompt"
            )
        if isinstance(prompt, str):
            return list(self._need_tokenizer(prompt).encode(prompt))
        if len(prompt) and isinstance(prompt[0], Mapping):
            ids = self._need_tokenizer(prompt).apply_chat_template(
                list(prompt), add_generation_prompt=True, tokenize=True
            )
            return list(ids["input_ids"] if isinstance(ids, Mapping) else ids)
        return [int(i) for i in prompt]

    def decode(self, ids: Tensor) -> Any:
        """What the reward function gets: the response's text without its end of sequence."""
        kept = [i for i in ids.tolist() if i not in self.eos_ids]
        return kept if self.tokenizer is None else self.tokenizer.decode(kept)

    def _need_tokenizer(self, prompt: Any) -> Any:
        if self.tokenizer is None:
            raise TypeError(f"a prompt that is no list of token ids needs a tokenizer: {prompt!r}")
        return self.tokenizer

    def generate(self, rows: Sequence[Row], seeds: Sequence[int], sampling: Sampling) -> Generated:
        """A response for each row, in text; see ``miniray.rl.generate`` for what is refused."""
        known: dict[int, Tensor] = {}  # rollouts of a prompt share its row
        for row in rows:
            if id(row) not in known:
                known[id(row)] = torch.tensor(self.encode(row), dtype=torch.long)
        prompts = [known[id(row)] for row in rows]
        responses = generate(
            self.model,
            prompts,
            seeds,
            sampling,
            eos_ids=self.eos_ids,
            extra=lambda chosen: self.extra_inputs([rows[i] for i in chosen]),
            same=[id(row) for row in rows],
        )
        return Generated(prompts, responses, [self.decode(r) for r in responses])

    def extra_inputs(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Further arguments of the model: what the processor of ``RLHFDataset`` made of images.

        Override it for other rows: ``return {"pixel_values": torch.stack([decode(row["images"][0])
        for row in rows])}``. It is called for the prompts of a batch and for each micro-batch, so
        that no more is decoded than is used at a time.
        """
        made = [row.get("multi_modal_inputs") or {} for row in rows]
        device = next(self.model.parameters()).device
        return {
            name: torch.cat([inputs[name] for inputs in made if name in inputs]).to(device)
            for name in dict.fromkeys(name for inputs in made for name in inputs)
        }

    # -- log-probs and values ----------------------------------------------------------------------

    def log_probs(self, batch: MicroBatch) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probs of the responses; with gradients enabled, their entropies too."""
        return self._log_probs(self._run(self.model, batch).logits, batch)

    def values(self, batch: MicroBatch) -> Tensor:
        """What was expected before each token of the responses. ``TypeError`` without a head."""
        if self.value_head is None:
            raise TypeError("this CausalLM has no values: make it with value_head=True or critic=")
        trunk = self.model if self.critic is None else self.critic
        out = self._run(trunk, batch, output_hidden_states=True)
        return self._values(out.hidden_states[-1], batch)

    def log_probs_and_values(
        self, batch: MicroBatch
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
        """Both, by one pass where the value head is on the policy's own hidden states."""
        if self.critic is not None or self.value_head is None:
            return self.log_probs(batch), self.values(batch)
        out = self._run(self.model, batch, output_hidden_states=True)
        return self._log_probs(out.logits, batch), self._values(out.hidden_states[-1], batch)

    def critic_parameters(self) -> list[torch.nn.Parameter]:
        """Those that only values need; what a critic shares with the model is the model's."""
        shared = {id(p) for p in self.model.parameters()}
        return [p for p in self.parameters() if id(p) not in shared]

    def _run(self, model: Any, batch: MicroBatch, **more: Any) -> Any:
        takes = taken_by(model)
        optional = {"position_ids": batch.position_ids, "logits_to_keep": batch.width + 1}
        given = {key: value for key, value in optional.items() if key in takes}
        return model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
            **given,
            **self.extra_inputs(batch.rows),
            **more,
        )

    def _log_probs(self, logits: Tensor, batch: MicroBatch) -> Tensor | tuple[Tensor, Tensor]:
        # The logits of a column are about the next one.
        kept = logits[:, logits.shape[1] - batch.width - 1 :]
        logp, entropies = chosen_log_probs(kept, batch.responses, batch.temperature)
        return (logp, entropies) if torch.is_grad_enabled() else logp

    def _values(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        assert self.value_head is not None
        kept = hidden[:, hidden.shape[1] - batch.width - 1 : -1]
        return self.value_head(kept.to(self.value_head.weight.dtype))[..., 0].float()


def as_policy(made: Any, tokenizer: Any, needs_values: bool) -> Any:
    """The policy that a user's factory made: one already, a model, or (model, tokenizer)."""
    if isinstance(made, tuple) and len(made) == 2:
        made, tokenizer = made
    if not isinstance(made, torch.nn.Module):
        raise TypeError(
            "policy() must return a torch.nn.Module: a policy with generate() and log_probs(), or "
            f"a causal language model; it returned {made!r:.200}"
        )
    if not hasattr(made, "log_probs"):
        takes = taken_by(made)
        if "input_ids" not in takes:
            raise TypeError(
                f"{type(made).__name__} is neither a policy, with generate() and log_probs(), "
                "nor a causal language model that takes input_ids"
            )
        if "decoder_input_ids" in takes:
            raise TypeError(
                f"{type(made).__name__} has an encoder: only models that go on with their prompt "
                "are taken as they are. Write a policy with generate() and log_probs() around it"
            )
        made = CausalLM(made, tokenizer, value_head=needs_values)
    missing = [name for name in ("generate", "log_probs") if not hasattr(made, name)]
    if needs_values and not hasattr(made, "values"):
        missing.append("values")
    if missing:
        raise TypeError(
            f"policy {type(made).__name__} lacks {', '.join(f'{m}()' for m in missing)}"
        )
    if needs_values and isinstance(made, CausalLM) and made.value_head is None:
        raise TypeError("PPO needs values: make the CausalLM with value_head=True or critic=")
    return made


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    owners = (tokenizer, *(getattr(model, n, None) for n in ("generation_config", "config")))
    for owner in owners:
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    raise ValueError(
        "neither tokenizer nor model knows its eos_token_id; CausalLM(..., eos_ids=[...]) sets it, "
        "and eos_ids=[] means that every response has full length"
    )


def _hidden_size(model: Any) -> int:
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    if not hasattr(config, "hidden_size"):
        raise TypeError(
            f"a value head needs to know the width of {type(model).__name__}'s hidden states: its "
            "config.hidden_size. Or write a policy with generate(), log_probs() and values()"
        )
    return int(config.hidden_size)
