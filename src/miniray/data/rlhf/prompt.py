"""Convert chat messages and images of a row to text, token ids and pixels.

Images keep their encoded bytes until their pixels are accessed.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miniray.data.filter.fingerprint import fingerprint_callable
from miniray.data.rlhf.config import RLHFConfig
from miniray.errors import DataError

_PLACEHOLDERS = re.compile(r"(<image>|<video>)")
_TEMPLATE_KEYS = ("tokenize", "return_dict", "return_tensors", "add_generation_prompt")


def lazy_image(value: Any) -> Any:
    """Return a Pillow image whose pixels are decoded when they are accessed.

    ``value`` is ``{"bytes", "path"}``, encoded bytes, a path or a Pillow image.
    """
    from PIL import Image

    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return Image.open(io.BytesIO(value["bytes"]))
        value = value.get("path") or value.get("image")
    if isinstance(value, (bytes, bytearray)):
        return Image.open(io.BytesIO(value))
    if isinstance(value, str):
        return Image.open(value)
    if isinstance(value, Image.Image):
        return value
    raise DataError(
        f"an image must be bytes, a path or {{bytes, path}}, not {type(value).__name__}"
    )


def rgb(image: Any) -> Any:
    """Return a decoded image with three channels."""
    if image.mode.startswith("I;16"):  # Pillow would clip the values at 255 instead of scaling
        image = image.point(lambda value: value / 256, "L")
    return image.convert("RGB")


def build_messages(prompt: Any, images: Sequence[Any], *, structured: bool) -> list[dict[str, Any]]:
    """Return chat messages with the placeholders ``<image>`` replaced by the images, in order.

    With ``structured``, the content becomes a list of ``{"type": "image", ...}`` and ``{"type":
    "text", ...}``, which processors need. Otherwise, the text doesn't change.

    Raises ``DataError`` if the numbers of placeholders and images differ.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not all(isinstance(m, Mapping) for m in prompt):
        raise DataError(f"a prompt must be a list of chat messages, not {type(prompt).__name__}")
    places = sum(
        len(_PLACEHOLDERS.findall(message["content"]))
        for message in prompt
        if isinstance(message["content"], str)
    )
    if images and places != len(images):
        raise DataError(f"{len(images)} images for {places} <image> in the prompt")
    if not (structured and images):
        return [dict(message) for message in prompt]
    left = iter(images)
    return [{**message, "content": _split_content(message["content"], left)} for message in prompt]


def _split_content(content: Any, images: Any) -> Any:
    if not isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for segment in _PLACEHOLDERS.split(content):
        if segment == "<video>":
            raise DataError("prompts with <video> are not supported")
        if segment == "<image>":
            parts.append({"type": "image", "image": lazy_image(next(images))})
        elif segment:
            parts.append({"type": "text", "text": segment})
    return parts


def truncate(ids: list[int], limit: int, how: str) -> list[int]:
    """Return at most ``limit`` tokens: the last ones, the first ones, or both ends."""
    if len(ids) <= limit:
        return ids
    if how == "left":
        return ids[-limit:]
    if how == "right":
        return ids[:limit]
    if how == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    raise DataError(
        f"The prompt has {len(ids)} tokens, but max_prompt_length is {limit}. Raise it, skip such"
        " rows with filter_overlong_prompts=True, or truncate them with truncation='left',"
        " 'right' or 'middle'."
    )


class PromptEncoder:
    """Encodes prompts with a tokenizer and a processor with Hugging Face's signatures."""

    def __init__(self, tokenizer: Any, processor: Any, config: RLHFConfig) -> None:
        self.tokenizer, self.processor, self.config = tokenizer, processor, config
        given = config.apply_chat_template_kwargs
        self._template = {key: given[key] for key in given if key not in _TEMPLATE_KEYS}

    def text(self, messages: list[dict[str, Any]]) -> str:
        """Return the templated prompt, which ends with the start of the answer."""
        templated = self.tokenizer if self.processor is None else self.processor
        text: str = templated.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **self._template
        )
        return text

    def ids(self, text: str) -> list[int]:
        """Return the token ids of text that already has special tokens."""
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def inputs(self, text: str, images: Sequence[Any]) -> dict[str, Any]:
        """Process text and images. ``input_ids`` has a batch dimension of 1."""
        found = self.processor(
            text=[text],
            images=[rgb(image) for image in images],
            return_tensors="pt",
            **self.config.mm_processor_kwargs,
        )
        return dict(found)

    def length(self, messages: list[dict[str, Any]], images: Sequence[Any]) -> int:
        """Return the number of tokens. With a processor, images are decoded to find out."""
        text = self.text(messages)
        if self.processor is None or not images:
            return len(self.ids(text))
        return len(self.inputs(text, images)["input_ids"][0])

    def identity(self, *made_by: Callable[..., Any]) -> str:
        """Return a digest of everything that the result of ``length`` depends on."""
        parts = [
            *(fingerprint_callable(function, None) for function in made_by),
            identity_of(self.tokenizer),
            identity_of(self.processor),
            self.config.prompt_key,
            self.config.image_key,
            str(self.config.max_prompt_length),
            _stable(self._template),
            _stable(self.config.mm_processor_kwargs),
        ]
        return "prompt-length-" + hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:32]


def identity_of(part: Any) -> str:
    """Return a digest of a tokenizer or processor: its vocabulary, template and settings."""
    if part is None:
        return "none"
    digest = hashlib.sha256(type(part).__qualname__.encode())
    backend: Any = getattr(part, "backend_tokenizer", None)
    if hasattr(backend, "to_str"):
        digest.update(backend.to_str().encode())
    elif hasattr(part, "get_vocab"):
        digest.update(_stable(part.get_vocab()).encode())
    elif hasattr(part, "to_dict"):
        digest.update(_stable(part.to_dict()).encode())
    else:
        digest.update(str(getattr(part, "name_or_path", "")).encode())
    inner = getattr(part, "tokenizer", None)
    if inner is not None and inner is not part:
        digest.update(identity_of(inner).encode())
    digest.update(str(getattr(part, "chat_template", "")).encode())
    return digest.hexdigest()


def _stable(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=lambda other: type(other).__qualname__)
