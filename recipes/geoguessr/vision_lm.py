"""A small vision-language model: a patch encoder in front of a causal decoder of bytes.

It is called as Hugging Face's are, so ``miniray.rl.CausalLM`` makes a policy of it. Image tokens in
``input_ids`` are places for the encoder's patches.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Cache:
    """Keys and values of all layers; rows can be chosen or repeated.

    Room for tokens to come is made ahead: one more token does not copy all that were before it.
    """

    _ROOM = 32

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}  # (2, rows, heads, tokens and room, width of a head)
        self._filled: dict[int, int] = {}

    def add(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        start = self._filled.get(layer, 0)
        end = self._filled[layer] = start + keys.shape[2]
        if start == 0 or end > self._kept[layer].shape[3]:
            rows, heads, _, width = keys.shape
            larger = keys.new_empty(2, rows, heads, end + self._ROOM, width)
            if start:
                larger[..., :start, :] = self._kept[layer][..., :start, :]
            self._kept[layer] = larger
        for kept, new in zip(self._kept[layer], (keys, values), strict=True):
            kept[:, :, start:end] = new
        kept_keys, kept_values = self._kept[layer][..., :end, :]
        return kept_keys, kept_values

    def batch_select_indices(self, index: Tensor) -> None:
        self._kept = {layer: kept[:, index] for layer, kept in self._kept.items()}


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self, x: Tensor, allowed: Tensor | None, cache: Cache | None = None, layer: int = 0
    ) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        if cache is not None:
            keys, values = cache.add(layer, keys, values)
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class PatchEncoder(nn.Module):
    """Pictures of (3, side, side) to (side / 16)² vectors: four strided convolutions and blocks."""

    def __init__(self, side: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        channels = [3, width // 4, width // 2, width, width]
        self.stem = nn.Sequential()
        for there, here in itertools.pairwise(channels):
            self.stem.append(nn.Conv2d(there, here, 3, stride=2, padding=1))
            self.stem.append(nn.GroupNorm(8, here))
            self.stem.append(nn.GELU())
        self.place = nn.Parameter(torch.randn((side // 16) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, pixels: Tensor) -> Tensor:
        found = self.stem(pixels.float() / 127.5 - 1).flatten(2).transpose(1, 2)
        x = found + self.place
        for block in self.blocks:
            x = block(x, None)
        return self.norm(x)


class VisionLM(nn.Module):
    """``pixel_values`` are the pictures (uint8), each once; ``image_of`` says whose is which."""

    def __init__(
        self,
        *,
        side: int,
        width: int,
        heads: int,
        encoder_layers: int,
        decoder_layers: int,
        vocabulary: int,
        context: int,
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=width, max_position_embeddings=context)
        self.image_token = vocabulary  # can be read, never written
        self.image_tokens = (side // 16) ** 2
        self.encoder = PatchEncoder(side, width, heads, encoder_layers)
        self.tokens = nn.Embedding(vocabulary + 1, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(decoder_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in (self.tokens, self.positions, self.head):
            nn.init.normal_(module.weight, std=0.02)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_of: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
    ) -> Any:
        x = self.tokens(input_ids) + self.positions(position_ids)
        if pixel_values is not None:
            patches = self.encoder(pixel_values)[image_of]
            x = x.masked_scatter((input_ids == self.image_token)[..., None], patches.to(x.dtype))
        cache = past_key_values or (Cache() if use_cache else None)
        allowed = _allowed(attention_mask, input_ids.shape[1])
        for i, block in enumerate(self.blocks):
            x = block(x, allowed, cache, i)
        x = self.norm(x)
        return SimpleNamespace(
            logits=self.head(x[:, -logits_to_keep:]),
            past_key_values=cache,
            hidden_states=(x,) if output_hidden_states else None,
        )


def _allowed(mask: Tensor, queries: int) -> Tensor:
    """(rows, 1, queries, keys): what each of the last tokens may look at, padding never.

    Itself always: a padded token that may look at nothing has no mean to take.
    """
    keys = mask.shape[1]
    own = torch.arange(keys - queries, keys, device=mask.device)[:, None]
    there = torch.arange(keys, device=mask.device)[None]
    return ((there <= own) & mask.bool()[:, None] | (there == own))[:, None]
