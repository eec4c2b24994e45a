"""PolicyTuner: the update of GRPO and its kin from rollouts, packed with every prompt computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from lightning_fastft.core.checks import check_bool, check_choice, check_float, check_int, refuse_unread
from lightning_fastft.core.errors import OptionError
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.completions import Completions
from lightning_fastft.packing.needs import DataNeeds
from lightning_fastft.training.data.rollouts import find_end_ids
from lightning_fastft.training.losses import (
    CLIPPED_LOSSES,
    POLICY_LOSSES,
    TOKEN_LOSSES,
    PolicyLoss,
    policy_loss,
    reference_divergence,
    sampler_weight,
)
from lightning_fastft.training.reference import ReferenceTuner, check_read, evaluating

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lightning_fastft.patches.lazy_logits import LazyLogits

Advantage = Literal["normalised", "centred", "leave_one_out", "given"]

ADVANTAGES: tuple[Advantage, ...] = get_args(Advantage)
# Added to the deviation of a group's rewards, as GRPO's implementations do.
DEVIATION_EPS = 1e-4
LARGEST_WEIGHT = 1e3
# What is logged as a mean over groups.
_OF_GROUPS = ("reward_deviation", "equal_reward_share")
# Options that a checkpoint keeps.
_OPTIONS = (
    "loss", "advantage", "ratio", "clip_low", "clip_high", "dual_clip", "sapo_temperature_pos", "sapo_temperature_neg",
    "kl_weight", "unbiased_kl", "temperature", "sampler_clip", "max_completion_tokens",
)  # fmt: skip


class PolicyTuner(ReferenceTuner):
    """Update a policy from rollouts: prompts, groups of completions, and their rewards.

    Rows come from files (format "rollouts") or from a ``RolloutDataModule``, which samples them during the training.
    GRPO is the default; DAPO is loss="dapo" with clip_high=0.28, GSPO is ratio="sequence", Dr. GRPO is loss="dr_grpo"
    with advantage="centred" and max_completion_tokens. On sums over the tokens of a completion, which is loss="dr_grpo"
    with max_completion_tokens=1, RLOO is advantage="leave_one_out" and LUSPO is ratio="sequence".

    Args:
        model: As in ``FineTuner``.
        loss: What the loss is a mean over: "grpo" first over the tokens of a completion and then over completions,
            "dapo" over all tokens, "dr_grpo" over completions of max_completion_tokens tokens each. "cispo" has the
            mean of "dapo", and the clipped ratio is a weight of the log-probability, so that every token trains. "sapo"
            has the mean of "grpo" and a smooth gate in place of the clipping.
        advantage: From the rewards of a group: "normalised" by its mean and deviation, "centred" by its mean,
            "leave_one_out" by the mean of the others; "given": the rewards of the rows are advantages.
        ratio: Importance ratio of a "token" or of a whole "sequence". ``train_clip_share`` is the share of clipped
            ratios: of tokens, or of completions, as TRL counts them. (The GSPO paper counts the tokens of clipped
            completions.)
        clip_low: A ratio counts down to 1 - clip_low. Not with "cispo" and "sapo".
        clip_high: A ratio counts up to 1 + clip_high. Not with "sapo"; with "cispo" 4.0 in the ScaleRL paper.
        dual_clip: Largest ratio for negative advantages, at least 1 + clip_high; often 3 or 4. None: no bound. Not with
            "cispo" and "sapo".
        sapo_temperature_pos: Sharpness of the gate of "sapo" for positive advantages.
        sapo_temperature_neg: The same for the other advantages.
        kl_weight: Weight of the divergence from the reference model; 0 for none, which needs no reference.
        unbiased_kl: Multiply the divergence by the importance ratio, which makes its gradient with ratio="token" that
            of the reverse KL divergence.
        temperature: Temperature that the completions were sampled with; log-probabilities are taken at it.
        sampler_clip: Largest weight that corrects for a sampler in another precision. None: no correction. The sampler
            of a ``RolloutDataModule`` is then taken for the policy before the update, and log-probabilities in rows of
            files are those of the policy before the update.
        max_completion_tokens: Length that "dr_grpo" divides by; 1 for the sum over the tokens of a completion.
        reference: As in ``ReferenceTuner``; "stored" is refused, and so is a second model if kl_weight is 0.
        options: Options of ``Tuner``.

    Raises:
        OptionError: A value is not allowed, or two options do not fit.

    Source:
        GRPO arXiv 2402.03300; DAPO arXiv 2503.14476; GSPO arXiv 2507.18071; Dr. GRPO arXiv 2503.20783; RLOO arXiv
        2402.14740; CISPO arXiv 2506.13585 (MiniMax-M1) and 2510.13786 (ScaleRL); SAPO arXiv 2511.20347; LUSPO arXiv
        2602.05261; dual_clip arXiv 1912.09729 and 2505.07291 (INTELLECT-2); unbiased_kl arXiv 2512.02556
        (DeepSeek-V3.2).

    Example:
        >>> config = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
        >>> PolicyTuner(config, init="random", lora={"r": 4}, loss="dapo", clip_high=0.28).data_needs.loss_unit
        'token'
    """

    def __init__(
        self,
        model: str | dict[str, Any] | PretrainedConfig | PreTrainedModel,
        *,
        loss: PolicyLoss = "grpo",
        advantage: Advantage = "normalised",
        ratio: Literal["token", "sequence"] = "token",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        kl_weight: float = 0.0,
        unbiased_kl: bool = False,
        temperature: float = 1.0,
        sampler_clip: float | None = None,
        max_completion_tokens: int | None = None,
        reference: str | nn.Module | None = None,
        **options: Any,
    ) -> None:
        if reference == "stored":
            raise OptionError(
                "reference='stored' keeps sums over completions of a data set, and a policy compares tokens: leave "
                "reference out for the base without adapters, or give the name of a second model."
            )
        super().__init__(model, reference=reference, needs_reference=kl_weight > 0, **options)
        check_read(reference, is_read=self.needs_reference, reader="a kl_weight above 0")
        self.loss = check_choice("loss", loss, POLICY_LOSSES)
        self.advantage = check_choice("advantage", advantage, ADVANTAGES)
        self.ratio = check_choice("ratio", ratio, ("token", "sequence"))
        self.clip_low = check_float("clip_low", clip_low, low=0.0, high=1.0)
        self.clip_high = check_float("clip_high", clip_high, low=0.0, high=LARGEST_WEIGHT)
        self.dual_clip = dual_clip
        if dual_clip is not None:
            check_float("dual_clip", dual_clip, low=1.0, high=LARGEST_WEIGHT)
        sharpness = {"low": 1e-3, "high": LARGEST_WEIGHT}
        self.sapo_temperature_pos = check_float("sapo_temperature_pos", sapo_temperature_pos, **sharpness)
        self.sapo_temperature_neg = check_float("sapo_temperature_neg", sapo_temperature_neg, **sharpness)
        self.kl_weight = check_float("kl_weight", kl_weight, low=0.0, high=LARGEST_WEIGHT)
        self.unbiased_kl = check_bool("unbiased_kl", unbiased_kl)
        self._check_reads()
        self.temperature = check_float("temperature", temperature, low=1e-3, high=LARGEST_WEIGHT)
        self.sampler_clip = sampler_clip
        if sampler_clip is not None:
            check_float("sampler_clip", sampler_clip, low=1e-3, high=LARGEST_WEIGHT)
        if (loss == "dr_grpo") != (max_completion_tokens is not None):
            raise OptionError("loss='dr_grpo' divides by max_completion_tokens; give it with this loss and no other.")
        self.max_completion_tokens = max_completion_tokens
        if max_completion_tokens is not None:
            check_int("max_completion_tokens", max_completion_tokens, low=1)
        self.save_hyperparameters({name: getattr(self, name) for name in _OPTIONS})

    def _check_reads(self) -> None:
        """Refuse options that the loss does not read, and a dual_clip inside the other bounds.

        Raises:
            OptionError: There is one.
        """
        is_clipped, is_sapo = self.loss in CLIPPED_LOSSES, self.loss == "sapo"
        clipped = 'loss="grpo", "dapo" or "dr_grpo"'
        for name, default, is_read, reader in (
            ("clip_low", 0.2, is_clipped, clipped),
            ("clip_high", 0.2, not is_sapo, 'loss="grpo", "dapo", "dr_grpo" or "cispo"'),
            ("dual_clip", None, is_clipped, clipped),
            ("sapo_temperature_pos", 1.0, is_sapo, 'loss="sapo"'),
            ("sapo_temperature_neg", 1.05, is_sapo, 'loss="sapo"'),
            ("unbiased_kl", False, self.kl_weight > 0, "a kl_weight above 0"),
        ):
            refuse_unread(name, getattr(self, name), default=default, is_read=is_read, reader=reader)
        if self.dual_clip is not None and self.dual_clip < 1 + self.clip_high:
            raise OptionError(
                f"dual_clip={self.dual_clip} bounds ratios of negative advantages beyond 1 + clip_high="
                f"{1 + self.clip_high}: give it a larger value, or lower clip_high."
            )

    @property
    def data_needs(self) -> DataNeeds:
        """Rollouts; the loss is a mean over tokens or over completions."""
        return DataNeeds(
            frozenset({"rollouts"}),
            loss_unit="token" if self.loss in TOKEN_LOSSES else "completion",
            score_use="read" if self.advantage == "given" else "compared",
        )

    def _logged(self) -> tuple[str, ...]:
        more = ("divergence",) if self.needs_reference else ()
        # Given advantages are not rewards that a group compares.
        of_groups = () if self.advantage == "given" else _OF_GROUPS
        # A gate clips nothing.
        clipped = () if self.loss == "sapo" else ("clip_share",)
        return "loss", "reward", "entropy", *clipped, "length", *of_groups, "truncated_share", *more

    def predict_step(self, batch: PackedBatch, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        """Return the log-probability of each completion, shape (C,), in the order of the pack."""
        return self._find_completions(batch).sum(self._read_log_probs(batch, temperature=self.temperature))

    def has_signal(self, batch: PackedBatch) -> bool:
        """Return whether a batch can train anything: not where the rewards of each group are equal."""
        completions = batch.context.completions
        compares_groups = self.advantage != "given" and not self.kl_weight
        return super().has_signal(batch) and not (
            compares_groups and completions is not None and not completions.has_unequal_scores
        )

    def note_old_log_probs(self, batch: PackedBatch) -> None:
        """Keep the present log-probabilities in a batch that further updates will come before.

        They are without dropout, as the completions were sampled.

        Cost:
            A forward without gradients.
        """
        with evaluating(self.model):
            self._find_completions(batch).old_log_prob_R = self._read_log_probs(batch, temperature=self.temperature)

    def advantages(self, completions: Completions) -> torch.Tensor:
        """Return the advantage of each completion, shape (C,).

        Args:
            completions: Completions whose scores are rewards, or advantages with advantage="given".
        """
        score_C = completions.score_C
        if self.advantage == "given":
            return score_C
        centred_C, deviation_C = _compare(completions)
        if self.advantage == "normalised":
            return centred_C / (deviation_C + DEVIATION_EPS)
        if self.advantage == "leave_one_out":
            count_C = completions.length_G.to(score_C.dtype)[completions.example_C]
            return centred_C * count_C / (count_C - 1).clamp(min=1.0)
        return centred_C

    def _step(self, batch: PackedBatch, *, prefix: str) -> torch.Tensor:
        """Return the loss of a batch of rollouts, and log it with the other means.

        Cost:
            A forward of the reference model with a kl_weight above 0. No host sync of its own.
        """
        completions = self._find_completions(batch)
        reference_R = None
        if self.needs_reference:
            reference_R = self._reference_log_probs(batch, temperature=self.temperature)
        means: dict[str, torch.Tensor] = {}

        def objective(logits: LazyLogits) -> torch.Tensor:
            found = logits.log_probs(temperature=self.temperature, with_entropy=True)
            assert found.entropy_R is not None
            loss_R = self._row_losses(found.log_prob_R, completions, reference_R=reference_R, means=means)
            num_rows = max(1, completions.num_rows)
            means["entropy"] = found.entropy_R.sum() / num_rows
            means["reward"] = completions.score_C.sum() / max(1, completions.num_completions)
            means["length"] = completions.count_C.sum() / max(1, completions.num_trained)
            if self.advantage != "given":
                means.update(_group_means(completions))
            if end_ids := find_end_ids(self):
                is_truncated_C = _find_truncated(batch, completions, end_ids=end_ids)
                means["truncated_share"] = is_truncated_C.float().sum() / max(1, completions.num_completions)
            total, own_count = loss_R.sum(), num_rows
            if self.loss not in TOKEN_LOSSES:
                own_count = max(1, completions.num_completions)
                # Dr. GRPO's completions all count as long as the longest.
                length = self.max_completion_tokens
                total = completions.mean(loss_R).sum() if length is None else total / length
            means["loss"] = total.detach() / own_count
            return total / batch.context.num_items

        loss = self._minimise(batch, objective)
        of_tokens = {"entropy", "divergence"}
        of_tokens |= {"clip_share"} if self.ratio == "token" else set()
        of_tokens |= {"loss"} if self.loss in TOKEN_LOSSES else set()
        counts = dict.fromkeys(means, completions.num_completions)
        counts |= dict.fromkeys(of_tokens, completions.num_rows) | dict.fromkeys(_OF_GROUPS, completions.num_examples)
        # Completions that are masked have no tokens here.
        counts["length"] = completions.num_trained
        for name, value in means.items():
            self._log_means({name: value}, prefix=prefix, count=counts[name], shown=("loss", "reward"))
        return loss

    def _row_losses(
        self,
        log_prob_R: torch.Tensor,
        completions: Completions,
        *,
        reference_R: torch.Tensor | None,
        means: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the loss of each row, 0 in padding rows; fill means."""
        sampler_R = completions.log_prob_R
        old_R = completions.old_log_prob_R
        if old_R is None:
            old_R = log_prob_R.detach()
            if sampler_R is not None and self.sampler_clip is None:
                old_R = torch.where(sampler_R.isnan(), old_R, sampler_R)
        log_ratio_R = log_prob_R - old_R
        if self.ratio == "sequence":
            log_ratio_R = completions.spread(completions.mean(log_ratio_R))
        ratio_R = log_ratio_R.exp()
        loss_R, is_clipped_R = policy_loss(
            log_prob_R,
            ratio_R=ratio_R,
            advantage_R=completions.spread(self.advantages(completions)),
            loss=self.loss,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
        )
        num_rows = max(1, completions.num_rows)
        if self.loss != "sapo" and self.ratio == "token":
            means["clip_share"] = is_clipped_R.float().sum() / num_rows
        elif self.loss != "sapo":
            # All rows of a completion have its ratio.
            means["clip_share"] = completions.mean(is_clipped_R.float()).sum() / max(1, completions.num_completions)
        if self.sampler_clip is not None and sampler_R is not None:
            loss_R = loss_R * sampler_weight(old_R, sampler_R, clip=self.sampler_clip)
        if reference_R is not None:
            divergence_R = reference_divergence(log_prob_R, reference_R, ratio_R=ratio_R if self.unbiased_kl else None)
            means["divergence"] = divergence_R.detach().sum() / num_rows
            loss_R = loss_R + self.kl_weight * divergence_R
        return loss_R


