"""DistillationTuner: a student learns from the distributions of a teacher, which is live or stored.

Axes: K stored tokens of each labelled row, R labelled rows of a pack, E width of the teacher.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_fastft.core.checks import check_choice, check_float, check_int, check_path, check_share, refuse_unread
from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.kernels.divergence.reference import KINDS, Kind
from lightning_fastft.kernels.logit_rows import Head
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.store.dataset import TokenizedDataset
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.model.options import check_second_model
from lightning_fastft.training.teacher_store import TeacherRows, TeacherStore
from lightning_fastft.training.tuner import Tuner

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lightning_fastft.patches.lazy_logits import LazyLogits

LARGEST_WEIGHT = 1e3
LARGEST_TOP_K = 4096
# Arrays of a store.
IDS, LOG_PROBS, STATES = "ids", "log_probs", "hidden_states"


class DistillationTuner(Tuner):
    """Train a student to match a teacher's distribution at the labelled tokens of packed batches.

    A live teacher is compared over the full vocabulary, in chunks of rows: no tensor of all tokens and the vocabulary
    exists. With ``store`` the teacher runs once over the data before training and is then freed: this run and later
    ones read its most likely tokens, or its last hidden states, from the store. Hidden states give the divergence of
    the live teacher; the teacher's output layer then stays in memory.

    A ``RolloutDataModule`` gives completions that the student samples itself (GKD, arXiv 2306.13649); they need a live
    teacher.

    Args:
        model: The student, as in ``FineTuner``.
        teacher: Name, folder or model of the teacher, with the student's tokenizer. Frozen, and held in memory.
        kind: "forward_kl" (teacher against student), "reverse_kl", or "jsd"; stored tokens serve "forward_kl" alone.
        beta: Share of the teacher in the mixture of "jsd", between 0 and 1.
        temperature: Divides the logits of both.
        sft_weight: Share of the cross-entropy of the labels in the loss, in [0, 1]; the divergence has the rest.
        vocab_size: Number of first columns to compare, if the embeddings of the two are padded differently.
        store: Folder for the output of the teacher at each labelled token; None runs the teacher in each step.
        top_k: Most likely tokens to store for each labelled token, at 8 bytes each. All other tokens are compared as
            one, so the divergence is at most that of the whole vocabulary. None stores the teacher's last hidden
            state, in its dtype: the whole vocabulary, with any kind and temperature.
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
        top_k: int | None = 64,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        check_second_model("teacher", teacher)
        # In a tuple, so that a model is not a submodule before it is held.
        self._teacher = (teacher,)
        check_choice("kind", kind, KINDS)
        self.kind: Kind = kind
        self.beta = check_float("beta", beta, low=1e-6, high=1 - 1e-6)
        self.temperature = check_float("temperature", temperature, low=1e-3, high=LARGEST_WEIGHT)
        self.sft_weight = check_share("sft_weight", sft_weight)
        self.compared_columns = None if vocab_size is None else check_int("vocab_size", vocab_size, low=2)
        self.store = store
        self.top_k = None if top_k is None else check_int("top_k", top_k, low=1, high=LARGEST_TOP_K)
        if store is not None:
            check_path("store", store)
            if top_k is not None and (kind != "forward_kl" or vocab_size is not None):
                raise OptionError(
                    "Stored tokens of a teacher serve kind='forward_kl' without vocab_size. Set top_k=None "
                    "(--model.top_k null) to store its hidden states instead."
                )
        refuse_unread("beta", beta, default=0.5, is_read=kind == "jsd", reader="kind='jsd'")
        # A live teacher is compared over the whole vocabulary, as top_k=None says.
        refuse_unread("top_k", top_k, default=64, is_read=store is not None or top_k is None, reader="store")
        self._stores: dict[str, TeacherStore] = {}
        self._teacher_head: Head | None = None
        self.save_hyperparameters(
            {
                **({"teacher": teacher} if isinstance(teacher, str) else {}),
                "kind": kind,
                "beta": beta,
                "temperature": temperature,
                "sft_weight": sft_weight,
                "vocab_size": vocab_size,
                "store": store,
                "top_k": top_k,
            }
        )

    def _logged(self) -> tuple[str, ...]:
        return "loss", "divergence", *(("nll",) if self.sft_weight else ())

    def configure_model(self) -> None:
        """Build the student, and load a live teacher."""
        super().configure_model()
        if self.store is None and self.frozen_model is None:
            self._open_teacher()

    def _step(self, batch: PackedBatch, *, prefix: str) -> torch.Tensor:
        """Return the loss of a batch; log it with the divergence, both as means over labelled tokens.

        Cost:
            A forward of the teacher, or a copy of its stored rows to the device. No host sync of its own.
        """
        context = batch.context
        live = self._read(batch, lambda logits: logits, model=self.frozen_model) if self.store is None else None
        stored = {} if self.store is None else self._read_stored(batch)
        means: dict[str, torch.Tensor] = {}
        divisor = max(1, context.num_labelled)

        def objective(logits: LazyLogits) -> torch.Tensor:
            if IDS in stored:
                divergence_R = logits.topk_divergence(
                    stored[IDS].long(), stored[LOG_PROBS], temperature=self.temperature
                )
            else:
                divergence_R = logits.divergence(
                    live if live is not None else self._stored_head(stored[STATES]), kind=self.kind, beta=self.beta,
                    temperature=self.temperature, vocab_size=self.compared_columns,
                )  # fmt: skip
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

    # The teacher.

    def _open_teacher(self) -> None:
        """Hold the teacher, and check that it has the student's tokens.

        Raises:
            OptionError: A token has another number in the teacher's tokenizer.
        """
        (teacher,) = self._teacher
        if isinstance(teacher, str):
            from lightning_fastft.hf.loading.source import ModelSource

            other = ModelSource(teacher).load_tokenizer(option="teacher")
            if other is not None and self.tokenizer is not None:
                check_same_tokens(self.tokenizer, other, teacher=teacher, num_compared=self.compared_columns)
        self._open_frozen(teacher)

    def on_fit_start(self) -> None:
        """Store the outputs of the teacher for the training and validation data that are not stored yet."""
        super().on_fit_start()
        self._open_stores("train", "val")

    def on_validation_start(self) -> None:
        """Store what it says about the validation data, where there was no fit."""
        super().on_validation_start()
        self._open_stores("val")

    def on_test_start(self) -> None:
        """Store what it says about the test data."""
        super().on_test_start()
        self._open_stores("test")

    def teardown(self, stage: str) -> None:
        """Release the teacher's output layer."""
        super().teardown(stage)
        self._teacher_head = None

    def _open_stores(self, *splits: str) -> None:
        if self.store is None:
            return
        for split in splits:
            dataset = self._find_dataset(split)
            if dataset is not None and dataset.content_digest not in self._stores:
                self._stores[dataset.content_digest] = self._open_store(split, dataset)
        if self.frozen_model is not None:
            # Its memory is the student's from here on.
            self.frozen_model = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if self.top_k is None and self._teacher_head is None:
            self._teacher_head = self._load_head()

    def _find_data(self) -> PackedDataModule:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, PackedDataModule):
            raise OptionError("store numbers the examples of a PackedDataModule: give one to the Trainer.")
        if data.is_streamed:
            raise OptionError("store numbers the examples of data that is read whole. Leave store or streaming out.")
        return data

    def _find_dataset(self, split: str) -> TokenizedDataset | None:
        subset = self._find_data().subset(split)
        dataset = None if subset is None else subset.documents
        assert dataset is None or isinstance(dataset, TokenizedDataset)
        return dataset

    def _open_store(self, split: str, dataset: TokenizedDataset) -> TeacherStore:
        """Return the store of a data set, written by rank 0 where there is none."""
        assert self.store is not None
        (teacher,) = self._teacher
        key: dict[str, Any] = {"data": dataset.content_digest, "teacher": self._teacher_name()}
        if self.top_k is None:
            dtype = self._compute_dtype if isinstance(teacher, str) else teacher.dtype
            key["hidden states in"] = str(dtype).removeprefix("torch.")
        else:
            key |= {"top_k": self.top_k, "temperature": self.temperature}
        store = TeacherStore(
            Path(self.store).expanduser(),
            key=key,
            witnesses=self._witnesses(dataset),
            num_labelled_N=dataset.num_labelled_N,
        )
        if not store.is_written:
            if self.is_sharded:
                raise OptionError(
                    f"The store {self.store} has nothing about the {split} data, and a sharded run does not hold the "
                    "teacher. Write it first: add --trainer.strategy fastft --trainer.max_steps 1 to this command."
                )
            self.trainer.strategy.barrier("teacher")
            if self.trainer.is_global_zero:
                self._write_store(store, split)
            self.trainer.strategy.barrier("teacher")
        store.open()
        return store

    def _teacher_name(self) -> str:
        (teacher,) = self._teacher
        if isinstance(teacher, str):
            return teacher
        from lightning_fastft.hf.base_digest import digest_tensors

        return digest_tensors(teacher, is_trained_too=True)

    def _witnesses(self, dataset: TokenizedDataset) -> dict[str, str]:
        """Return digests of the teacher's files, of the student's tokens and, if a data set has images, of what makes
        inputs of them, as far as these are there.
        """
        from lightning_fastft.hf.base_digest import digest_files

        (teacher,) = self._teacher
        files = sorted(Path(teacher).expanduser().glob("*.safetensors")) if isinstance(teacher, str) else []
        tokens = None if self.tokenizer is None else sorted(self.tokenizer.get_vocab().items())
        encoder = None if dataset.images is None else self._find_data().image_encoder
        return {
            "the teacher in its folder": digest_files(files) if files else "",
            "the tokenizer": "" if tokens is None else hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
            "the processor of images": "" if encoder is None else encoder.fingerprint,
        }

    def _write_store(self, store: TeacherStore, split: str) -> None:
        """Write the output of the teacher at every labelled token.

        Cost:
            A forward of the teacher over the data, and a host sync for each pack. On disk, for each token, 8 bytes for
            each of the most likely tokens, or a hidden state.
        """
        from lightning_fastft.patches.packed import install_packed_training

        self._open_teacher()
        # The strategy has prepared the models that were there before it.
        patcher = ModelPatcher()
        install_packed_training(self.frozen_model, patcher)
        try:
            store.write(self._teacher_rows(split))
        finally:
            patcher.undo()
        what = "hidden states" if self.top_k is None else f"{self.top_k} most likely tokens"
        rank_zero_info(f"Teacher: the {what} of {store.num_rows} labelled tokens are stored.")

    def _teacher_rows(self, split: str) -> Iterator[TeacherRows]:
        """Yield the outputs of the teacher for each pack of a data set."""
        data = self._find_data()

        def read(logits: LazyLogits) -> TeacherRows:
            if self.top_k is not None:
                id_RK, log_prob_RK = logits.likeliest(self.top_k, temperature=self.temperature)
                return TeacherRows(batch.numbers, {IDS: id_RK.int(), LOG_PROBS: log_prob_RK}, None)
            head = logits.as_head()
            self._check_columns(len(head.weight_VD))
            state_RE = head.hidden_TD.index_select(0, batch.context.labelled_row_R)
            return TeacherRows(batch.numbers, {STATES: state_RE}, head)

        for held in data.whole_stream(split, is_shared=False):
            batch = held.to(self.device)
            yield self._read(batch, read, model=self.frozen_model)

    # Stored rows.

    def _load_head(self) -> Head | None:
        """Return the teacher's output layer, which all stores share.

        Raises:
            DataError: They have different ones.
        """
        stores = list(self._stores.values())
        if not stores:
            return None
        if len({store.head_digest for store in stores}) > 1:
            folders = ", ".join(str(store.folder) for store in stores)
            raise DataError(
                f"The stores {folders} are of different teachers. Delete them and run the same command again, which "
                "writes them anew."
            )
        head = stores[0].load_head(self.device)
        self._check_columns(len(head.weight_VD))
        return head

    def _check_columns(self, num_columns: int) -> None:
        """Check that the teacher's vocabulary is the student's.

        Raises:
            OptionError: They differ.
        """
        if self.compared_columns is None and num_columns != self.vocab_size:
            raise OptionError(
                f"The teacher has {num_columns} tokens, the student {self.vocab_size}. If both have the same tokenizer "
                "and only the padding of their embeddings differs, give vocab_size, the number of tokens of the "
                "tokenizer: --model.vocab_size N."
            )

    def _stored_head(self, state_RE: torch.Tensor) -> Head:
        assert self._teacher_head is not None
        return self._teacher_head._replace(hidden_TD=state_RE)

    def _read_stored(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """Return the stored rows of a pack, on its device, each (R, ...).

        Raises:
            DataError: The store has not this data.
        """
        split = "train" if self.trainer.training else "test" if self.trainer.testing else "val"
        dataset = self._find_dataset(split)
        store = None if dataset is None else self._stores.get(dataset.content_digest)
        if store is None:
            raise DataError(f"The teacher's rows of the {split} data are not stored.")
        return store.read(batch.numbers, num_padded=len(batch.context.labelled_row_R), device=batch.context.device)


def check_same_tokens(ours: Any, theirs: Any, *, teacher: str, num_compared: int | None) -> None:
    """Check that each token of the student has the same number in the teacher's tokenizer.

    Raises:
        OptionError: One has another number, or none.
    """
    number_of = theirs.get_vocab()
    for token, number in sorted(ours.get_vocab().items(), key=lambda item: item[1]):
        if num_compared is not None and number >= num_compared:
            return
        if number_of.get(token) != number:
            found = "does not have it" if token not in number_of else f"has number {number_of[token]} for it"
            raise OptionError(
                f"The student's token {token!r} has number {number}, and the tokenizer of the teacher {teacher!r} "
                f"{found}. Give a teacher with the same tokens, or vocab_size={number} if only later ones differ."
            )
