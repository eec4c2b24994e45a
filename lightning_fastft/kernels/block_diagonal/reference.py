"""A block-diagonal matrix in plain PyTorch.

Axes: O rows of all blocks together, C columns of the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_fastft.kernels.backends import one_kernel


@one_kernel
def write_block_diagonal(out_OC: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
    """Write the blocks on the diagonal, and zeros everywhere else."""
    out_OC.zero_()
    row = column = 0
    for block in blocks:
        num_rows, num_columns = block.shape
        out_OC[row : row + num_rows, column : column + num_columns] = block
        row, column = row + num_rows, column + num_columns
