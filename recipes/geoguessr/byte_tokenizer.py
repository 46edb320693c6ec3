"""A tokenizer of bytes with Hugging Face's call signatures: nothing to download, nothing to train.

For checks and small models. Anything from ``transformers`` takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PAD, END, START = 256, 257, 258


class ByteTokenizer:
    """A token a byte of UTF-8, and three of its own: padding, end and start of a message."""

    pad_token_id = PAD
    eos_token_id = END
    vocab_size = 259
    name_or_path = "bytes-1"
    chat_template = "<start>role\\ncontent<end>"

    def apply_chat_template(
        self,
        messages: Iterable[dict[str, Any]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **_: Any,
    ) -> Any:
        text = "".join(f"<start>{m['role']}\n{_text(m['content'])}<end>" for m in messages)
        text += "<start>assistant\n" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        ids = self.encode(text)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def encode(self, text: str, **_: Any) -> list[int]:
        ids: list[int] = []
        for part in text.replace("<end>", "<start>\0").split("<start>"):
            ends = part.startswith("\0")
            ids.append(END if ends else START)
            ids.extend(part[ends:].encode())
        return ids[1:]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        names = {PAD: "<pad>", END: "<end>", START: "<start>"}
        text = b"".join(
            bytes([i]) if i < 256 else b"" if skip_special_tokens else names[i].encode()
            for i in map(int, ids)
        )
        return text.decode(errors="replace")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join("<image>" if part["type"] == "image" else part["text"] for part in content)
