"""Rows of a table on the host in plain PyTorch.

Axes: T tokens of the pack, V rows of the table, D model width.
"""

from __future__ import annotations

import torch

from lightning_fastft.kernels.backends import one_kernel


@one_kernel
def gather_rows(weight_VD: torch.Tensor, token_T: torch.Tensor) -> torch.Tensor:
    """Return ``weight_VD[token_T]``, gathered on the device of the table and moved to the device of the tokens.

    Raises:
        IndexError: A token is outside the table.
    """
    return weight_VD.index_select(0, token_T.to(weight_VD.device)).to(token_T.device)
