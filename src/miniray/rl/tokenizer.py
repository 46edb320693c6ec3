"""A tokenizer for small models: a token for every character."""

from __future__ import annotations

from collections.abc import Iterable


class CharTokenizer:
    """Token 0 is padding, 1 begins a text, 2 ends it, the others are the characters in order.

    ``encode`` raises ``ValueError`` for a character that is not in the alphabet.
    """

    pad_token_id = 0
    bos_token_id = 1
    eos_token_id = 2

    def __init__(self, alphabet: str) -> None:
        self.alphabet = "".join(dict.fromkeys(alphabet))
        self._ids = {character: i for i, character in enumerate(self.alphabet, start=3)}

    def __len__(self) -> int:
        return len(self.alphabet) + 3

    def encode(self, text: str) -> list[int]:
        """Its token ids, after that which begins a text."""
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise ValueError(f"{text!r:.80} has characters that are not in the alphabet: {unknown}")
        return [self.bos_token_id, *(self._ids[character] for character in text)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; special tokens are left out."""
        return "".join(self.alphabet[i - 3] for i in ids if 3 <= i < len(self))
