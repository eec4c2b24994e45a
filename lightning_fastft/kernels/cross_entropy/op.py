"""Cross-entropy and log-probabilities of the labelled rows of a pack, in chunks.

Full logits are never materialised, and the forward computes the gradient.

Axes: T tokens of the pack, D model width, V vocabulary, R labelled rows (padded to a bucket; the first num_rows count).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from lightning_fastft.core.autocast import autocast_off
from lightning_fastft.core.checks import check_tensor
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.kernels import logit_rows
from lightning_fastft.kernels.backends import choose_module, wide_dtype
from lightning_fastft.kernels.cross_entropy import reference
from lightning_fastft.kernels.logit_rows import DEFAULT_CHUNK_ROWS, Chunk, Head, LabelledRows


class LogProbs(NamedTuple):
    """Log-probability of each labelled row's target, and the entropy of the row's distribution (None unless asked
    for).
    """

    log_prob_R: torch.Tensor
    entropy_R: torch.Tensor | None


def labelled_cross_entropy(
    head: Head,
    *,
    row_R: torch.Tensor | None,
    target_R: torch.Tensor,
    num_rows: int,
    num_items: float | torch.Tensor,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> torch.Tensor:
    """Return the summed cross-entropy of the first num_rows rows, divided by num_items.

    The GEMMs run in the dtype of the states (in autocast's dtype if it is on), softmax and sums in fp32. The power of
    two in num_items divides gradients only in the backward, so nothing underflows in fp16. The gradient of a trained
    weight is summed over the chunks in fp32.

    Args:
        head: Hidden states and output layer.
        row_R: Trained rows of the states, int64, each at most once among the first num_rows; None for rows 0 to
            num_rows - 1.
        target_R: Target token of each row, int64; -100 skips the row.
        num_rows: Number of labelled rows; the rows after them are padding.
        num_items: Divisor of the sum, above 0; a number, or a 0-dim tensor on the device, which is read without a host
            sync.
        chunk_rows: Rows of logits in memory at a time.

    Returns:
        Loss, 0-dim, fp32 (float64 for float64 states), with a graph where an input requires a gradient. With no rows: 0
        and gradients of 0.

    Raises:
        OptionError: num_rows, num_items, softcap or chunk_rows is out of range.

    Cost:
        2 V D FLOP per row each for the logits, the gradient of the states and the gradient of the weight. Memory:
        chunk_rows x V logits; with a gradient, R x D states for the backward, and V x D in fp32 if the weight is
        trained. No host sync.

    Source:
        Gradient in the forward: Liger kernel (arXiv 2410.10989). Skipping rows without a label: own.

    Example:
        >>> head = Head(torch.zeros(3, 2), torch.zeros(4, 2))
        >>> rows = {"row_R": torch.tensor([0]), "target_R": torch.tensor([1]), "num_rows": 1}
        >>> loss = labelled_cross_entropy(head, **rows, num_items=1.0)
        >>> round(loss.item(), 4)
        1.3863
    """
    rows = _check(head, row_R=row_R, target_R=target_R, num_rows=num_rows, chunk_rows=chunk_rows)
    if not isinstance(num_items, torch.Tensor) and not 0 < num_items < float("inf"):
        raise OptionError(f"num_items must be a finite number above 0, got {num_items}.")
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in head.inputs):
        return _LabelledCrossEntropy.apply(*head.inputs, head.scale, head.softcap, rows, target_R, num_items)
    nll_sum, _ = _sum_statistics(head, rows, target_R, count_correct=False)
    return nll_sum / num_items


def token_statistics(
    head: Head,
    *,
    row_R: torch.Tensor | None,
    target_R: torch.Tensor,
    num_rows: int,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed negative log-likelihood and the number of rows whose most likely token is the target.

    Takes the arguments of ``labelled_cross_entropy`` and never builds a graph. Among equal logits the token with the
    lowest index counts as the most likely.

    Returns:
        nll_sum: 0-dim, fp32 (float64 for float64 states), on the device of the states.
        num_correct: 0-dim, int64, on the same device.

    Cost:
        2 V D FLOP per row; chunk_rows x V logits; no host sync.
    """
    rows = _check(head, row_R=row_R, target_R=target_R, num_rows=num_rows, chunk_rows=chunk_rows)
    return _sum_statistics(head, rows, target_R, count_correct=True)


def labelled_log_probs(
    head: Head,
    *,
    row_R: torch.Tensor | None,
    target_R: torch.Tensor,
    num_rows: int,
    with_entropy: bool = False,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> LogProbs:
    """Return the log-probability of each row's target under the softmax of the row's logits.

    Takes the arguments of ``labelled_cross_entropy``; a target of -100 gives 0, without gradient. Differentiable in
    the tensors of the head; the entropy is a metric without gradient. The gradient of a log-probability is kept
    undivided and multiplied by the incoming gradient in fp32, so a small one does not underflow in fp16.

    Returns:
        log_prob_R: Shape (R,), fp32 (float64 for float64 states); 0 from num_rows on.
        entropy_R: The same for ``-sum p log p``; None unless asked for.

    Raises:
        OptionError: num_rows, softcap or chunk_rows is out of range.

    Cost:
        2 V D FLOP per row each for the logits and the gradient of the states. A trained weight or bias costs the logits
        once more, and 2 V D for its gradient. Memory: chunk_rows x V logits; with a gradient, R x D states for the
        backward, and V x D in fp32 if the weight is trained. No host sync.

    Source:
        Own: the forward computes the gradient of each row before the loss over rows is known.

    Example:
        >>> head = Head(torch.zeros(3, 2), torch.zeros(4, 2))
        >>> rows = {"row_R": torch.tensor([0, 0]), "target_R": torch.tensor([1, 0]), "num_rows": 1}
        >>> labelled_log_probs(head, **rows).log_prob_R
        tensor([-1.3863,  0.0000])
    """
    rows = _check(head, row_R=row_R, target_R=target_R, num_rows=num_rows, chunk_rows=chunk_rows)

    def log_probs(chunk: Chunk, writes_gradient: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The factor turns the gradient of the loss into the gradient of the log-probability.
        gradient_factor = -1.0 if writes_gradient else None
        nll_R, _, entropy_R = _row_losses(
            chunk, target_R, head, gradient_factor=gradient_factor, with_entropy=with_entropy
        )
        return -nll_R, entropy_R

    return LogProbs(*logit_rows.evaluate_rows(head, rows, log_probs, has_metric=with_entropy))


class _LabelledCrossEntropy(torch.autograd.Function):
    """Save the gradient of the trained rows, and of weight and bias if they are trained, before the division by the
    power of two. It saves neither logits nor states.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        scale: float,
        softcap: float | None,
        rows: LabelledRows,
        target_R: torch.Tensor,
        num_items: float | torch.Tensor,
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        head = Head(hidden_TD, weight_VD, bias_V, scale, softcap)
        dtype, wide, device = head.compute_dtype, wide_dtype(hidden_TD.dtype), hidden_TD.device
        d_row_RD = (
            torch.empty(rows.num_padded, hidden_TD.shape[1], dtype=dtype, device=device) if needs_hidden else None
        )
        d_weight_VD = torch.zeros(weight_VD.shape, dtype=wide, device=device) if needs_weight else None
        d_bias_V = torch.zeros(weight_VD.shape[0], dtype=wide, device=device) if needs_bias else None
        nll_R = torch.zeros(rows.num_padded, dtype=wide, device=device)
        factor, ctx.divisor = _split_divisor(num_items)

        for chunk in logit_rows.logit_chunks(head, rows, dtype=dtype):
            nll_R[chunk.begin : chunk.end], _, _ = _row_losses(chunk, target_R, head, gradient_factor=factor)
            with autocast_off(device.type):
                if d_row_RD is not None:
                    torch.mm(chunk.logits_RV, chunk.weight_VD, out=d_row_RD[chunk.begin : chunk.end])
                if d_weight_VD is not None:
                    logit_rows.add_product(d_weight_VD, chunk.logits_RV.T, chunk.hidden_RD)
                if d_bias_V is not None:
                    d_bias_V += chunk.logits_RV.sum(dim=0, dtype=wide)

        ctx.save_for_backward(rows.row_R, d_row_RD, d_weight_VD, d_bias_V)
        ctx.num_rows = rows.num_rows
        ctx.hidden_shape, ctx.hidden_dtype = hidden_TD.shape, hidden_TD.dtype
        ctx.weight_dtype = weight_VD.dtype
        ctx.bias_dtype = None if bias_V is None else bias_V.dtype
        return nll_R.sum() / num_items

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        row_R, d_row_RD, d_weight_VD, d_bias_V = ctx.saved_tensors
        factor = d_loss / ctx.divisor
        d_hidden_TD = None
        if d_row_RD is not None:
            d_row_RD = logit_rows.multiply(d_row_RD[: ctx.num_rows], factor, dtype=ctx.hidden_dtype)
            d_hidden_TD = logit_rows.scatter_rows(d_row_RD, row_R, shape=ctx.hidden_shape)
        d_weight = None if d_weight_VD is None else logit_rows.multiply(d_weight_VD, factor, dtype=ctx.weight_dtype)
        d_bias = None if d_bias_V is None else logit_rows.multiply(d_bias_V, factor, dtype=ctx.bias_dtype)
        return d_hidden_TD, d_weight, d_bias, None, None, None, None, None


@torch.no_grad()
def _sum_statistics(
    head: Head, rows: LabelledRows, target_R: torch.Tensor, *, count_correct: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum losses and correct rows over all chunks, without gradients."""
    nll_sum = torch.zeros((), dtype=wide_dtype(head.hidden_TD.dtype), device=head.hidden_TD.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=head.hidden_TD.device)
    for chunk in logit_rows.logit_chunks(head, rows, dtype=head.compute_dtype):
        nll_R, correct_R, _ = _row_losses(chunk, target_R, head, gradient_factor=None, count_correct=count_correct)
        nll_sum = nll_sum + nll_R.sum()
        if correct_R is not None:
            num_correct = num_correct + correct_R.sum()
    return nll_sum, num_correct


def _row_losses(
    chunk: Chunk,
    target_R: torch.Tensor,
    head: Head,
    *,
    gradient_factor: float | None,
    count_correct: bool = False,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Run the Triton kernel on narrow logits on CUDA, and the PyTorch reference otherwise."""
    return choose_module(reference, chunk.logits_RV, dtypes=logit_rows.KERNEL_DTYPES).row_losses(
        chunk.logits_RV,
        target_R[chunk.begin : chunk.end],
        scale=head.scale,
        softcap=head.softcap,
        gradient_factor=gradient_factor,
        count_correct=count_correct,
        with_entropy=with_entropy,
    )


def _split_divisor(num_items: float | torch.Tensor) -> tuple[float, float | torch.Tensor]:
    """Split 1 / num_items into a factor between 1 and 2 and a divisor that is a power of two.

    The factor is applied before gradients are rounded to a narrow dtype, the divisor after. Dividing by a power of two
    rounds nothing, and fp16 keeps small gradients until the loss scale is applied.
    """
    if isinstance(num_items, torch.Tensor):
        return 1.0, num_items
    mantissa, exponent = math.frexp(num_items)
    return 1.0 / mantissa, 2.0**exponent


def _check(
    head: Head, *, row_R: torch.Tensor | None, target_R: torch.Tensor, num_rows: int, chunk_rows: int
) -> LabelledRows:
    """Raise if the loop or the kernel would read an argument wrongly."""
    logit_rows.check_head(head)
    check_tensor("target_R", target_R, ndim=1, dtypes=(torch.int64,))
    rows = LabelledRows(row_R, target_R.shape[0], num_rows, chunk_rows)
    logit_rows.check_rows(head, rows)
    return rows
