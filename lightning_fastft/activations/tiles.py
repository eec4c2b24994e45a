"""Tiled feed-forward blocks: rows of tokens one tile after the other, each computed again just before its own
backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_fastft.activations.segments import Segment, is_random
from lightning_fastft.activations.values import SEGMENT_ATTRIBUTE
from lightning_fastft.core.errors import SwapError
from lightning_fastft.core.patcher import ModelPatcher

BLOCK_NAMES = ("mlp", "feed_forward", "ffn")


class _Block(NamedTuple):
    """A tiled block: where it stands, the segment of its layer, and the one its tiles run in."""

    layer: nn.Module
    name: str
    outer: Segment
    segment: Segment
    num_tiles: int


def install_tiles(
    layers: Sequence[nn.Module], segments: Sequence[Segment], patcher: ModelPatcher, *, num_tiles: int
) -> int:
    """Run the dense feed-forward block of every decoder layer in tiles of tokens, in training.

    A block treats every token by itself, so tiles change no value beyond the rounding of products with fewer rows. Only
    one tile's intermediates (gate, up, their product and gradients) exist at a time. Inside a layer that is recomputed
    nothing more is computed than before: the layer's second run ends where the block begins, and each tile runs again
    before its backward.

    Args:
        layers: Decoder layers.
        segments: One per layer.
        patcher: Where the changes are written down.
        num_tiles: Tiles of a pack, at least 2.

    Returns:
        How many blocks are tiled; blocks of experts are left as they are.

    Raises:
        SwapError: No layer has a dense feed-forward block.

    Cost:
        Products of 1/num_tiles of the rows, and a copy of the block's output.
    """
    num_tiled = 0
    for layer, outer in zip(layers, segments):
        for name in BLOCK_NAMES:
            block = layer._modules.get(name)
            if block is None or _has_experts(block):
                continue
            segment = Segment(outer.index, is_random=any(map(is_random, block.modules())))
            for module in block.modules():
                if SEGMENT_ATTRIBUTE in vars(module):
                    patcher.set_attribute(module, SEGMENT_ATTRIBUTE, segment)
            patcher.set_attribute(
                block, "forward", functools.partial(_run_tiled, _Block(layer, name, outer, segment, num_tiles))
            )
            num_tiled += 1
    if not num_tiled:
        raise SwapError(
            f"mlp_tiles={num_tiles}: no decoder layer has a dense feed-forward block ({', '.join(BLOCK_NAMES)})."
        )
    return num_tiled


def _run_tiled(block: _Block, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the block that stands in the layer now, which may be another instance with the same state."""
    module = block.layer._modules[block.name]
    assert module is not None
    forward = functools.partial(type(module).forward, module)
    if args or kwargs or not torch.is_grad_enabled() or not module.training:
        return forward(x, *args, **kwargs)
    tiles = x.chunk(block.num_tiles, dim=-2)
    session = block.outer.session
    is_unneeded = session is not None and session.is_last(block.name)
    with nullcontext() if session is None else session.watch_end(block.name):
        outputs = [block.segment.run(_skip if is_unneeded else forward, tile) for tile in tiles]
    if is_unneeded:
        # The layer's second run went on, so somebody may read the output after all.
        with torch.no_grad():
            for output, tile in zip(outputs, tiles):
                output.data = forward(tile)
    return torch.cat(outputs, dim=-2)


def _skip(tile: torch.Tensor) -> torch.Tensor:
    """Stand in for a block whose output nobody will read."""
    return tile * float("nan")


def _has_experts(block: nn.Module) -> bool:
    return any("expert" in name.lower() or "router" in name.lower() for name, _ in block.named_modules())
