"""ReferenceTuner: a tuner whose loss compares the model with a reference model that is not trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_fastft.core.errors import OptionError, ResumeError
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.completions import Completions
from lightning_fastft.packing.stream import PlannedStream
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.model.options import check_second_model
from lightning_fastft.training.tuner import Tuner

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ADAPTERS_OFF, STORED = "adapters_off", "stored"


class ReferenceTuner(Tuner):
    """Add a reference model: the base without its adapters, stored log-probabilities, or a second model.

    Args:
        model: As in ``FineTuner``.
        reference: "adapters_off": the same model without its adapters, which takes no memory. "stored": the
            log-probabilities of the model at the start of the run, computed once in a pass over the data and kept on
            the host and in checkpoints. A name, a folder or a model: a second model, held in memory. None for
            "adapters_off" where adapters are trained. All of them are without dropout.
        needs_reference: Whether the loss reads the reference.
        options: Options of ``Tuner``.

    Raises:
        OptionError: The loss needs a reference, there are no adapters and reference is None, or "adapters_off" without
            adapters.
    """

    def __init__(
        self,
        model: str | dict[str, Any] | PretrainedConfig | PreTrainedModel,
        *,
        reference: str | nn.Module | None = None,
        needs_reference: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        if reference is not None:
            check_second_model("reference", reference)
        if reference is None and self.has_adapters:
            reference = ADAPTERS_OFF
        if needs_reference and reference is None:
            raise OptionError(
                "The loss needs a reference model, and without lora all weights are trained: give reference='stored', "
                "which computes its log-probabilities before the training, or the name of a second model."
            )
        if reference == ADAPTERS_OFF and not self.has_adapters:
            raise OptionError("reference='adapters_off' needs adapters: give lora, or reference='stored'.")
        self.needs_reference = needs_reference
        # In a tuple, so that a model is no part of this module before it is held.
        self._reference: tuple[str | nn.Module | None] = (reference,)
        # By the digest of a data set: sums of log-probabilities, shape (N, most completions), fp32, on the host.
        self._stored: dict[str, torch.Tensor] = {}
        if isinstance(reference, str):
            self.save_hyperparameters({"reference": reference})

    @property
    def reference(self) -> str | nn.Module | None:
        """What was given, or "adapters_off"."""
        return self._reference[0]

    @reference.setter
    def reference(self, reference: str | nn.Module | None) -> None:
        self._reference = (reference,)

    def configure_model(self) -> None:
        """Build the model, and the reference model where it is a second one."""
        super().configure_model()
        if self.needs_reference and self.reference not in (ADAPTERS_OFF, STORED) and self.frozen_model is None:
            assert self.reference is not None
            self._open_frozen(self.reference)

    def on_fit_start(self) -> None:
        """Compute the reference's log-probabilities where they are to be stored and the run does not resume."""
        super().on_fit_start()
        if self.needs_reference and self.reference == STORED and self.trainer.ckpt_path is None:
            for split in ("train", "val"):
                self._store(split)

    def _store(self, split: str) -> None:
        """Store the sums of all examples of the data set that a split is from.

        Raises:
            OptionError: The data is not a PackedDataModule.
        """
        data = self._find_data()
        subset = data.subset(split)
        if subset is None or subset.documents.content_digest in self._stored:
            return
        was_training = self.training
        self.eval()
        try:
            self._stored[subset.documents.content_digest] = self._compute_sums(data.whole_stream(split))
        finally:
            self.train(was_training)

    def _compute_sums(self, stream: PlannedStream) -> torch.Tensor:
        """Return the sums of all examples, each computed once, by one rank.

        Cost:
            A forward of every example, and a host sync for each pack.
        """
        found: list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]] = []
        most = 1
        for batch in stream:
            moved = batch.to(self.device)
            completions = moved.context.completions
            # A sharded model needs every rank in every forward.
            log_prob_R = self._read_log_probs(moved)
            if completions is not None and completions.num_examples:
                counts = completions.completions_per_example
                found.append((moved.numbers, counts, completions.sum(log_prob_R).cpu()))
                most = max(most, *counts)
        strategy = self.trainer.strategy
        most = int(strategy.reduce(torch.tensor(float(most), device=self.device), reduce_op="max"))
        sum_NC = torch.zeros(len(stream.subset), most)
        for numbers, counts, sum_C in found:
            for number, part in zip(numbers, sum_C.split(list(counts))):
                sum_NC[number, : len(part)] = part
        total_NC: torch.Tensor = strategy.reduce(sum_NC.to(self.device), reduce_op="sum").cpu()
        rank_zero_info(f"Reference: the log-probabilities of {len(total_NC)} examples are stored.")
        return total_NC

    def _find_data(self) -> PackedDataModule:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, PackedDataModule):
            raise OptionError("reference='stored' numbers the examples of a PackedDataModule: give one to the Trainer.")
        return data

    def _reference_sums(self, batch: PackedBatch, completions: Completions) -> torch.Tensor:
        """Return the summed log-probability of each completion under the reference, shape (C,), without a graph.

        Raises:
            ResumeError: They are to be read from the checkpoint, which has none for this data.
        """
        if self.reference != STORED:
            return completions.sum(self._reference_log_probs(batch))
        split = "train" if self.trainer.training else "test" if self.trainer.testing else "val"
        subset = self._find_data().subset(split)
        stored_NC = self._stored.get("" if subset is None else subset.documents.content_digest)
        if stored_NC is None:
            raise ResumeError(
                f"There are no stored log-probabilities for the {split} data, and the trained model is no longer the "
                "reference. Resume with the data of the checkpoint, or give reference the name of the model."
            )
        parts = [stored_NC[number, :count] for number, count in zip(batch.numbers, completions.completions_per_example)]
        return (torch.cat(parts) if parts else stored_NC.new_empty(0)).to(batch.context.device, non_blocking=True)

    def _reference_log_probs(self, batch: PackedBatch, *, temperature: float = 1.0) -> torch.Tensor:
        """Return the log-probability of each labelled row's target under the reference, shape (R,), without a graph."""
        if self.reference != ADAPTERS_OFF:
            return self._read_log_probs(batch, temperature=temperature, model=self.frozen_model)
        from lightning_fastft.hf.lora import adapters_off

        with adapters_off(self.model), _evaluating(self.model):
            return self._read_log_probs(batch, temperature=temperature)

    # Saving.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the stored log-probabilities."""
        super().on_save_checkpoint(checkpoint)
        if self._stored:
            checkpoint["fastft_reference"] = self._stored

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up the stored log-probabilities."""
        super().on_load_checkpoint(checkpoint)
        self._stored = dict(checkpoint.get("fastft_reference", {}))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside a block: the reference is one distribution, and draws no random numbers."""
    switched = [module for module in model.modules() if module.training]
    try:
        for module in switched:
            module.training = False
        yield
    finally:
        for module in switched:
            module.training = True
