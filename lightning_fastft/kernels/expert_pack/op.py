"""Conversion of expert adapters between expert-last and expert-first layout.

PEFT stores the second factor of an expert adapter with the expert as the fastest axis; grouped products need the expert
as the first axis.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_layout, do_ranges_overlap
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.backends import FLOATING, choose_module, must_check
from lightning_fastft.kernels.expert_pack import reference


def exchange_ends(
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    is_checked: bool = True,
) -> torch.Tensor:
    """Return a contiguous copy with the first and the last axis exchanged: ``out[k, j, i] = source[i, j, k]``.

    (columns, R, E) becomes (E, R, columns), and back.

    Args:
        source: Three axes, contiguous; bf16, fp16, fp32 or float64.
        dtype: Dtype of the result, one of those above; None for the dtype of out, or of source.
        out: Output tensor, contiguous, on the device of source, sharing no memory with it; None for new memory.
        is_checked: As in ``must_check``.

    Returns:
        The result, on the device of source; no gradient.

    Cost:
        Reads source and writes the result once, in one launch; no host sync.

    Example:
        >>> exchange_ends(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])).tolist()
        [[[1.0, 3.0]], [[2.0, 4.0]]]
    """
    dtype = dtype or (source.dtype if out is None else out.dtype)
    if must_check(is_checked):
        check_layout("source", source, (None, None, None), dtypes=FLOATING)
        if dtype not in FLOATING:
            raise ShapeError(f"dtype is {dtype}; allowed are bf16, fp16, fp32 and float64.")
        if out is not None:
            check_layout("out", out, source.shape[::-1], dtypes=(dtype,), like=source)
            if do_ranges_overlap(out, source):
                raise ShapeError("out shares memory with the source. Give separate memory, or None.")
    if out is None:
        out = torch.empty(source.shape[::-1], dtype=dtype, device=source.device)
    with torch.no_grad():
        # The kernel supports float64 neither as input nor as output.
        module = choose_module(reference, out if out.dtype is torch.float64 else source)
        return module.exchange_ends(source, out=out)
