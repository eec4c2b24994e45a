"""DistillationTuner: a student learns from a teacher's distributions, over the full vocabulary or from stored tokens.

Axes: L labelled tokens of a data set, K stored tokens for each, R labelled rows of a pack.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_fastft.core.checks import check_choice, check_float, check_int, check_path, check_share
from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.store.dataset import TokenizedDataset, replace_file
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.model.options import check_second_model
from lightning_fastft.training.tuner import Tuner

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lightning_fastft.kernels.divergence.reference import Kind
    from lightning_fastft.patches.lazy_logits import LazyLogits

KINDS = ("forward_kl", "reverse_kl", "jsd")
LARGEST_WEIGHT = 1e3
LARGEST_TOP_K = 4096


class _Stored(NamedTuple):
    """The teacher's likeliest tokens of a data set, memory-mapped; rows of an example are consecutive."""

    id_LK: np.ndarray
    log_prob_LK: np.ndarray
    start_N1: np.ndarray


class DistillationTuner(Tuner):
    """Train a student towards a teacher's distribution on the labelled tokens of packed batches.

    A live teacher is compared over the full vocabulary, in chunks of rows: no tensor of all tokens and the vocabulary
    exists. With ``store`` the teacher's likeliest tokens are computed once, in a pass before the training, and are read
    from there in this and later runs; the teacher is then not in memory.

    A ``RolloutDataModule`` gives completions that the student samples itself (GKD, arXiv 2306.13649); they need a live
    teacher.

    Args:
        model: The student, as in ``FineTuner``.
        teacher: Name, folder or model of the teacher, with the student's tokens. Held beside the student, frozen.
        kind: "forward_kl" (teacher against student), "reverse_kl", or "jsd"; stored tokens know "forward_kl" alone.
        beta: Share of the teacher in the mixture of "jsd", between 0 and 1.
        temperature: Divides the logits of both.
        sft_weight: Share of the cross-entropy of the labels in the loss, in [0, 1]; the divergence has the rest.
        vocab_size: Compare the first columns only, where the embeddings of the two are padded differently.
        store: Folder for the teacher's likeliest tokens; None compares with the live teacher.
        top_k: Tokens that are stored for each labelled token.
        options: Options of ``Tuner``.

    Raises:
        OptionError: A value is not allowed, or two options do not fit.

    Example:
        >>> config = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
        >>> DistillationTuner(config, init="random", teacher="Qwen/Qwen3-8B", kind="jsd").kind
        'jsd'
    """

    teacher: str | nn.Module

    def __init__(
        self,
        model: str | dict[str, Any] | PretrainedConfig | PreTrainedModel,
        *,
        teacher: str | nn.Module,
        kind: Kind = "forward_kl",
        beta: float = 0.5,
        temperature: float = 1.0,
        sft_weight: float = 0.0,
        vocab_size: int | None = None,
        store: str | None = None,
        top_k: int = 64,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        check_second_model("teacher", teacher)
        # In a tuple, so that a model is no part of this module before it is held.
        self._teacher = (teacher,)
        check_choice("kind", kind, KINDS)
        self.kind: Kind = kind
        self.beta = check_float("beta", beta, low=1e-6, high=1 - 1e-6)
        self.temperature = check_float("temperature", temperature, low=1e-3, high=LARGEST_WEIGHT)
        check_share("sft_weight", sft_weight)
        self.sft_weight = sft_weight
        self.compared_columns = vocab_size
        if vocab_size is not None:
            check_int("vocab_size", vocab_size, low=2)
        self.store = store
        if store is not None:
            check_path("store", store)
            if kind != "forward_kl" or vocab_size is not None:
                raise OptionError("store keeps the teacher's likeliest tokens, which serve kind='forward_kl' alone.")
        self.top_k = check_int("top_k", top_k, low=1, high=LARGEST_TOP_K)
        self._stored: dict[str, _Stored] = {}
        self.save_hyperparameters(
            {
                **({"teacher": teacher} if isinstance(teacher, str) else {}),
                "kind": kind,
                "beta": beta,
                "temperature": temperature,
                "sft_weight": sft_weight,
                "store": store,
                "top_k": top_k,
            }
        )

    @property
    def logged_names(self) -> frozenset[str] | None:
        """Names that callbacks can monitor in training; None for a subclass, which may log more."""
        if type(self) is not DistillationTuner:
            return None
        return frozenset(f"{prefix}_{name}" for prefix in ("train", "val") for name in ("loss", "divergence", "nll"))

    def configure_model(self) -> None:
        """Build the student, and hold a live teacher beside it."""
        super().configure_model()
        if self.store is None and self.frozen_model is None:
            self._open_frozen(self._teacher[0])

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch; log it with the divergence, both as means over labelled tokens.

        Cost:
            A forward of the teacher, or a copy of its stored tokens to the device. No host sync of its own.
        """
        return super().training_step(batch, batch_idx)

    def _step(self, batch: PackedBatch, *, prefix: str) -> torch.Tensor:
        context = batch.context
        teacher = self._read(batch, lambda logits: logits, model=self.frozen_model) if self.store is None else None
        stored = None if self.store is None else self._read_stored(batch)
        means: dict[str, torch.Tensor] = {}
        divisor = max(1, context.num_labelled)

        def objective(logits: LazyLogits) -> torch.Tensor:
            if teacher is not None:
                divergence_R = logits.divergence(
                    teacher, kind=self.kind, beta=self.beta, temperature=self.temperature,
                    vocab_size=self.compared_columns,
                )  # fmt: skip
            else:
                assert stored is not None
                divergence_R = logits.topk_divergence(*stored, temperature=self.temperature)
            means["divergence"] = divergence_R.detach().sum() / divisor
            total = (1 - self.sft_weight) * divergence_R.sum()
            if self.sft_weight:
                nll = -logits.log_probs().log_prob_R.sum()
                means["nll"] = nll.detach() / divisor
                total = total + self.sft_weight * nll
            means["loss"] = total.detach() / divisor
            return total / context.num_items

        loss = self._minimise(batch, objective)
        self._log_means(means, prefix=prefix, count=context.num_labelled, shown=("loss",))
        return loss

    # Stored tokens.

    def on_fit_start(self) -> None:
        """Compute the teacher's likeliest tokens of the training and validation data that are not stored yet."""
        super().on_fit_start()
        self._fill_stores("train", "val")

    def on_validation_start(self) -> None:
        """Compute those of the validation data, where there was no fit."""
        super().on_validation_start()
        self._fill_stores("val")

    def on_test_start(self) -> None:
        """Compute those of the test data."""
        super().on_test_start()
        self._fill_stores("test")

    def _fill_stores(self, *splits: str) -> None:
        if self.store is None:
            return
        for split in splits:
            dataset = self._find_dataset(split)
            if dataset is not None and dataset.content_digest not in self._stored:
                self._stored[dataset.content_digest] = self._open_store(split, dataset)
        if self.frozen_model is not None:
            # Its memory is the student's from here on.
            self.frozen_model = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _find_dataset(self, split: str) -> TokenizedDataset | None:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, PackedDataModule):
            raise OptionError("store numbers the examples of a PackedDataModule: give one to the Trainer.")
        subset = data.subset(split)
        dataset = None if subset is None else subset.documents
        assert dataset is None or isinstance(dataset, TokenizedDataset)
        return dataset

    def _open_store(self, split: str, dataset: TokenizedDataset) -> _Stored:
        """Return the stored tokens of a data set, computed by rank 0 where the store has none."""
        assert self.store is not None
        key = json.dumps([dataset.content_digest, self._teacher_name(), self.top_k, self.temperature])
        folder = Path(self.store) / hashlib.sha256(key.encode()).hexdigest()[:32]
        start_N1 = np.concatenate([[0], np.cumsum(dataset.num_labelled_N)])
        if not (folder / "meta.json").is_file():
            self.trainer.strategy.barrier("teacher")
            if self.trainer.is_global_zero:
                self._fill_store(folder, split, start_N1=start_N1, key=key)
            self.trainer.strategy.barrier("teacher")
        shape = (int(start_N1[-1]), self.top_k)
        return _Stored(
            np.memmap(folder / "ids.bin", dtype=np.int32, mode="r", shape=shape),
            np.memmap(folder / "log_probs.bin", dtype=np.float32, mode="r", shape=shape),
            start_N1,
        )

    def _teacher_name(self) -> str:
        (teacher,) = self._teacher
        if isinstance(teacher, str):
            return teacher
        from lightning_fastft.hf.base_digest import digest_tensors

        return digest_tensors(teacher, is_trained_too=True)

    def _fill_store(self, folder: Path, split: str, *, start_N1: np.ndarray, key: str) -> None:
        """Write the teacher's likeliest tokens of every labelled token.

        Cost:
            A forward of the teacher over the data, and a host sync for each pack; 8 K bytes on disk for each token.
        """
        data = getattr(self.trainer, "datamodule", None)
        assert isinstance(data, PackedDataModule)
        from lightning_fastft.patches.packed import install_packed_training

        self._open_frozen(self._teacher[0])
        # The strategy has prepared the models that were there before it.
        patcher = ModelPatcher()
        install_packed_training(self.frozen_model, patcher)
        folder.mkdir(parents=True, exist_ok=True)
        shape = (int(start_N1[-1]), self.top_k)
        id_LK = np.memmap(folder / "ids.bin", dtype=np.int32, mode="w+", shape=shape)
        log_prob_LK = np.memmap(folder / "log_probs.bin", dtype=np.float32, mode="w+", shape=shape)
        try:
            for batch in data.whole_stream(split, is_shared=False):
                moved = batch.to(self.device)
                id_RK, log_prob_RK = self._read(moved, self._find_likeliest, model=self.frozen_model)
                row = 0
                for number in batch.numbers:
                    begin, end = int(start_N1[number]), int(start_N1[number + 1])
                    id_LK[begin:end] = id_RK[row : row + end - begin].cpu().numpy()
                    log_prob_LK[begin:end] = log_prob_RK[row : row + end - begin].cpu().numpy()
                    row += end - begin
        finally:
            patcher.undo()
        id_LK.flush()
        log_prob_LK.flush()
        # Last: what has it is complete.
        replace_file(folder / "meta.json", json.dumps({"key": key}).encode())
        rank_zero_info(f"Teacher: the {self.top_k} likeliest tokens of {shape[0]} labelled tokens are stored.")

    def _find_likeliest(self, logits: LazyLogits) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens of each labelled row and their log-probabilities, both (R, K)."""
        return logits.likeliest(self.top_k, temperature=self.temperature)

    def _read_stored(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored tokens of each labelled row of a pack, on its device, both (R, K).

        Raises:
            DataError: The store has not this data.
        """
        split = "train" if self.trainer.training else "test" if self.trainer.testing else "val"
        dataset = self._find_dataset(split)
        stored = None if dataset is None else self._stored.get(dataset.content_digest)
        if stored is None:
            raise DataError(f"The teacher's tokens of the {split} data are not stored.")
        num_rows, device = len(batch.context.labelled_row_R), batch.context.device
        id_RK = torch.zeros(num_rows, self.top_k, dtype=torch.int64)
        log_prob_RK = torch.zeros(num_rows, self.top_k)
        row = 0
        for number in batch.numbers:
            begin, end = int(stored.start_N1[number]), int(stored.start_N1[number + 1])
            id_RK[row : row + end - begin] = torch.from_numpy(stored.id_LK[begin:end].astype(np.int64))
            log_prob_RK[row : row + end - begin] = torch.from_numpy(np.array(stored.log_prob_LK[begin:end]))
            row += end - begin
        if device.type == "cuda":
            id_RK, log_prob_RK = id_RK.pin_memory(), log_prob_RK.pin_memory()
        return id_RK.to(device, non_blocking=True), log_prob_RK.to(device, non_blocking=True)
