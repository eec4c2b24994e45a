"""Dequantise NF4 weights of linear layers in one launch, each into separate memory or into rows of a larger buffer.

Axes: O output columns and I input columns of a weight, (O, I) in memory; C = O I / 2 bytes, Q = O I / 64 blocks that
    share a scale, G groups of 256 blocks that share a scale of scales, M entries of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_fastft.core.checks import check_layout, check_rows_apart, check_tensor
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.backends import TRITON_DTYPES, choose_module, must_check, no_graph
from lightning_fastft.kernels.nf4_experts.reference import BLOCK_WEIGHTS, GROUP_BLOCKS
from lightning_fastft.kernels.nf4_linear import reference
from lightning_fastft.kernels.nf4_linear.reference import NF4Weight


def read_params4bit(weight: torch.Tensor) -> NF4Weight | None:
    """Return the tensors of a ``bitsandbytes.nn.Params4bit``; None if it is anything but NF4 in blocks of 64.

    The function reads attributes only and does not import bitsandbytes. It supports fp32 statistics and statistics
    quantised again in blocks of 256, in any ``quant_storage``. The result shares the memory of the weight: call it
    again after the weight was moved or loaded.

    Args:
        weight: The weight of a ``Linear4bit``, or any other tensor.

    Returns:
        Views of the weight's tensors. None for a dense or not yet quantised weight, fp4, another block size, a part
        that is not contiguous, and the byte order that bitsandbytes uses for inference on a CPU.

    Cost:
        About ten views on the host; no copy and no host sync.

    Source:
        bitsandbytes 0.50, ``functional.QuantState``.

    Example:
        >>> read_params4bit(torch.nn.Parameter(torch.zeros(2, 64))) is None
        True
    """
    state = getattr(weight, "quant_state", None)
    if state is None or not _is_served(weight, state):
        return None
    packed_C = weight.data.view(-1).view(torch.uint8)
    if state.state2 is None:
        return NF4Weight(packed_C, state.absmax, None, None, state.code, None)
    return NF4Weight(packed_C, state.absmax, state.state2.absmax, state.offset.view(()), state.code, state.state2.code)


def dequantise_many(weights: Sequence[NF4Weight], *, outs: Sequence[torch.Tensor], is_checked: bool = True) -> None:
    """Dequantise several weights, such as q, k and v, in one launch.

    The values are bit-equal to ``bitsandbytes.functional.dequantize_4bit`` in the original dtype, and rounded once from
    fp32 in any other.

    Args:
        weights: The quantised weights, any number, from ``read_params4bit``.
        outs: Output tensors, one per weight. Shape (O, I), I a multiple of 64; all of one dtype (bf16, fp16 or fp32) on
            the device of the weights; last axis contiguous, any row stride. The memory between their rows is not
            touched. They may be views of one buffer; no two may share an element.
        is_checked: As in ``must_check``.

    Raises:
        OptionError: The columns of an output are not a multiple of 64, or the numbers of weights and outputs differ.
        ShapeError: Shapes, dtypes, devices or layouts do not match.

    Cost:
        Reads 0.52 bytes and writes one value per weight, in one launch per four weights on CUDA; no temporary memory
        and no host sync. A separate program is compiled for each number of weights and each combination of their
        columns. The reference makes copies of about 14 bytes per weight.

    Source:
        NF4 and double quantisation: QLoRA, arXiv 2305.14314.

    Example:
        >>> packed, table = torch.full((32,), 0xF0, dtype=torch.uint8), torch.linspace(-1.0, 1.0, 16)
        >>> parts = packed, torch.tensor([3.0]), None, None, table, None
        >>> buffer = torch.zeros(2, 66)
        >>> dequantise_many([NF4Weight(*parts), NF4Weight(*parts)], outs=[buffer[:1, :64], buffer[1:, :64]])
        >>> buffer[:, 61:]
        tensor([[-3.,  3., -3.,  0.,  0.],
                [-3.,  3., -3.,  0.,  0.]])
    """
    if must_check(is_checked):
        if len(weights) != len(outs):
            raise OptionError(f"There are {len(weights)} weights and {len(outs)} outs; give one out for each weight.")
        for place, (weight, out) in enumerate(zip(weights, outs)):
            _check_out(f"outs[{place}]", out, outs[0])
            _check_weight(weight)
            _check_parts(weight, out)
    if not outs:
        return
    with no_graph():
        choose_module(reference, outs[0], dtypes=None).dequantise_many(weights, outs)


def _is_served(weight: torch.Tensor, state: Any) -> bool:
    """Return whether a quantised weight has the format that the kernel reads."""
    if state.quant_type != "nf4" or state.blocksize != BLOCK_WEIGHTS or getattr(state, "packing_format_for_cpu", False):
        return False
    nested = state.state2
    floats = [state.code] if nested is None else [state.code, nested.code, nested.absmax, state.offset]
    if nested is not None and (nested.blocksize != GROUP_BLOCKS or nested.state2 is not None):
        return False
    if state.absmax.dtype is not (torch.float32 if nested is None else torch.uint8):
        return False
    return all(part.dtype is torch.float32 for part in floats) and all(
        part.is_contiguous() for part in (weight, state.absmax, *floats)
    )


def _check_columns(name: str, num_inputs: int) -> None:
    """Raise on rows that do not start with a block."""
    if num_inputs % BLOCK_WEIGHTS:
        raise OptionError(
            f"{name} has {num_inputs} input columns; NF4 needs multiples of {BLOCK_WEIGHTS}, so that no block spans "
            "two rows. Use "
            "bitsandbytes.functional.dequantize_4bit for this weight."
        )


def _check_out(name: str, out: torch.Tensor, first: torch.Tensor) -> None:
    """Raise on an output that cannot hold rows of dense weights, or differs from the first in dtype or device."""
    check_tensor(name, out, ndim=2, dtypes=TRITON_DTYPES)
    _check_columns(name, out.shape[1])
    check_layout(name, out, (None, None), like=first, num_strided=1)
    check_rows_apart(name, out)


def _check_weight(weight: NF4Weight) -> None:
    """Raise on a value that did not come from ``read_params4bit``, including None."""
    if not isinstance(weight, NF4Weight):
        raise OptionError(
            f"weight must be an NF4Weight, got {type(weight).__name__}; read_params4bit returns one, or None for other "
            "formats."
        )


def _check_parts(weight: NF4Weight, out_OI: torch.Tensor) -> None:
    """Raise on parts that do not describe the weights of out_OI."""
    num_blocks = out_OI.numel() // BLOCK_WEIGHTS
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]] | None] = {
        "packed_C": (torch.uint8, (num_blocks * BLOCK_WEIGHTS // 2,)),
        "absmax_Q": (torch.uint8, (num_blocks,)),
        "nested_absmax_G": (torch.float32, (-(-num_blocks // GROUP_BLOCKS),)),
        "offset": (torch.float32, ()),
        "quant_map_M": (torch.float32, (16,)),
        "nested_quant_map_M": (torch.float32, (256,)),
    }
    if weight.nested_absmax_G is None:
        expected |= {
            "absmax_Q": (torch.float32, (num_blocks,)),
            "nested_absmax_G": None,
            "offset": None,
            "nested_quant_map_M": None,
        }
    for name, want in expected.items():
        part = getattr(weight, name)
        if want is None and part is None:
            continue
        if want is None or part is None:
            raise ShapeError(
                f"{name} is {'None' if part is None else 'given'}; the scales of scales, their offset and their table "
                "must be given together."
            )
        dtype, shape = want
        check_layout(name, part, shape, dtypes=(dtype,), like=out_OI)
