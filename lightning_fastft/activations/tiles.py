"""Tiled feed-forward blocks: run tokens tile by tile, and recompute each tile just before its backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lightning_fastft.activations.segments import Segment
from lightning_fastft.activations.values import SEGMENT_ATTRIBUTE
from lightning_fastft.core.errors import SwapError
from lightning_fastft.core.patcher import ModelPatcher

BLOCK_NAMES = ("mlp", "feed_forward", "ffn")
# Tiles of "auto". More of them save little: one tile's intermediates are then smaller than the rest of a layer.
AUTO_TILES = 8


def install_tiles(
    layers: Sequence[nn.Module], segments: Sequence[Segment], patcher: ModelPatcher, *, num_tiles: int
) -> int:
    """Run the dense feed-forward block of every decoder layer in tiles of tokens, in training.

    The block processes tokens independently, so tiles change only the rounding of GEMMs with fewer rows. The
    intermediates (gate, up, their product and gradients) of only one tile exist at a time. A recomputed layer does no
    extra work: its recompute ends before the block, and each tile is recomputed before its backward.

    Returns:
        The number of tiled blocks; blocks of experts are not tiled.

    Raises:
        SwapError: No layer has a dense feed-forward block.

    Cost:
        GEMMs with 1/num_tiles of the rows, and a copy of the block's output.
    """
    num_tiled = 0
    for layer, outer in zip(layers, segments):
        for name, block in dense_blocks(layer).items():
            segment = Segment(outer.index, list(block.modules()))
            for module in block.modules():
                if SEGMENT_ATTRIBUTE in vars(module):
                    patcher.set_attribute(module, SEGMENT_ATTRIBUTE, segment)
            patcher.set_attribute(
                block, "forward", functools.partial(_run_tiled, layer, name, outer, segment, num_tiles)
            )
            num_tiled += 1
    if not num_tiled:
        raise SwapError(
            f"mlp_tiles={num_tiles}: no decoder layer has a dense feed-forward block ({', '.join(BLOCK_NAMES)})."
        )
    return num_tiled


def dense_blocks(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the dense feed-forward blocks of a decoder layer, keyed by their names."""
    found = {name: layer._modules.get(name) for name in BLOCK_NAMES}
    return {name: block for name, block in found.items() if block is not None and not _has_experts(block)}


def _run_tiled(
    layer: nn.Module,
    name: str,
    outer: Segment,
    segment: Segment,
    num_tiles: int,
    x: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the current block of a name in a layer, which may be another instance with the same state.

    outer is the segment of the layer, segment that of the tiles.
    """
    module = layer._modules[name]
    assert module is not None
    forward = functools.partial(type(module).forward, module)
    if args or kwargs or not torch.is_grad_enabled() or not module.training:
        return forward(x, *args, **kwargs)
    tiles = x.chunk(num_tiles, dim=-2)
    session = outer.session
    is_unneeded = session is not None and session.is_last(name)
    with nullcontext() if session is None else session.watch_end(name):
        outputs = [segment.run(_skip if is_unneeded else forward, tile) for tile in tiles]
    if is_unneeded:
        # The recompute of the layer continued, so the output may be read.
        with torch.no_grad():
            for output, tile in zip(outputs, tiles):
                output.data = forward(tile)
    return torch.cat(outputs, dim=-2)


def _skip(tile: torch.Tensor) -> torch.Tensor:
    """Replace a block whose output is not read."""
    return tile * float("nan")


def _has_experts(block: nn.Module) -> bool:
    return any("expert" in name.lower() or "router" in name.lower() for name, _ in block.named_modules())
