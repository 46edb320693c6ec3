r"""The policy: looks at a row's picture and writes ``\boxed{lat, lon}``, a byte at a time.

Rows carry their pictures encoded, about 30 KB each. Pixels are made for the sequences at hand, a
picture once however many responses it has.
"""

from __future__ import annotations

import dataclasses
import io
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from byte_tokenizer import START, ByteTokenizer
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy
from vision_lm import VisionLM

from miniray.rl import CausalLM, pad_left, positions

QUESTION_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a policy is. ``reads_question``: the prompt's text too, not only the picture."""

    side: int
    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    reads_question: bool = False


#: The question is the same in every row, so the models for a CPU do without its 190 bytes.
SIZES = {
    "tiny": Size(side=32, width=32, heads=2, encoder_layers=0, decoder_layers=1),
    "small": Size(side=64, width=128, heads=4, encoder_layers=1, decoder_layers=2),
    "large": Size(128, 768, heads=12, encoder_layers=6, decoder_layers=12, reads_question=True),
}


def answer(lat: float, lon: float) -> str:
    r"""The form the warm-up teaches: ``\boxed{+07.3, -120.4}``, digits always in the same place."""
    return rf"\boxed{{{lat:+05.1f}, {lon:+06.1f}}}"


ANSWER_TOKENS = len(answer(0, 0)) + 1  # and the end


class Pixels:
    """Encoded pictures to small ones of (3, side, side) bytes, when they are asked for.

    A step looks at a picture several times (rollout, log-probs, update), so the latest are kept, up
    to ``budget`` bytes. A picture that cannot be decoded raises what PIL raises.
    """

    def __init__(self, side: int, threads: int = 1, budget: int = 32 << 20) -> None:
        self._side = side
        self._keep = max(1, budget // (3 * side * side))
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()
        self._pool = ThreadPoolExecutor(threads, "decode") if threads > 1 else None
        self.seconds = 0.0  # spent here so far

    def __call__(self, encoded: Sequence[bytes]) -> Tensor:
        began = time.perf_counter()
        by_key = {hash(picture): picture for picture in encoded}
        missing = [key for key in by_key if key not in self._kept]
        decode = map if self._pool is None else self._pool.map
        made = decode(self._decode, [by_key[key] for key in missing])
        found = dict(zip(missing, made, strict=True))
        for key in by_key.keys() - found.keys():
            found[key] = self._kept[key]
        for key, pixels in found.items():
            self._kept[key] = pixels
            self._kept.move_to_end(key)
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        pixels = torch.from_numpy(np.stack([found[hash(picture)] for picture in encoded]))
        self.seconds += time.perf_counter() - began
        return pixels

    def _decode(self, encoded: bytes) -> np.ndarray:
        with Image.open(io.BytesIO(encoded)) as image:
            image.draft("RGB", (self._side, self._side))  # a JPEG at half its size: a third of work
            small = image.convert("RGB").resize((self._side, self._side), Image.Resampling.BILINEAR)
        return np.asarray(small).transpose(2, 0, 1)

    def __deepcopy__(self, memo: Any) -> Pixels:
        return self  # a reference model looks at the same pictures


class PlacePolicy(CausalLM):
    """``VisionLM`` as a policy of ``miniray.rl``. Rows have ``image`` and ``prompt_ids``."""

    def __init__(
        self, size: Size, *, seed: int = 0, decode_threads: int = 1, value_head: bool = False
    ) -> None:
        self.size = size
        patches = (size.side // 16) ** 2
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = VisionLM(
                side=size.side,
                width=size.width,
                heads=size.heads,
                encoder_layers=size.encoder_layers,
                decoder_layers=size.decoder_layers,
                vocabulary=ByteTokenizer.vocab_size,
                context=patches + QUESTION_TOKENS + ANSWER_TOKENS,
            )
        super().__init__(model, ByteTokenizer(), value_head=value_head)
        self.pixels = Pixels(size.side, decode_threads)

    def encode(self, row: Mapping[str, Any]) -> list[int]:
        """A token for every patch, then the question or just the start of the answer."""
        question = row["prompt_ids"] if self.size.reads_question else [START]
        return [self.model.image_token] * self.model.image_tokens + list(question)

    def extra_inputs(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The pictures of these rows. Responses to a prompt share its row, and so its picture."""
        distinct = {id(row): row for row in rows}
        number = {key: i for i, key in enumerate(distinct)}
        pixels = self.pixels([row["image"] for row in distinct.values()])
        image_of = torch.tensor([number[id(row)] for row in rows])
        device = self.model.head.weight.device
        if device.type == "cuda":
            pixels, image_of = pixels.pin_memory(), image_of.pin_memory()
        return {
            "pixel_values": pixels.to(device, non_blocking=True),
            "image_of": image_of.to(device, non_blocking=True),
        }

    def imitation_loss(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """Mean cross-entropy of the right answers' tokens: what the warm-up makes small."""
        device = self.model.head.weight.device
        end = self.eos_ids[:1]
        answers = [self.tokenizer.encode(answer(*row["place"])) + end for row in rows]
        whole = [
            torch.tensor(self.encode(row) + wanted)
            for row, wanted in zip(rows, answers, strict=True)
        ]
        ids, mask = pad_left(whole, device)
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions(mask),
            logits_to_keep=ANSWER_TOKENS + 1,
            **self.extra_inputs(rows),
        )
        logits = out.logits[:, :-1].float()
        return cross_entropy(logits.flatten(0, 1), ids[:, -ANSWER_TOKENS:].flatten())
