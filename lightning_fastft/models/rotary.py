"""Rotary scaling that depends on the length of a document: each document of a pack gets the factors that it would get alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from lightning_fastft.models.swap import SwapLedger
from lightning_fastft.status import Status

_LENGTH_DEPENDENT = ("longrope", "dynamic")


def install_rotary(model: PreTrainedModel, ledger: SwapLedger) -> Status | None:
    """Make length-dependent rotary scaling exact per document.

    transformers picks the factors of a whole row by its longest position. With longrope each document gets the short or the long factors by its own
    length, with dynamic scaling the base of its own length.

    Args:
        model: A causal language model.
        ledger: Where the change of each rotary embedding is recorded.

    Returns:
        Status "rotary scaling"; None where positions are scaled independently of length.

    Cost:
        longrope: angles are computed twice per step. dynamic: once, and once more for each length above the limit, with one host sync per forward
        (transformers' own code has one).

    Source:
        own; the factors are those of transformers.modeling_rope_utils.
    """
    found: set[str] = set()
    for module in model.get_decoder().modules():
        kind = _kind_of(module)
        if kind is None:
            continue
        compute = _angles_by_two_sets if kind == "longrope" else _angles_by_length
        ledger.set_attribute(module, "forward", functools.partial(compute, module.forward, _limit_of(module, kind)))
        found.add(kind)
    if not found:
        return None
    return Status("rotary scaling", "active", f"{', '.join(sorted(found))}: each document has the factors of its own length")


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Return for each token the length of its document; a position of 0 begins one.

    Args:
        position_ids: Shape (1, T), int64.

    Returns:
        Shape (1, T), int64, on the same device. Where the row does not begin at 0, its beginning counts as one document up to its last position.

    Example:
        >>> document_lengths(torch.tensor([[0, 1, 2, 0, 0, 1]]))
        tensor([[3, 3, 3, 1, 2, 2]])
    """
    document_T = ((position_ids[0] == 0).cumsum(0) - 1).clamp(min=0)
    last_T = torch.zeros_like(document_T).scatter_reduce(0, document_T, position_ids[0], "amax")
    return (last_T[document_T] + 1)[None]


def _kind_of(module: nn.Module) -> str | None:
    """Return which length-dependent scaling a rotary embedding has, in any of its layer types."""
    kind = getattr(module, "rope_type", None)
    kinds = set(kind.values()) if isinstance(kind, Mapping) else {kind}
    return next((name for name in _LENGTH_DEPENDENT if name in kinds), None)


def _limit_of(module: Any, kind: str) -> int:  # noqa: ANN401 - a rotary embedding of any family
    """Return the longest document that keeps the original factors."""
    if kind == "dynamic":
        return int(module.config.max_position_embeddings)
    parameters = module.config.rope_parameters
    entries = [parameters, *(entry for entry in parameters.values() if isinstance(entry, Mapping))]
    return min(int(entry["original_max_position_embeddings"]) for entry in entries if entry.get("rope_type") == kind)


def _is_one_row(position_ids: torch.Tensor) -> bool:
    return position_ids.shape[-2] == 1 and position_ids.shape[-1] > 1


def _angles_by_two_sets(own_forward: Callable[..., Any], limit: int, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Compute angles with the short and with the long factors, and take those of each token's document."""
    if not _is_one_row(position_ids):
        return own_forward(x, position_ids, *args, **kwargs)
    is_long = document_lengths(position_ids.reshape(-1, position_ids.shape[-1])[:1]) > limit
    short = own_forward(x, position_ids.masked_fill(is_long, 0), *args, **kwargs)
    long = own_forward(x, position_ids.masked_fill(~is_long, 0), *args, **kwargs)
    return tree_map(lambda a, b: torch.where(is_long[..., None], b, a), short, long)


def _angles_by_length(own_forward: Callable[..., Any], limit: int, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Compute angles once for all documents up to the limit, and once for each length above it."""
    if not _is_one_row(position_ids):
        return own_forward(x, position_ids, *args, **kwargs)
    length = document_lengths(position_ids.reshape(-1, position_ids.shape[-1])[:1])

    def compute(is_chosen: torch.Tensor) -> Any:  # noqa: ANN401 - as the family's
        # The embedding remembers the base of the longest row; one position below its limit brings the original back.
        own_forward(x, torch.zeros_like(position_ids), *args, **kwargs)
        return own_forward(x, position_ids.masked_fill(~is_chosen, 0), *args, **kwargs)

    angles = compute(length <= limit)
    for value in length[length > limit].unique().tolist():
        is_chosen = (length == value)[..., None]
        angles = tree_map(functools.partial(torch.where, is_chosen), compute(is_chosen[..., 0]), angles)
    return angles