def _compare(completions: Completions) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distance of each reward to the mean of its group, and the deviation of its group, both of shape (C,).

    The deviation is that of a sample, as ``torch.std``; 0 in a group of one.
    """
    # The fp32 mean of equal rewards can differ from them in its last bit; that of distances to one of them is 0.
    score_C = completions.score_C
    score_C = score_C - score_C[_first_G(completions)[completions.example_C]]
    centred_C = score_C - completions.example_mean(score_C)
    count_C = completions.length_G.to(score_C.dtype)[completions.example_C]
    variance_C = completions.example_mean(centred_C.square()) * count_C / (count_C - 1).clamp(min=1.0)
    return centred_C, variance_C.sqrt()


def _group_means(completions: Completions) -> dict[str, torch.Tensor]:
    """Return the mean deviation of the rewards in a group, and the share of groups whose rewards are equal."""
    deviation_G = _compare(completions)[1][_first_G(completions)]
    found = (deviation_G, (deviation_G == 0).float())
    return {name: value_G.sum() / max(1, completions.num_examples) for name, value_G in zip(_OF_GROUPS, found)}


def _find_truncated(batch: PackedBatch, completions: Completions, *, end_ids: Sequence[int]) -> torch.Tensor:
    """Return whether each completion was cut: its last trained token, or the last one of a completion of which none is
    trained, is no end of text. Shape (C,), bool.
    """
    # The row before the next completion's first; there may be none.
    trained_C = nn.functional.pad(batch.context.labelled_target_R, (1, 0))[completions.start_C1[1:]]
    last_C = torch.where(completions.count_C > 0, trained_C, batch["input_ids"][0, completions.last_token_C])
    is_truncated_C = torch.ones_like(last_C, dtype=torch.bool)
    for token in end_ids:
        is_truncated_C = is_truncated_C & (last_C != token)
    return is_truncated_C


def _first_G(completions: Completions) -> torch.Tensor:
    """Return the first completion of each group, shape (G,)."""
    return completions.length_G.cumsum(0) - completions.length_G
