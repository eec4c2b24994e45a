"""PreferenceTuner: DPO and its kin on packed pairs of completions whose prompt is computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_fastft.core.checks import check_choice, check_float, refuse_unread
from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.completions import Completions
from lightning_fastft.packing.needs import DataNeeds
from lightning_fastft.training.losses import (
    MEAN_LOSSES,
    PREFERENCE_LOSSES,
    REFERENCE_LOSSES,
    SFT_WEIGHTS,
    SMOOTHED_LOSSES,
    PreferenceLoss,
    kto_loss,
    preference_loss,
)
from lightning_fastft.training.reference import ReferenceTuner, check_read

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lightning_fastft.patches.lazy_logits import LazyLogits

LARGEST_BETA = 1e3
# Options that a checkpoint keeps; and sft_weight as it was given, because None is another number for another loss.
_OPTIONS = ("loss", "beta", "label_smoothing", "gamma", "desirable_weight", "undesirable_weight")
# Options of one loss, with their defaults.
_OF_ONE_LOSS = {"gamma": ("simpo", 0.5), "desirable_weight": ("kto", 1.0), "undesirable_weight": ("kto", 1.0)}


class PreferenceTuner(ReferenceTuner):
    """Train a model to prefer chosen completions over rejected ones.

    A prompt with its completions is one example; a pack holds the prompt once. The loss of an optimizer
    step is the exact mean over its examples, however they are packed, accumulated and distributed over ranks. The loss
    "kto" also reads an estimate of the divergence from the reference. As in TRL, it is the mean over the examples of
    one micro-batch on all ranks: use packs of several examples, because longer packs and more ranks estimate it better,
    and accumulation does not.

    Args:
        model: As in ``FineTuner``.
        loss: "sigmoid" (DPO), "sigmoid_norm" (the same on means over tokens), "hinge", "ipo", "robust", "apo_zero"
            (raise chosen, lower rejected completions), "apo_down" (lower both, rejected ones more), "kto" (completions
            with a label, no pairs), or without a reference model "orpo", "simpo" and "cpo".
        beta: Sharpness of the comparison, above 0; the tau of "ipo" and the lambda of "orpo".
        label_smoothing: Probability that a label is wrong, in [0, 0.5); for "sigmoid", "sigmoid_norm", "robust",
            "simpo" and "cpo".
        gamma: Target margin of "simpo".
        sft_weight: Weight of the negative log-likelihood of chosen completions (mean over their tokens); None for 1
            with "orpo" and "cpo" and 0 elsewhere.
        reference: As in ``ReferenceTuner``; "stored" or a second model is refused for losses without a reference model.
        desirable_weight: Weight of desirable completions with "kto".
        undesirable_weight: Weight of undesirable completions with "kto".
        options: Options of ``Tuner``.

    Raises:
        OptionError: A value is not allowed, or two options do not fit.

    Source:
        The papers that ``training/losses.py`` names for each loss, as TRL 1.16 has them; shared prompts are own.

    Example:
        >>> config = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
        >>> PreferenceTuner(config, init="random", lora={"r": 4}, beta=0.2).loss
        'sigmoid'
    """

    def __init__(
        self,
        model: str | dict[str, Any] | PretrainedConfig | PreTrainedModel,
        *,
        loss: PreferenceLoss = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        gamma: float = 0.5,
        sft_weight: float | None = None,
        reference: str | nn.Module | None = None,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        **options: Any,
    ) -> None:
        check_choice("loss", loss, PREFERENCE_LOSSES)
        super().__init__(model, reference=reference, needs_reference=loss in REFERENCE_LOSSES, **options)
        check_read(reference, is_read=self.needs_reference, reader="a loss with a reference model")
        self.loss = loss
        self.beta = check_float("beta", beta, low=1e-6, high=LARGEST_BETA)
        self.label_smoothing = check_float("label_smoothing", label_smoothing, low=0.0, high=0.499)
        self.gamma = check_float("gamma", gamma, low=0.0, high=LARGEST_BETA)
        weight = SFT_WEIGHTS.get(loss, 0.0) if sft_weight is None else sft_weight
        self.sft_weight = check_float("sft_weight", weight, low=0.0, high=LARGEST_BETA)
        self.desirable_weight = check_float("desirable_weight", desirable_weight, low=0.0, high=LARGEST_BETA)
        self.undesirable_weight = check_float("undesirable_weight", undesirable_weight, low=0.0, high=LARGEST_BETA)
        for name, (reader, default) in _OF_ONE_LOSS.items():
            refuse_unread(name, getattr(self, name), default=default, is_read=loss == reader, reader=f"loss={reader!r}")
        if label_smoothing and loss not in SMOOTHED_LOSSES:
            raise OptionError(
                f"loss={loss!r} has no label_smoothing; losses that have it: {', '.join(sorted(SMOOTHED_LOSSES))}."
            )
        if loss == "robust" and not label_smoothing:
            raise OptionError("loss='robust' corrects for wrong labels: set label_smoothing to their share, above 0.")
        self.save_hyperparameters({name: getattr(self, name) for name in _OPTIONS} | {"sft_weight": sft_weight})

    @property
    def data_needs(self) -> DataNeeds:
        """Pairs, or completions with a label; the loss is a mean over examples."""
        if self.loss == "kto":
            return DataNeeds(frozenset({"labelled"}), loss_unit="example", adds_mismatched=True)
        return DataNeeds(frozenset({"preference"}), loss_unit="example", score_use="ignored")

    def _logged(self) -> tuple[str, ...]:
        of_pairs = ("reward_margin", "log_prob_chosen", "log_prob_rejected", "length")
        more = ("divergence",) if self.loss == "kto" else of_pairs
        return "loss", "reward_chosen", "reward_rejected", "reward_accuracy", *more

    def predict_step(self, batch: PackedBatch, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        """Return the log-probability of each completion, shape (C,), in the order of the pack."""
        completions = self._find_completions(batch)
        return completions.sum(self._read_log_probs(batch))

    def _step(self, batch: PackedBatch, *, prefix: str) -> torch.Tensor:
        """Return the loss of a batch; log it with rewards, margins and the share of pairs in the right order.

        Cost:
            A forward of the reference model, if there is one; with "kto" an all-reduce of two numbers. No host sync of
            its own.
        """
        completions = self._find_completions(batch)
        reference_C = self._reference_sums(batch, completions) if self.needs_reference else None
        means: dict[str, torch.Tensor] = {}

        def objective(logits: LazyLogits) -> torch.Tensor:
            sum_C = completions.sum(logits.log_probs().log_prob_R)
            compare = self._compare_labels if self.loss == "kto" else self._compare_pairs
            return compare(sum_C, completions, reference_C, num_items=batch.context.num_items, means=means)

        loss = self._minimise(batch, objective)
        if self.loss == "kto":
            # Without a row of one label its mean is no 0.
            num_chosen = sum(label > 0 for label in completions.scores[::2])
            counts = {"reward_chosen": num_chosen, "reward_rejected": completions.num_examples - num_chosen}
            for name, count in counts.items():
                self._log_partial_mean(name, means.pop(name), prefix=prefix, count=count)
        self._log_means(means, prefix=prefix, count=completions.num_examples, shown=("loss", "reward_accuracy"))
        return loss

    def _compare_pairs(
        self,
        sum_C: torch.Tensor,
        completions: Completions,
        reference_C: torch.Tensor | None,
        *,
        num_items: float,
        means: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the summed loss of the pairs, divided by num_items; fill means."""
        if any(count != 2 for count in completions.completions_per_example):
            raise DataError(
                f"loss={self.loss!r} compares pairs, and an example has another number of completions: give rows with "
                "chosen and rejected, or loss='kto' for rows with a label."
            )
        length_C = completions.count_C.clamp(min=1.0)
        value_C = sum_C if reference_C is None else sum_C - reference_C
        compared_C = value_C / length_C if self.loss in MEAN_LOSSES else value_C
        chosen_G, rejected_G = compared_C.view(-1, 2).unbind(1)
        loss_G = preference_loss(
            chosen_G, rejected_G, loss=self.loss, beta=self.beta, label_smoothing=self.label_smoothing, gamma=self.gamma
        )
        mean_chosen_G = (sum_C / length_C).view(-1, 2)[:, 0]
        if self.sft_weight:
            loss_G = loss_G - self.sft_weight * mean_chosen_G
        with torch.no_grad():
            reward_G2 = self.beta * compared_C.view(-1, 2)
            divisor = max(1, completions.num_examples)
            columns = {
                "loss": loss_G,
                "reward_chosen": reward_G2[:, 0],
                "reward_rejected": reward_G2[:, 1],
                "reward_margin": reward_G2[:, 0] - reward_G2[:, 1],
                "reward_accuracy": (reward_G2[:, 0] > reward_G2[:, 1]).float(),
                "log_prob_chosen": sum_C.view(-1, 2)[:, 0],
                "log_prob_rejected": sum_C.view(-1, 2)[:, 1],
                "length": completions.count_C.view(-1, 2).mean(1),
            }
            means.update({name: value_G.sum() / divisor for name, value_G in columns.items()})
        return loss_G.sum() / num_items

    def _compare_labels(
        self,
        sum_C: torch.Tensor,
        completions: Completions,
        reference_C: torch.Tensor | None,
        *,
        num_items: float,
        means: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the summed loss of labelled completions, divided by num_items; fill means.

        Every second completion is a mismatched one: the mean of their ratios over all ranks estimates the divergence.
        """
        assert reference_C is not None
        ratio_G2 = (sum_C - reference_C).view(-1, 2)
        label_G = completions.score_C.view(-1, 2)[:, 0]
        divisor = max(1, completions.num_examples)
        total = ratio_G2[:, 1].detach().sum()
        # A rank without examples has a share of the estimate too, so that all ranks meet here.
        total, num_examples = self._sum_over_ranks(torch.stack([total, total.new_full((), completions.num_examples)]))
        baseline = (total / num_examples.clamp(min=1.0)).clamp(min=0.0)
        loss_G = kto_loss(
            ratio_G2[:, 0], label_G, baseline=baseline, beta=self.beta, desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )  # fmt: skip
        if self.sft_weight:
            length_G = completions.count_C.view(-1, 2)[:, 0].clamp(min=1.0)
            loss_G = loss_G - self.sft_weight * label_G * sum_C.view(-1, 2)[:, 0] / length_G
        with torch.no_grad():
            reward_G = self.beta * ratio_G2[:, 0]
            num_chosen = label_G.sum().clamp(min=1.0)
            num_rejected = (1 - label_G).sum().clamp(min=1.0)
            means["loss"] = loss_G.sum() / divisor
            means["divergence"] = baseline
            means["reward_chosen"] = (reward_G * label_G).sum() / num_chosen
            means["reward_rejected"] = (reward_G * (1 - label_G)).sum() / num_rejected
            is_right_G = torch.where(label_G > 0, ratio_G2[:, 0] > baseline, ratio_G2[:, 0] < baseline)
            means["reward_accuracy"] = is_right_G.float().sum() / divisor
        return loss_G.sum() / num_items

    def _sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of the run. No host sync."""
        run = self._trainer or self._fabric
        if run is not None and run.world_size > 1:
            torch.distributed.all_reduce(values)
        return values
