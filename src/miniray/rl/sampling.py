"""How responses are sampled: the settings, and a seed for each row."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection

from miniray.checks import whole
from miniray.rl.checks import above, in_range


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How responses are generated.

    Args:
        max_new_tokens: where a response ends if the model does not end it.
        temperature: 0 takes the most likely token.
        top_k: only the k most likely tokens; 0 means all.
        top_p: only the most likely tokens that together have this probability.
        max_prompt_tokens: longer prompts are left out, and counted.
        stop_ids: tokens that end a response, besides the model's own end of sequence.
        batch_tokens: how many tokens, prompts included, are generated at a time at most.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_prompt_tokens: int | None = None
    stop_ids: tuple[int, ...] = ()
    batch_tokens: int = 65_536

    def __post_init__(self) -> None:
        whole("max_new_tokens", self.max_new_tokens, 1)
        in_range("temperature", self.temperature, 0)
        whole("top_k", self.top_k, 0)
        above("top_p", self.top_p, 0, 1)  # of 0 no token would be left
        if self.max_prompt_tokens is not None:
            whole("max_prompt_tokens", self.max_prompt_tokens, 1)
        if not isinstance(self.stop_ids, Collection):
            raise TypeError(f"stop_ids must be a tuple of token ids, not {self.stop_ids!r}")
        for token in self.stop_ids:
            whole("a token of stop_ids", token, 0)
        whole("batch_tokens", self.batch_tokens, 1)


def row_seed(*parts: int) -> int:
    """A seed of 64 bits from what identifies a row: run, step, prompt, number of the rollout."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
