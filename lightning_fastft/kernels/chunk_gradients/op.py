"""Gradients of queries, keys and decays in chunked linear attention: gated delta rules and Mamba-2.

A chunk is up to 64 tokens of a document. Inside it, with decays summed from its first token,
``out_i = scale * (2^decay_i state q_i + sum_{j <= i} 2^(decay_i - decay_j) (q_i . k_j) v_j)`` and the state of the next
chunk is ``2^decay_last state + sum_j 2^(decay_last - decay_j) k_j v_j``. The values of a gated delta rule are
``v = u - w state``.

Axes: T tokens, H heads of queries and keys, J heads of values, K and V their widths, N chunks, S documents.
The function is not differentiable; the autograd Functions of mixers call it.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_layout
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.backends import FLOATING, choose_module, must_check, plain_numbers
from lightning_fastft.kernels.chunk_gradients import reference
from lightning_fastft.kernels.chunk_gradients.reference import ChunkInputs


def chunk_gradients(
    inputs: ChunkInputs, *, is_checked: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the gradients of queries, keys, decays and the rows that read the state.

    Sums are fp32 (float64 for float64) in a fixed order, so two calls are bit-equal. Factors of products between tiles
    have the dtype of the queries.

    Args:
        inputs: Rows, states and decays, and where the chunks are.
        is_checked: As in ``must_check``.

    Returns:
        d_q_THK: Gradient of the queries, in their dtype.
        d_k_THK: Gradient of the keys, in the dtype of the queries.
        d_w_TJK: Gradient of the rows that read the state, like d_q_THK; None without d_value_TJV.
        d_decay_TJ: Gradient of the decays, in natural logarithms and summed inside each chunk; fp32 (float64 for
            float64).

    Cost:
        Reads values, states and their gradients once per 64 columns of K, and writes each gradient once. No host sync.
        The reference makes wide copies and reads the offsets on the host.

    Source:
        Gated linear attention, arXiv 2312.06635; gated delta networks, arXiv 2412.06464.

    Example:
        >>> rows, states = torch.ones(2, 1, 1), torch.zeros(1, 1, 1, 1)
        >>> start, chunk, decay = torch.tensor([0, 2]), torch.tensor([[0, 0]]), torch.zeros(2, 1)
        >>> found = chunk_gradients(ChunkInputs(rows, rows, rows, rows, states, states, decay, start, chunk, scale=1.0))
        >>> found[0].flatten(), found[1].flatten()
        (tensor([1., 2.]), tensor([2., 1.]))
    """
    if must_check(is_checked):
        _check(inputs)
    with plain_numbers(inputs.q_THK.device.type):
        return choose_module(reference, inputs.q_THK).chunk_gradients(inputs)


def _check(inputs: ChunkInputs) -> None:
    """Raise on tensors that do not belong together."""
    q_THK, k_THK, v_TJV, d_out_TJV, state_NJKV, d_state_NJKV, decay_TJ, start_S1, chunk_N2, _, d_value_TJV = inputs
    num_tokens, num_heads, num_keys = check_layout("q_THK", q_THK, (None, None, None), dtypes=FLOATING).shape
    _, num_value_heads, num_values = check_layout("v_TJV", v_TJV, (num_tokens, None, None), like=q_THK).shape
    if num_heads == 0 or num_value_heads % num_heads:
        raise ShapeError(f"{num_value_heads} heads of v_TJV cannot share {num_heads} heads of q_THK evenly.")
    check_layout("k_THK", k_THK, q_THK.shape, like=q_THK)
    check_layout("d_out_TJV", d_out_TJV, v_TJV.shape, like=q_THK)
    if d_value_TJV is not None:
        check_layout("d_value_TJV", d_value_TJV, v_TJV.shape, like=q_THK)
    check_layout("decay_TJ", decay_TJ, v_TJV.shape[:2], dtypes=(torch.float32, torch.float64), like=q_THK)
    check_layout("start_S1", start_S1, (None,), dtypes=(torch.int32, torch.int64), like=q_THK)
    check_layout("chunk_N2", chunk_N2, (None, 2), dtypes=(torch.int32, torch.int64), like=q_THK)
    state_shape = (len(chunk_N2), num_value_heads, num_keys, num_values)
    check_layout("state_NJKV", state_NJKV, state_shape, dtypes=FLOATING, like=q_THK)
    check_layout("d_state_NJKV", d_state_NJKV, state_shape, dtypes=FLOATING, like=q_THK)
