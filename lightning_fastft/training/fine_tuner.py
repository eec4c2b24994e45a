"""FineTuner: one LightningModule for QLoRA, LoRA and full fine-tuning of any Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_fastft.core.checks import check_float
from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.training.metrics import TokenMean, TokenPerplexity, logits_statistics
from lightning_fastft.training.model.forward import call_model
from lightning_fastft.training.model.neftune import embedding_noise
from lightning_fastft.training.tuner import Tuner

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Published sizes are 5 to 15.
LARGEST_NOISE = 1e3


class FineTuner(Tuner):
    """Fine-tune a causal language model; the model is built in ``configure_model``, on the device of its rank.

    Options are those of ``Tuner``. The loss is the cross-entropy of the labelled tokens.

    Args:
        model: As in ``Tuner``.
        neftune_noise_alpha: NEFTune: size of the noise on the embeddings in training, for example 5; per document
            ``alpha / sqrt(length * width)``, never in validation. None for no noise.
        options: Options of ``Tuner``.

    Raises:
        OptionError: A value is not allowed, or two options do not fit.

    Example:
        >>> config = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
        >>> tuner = FineTuner(config, init="random", lora={"r": 4})
        >>> tuner.vocab_size
        64
    """

    trains_on_parts = True

    def __init__(
        self,
        model: str | dict[str, Any] | PretrainedConfig | PreTrainedModel,
        *,
        neftune_noise_alpha: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        if neftune_noise_alpha is not None:
            check_float("neftune_noise_alpha", neftune_noise_alpha, low=1e-6, high=LARGEST_NOISE)
        self.neftune_noise_alpha = neftune_noise_alpha
        self.save_hyperparameters({"neftune_noise_alpha": neftune_noise_alpha})

    def training_step(self, batch: PackedBatch | Mapping[str, Any], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch; log ``train_loss``, the mean over its labelled tokens plus auxiliary losses.

        Cost:
            No host sync of its own.
        """
        with self._noise(batch, batch_idx):
            output = call_model(self.model, batch)
        if output.loss is None:
            raise DataError("The model returned no loss: the batch needs labels.")
        loss = output.loss.detach()
        if isinstance(batch, PackedBatch):
            # The loss is divided for the whole window of accumulation and ranks; what is shown is this batch's own
            # mean.
            context = batch.context.whole
            num_labelled = max(1, context.num_labelled)
            # Auxiliary losses of the model are means already.
            cross_entropy = _find_cross_entropy(output, batch)
            cross_entropy = loss if cross_entropy is None else cross_entropy
            mean = cross_entropy * (context.num_items / num_labelled) + (loss - cross_entropy)
            self.log("train_loss", mean, batch_size=num_labelled)
        else:
            self.log("train_loss", loss, batch_size=len(batch["input_ids"]))
        return output.loss if output.loss.requires_grad else self._with_tower(output.loss)

    def _with_tower(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss without a graph with gradients of 0 for a trained image tower: the pack had no image, and
        nothing else is trained.
        """
        from lightning_fastft.hf.families import tower_parameters

        for parameter in tower_parameters(self.model):
            if parameter.requires_grad:
                loss = loss + 0.0 * parameter.sum()
        return loss

    def _noise(self, batch: PackedBatch | Mapping[str, Any], batch_idx: int) -> AbstractContextManager[None]:
        """Return the block in which a training batch gets noise on its embeddings."""
        if self.neftune_noise_alpha is None:
            return nullcontext()
        epoch, rank = (0, 0) if self._trainer is None else (self.current_epoch, self.global_rank)
        seeds = (self._seed, epoch, batch_idx, rank)
        return embedding_noise(self.model.get_input_embeddings(), batch, alpha=self.neftune_noise_alpha, seeds=seeds)

    @property
    def logged_names(self) -> frozenset[str] | None:
        """Names that callbacks can monitor in training; None for a subclass, which may log more."""
        if type(self) is not FineTuner:
            return None
        names = frozenset({"train_loss", "val_loss", "val_perplexity", "val_token_accuracy"})
        return self._with_loader_names(names)

    def _evaluate(self, batch: PackedBatch | Mapping[str, Any], *, prefix: str) -> None:
        """Log loss, perplexity and token accuracy; no full logits are made where the lazy head is in place."""
        output = call_model(self.model, batch)
        if "labels" not in batch:
            raise DataError("Evaluation compares predictions with labels: the batch needs labels.")
        statistics = getattr(output.logits, "statistics", None)
        if statistics is None:
            statistics = logits_statistics(output.logits, batch["labels"])
        nll_sum, num_correct, num_tokens = statistics
        self._log_sums(TokenMean, "loss", prefix=prefix, total=nll_sum, num_tokens=num_tokens)
        self._log_sums(TokenPerplexity, "perplexity", prefix=prefix, total=nll_sum, num_tokens=num_tokens)
        self._log_sums(TokenMean, "token_accuracy", prefix=prefix, total=num_correct, num_tokens=num_tokens)


def _find_cross_entropy(output: Any, batch: PackedBatch) -> torch.Tensor | None:
    """Return the cross-entropy in the loss of a packed batch, without a graph; None if it is the whole loss.

    Cost:
        A pass over the logits if the head is not lazy and the model has an auxiliary loss; no host sync.
    """
    if not isinstance(output.logits, torch.Tensor):
        return cast("torch.Tensor | None", output.logits.cross_entropy)
    if getattr(output, "aux_loss", None) is None:
        return None
    return logits_statistics(output.logits.detach(), batch["labels"])[0] / batch.context.num_items
