"""Token metrics from sums: loss, perplexity and accuracy over labelled tokens, exact over batches and ranks of
any size.
"""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics import Metric

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.packing.document import IGNORED_LABEL

# Rows of logits that are turned to fp32 at a time when statistics come from full logits: 2,048 rows of a 150k
# vocabulary are 1.2 GB.
CHUNK_ROWS = 2048


class TokenMean(Metric):
    """Mean of a sum over labelled tokens; the sums of all batches and ranks are added before the division.

    It is the loss, in nats, if the negative log-likelihood is summed, and the accuracy if hits are.

    Args:
        kwargs: Options of torchmetrics.Metric.

    Cost:
        Two additions on the device per update; no host sync.

    Example:
        >>> metric = TokenMean()
        >>> metric.update(6.0, num_tokens=2)
        >>> metric.update(2.0, num_tokens=2)
        >>> float(metric.compute())
        2.0
    """

    is_differentiable = False
    full_state_update = False
    total: torch.Tensor
    num_tokens: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # fp64 and int64: a validation set has more tokens than fp32 counts exactly.
        self.add_state("total", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_tokens", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, total: torch.Tensor | float, num_tokens: torch.Tensor | int) -> None:
        """Add the sum over num_tokens labelled tokens."""
        # Again here: Trainer(precision="bf16-true") casts every floating tensor of the module.
        self.total = self.total.to(torch.float64) + total
        self.num_tokens = self.num_tokens + num_tokens

    def compute(self) -> torch.Tensor:
        """Return the mean; NaN before any labelled token."""
        return self.total / self.num_tokens


class TokenPerplexity(TokenMean):
    """Exponential of the mean negative log-likelihood per labelled token.

    Example:
        >>> metric = TokenPerplexity()
        >>> metric.update(torch.log(torch.tensor(9.0)), num_tokens=2)
        >>> round(float(metric.compute()), 4)
        3.0
    """

    def compute(self) -> torch.Tensor:
        """Return the perplexity; NaN before any labelled token."""
        return torch.exp(super().compute())


def logits_statistics(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the summed negative log-likelihood, the hits and the labelled tokens of logits that are there already.

    The logit at position t is judged by the label at t + 1; labels of -100 are ignored.

    Args:
        logits: Shape (B, T, V), any floating dtype.
        labels: Unshifted labels, shape (B, T), int64.

    Returns:
        nll_sum (fp32), num_correct (int64), num_tokens (int64), each 0-dim on the device of logits.

    Raises:
        ShapeError: The shapes do not belong together.

    Cost:
        fp32 copies of 2,048 rows at a time; no host sync.

    Example:
        >>> nll_sum, num_correct, num_tokens = logits_statistics(torch.zeros(1, 3, 4), torch.tensor([[-100, 0, -100]]))
        >>> round(float(nll_sum), 4), int(num_correct), int(num_tokens)
        (1.3863, 1, 1)
    """
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise ShapeError(
            f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} do not belong together."
        )
    logit_RV = logits[:, :-1].reshape(-1, logits.shape[-1])
    target_R = labels[:, 1:].reshape(-1).to(logits.device)
    nll_sum = torch.zeros((), dtype=torch.float32, device=logits.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=logits.device)
    for start in range(0, target_R.numel(), CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        chunk_RV = logit_RV[part].float()
        nll_sum += torch.nn.functional.cross_entropy(
            chunk_RV, target_R[part], ignore_index=IGNORED_LABEL, reduction="sum"
        )
        # No token is -100, so rows without a label are never hits.
        num_correct += (chunk_RV.argmax(dim=-1) == target_R[part]).sum()
    return nll_sum, num_correct, (target_R != IGNORED_LABEL).sum()
