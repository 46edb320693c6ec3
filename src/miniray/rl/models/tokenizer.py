"""A character tokenizer for small models."""

from __future__ import annotations

from collections.abc import Iterable


class CharTokenizer:
    """A tokenizer with one token per character.

    Token 0 is padding, 1 is the beginning of a text and 2 its end. The other tokens are the
    characters of the alphabet in order. ``encode`` raises ``ValueError`` for other characters.
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
        """Return the token IDs of the text, starting with ``bos_token_id``."""
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise ValueError(f"{text!r:.80} has characters that aren't in the alphabet: {unknown}")
        return [self.bos_token_id, *(self._ids[character] for character in text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text without special tokens."""
        return "".join(self.alphabet[i - 3] for i in ids if 3 <= i < len(self))
