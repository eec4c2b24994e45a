"""ReferenceTuner: a tuner whose loss compares the model with a reference model that is not trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_fastft.core.checks import refuse_unread
from lightning_fastft.core.errors import OptionError, ResumeError, list_names
from lightning_fastft.core.status import Status
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.completions import Completions
from lightning_fastft.packing.loader import PlannedStream
from lightning_fastft.training.data.trainer_facts import has_trained
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.model.options import check_second_model
from lightning_fastft.training.tuner import Tuner

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ADAPTERS_OFF, STORED = "adapters_off", "stored"


def check_read(reference: str | nn.Module | None, *, is_read: bool, reader: str) -> None:
    """Refuse a stored reference or a second model that the loss does not read; adapters that are off cost nothing.

    Args:
        reference: As in ``ReferenceTuner``.
        is_read: Whether the loss reads it.
        reader: What would read it, for the error.

    Raises:
        OptionError: It is not read.
    """
    shown = reference if reference is None or isinstance(reference, str) else type(reference).__name__
    refuse_unread("reference", shown, default=None, is_read=is_read or reference == ADAPTERS_OFF, reader=reader)


class ReferenceTuner(Tuner):
    """Add a reference model: the model at the start of the run, as "adapters_off" or "stored", or a second model.

    Args:
        model: As in ``FineTuner``.
        reference: "adapters_off": the same model without its trained adapters and with its frozen ones, which takes no
            memory. "stored": the log-probabilities of the model at the start of the run, computed once in a pass over
            the data and kept on the host and in checkpoints. A name, a folder or a model: a second model, held in
            memory. None for "adapters_off" where the trained adapters start without effect. All of them are without
            dropout.
        needs_reference: Whether the loss reads the reference.
        options: Options of ``Tuner``.

    Raises:
        OptionError: The loss needs a reference, and reference is None without adapters or with adapters that change
            the model from the start; or "adapters_off" without adapters or after an initialisation that changed the
            base.
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
        if needs_reference and self.has_adapters and reference in (None, ADAPTERS_OFF):
            self._check_adapters_off(is_asked=reference is not None)
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
        # In a tuple, so that a model is not a submodule before it is held.
        self._reference: tuple[str | nn.Module | None] = (reference,)
        # By the digest of a data set: sums of log-probabilities, shape (N, most completions), fp32, on the host.
        self._stored: dict[str, torch.Tensor] = {}
        # Whether the model is the one at the start of the run, so that more sums can be computed with it.
        self._is_at_start = True
        # Names of adapters that are not trained, so that they are part of the reference.
        self._frozen_adapters: list[str] = []
        if isinstance(reference, str):
            self.save_hyperparameters({"reference": reference})

    def _check_adapters_off(self, *, is_asked: bool) -> None:
        """Refuse adapters without which the model is not the model at the start of the run.

        Raises:
            OptionError: The initialisation changed the base; or, unless asked for, adapters begin with an effect.
        """
        from lightning_fastft.hf.lora import change_outputs
        from lightning_fastft.hf.lora_init import changes_base

        for lora in self.model.peft_config.values() if self.lora is None else [self.lora]:
            if changes_base(lora):
                raise OptionError(
                    f"reference='adapters_off' with init_lora_weights={lora.init_lora_weights!r} would be the base "
                    "without what the adapters took out of it. Give reference='stored' (not for PolicyTuner) or the "
                    "name of the model, or use init_lora_weights=True."
                )
        folder, begins = self._options.adapter, "The adapters of the model have an effect"
        if folder is not None:
            begins = f"The adapters of {folder} have an effect"
        elif self.lora is not None and self.lora.init_lora_weights == "loftq":
            begins = "LoftQ adapters make up for the error of NF4"
        elif self.lora is not None and not self.lora.init_lora_weights:
            begins = f"Adapters of init_lora_weights={self.lora.init_lora_weights} have an effect"
        elif self.lora is not None or not change_outputs(self.model):
            return
        if not is_asked:
            raise OptionError(
                f"{begins} from the start, so the model without them is not the one that training begins with. Give "
                "reference='stored' (not for PolicyTuner) or the name of a model, or keep them and train others: "
                "frozen_adapters=[folder] with lora. With reference='adapters_off' the base is the reference."
            )

    @property
    def reference(self) -> str | nn.Module | None:
        """What was given, or "adapters_off"."""
        return self._reference[0]

    @reference.setter
    def reference(self, reference: str | nn.Module | None) -> None:
        self._reference = (reference,)

    def statuses(self) -> list[Status]:
        """Return the statuses of the model, and the reference that the loss reads."""
        statuses = super().statuses()
        if not statuses or not self.needs_reference:
            return statuses
        reasons = {
            ADAPTERS_OFF: "the same model with its trained adapters off: no memory, one more forward",
            STORED: "log-probabilities of the model at the start of the run, stored on the host",
        }
        reason = reasons.get(self.reference) if isinstance(self.reference, str) else None
        name = self.reference if isinstance(self.reference, str) else type(self.reference).__name__
        return [*statuses, Status("reference", "active", reason or f"a second model in memory: {name}")]

    def configure_model(self) -> None:
        """Build the model, and the reference model where it is a second one.

        Raises:
            OptionError: The reference is the model without its adapters, and other weights are trained too; or it is a
                second model with other tokens.
        """
        from lightning_fastft.hf.lora import trained_adapters
        from lightning_fastft.hf.lora_targets import OWNED_BY_ADAPTER

        super().configure_model()
        if self.needs_reference and self.reference not in (ADAPTERS_OFF, STORED) and self.frozen_model is None:
            assert self.reference is not None
            if isinstance(self.reference, str):
                self._check_tokens(self.reference)
            self._open_frozen(self.reference)
        if self.reference == ADAPTERS_OFF:
            trained = trained_adapters(self.model)
            self._frozen_adapters = [name for name in self.model.peft_config if name not in trained]
            beside = [
                name
                for name, parameter in self.model.named_parameters()
                if parameter.requires_grad and OWNED_BY_ADAPTER.search(name) is None
            ]
            if self.needs_reference and beside:
                raise OptionError(
                    f"reference='adapters_off' would change with {list_names(beside)}, which are trained and no part "
                    "of the adapters. Give reference='stored' (not for PolicyTuner) or the name of a model, or freeze "
                    "them (lora: bias 'none')."
                )

    def _check_tokens(self, reference: str) -> None:
        """Check that tokens have the same numbers in a second model; it may lack some, or name them otherwise.

        Raises:
            OptionError: A token has another number.
        """
        from lightning_fastft.hf.loading.source import ModelSource

        own, other = self.tokenizer, ModelSource(reference).load_tokenizer(option="reference")
        if own is None or other is None:
            return
        number_of = other.get_vocab()
        for token, number in sorted(own.get_vocab().items(), key=lambda item: item[1]):
            if number_of.get(token, number) != number:
                raise OptionError(
                    f"Token {token!r} is number {number} of the model and number {number_of[token]} of "
                    f"reference={reference!r}: the reference would read another text. Give a model with the same "
                    "tokenizer, reference='stored' (not for PolicyTuner), or lora, whose base is the reference."
                )

    def on_fit_start(self) -> None:
        """Compute the reference's log-probabilities where they are to be stored and the run does not resume."""
        super().on_fit_start()
        if self.trainer.ckpt_path is None and not has_trained(self.trainer):
            # Sums of an earlier run are not of the model that this one begins with.
            self._stored.clear()
            self._is_at_start = True
        self._store("train", "val")
        self._is_at_start = False

    def on_validation_start(self) -> None:
        """Compute them for the validation data, where there was no fit."""
        super().on_validation_start()
        self._store("val")

    def on_test_start(self) -> None:
        """Compute them for the test data, where there was no fit."""
        super().on_test_start()
        self._store("test")

    def _store(self, *splits: str) -> None:
        """Store the sums of all examples of the data sets that splits are from, if the model is still the reference.

        Raises:
            OptionError: The data is not a PackedDataModule.
        """
        if self.needs_reference and self.reference == STORED and self._is_at_start:
            for split in splits:
                self._store_split(self._find_data(), split=split)

    def _store_split(self, data: PackedDataModule, *, split: str) -> None:
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
            # The strategy's copy: ranks that own experts agree on their longest pack in it.
            moved = self.trainer.strategy.batch_to_device(batch, self.device)
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
                "reference: those of the training and validation data are stored when a run begins. Give it this data "
                "as val_paths, resume with the data of the checkpoint, or give reference the name of the model."
            )
        parts = [stored_NC[number, :count] for number, count in zip(batch.numbers, completions.completions_per_example)]
        return (torch.cat(parts) if parts else stored_NC.new_empty(0)).to(batch.context.device, non_blocking=True)

    def _reference_log_probs(self, batch: PackedBatch, *, temperature: float = 1.0) -> torch.Tensor:
        """Return the log-probability of each labelled row's target under the reference, shape (R,), without a graph."""
        if self.reference != ADAPTERS_OFF:
            return self._read_log_probs(batch, temperature=temperature, model=self.frozen_model)
        from lightning_fastft.hf.lora import adapters_off

        with adapters_off(self.model, kept=self._frozen_adapters), evaluating(self.model):
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
        self._is_at_start = False
        self._stored = dict(checkpoint.get("fastft_reference", {}))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside a block: what a policy is compared with is one distribution, without random numbers."""
    switched = [module for module in model.modules() if module.training]
    try:
        for module in switched:
            module.training = False
        yield
    finally:
        for module in switched:
            module.training = True
