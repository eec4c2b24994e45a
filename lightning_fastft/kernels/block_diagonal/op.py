"""Write block-diagonal matrices, which fuse the adapters of several layers into the product of their weights.

Axes: O rows of all blocks together, C columns of the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_fastft.core.checks import check_layout, check_rows_apart
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.backends import FLOATING, choose_module, must_check, no_graph
from lightning_fastft.kernels.block_diagonal import reference

MAX_COLUMNS = 4096
MAX_BLOCKS = 4


def write_block_diagonal(out_OC: torch.Tensor, blocks: Sequence[torch.Tensor], *, is_checked: bool = True) -> None:
    """Write blocks on the diagonal of a matrix, and zeros everywhere else.

    Args:
        out_OC: Output tensor. Shape (O, C), C at most 4,096; bf16, fp16, fp32 or float64; last axis contiguous, any row
            stride; memory between the rows is not written.
        blocks: At most 4 blocks of any number of columns, including 0. Their rows add up to O, their columns to at most
            C. Dtype and device of out_OC; last axis contiguous, any row stride; in separate memory.
        is_checked: As in ``must_check``.

    Cost:
        Reads the blocks and writes O x C values once, in one launch; no host sync.

    Example:
        >>> out = torch.empty(3, 4)
        >>> write_block_diagonal(out, [torch.ones(1, 1), torch.full((2, 2), 2.0)])
        >>> out
        tensor([[1., 0., 0., 0.],
                [0., 2., 2., 0.],
                [0., 2., 2., 0.]])
    """
    if must_check(is_checked):
        check_layout("out_OC", out_OC, (None, None), dtypes=FLOATING, num_strided=1)
        check_rows_apart("out_OC", out_OC)
        if len(blocks) > MAX_BLOCKS or out_OC.shape[1] > MAX_COLUMNS:
            raise ShapeError(
                f"{len(blocks)} blocks in {out_OC.shape[1]} columns; at most {MAX_BLOCKS} blocks and {MAX_COLUMNS} "
                "columns are supported."
            )
        for number, block in enumerate(blocks):
            check_layout(f"blocks[{number}]", block, (None, None), like=out_OC, num_strided=1)
        num_rows, num_columns = (sum(block.shape[axis] for block in blocks) for axis in (0, 1))
        if num_rows != out_OC.shape[0] or num_columns > out_OC.shape[1]:
            raise ShapeError(
                f"The blocks have {num_rows} rows and {num_columns} columns together; out_OC is {tuple(out_OC.shape)}."
            )
    with no_graph():
        choose_module(reference, out_OC).write_block_diagonal(out_OC, blocks)
