"""Policies, which generate responses and compute their log-probs.

A policy is a ``torch.nn.Module`` with the methods of ``Policy``. ``CausalLM`` wraps a language
model with Hugging Face's calling convention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from miniray.rl.config import Sampling
from miniray.rl.models.generation import generate, taken_by
from miniray.rl.models.logprobs import chosen_log_probs
from miniray.rl.rollouts.batch import Generated, MicroBatch
from miniray.rl.rollouts.sources import Row


@runtime_checkable
class Policy(Protocol):
    """The methods that a policy must implement. It must also be a ``torch.nn.Module``.

    Further methods:

    * ``values(batch)`` is required for PPO.
    * ``encode(row)`` (optional) returns the token IDs of the prompt. With it, prompts that are
      longer than ``max_prompt_tokens`` are skipped before generation.
    * ``log_probs_and_values(batch)`` (optional) returns the results of ``log_probs`` and ``values``
      from a single forward pass.
    * ``critic_parameters()`` returns the parameters that ``PPOConfig(critic_lr=...)`` applies to.
    """

    def generate(self, rows: Sequence[Row], seeds: Sequence[int], sampling: Sampling) -> Generated:
        """Generate a response for each row. All random numbers must depend on the row's seed."""
        ...

    def log_probs(self, batch: MicroBatch) -> Tensor | tuple[Tensor, Tensor]:
        """Return log-probs of the response tokens, (sequences, width), and optionally entropies."""
        ...


