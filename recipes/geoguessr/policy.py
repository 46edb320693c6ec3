r"""The policy: looks at a row's picture and writes ``\boxed{lat, lon}``, a byte at a time.

A row has its picture as small as the model sees it; the loader has decoded it ahead. A picture goes
to the device once, however many responses it has.
"""

from __future__ import annotations

import dataclasses
import io
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from byte_tokenizer import START, ByteTokenizer
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy
from vision_lm import VisionLM

from miniray.rl import CausalLM, pad_left, positions

Row = Mapping[str, Any]

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


def pixels(encoded: bytes, side: int) -> Tensor:
    """An encoded picture as (3, side, side) bytes. Raises what PIL raises if it cannot be read."""
    with Image.open(io.BytesIO(encoded)) as image:
        image.draft("RGB", (side, side))  # a JPEG at half its size, if that is enough: less work
        small = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.ascontiguousarray(np.asarray(small).transpose(2, 0, 1)))


class Pictures:
    """Pictures of rows on the model's device, copied there once for the many passes of a step.

    Rollout, log-probs and updates look at the same rows. The latest are kept, up to ``budget``
    bytes.
    """

    def __init__(self, budget: int = 64 << 20) -> None:
        self._budget = budget
        self._kept: OrderedDict[int, tuple[Row, Tensor]] = OrderedDict()
        self.seconds = 0.0  # spent here so far

    def __call__(self, rows: Sequence[Row], device: torch.device) -> Tensor:
        began = time.perf_counter()
        if device.type == "cpu":
            made = torch.stack([row["pixels"] for row in rows])
        else:
            self._copy([row for row in rows if id(row) not in self._kept], device)
            made = torch.stack([self._kept[id(row)][1] for row in rows])
            while len(self._kept) * made[0].nbytes > self._budget:
                self._kept.popitem(last=False)
        self.seconds += time.perf_counter() - began
        return made

    def _copy(self, rows: Sequence[Row], device: torch.device) -> None:
        if not rows:
            return
        # From pinned memory, and nobody waits for it: kernels that read it come after it.
        block = torch.stack([row["pixels"] for row in rows]).pin_memory()
        for row, picture in zip(rows, block.to(device, non_blocking=True), strict=True):
            self._kept[id(row)] = row, picture  # with its row, or its id might be another's

    def __deepcopy__(self, memo: Any) -> Pictures:
        return self  # a reference model looks at the same pictures


class PlacePolicy(CausalLM):
    """``VisionLM`` as a policy of ``miniray.rl``. Rows have ``pixels`` and ``prompt_ids``."""

    def __init__(self, size: Size, *, seed: int = 0, value_head: bool = False) -> None:
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
        self.pictures = Pictures()

    def encode(self, row: Row) -> list[int]:
        """A token for every patch, then the question or just the start of the answer."""
        question = row["prompt_ids"] if self.size.reads_question else [START]
        return [self.model.image_token] * self.model.image_tokens + list(question)

    def extra_inputs(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The pictures of these rows. Responses to a prompt share its row, and so its picture."""
        distinct = {id(row): row for row in rows}
        number = {key: i for i, key in enumerate(distinct)}
        device = self.model.head.weight.device
        return {
            "pixel_values": self.pictures(list(distinct.values()), device),
            "image_of": torch.tensor([number[id(row)] for row in rows], device=device),
        }

    def imitation_loss(self, rows: Sequence[Row]) -> Tensor:
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
