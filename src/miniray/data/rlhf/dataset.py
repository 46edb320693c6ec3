"""Prompts for reinforcement learning: verl's rows and configuration on ``ParquetDataset``.

A rank reads its rows and tokenizes them when they are accessed. Prompts that are too long are found
once per run, and the result is saved. ``max_samples`` are taken from the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from miniray.checks import check_int, suggest_options
from miniray.data.datasets import ParquetDataset
from miniray.data.loader.loader import DataLoader
from miniray.data.rlhf.config import RLHFConfig, read_config
from miniray.data.rlhf.prompt import PromptEncoder, build_messages, lazy_image, rgb, truncate
from miniray.data.sources.base import select_columns
from miniray.errors import DataError, RowError

__all__ = ["RLHFConfig", "RLHFDataset", "collate_fn"]

logger = logging.getLogger(__name__)


def collate_fn(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Create the batch that verl's ``collate_fn`` creates: stacked tensors and object arrays.

    Raise ``DataError`` if rows have different fields, which would misalign the columns.
    """
    batch: dict[str, Any] = {}
    for name in rows[0]:
        try:
            values = [row[name] for row in rows]
        except KeyError:
            lacking = sum(name not in row for row in rows)
            raise DataError(f"{lacking} of {len(rows)} rows have no field {name!r}") from None
        if isinstance(values[0], torch.Tensor):
            batch[name] = torch.stack(values)
        else:
            batch[name] = np.fromiter(values, dtype=object, count=len(values))
    extra = {name for row in rows for name in row} - set(batch)
    if extra:
        raise DataError(f"only some rows have the fields {sorted(extra)}")
    return batch