class CausalLM(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A policy from a causal language model and a tokenizer.

    Args:
        model: Called as ``model(input_ids=..., attention_mask=..., past_key_values=...,
            use_cache=...)``, and with ``position_ids`` and ``logits_to_keep`` if it accepts them.
            It returns an object with ``logits`` and ``past_key_values``.
        tokenizer: Object with ``encode(text)`` and ``decode(ids)``, and ``apply_chat_template`` if
            prompts are chat messages. Without a tokenizer, prompts must be token IDs, and the
            reward function receives token IDs.
        prompt: Name of the field that contains the prompt, or a function that returns the prompt of
            a row. Prompts are strings, lists of chat messages or token IDs. Rows of ``RLHFDataset``
            don't need this field.
        eos_ids: Token IDs that end a response. Default: those of the tokenizer or the model.
        value_head: Add a linear layer to the last hidden state, for the ``values`` of PPO.
        critic: A separate model for ``values``, instead of the hidden states of the policy.
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
            # Initial values are 0, so that early advantages are the rewards instead of noise.
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)

    # -- prompts and responses ---------------------------------------------------------------------

    def encode(self, row: Row) -> list[int]:
        """Return the token IDs of a row's prompt."""
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
                f"the row has no field {self._prompt!r}, only {', '.join(map(str, row))}. "
                "Set the name of the field with CausalLM(..., prompt=...)."
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
        """Return the text of a response without end-of-sequence tokens, for the reward function."""
        kept = [i for i in ids.tolist() if i not in self.eos_ids]
        return kept if self.tokenizer is None else self.tokenizer.decode(kept)

    def _need_tokenizer(self, prompt: Any) -> Any:
        if self.tokenizer is None:
            raise TypeError(f"without a tokenizer, prompts must be token IDs, not {prompt!r}")
        return self.tokenizer

    def generate(self, rows: Sequence[Row], seeds: Sequence[int], sampling: Sampling) -> Generated:
        """Generate a response for each row; see ``miniray.rl.generate`` for the errors."""
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
        """Return additional arguments of the model: images as processed by ``RLHFDataset``.

        Override it for other rows: ``return {"pixel_values": torch.stack([decode(row["images"][0])
        for row in rows])}``. It is called for the prompts of each batch and for each micro-batch,
        so that data is decoded only when it is needed.
        """
        made = [row.get("multi_modal_inputs") or {} for row in rows]
        device = next(self.model.parameters()).device
        return {
            name: torch.cat([inputs[name] for inputs in made if name in inputs]).to(device)
            for name in dict.fromkeys(name for inputs in made for name in inputs)
        }

    # -- log-probs and values ----------------------------------------------------------------------

    def log_probs(self, batch: MicroBatch) -> Tensor | tuple[Tensor, Tensor]:
        """Return log-probs of the responses, and entropies if gradients are enabled."""
        return self._log_probs(self._run(self.model, batch).logits, batch)

    def values(self, batch: MicroBatch) -> Tensor:
        """Return the values before each token of the responses.

        Raises:
            TypeError: The policy has neither a value head nor a critic.
        """
        if self.value_head is None:
            raise TypeError("values() needs CausalLM(..., value_head=True) or CausalLM(critic=...)")
        trunk = self.model if self.critic is None else self.critic
        out = self._run(trunk, batch, output_hidden_states=True)
        return self._values(out.hidden_states[-1], batch)

    def log_probs_and_values(
        self, batch: MicroBatch
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
        """Return log-probs and values, from one forward pass unless there is a separate critic."""
        if self.critic is not None or self.value_head is None:
            return self.log_probs(batch), self.values(batch)
        out = self._run(self.model, batch, output_hidden_states=True)
        return self._log_probs(out.logits, batch), self._values(out.hidden_states[-1], batch)

    def critic_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that only ``values`` needs, without those shared with the model."""
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
        # The logits of a column predict the token of the next one.
        kept = logits[:, logits.shape[1] - batch.width - 1 :]
        logp, entropies = chosen_log_probs(kept, batch.responses, batch.temperature)
        return (logp, entropies) if torch.is_grad_enabled() else logp

    def _values(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        assert self.value_head is not None
        kept = hidden[:, hidden.shape[1] - batch.width - 1 : -1]
        return self.value_head(kept.to(self.value_head.weight.dtype))[..., 0].float()


def as_policy(made: Any, tokenizer: Any, needs_values: bool) -> Any:
    """Return a policy from the result of ``policy()``: a policy, a model or (model, tokenizer)."""
    if isinstance(made, tuple) and len(made) == 2:
        made, tokenizer = made
    if not isinstance(made, torch.nn.Module):
        raise TypeError(
            "policy() must return a torch.nn.Module (a policy with generate() and log_probs(), or "
            f"a causal language model), not {made!r:.200}"
        )
    if not hasattr(made, "log_probs"):
        takes = taken_by(made)
        if "input_ids" not in takes:
            raise TypeError(
                f"{type(made).__name__} is neither a policy with generate() and log_probs() "
                "nor a causal language model that accepts input_ids"
            )
        if "decoder_input_ids" in takes:
            raise TypeError(
                f"{type(made).__name__} has an encoder, and only decoder models can be used "
                "directly. Wrap it in a policy with generate() and log_probs()."
            )
        made = CausalLM(made, tokenizer, value_head=needs_values)
    missing = [name for name in ("generate", "log_probs") if not hasattr(made, name)]
    if needs_values and not hasattr(made, "values"):
        missing.append("values")
    if missing:
        raise TypeError(
            f"policy {type(made).__name__} must have {', '.join(f'{m}()' for m in missing)}"
        )
    if needs_values and isinstance(made, CausalLM) and made.value_head is None:
        raise TypeError("PPO needs CausalLM(..., value_head=True) or CausalLM(..., critic=...)")
    return made


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    owners = (tokenizer, *(getattr(model, n, None) for n in ("generation_config", "config")))
    for owner in owners:
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    raise ValueError(
        "neither the tokenizer nor the model has an eos_token_id. Set it with CausalLM(..., "
        "eos_ids=[...]), or pass eos_ids=[] to generate responses of full length."
    )


def _hidden_size(model: Any) -> int:
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    if not hasattr(config, "hidden_size"):
        raise TypeError(
            f"a value head needs config.hidden_size, which {type(model).__name__} doesn't have. "
            "Set it, or implement a policy with generate(), log_probs() and values()."
        )
    return int(config.hidden_size)
