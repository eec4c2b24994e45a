"""DataNeeds: what a LightningModule asks of the data that it trains on."""

from __future__ import annotations

from typing import Literal, NamedTuple

LossUnit = Literal["token", "completion", "example"]
ScoreUse = Literal["read", "compared", "ignored"]


class DataNeeds(NamedTuple):
    """What the loss of a LightningModule is about; PackedDataModule reads it from the module's ``data_needs``.

    Args:
        formats: Formats of rows with completions that the module trains on (packing/rows/formats.py); empty for plain
            rows.
        loss_unit: What the loss is a mean over: labelled tokens, completions, or examples (a prompt with its
            completions). Packs are weighed by it, so that the mean of an accumulation window is exact.
        adds_mismatched: Whether each completion is followed by that of an example with another prompt, without labels
            of its own loss: KTO's estimate of the divergence.
        score_use: What the loss does with the scores of an example: it reads each, compares those of its completions,
            or ignores them (margins of pairs).
    """

    formats: frozenset[str] = frozenset()
    loss_unit: LossUnit = "token"
    adds_mismatched: bool = False
    score_use: ScoreUse = "read"