@suggest_options({field.name: "Set it in config=." for field in dataclasses.fields(RLHFConfig)})
class RLHFDataset(ParquetDataset, TorchDataset[Any]):  # type: ignore[misc]
    """Prompts of a rank, in the format of verl's ``RLHFDataset``.

    Args:
        data_files: A Parquet file, directory, glob or fsspec URL, or a list of these.
        tokenizer: Any object with Hugging Face's ``apply_chat_template`` and call signature.
        config: verl's ``data`` keys (see ``RLHFConfig``) in a dict, dataclass, namespace or
            OmegaConf node.
        processor: Hugging Face processor, for models with images.
        max_samples: Rows of the whole run, drawn once and then sharded; -1 or None selects all.
        rank, world_size: Rank of this process and number of ranks.

    ``ds[i]`` is a dict: the columns except prompt and images; ``input_ids``, ``attention_mask``
    and ``position_ids``, padded on the left to ``max_prompt_length``; ``raw_prompt_ids``;
    ``index``, ``tools_kwargs`` and ``interaction_kwargs`` from ``extra_info``; ``multi_modal_data``
    with encoded images and, with a processor, ``multi_modal_inputs``, both empty for a row without
    images; ``raw_prompt`` and ``full_prompts`` on request.

    Raises ``DataError`` on creation for an unusable file or column, and ``RowError`` with file and
    row for an unusable row, also in the filter.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        config: Any = None,
        processor: Any = None,
        max_samples: int | None = -1,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not callable(tokenizer):
            raise TypeError(f"tokenizer must be one with Hugging Face's call, not {tokenizer!r}")
        self.tokenizer, self.processor = tokenizer, processor
        max_samples = -1 if max_samples is None else max(-1, check_int("max_samples", max_samples))
        self.config = read_config(config)
        self.encoder = PromptEncoder(tokenizer, processor, self.config)
        self._tokenize = self.config.tokenize is not False
        shuffled = self.config.shuffle
        order = self.config.row_order or ("window" if shuffled else "file")
        seed = self.config.seed
        if not shuffled and max_samples >= 0 and order == "file" and seed is None:
            seed = 0  # not used
        filters = self.config.filter_overlong_prompts
        super().__init__(
            data_files if isinstance(data_files, (str, os.PathLike)) else list(data_files),
            rank=rank,
            world_size=world_size,
            max_samples=max_samples,
            seed=seed,
            shuffle=False if order == "file" else order,
            filter=self._fits if filters else None,
            filter_columns=self._find_filter_columns() if filters else None,
            filter_id=self.encoder.identity(*self._list_prompt_methods()) if filters else None,
            filter_workers=self.config.filter_overlong_prompts_workers or 1,
            memory_budget=self.config.memory_budget,
        )
        if not shuffled:  # as verl does
            self.row_set = self.row_set.members[0].take_first()
        select_columns(self.column_names or [], [self.config.prompt_key], "prompt_key: the data")

    # -- for subclasses --------------------------------------------------------------------------

    def build_messages(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the chat messages of a row. Override for other prompts; the filter uses it too."""
        return build_messages(
            row[self.config.prompt_key], self.images_of(row), structured=self.processor is not None
        )

    def position_ids(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, inputs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return the positions of tokens, 0 for padding. Override for other kinds of positions."""
        if "image_grid_thw" in inputs:
            raise DataError(
                "models of the Qwen-VL kind take positions in three dimensions: override"
                " position_ids(input_ids, attention_mask, inputs) with the model's get_rope_index,"
                " or set tokenize=False and let the rollout do it"
            )
        return (attention_mask.cumsum(-1) - 1).clamp(min=0)

    def images_of(self, row: Mapping[str, Any]) -> Sequence[Any]:
        """Return the images of a row as the file has them."""
        return row.get(self.config.image_key) or ()

    # -- rows ------------------------------------------------------------------------------------

    def encode(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a row of the files to model inputs. A ``transform`` for ``DataLoader``."""
        config = self.config
        if row.get(config.video_key):
            raise DataError(f"videos (column {config.video_key!r}) are not supported")
        messages = self.build_messages(row)
        left_out = (config.prompt_key, config.image_key, config.video_key)
        found = {key: value for key, value in row.items() if key not in left_out}
        if self._tokenize:
            self._add_tokens(found, messages, self.images_of(row))
        else:
            # verl's batches must have a tensor, and its rollout adds all others.
            found["dummy_tensor"] = torch.zeros(1, dtype=torch.uint8)
        if config.return_raw_chat or not self._tokenize:
            found["raw_prompt"] = messages
        self._add_extra_info(found)
        return found

    def _add_tokens(
        self, found: dict[str, Any], messages: list[dict[str, Any]], images: Sequence[Any]
    ) -> None:
        config, limit = self.config, self.config.max_prompt_length
        text = self.encoder.text(messages)
        raw_ids = self.encoder.ids(text)
        inputs: dict[str, Any] = {}
        ids = raw_ids
        if self.processor is not None and images:
            inputs = self.encoder.inputs(text, [lazy_image(image) for image in images])
            ids = [int(i) for i in inputs.pop("input_ids")[0]]
            inputs.pop("attention_mask", None)
        if images or self.processor is not None:
            # Opened again, so that the images decoded by the processor are freed.
            opened = {"image": [lazy_image(image) for image in images]}
            found["multi_modal_data"] = opened if images else {}
        # Also without images, so that all rows of a batch have the same fields.
        if self.processor is not None and config.return_multi_modal_inputs:
            found["multi_modal_inputs"] = inputs
        ids = truncate(ids, limit, config.truncation)
        padding = limit - len(ids)
        input_ids = torch.tensor([self._pad_id()] * padding + ids, dtype=torch.long)
        mask = torch.tensor([0] * padding + [1] * len(ids), dtype=torch.long)
        found["input_ids"], found["attention_mask"] = input_ids, mask
        found["position_ids"] = self.position_ids(input_ids, mask, inputs)
        found["raw_prompt_ids"] = truncate(raw_ids, limit, config.truncation)
        if config.return_full_prompt:
            found["full_prompts"] = text

    def _pad_id(self) -> int:
        for name in ("pad_token_id", "eos_token_id"):
            number = getattr(self.tokenizer, name, None)
            if number is not None:
                return int(number)
        raise DataError("the tokenizer has neither a pad nor an eos token to fill prompts with")

    def _add_extra_info(self, found: dict[str, Any]) -> None:
        extra = found["extra_info"] = dict(found.get("extra_info") or {})
        found["index"] = extra.get("index", 0)
        found["tools_kwargs"] = extra.get("tools_kwargs") or {}
        found["interaction_kwargs"] = extra.get("interaction_kwargs") or {}
        needs = extra.get("need_tools_kwargs", self.config.need_tools_kwargs)
        if needs and not found["tools_kwargs"]:
            logger.warning("row with index %s needs tools_kwargs and has none", found["index"])

    def _encode_at(self, index: int, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self.encode(row)
        except Exception as error:  # a template, tokenizer or image decoder can raise anything
            file, number = self.row_ids[index]
            raise RowError(
                f"{file}, row {number}: {type(error).__name__}: {error}", file, number
            ) from error

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        rows = super().__getitems__(indices)
        return [self._encode_at(i, row) for i, row in zip(indices, rows, strict=True)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index, row in enumerate(super().__iter__()):
            yield self._encode_at(index, row)

    def loader(self, batch_size: int, **options: Any) -> DataLoader:
        """Return a ``DataLoader`` of verl's batches, which tokenizes and decodes in threads."""
        return DataLoader(
            self, batch_size, **{"transform": self.encode, "collate_fn": collate_fn, **options}
        )

    # -- which rows ------------------------------------------------------------------------------

    def _fits(self, row: Mapping[str, Any]) -> bool:
        images = self.images_of(row) if self.processor is not None else ()
        messages = self.build_messages(row)
        length = self.encoder.length(messages, [lazy_image(image) for image in images])
        return length <= self.config.max_prompt_length

    @classmethod
    def _list_prompt_methods(cls) -> tuple[Callable[..., Any], ...]:
        """Return the methods that create a prompt, which subclasses can override."""
        return cls.build_messages, cls.images_of

    def _find_filter_columns(self) -> list[str] | None:
        if self._list_prompt_methods() != RLHFDataset._list_prompt_methods():
            return None  # all: an overridden method can use any
        # Without a processor, images have no tokens and aren't read.
        return [self.config.prompt_key] if self.processor is None else None

    # -- used by verl's rollout ------------------------------------------------------------------

    @classmethod
    async def process_multi_modal_info(
        cls, messages: list[dict[str, Any]], image_patch_size: int, config: Any
    ) -> tuple[list[Any] | None, None, None]:
        """Return the images of messages, decoded in a thread so as not to block the event loop."""
        images = [
            part["image"]
            for message in messages
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if part.get("type") == "image"
        ]
        decoded = await asyncio.to_thread(lambda: [rgb(lazy_image(image)) for image in images])
        return decoded or None, None, None

    @classmethod
    async def process_vision_info(
        cls, messages: list[dict[str, Any]], image_patch_size: int, config: Any
    ) -> tuple[list[Any] | None, None]:
        """Return images and videos, for versions of verl without audio."""
        images, videos, _ = await cls.process_multi_modal_info(messages, image_patch_size, config)
        return images, videos
