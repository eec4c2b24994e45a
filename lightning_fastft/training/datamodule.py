"""PackedDataModule: from files or rows to planned, packed micro-batches for any Trainer, with a position that is
one integer.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.checkpoint.lightning_internals import batch_progress, set_batches_of_epoch, take_back_batches
from lightning_fastft.core.checks import (
    check_bool,
    check_choice,
    check_int,
    check_path,
    check_replaceable,
    check_share,
    check_tokenizer,
    is_processor,
    tokenizer_of,
)
from lightning_fastft.core.errors import ContextError, DataError, OptionError, ResumeError, printable
from lightning_fastft.packing.needs import DataNeeds
from lightning_fastft.packing.packs import Packs, pack_best_fit_decreasing
from lightning_fastft.packing.reading.sources import REJECTED
from lightning_fastft.packing.rows.formats import TUNERS, FormatOptions
from lightning_fastft.packing.rows.rejects import is_rejects
from lightning_fastft.packing.step_plan import StepPlan, mix_bits
from lightning_fastft.packing.store.cache import TokenizedDataset, tokenize_sources
from lightning_fastft.packing.store.report import render_counts
from lightning_fastft.packing.stream import DocumentSubset, PackedLoader, PlannedStream, ResumedLoader

log = logging.getLogger(__name__)

# Goes up when the same arguments give another plan: a position saved under the old rule is refused.
PLAN_VERSION = 1
# Begins the identity of the data in a checkpoint; what older versions wrote does not begin so.
_BY_CONTENT = "tokens:"
# Parts of a plan's identity that may change between a checkpoint and its resumption, and what follows from them.
_SIZES, _EPOCH_SIZE = ("world_size", "accumulate_grad_batches"), "micro_batches_per_epoch"
HELD_OUT_STREAM = 0x48454C44
SPLITS = ("train", "val", "test", "predict")
MAX_PROCESSES = 8
# More than any machine has cores; beyond it a number is a slip.
MOST_WORKERS = 1024


class _Resized(NamedTuple):
    """What a run trained of an epoch, whose checkpoint another run with other sizes resumed."""

    epoch: int
    world_size: int
    accumulate: int
    micro_batches: int


class PackedDataModule(LightningDataModule):
    """Read, tokenise, pack and plan; yield PackedBatch objects that any model takes as ``model(**batch)``.

    Every example is trained once per epoch; packs are shuffled by seed and epoch, ranks get equal numbers of packs of
    like cost, and accumulation windows are whole. The position of a run is one integer in the checkpoint, from which
    training goes on bit for bit.

    Args:
        paths: Training data: a file or folder (.jsonl, .json, .parquet, .csv), a hub data set id, a list of them, rows,
            or a datasets.Dataset.
        val_paths: Validation data, in the same forms.
        test_paths: Test data, in the same forms.
        predict_paths: Data for ``trainer.predict``, in the same forms. Packs come in the same order every time, each
            rank has its share of them, and ``batch.numbers`` are the numbers of a pack's examples, from 0, among those
            that were accepted.
        val_share: Share of the training examples held out for validation where val_paths is not given; chosen by
            position and seed.
        tokenizer: Tokenizer or processor, its hub id or its folder; None takes ``tokenizer`` (and for images
            ``processor``) of the LightningModule.
        max_tokens: Length of a pack in tokens.
        format: "messages", "conversations" (ShareGPT's ``from`` and ``value``), "prompt_completion", "instruction",
            "text" or "input_ids"; for tuners of completions "preference" (chosen, rejected), "labelled" (label),
            "scored" (score) or "rollouts" (completions, rewards). "auto" finds it by columns.
        columns: Our column names to those of the data, for example {"prompt": "question", "completion": "answer"}.
        chat_template: Jinja text, or a file that ends in .jinja, in place of the tokenizer's own.
        loss_on: "completion" trains assistant turns and completions; "all" trains every token.
        add_eos: Append, and train, the end-of-sequence token where the format does not bring one.
        separator: Put between a prompt and a completion.
        extra_columns: "refuse" rejects a row with columns that the rows of its file do not have; "ignore" takes it.
        too_long: What happens to an example of more than max_tokens: "refuse", "truncate" or "split"; always counted.
        pad_to_max: Pad every pack to max_tokens, for static shapes.
        share_prompts: Whether a prompt with several completions (preference, rollouts) is computed once in a pack.
            "auto": where the model computes that exactly; hybrids with recurrent mixers and models whose positions are
            scaled by length get copies of the prompt, which is logged. true or false force it.
        seed: Seed of the shuffle and of the held-out choice.
        num_workers: 0 reads and collates when a batch is asked for; any other number does so in one thread ahead of the
            training. No process is started: a pack takes about a millisecond.
        pin_memory: "auto" pins where the trainer runs on CUDA; true or false force it.
        cache_dir: Folder of the tokenised cache; "auto" is the user's cache folder, None keeps everything in memory.
        num_proc: Processes that tokenise, from some 4,000 rows on; None for one per core, 8 at most.
        max_reject_share: Largest share of rejected rows before the run stops.
        rejected_path: Where rejected rows are written, if there are any; None for ``rejected.jsonl`` in the folder of
            the run: the logger's, or the Trainer's default_root_dir where there is no logger. Validation and test write
            beside it (``rejected_val.jsonl``, ``rejected_test.jsonl``). The path is logged. A file that holds anything
            but rejected rows is not replaced.
        show_progress: Whether tokenising shows a progress bar.

    Raises:
        OptionError: An option is not allowed.

    Example:
        >>> rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
        >>> data = PackedDataModule(rows, max_tokens=8, num_workers=0, cache_dir=None, num_proc=1, show_progress=False)
        >>> data.setup("fit")
        >>> [batch["input_ids"].tolist() for batch in data.train_dataloader()]
        [[[1, 2, 3, 4, 5]]]
    """

    # A checkpoint written inside an accumulation window resumes at the start of the window.
    repeats_windows = True

    def __init__(
        self,
        paths: str | list[str] | list[dict[str, Any]] | Any,
        *,
        val_paths: str | list[str] | list[dict[str, Any]] | Any = None,
        test_paths: str | list[str] | list[dict[str, Any]] | Any = None,
        predict_paths: str | list[str] | list[dict[str, Any]] | Any = None,
        val_share: float = 0.0,
        tokenizer: str | Any = None,
        max_tokens: int = 4096,
        format: str = "auto",
        columns: dict[str, str] | None = None,
        chat_template: str | None = None,
        loss_on: str = "completion",
        add_eos: bool = True,
        separator: str = "",
        extra_columns: str = "refuse",
        too_long: str = "refuse",
        pad_to_max: bool = False,
        share_prompts: bool | str = "auto",
        seed: int = 0,
        num_workers: int = 1,
        pin_memory: bool | str = "auto",
        cache_dir: str | None = "auto",
        num_proc: int | None = None,
        max_reject_share: float = 0.01,
        rejected_path: str | None = None,
        show_progress: bool = True,
    ) -> None:
        super().__init__()
        check_share("val_share", val_share)
        # The shuffle mixes 64 bits: larger seeds would stand for smaller ones.
        check_int("seed", seed, low=0, high=2**64 - 1)
        check_int("num_workers", num_workers, low=0, high=MOST_WORKERS)
        check_choice("pin_memory", pin_memory, ("auto", True, False))
        check_choice("share_prompts", share_prompts, ("auto", True, False))
        check_share("max_reject_share", max_reject_share)
        for name, flag in (("pad_to_max", pad_to_max), ("show_progress", show_progress)):
            check_bool(name, flag)
        sources = {"paths": paths, "val_paths": val_paths, "test_paths": test_paths, "predict_paths": predict_paths}
        for name, source in sources.items():
            check_source(name, source)
        for name, path in (("cache_dir", cache_dir), ("rejected_path", rejected_path)):
            if path is not None:
                check_path(name, path)
        if num_proc is not None:
            check_int("num_proc", num_proc, low=1, high=MOST_WORKERS)
        check_tokenizer(tokenizer)
        if val_share and val_paths is not None:
            raise OptionError(f"val_share={val_share} and val_paths are both given; give one of them.")
        self.options = FormatOptions(
            format=format,
            columns=columns,
            loss_on=loss_on,
            chat_template=chat_template,
            add_eos=add_eos,
            too_long=too_long,
            max_tokens=max_tokens,
            separator=separator,
            extra_columns=extra_columns,
        )
        self.max_tokens = max_tokens
        self.val_share = val_share
        self.pad_to_max = pad_to_max
        self.share_prompts = share_prompts
        self.seed = seed
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.cache_dir = _user_cache_dir() if cache_dir == "auto" else cache_dir
        self.num_proc = num_proc
        self.max_reject_share = max_reject_share
        self.rejected_path = rejected_path
        self.show_progress = show_progress
        self._sources = {"train": paths, "val": val_paths, "test": test_paths, "predict": predict_paths}
        self._given_tokenizer = tokenizer
        self._tokenizer: Any = tokenizer_of(tokenizer)
        self._tokenized: dict[str, tuple[Any, TokenizedDataset]] = {}
        self._subsets: dict[str, DocumentSubset] = {}
        self._packs: dict[str, Packs] = {}
        self._plan: StepPlan | None = None
        # The position of the run: where the next epoch or the rest of one begins, and what Lightning's own count stood
        # at then.
        self._position = 0
        self._anchor: int | None = None
        # Runs with other sizes before this one, in the epoch of the position: what they trained of it.
        self._resized: list[_Resized] = []
        self._moves_progress = False
        self._is_model_checked = False

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given here, else the one of the LightningModule; None if neither has one."""
        if isinstance(self._tokenizer, str):
            from lightning_fastft.hf.loading.source import ModelSource

            self._tokenizer = ModelSource(self._tokenizer).load_tokenizer()
        if self._tokenizer is None and self.trainer is not None:
            return getattr(self.trainer.lightning_module, "tokenizer", None)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._given_tokenizer = tokenizer
        self._tokenizer = tokenizer_of(tokenizer)

    def _image_encoder(self) -> Any:
        """Return the processor of images, given here or by the LightningModule; None if there is none."""
        from lightning_fastft.hf.images import ImageEncoder
        from lightning_fastft.hf.loading.source import ModelSource

        given = self._given_tokenizer
        if isinstance(given, str):
            source = ModelSource(given)
            return ImageEncoder(source) if source.has_processor else None
        module = None if self.trainer is None else self.trainer.lightning_module
        for processor in (given, getattr(module, "processor", None)):
            if is_processor(processor):
                return ImageEncoder(processor)
        return getattr(module, "image_encoder", None)

    def _document_images(self, split: str) -> Any:
        """Return the function from a document's images to inputs of the model; None if the split has no images.

        Raises:
            UnsupportedModelError: Images of this model's family are not served.
            OptionError: There is no model to take the positions of images from.
        """
        if self._subsets[split].documents.images is None:
            return None
        from lightning_fastft.hf.images import DocumentImages, find_config

        encoder = self._image_encoder()
        if encoder is None:
            raise OptionError("The data has images, and no processor turns them into inputs. Give one as tokenizer.")
        return DocumentImages(encoder, config=find_config(self._module, name=self._given_tokenizer))

    @property
    def plan(self) -> StepPlan:
        """The plan of the training micro-batches; there after ``setup("fit")``."""
        if self._plan is None:
            raise OptionError('There is no training plan yet; call setup("fit") first.')
        return self._plan

    @property
    def position(self) -> int:
        """Micro-batches of the plan that are behind this run: the one integer that a checkpoint keeps."""
        if self.trainer is None or self._anchor is None:
            return self._position
        return self._position + batch_progress(self.trainer).total.processed - self._anchor

    def subset(self, split: str) -> DocumentSubset | None:
        """Return the tokenised documents of "train", "val", "test" or "predict"; None where there is no such data, or
        before its setup.
        """
        return self._subsets.get(check_choice("split", split, SPLITS))

    def packs(self, split: str) -> Packs | None:
        """Return the packs of "train", "val", "test" or "predict" before whole windows and equal ranks; None where
        there is no such data.
        """
        return self._packs.get(check_choice("split", split, SPLITS))

    def find_examples(self, index: int) -> tuple[str, list[int]]:
        """Return where the examples of one micro-batch of this rank come from, and their numbers, from 0, among those
        that were accepted there.

        Args:
            index: Global number of the micro-batch in the plan, as ``PackedBatch.index`` has it.
        """
        epoch, micro_batch = divmod(index, self.plan.num_micro_batches)
        is_first_repeated = getattr(self.trainer, "overfit_batches", 0) > 0
        number_S = self.plan.epoch(0 if is_first_repeated else epoch).documents(
            rank=_ranks(self.trainer)[1], micro_batch=micro_batch
        )
        chosen_N = self._subsets["train"].index_N
        return _name_source(self._sources["train"]), (number_S if chosen_N is None else chosen_N[number_S]).tolist()

    def report(self, split: str) -> Any:
        """Return the ingest report of a split; None where there is no such data of its own."""
        entry = self._tokenized.get(check_choice("split", split, SPLITS))
        return None if entry is None else entry[1].report

    def prepare_data(self) -> None:
        """Fill the tokenised cache once per node, before the other ranks read it; rejected rows are written in
        setup, once the loggers stand.
        """
        if self.cache_dir is not None and self.trainer is not None and self.trainer.world_size > 1:
            for split in self._splits_of(self.trainer.state.fn):
                self._read_rows(split, stopped_path=self._rejected_file(split))

    def setup(self, stage: str) -> None:
        """Tokenise (or open the cache), pack, and plan; called by the Trainer, or by hand.

        Args:
            stage: "fit", "validate", "test" or "predict".

        Raises:
            DataError: There is nothing to train, rows are refused, or ranks read different data.
        """
        self._is_model_checked = False
        for split in self._splits_of(stage):
            self._tokenize(split)
        self._choose_subsets(stage)
        if stage == "fit":
            if "train" not in self._subsets:
                raise DataError("There is no training data: paths is None.")
            self._position, self._anchor = self.position if _trained_before(self.trainer) else 0, None
            self._plan = self._make_plan()
            self._agree_with_other_ranks()

    def train_dataloader(self) -> ResumedLoader:
        """Return the planned micro-batches of this rank, from the run's position on."""
        return ResumedLoader(
            self._open_training_stream,
            # Uncut: the trainer applies limit_train_batches to this length itself.
            num_batches=self.plan.num_uncut_micro_batches,
            num_workers=self.num_workers,
            pin_memory=self._pins_memory(),
            before_batch=self._check_step,
            after_batch=self._count_by_hand,
        )

    def val_dataloader(self) -> PackedLoader | list[PackedLoader]:
        """Return the validation packs of this rank, in the same order every time; an empty list where there is no
        validation data.
        """
        return self._evaluation_loader("val")

    def test_dataloader(self) -> PackedLoader | list[PackedLoader]:
        """Return the test packs of this rank, in the same order every time; an empty list where there is no test
        data.
        """
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> PackedLoader | list[PackedLoader]:
        """Return the packs of this rank to predict from, in the same order every time.

        Raises:
            OptionError: There is no such data.
        """
        if self._sources["predict"] is None:
            raise OptionError(
                "trainer.predict(...) gives log-probabilities or scores of the rows in predict_paths, and there are "
                "none. For metrics call trainer.test(...), for answers model.generate(...)."
            )
        return self._evaluation_loader("predict")

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the identity of its plan: plain numbers and strings."""
        if self._plan is None:
            return {}
        state = {"micro_batches": self.position, "plan": self._plan_identity()}
        resized = [entry._asdict() for entry in self._resized if entry.epoch == self._epoch_of(self.position)]
        return {**state, "resized": resized} if resized else state

    def _epoch_of(self, position: int) -> int:
        return position // self.plan.num_micro_batches

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the position of a checkpoint.

        Args:
            state_dict: The result of state_dict when the checkpoint was written.

        Raises:
            ResumeError: The position belongs to another plan; the message names the changes.
        """
        if self._plan is None or not state_dict:
            return
        saved, current = state_dict["plan"], self._plan_identity()
        if "data" in saved and not str(saved["data"]).startswith(_BY_CONTENT):
            rank_zero_warn(
                "The checkpoint knows its data by path and time, as older versions did: whether the data is the same "
                "cannot be told."
            )
            saved = {**saved, "data": current["data"]}
        changed = [
            f"{name} was {saved.get(name)!r} and is {value!r}"
            for name, value in current.items()
            if saved.get(name) != value
        ]
        has_other_sizes = any(saved.get(name) != current[name] for name in _SIZES)
        if has_other_sizes and len(changed) == sum(saved.get(name) != current[name] for name in (*_SIZES, _EPOCH_SIZE)):
            self._continue_with_other_sizes(state_dict, changed=changed)
            return
        if changed:
            raise ResumeError(
                f"The checkpoint stands at micro-batch {state_dict['micro_batches']} of another plan: "
                f"{'; '.join(changed)}. "
                "Resume with the values of the checkpoint, or begin a new run from its weights without resuming."
            )
        self._position, self._anchor = int(state_dict["micro_batches"]), None
        self._resized = [_Resized(**entry) for entry in state_dict.get("resized", ())]
        if self._resized:
            self._plan_rest(self._resized)

    def _continue_with_other_sizes(self, state_dict: Mapping[str, Any], *, changed: list[str]) -> None:
        """Take up the position of a run with another number of ranks or another accumulation.

        At the border of an epoch it is the same; inside of one, what is left of the epoch is planned anew: every
        example is still trained once.

        Raises:
            ResumeError: The saved plan was cut by limit_train_batches.
        """
        saved = state_dict["plan"]
        world_size, accumulate = (int(saved[name]) for name in _SIZES)
        before = self._make_plan(sizes=(world_size, accumulate))
        # A cut epoch leaves examples out that the rest would train.
        if before.num_micro_batches != saved[_EPOCH_SIZE] or before.num_micro_batches < before.num_uncut_micro_batches:
            raise ResumeError(
                f"The checkpoint belongs to a run with other sizes ({'; '.join(changed)}), whose epochs were cut by "
                "limit_train_batches. Resume with its sizes."
            )
        epoch, in_epoch = divmod(int(state_dict["micro_batches"]), before.num_micro_batches)
        resized = [_Resized(**entry) for entry in state_dict.get("resized", ())]
        if resized:
            in_epoch -= (
                before.num_micro_batches - self._rest_of(resized, sizes=(world_size, accumulate)).num_micro_batches
            )
        # No checkpoint keeps half-summed gradients.
        in_epoch -= in_epoch % accumulate
        self._position, self._anchor, self._moves_progress = epoch * self.plan.num_micro_batches, None, True
        self._resized = []
        if in_epoch or resized:
            self._resized = [*resized, _Resized(epoch, world_size, accumulate, in_epoch)]
            self._position += self._plan_rest(self._resized)
        rank_zero_info(
            f"The checkpoint is of a run with other sizes ({'; '.join(changed)}): what is left of its epoch is planned "
            "anew."
        )

    def _plan_rest(self, resized: list[_Resized]) -> int:
        """Plan what is left of an epoch, and return the micro-batch of the epoch at which it begins."""
        sizes = (self.plan.world_size, self.plan.accumulate)
        return self.plan.continue_epoch(resized[-1].epoch, self._rest_of(resized, sizes=sizes))

    def _rest_of(self, resized: list[_Resized], *, sizes: tuple[int, int]) -> StepPlan:
        """Return the plan of the examples that earlier runs with other sizes left of an epoch."""
        packs, left_N = self._packs["train"], np.ones(len(self._subsets["train"]), dtype=bool)
        for entry in resized:
            plan = self._make_plan(sizes=(entry.world_size, entry.accumulate), packs=packs)
            left_N[plan.epoch(entry.epoch).trained(num_micro_batches=entry.micro_batches)] = False
            packs = self._pack_some(left_N)
        return self._make_plan(sizes=sizes, packs=packs)

    def _pack_some(self, is_chosen_N: np.ndarray) -> Packs:
        """Return packs of the chosen training examples, under their numbers in the subset."""
        (number_N,) = np.nonzero(is_chosen_N)
        packs = pack_best_fit_decreasing(self._subsets["train"].length_N[number_N], max_tokens=self.max_tokens)
        return Packs(document_N=number_N[packs.document_N], start_P1=packs.start_P1, max_tokens=self.max_tokens)

    def _splits_of(self, stage: str | None) -> list[str]:
        """Name the splits with sources of their own that a stage reads."""
        wanted = {
            "fit": ["train", "val"],
            "validate": ["train", "val"] if self.val_share else ["val"],
            "test": ["test"],
            "predict": ["predict"],
        }
        return [
            split for split in wanted.get(str(getattr(stage, "value", stage)), []) if self._sources[split] is not None
        ]

    def _tokenize(self, split: str) -> None:
        if split in self._tokenized and self._tokenized[split][0] is self.tokenizer:
            return
        path = self._rejected_file(split)
        dataset = self._read_rows(split, rejected_path=path)
        report = dataset.report
        if path is not None and report.num_rejected:
            rank_zero_info(
                f"{split} data: {report.num_rejected} of {report.num_rows} rows are rejected "
                f"({render_counts(report.rejects)}); they are in "
                f"{printable(str(path))}"
            )
        if len(dataset) == 0:
            raise DataError(f"The {split} data {_name_source(self._sources[split])} holds no usable example.")
        self._tokenized[split] = (self.tokenizer, dataset)

    def _read_rows(
        self, split: str, *, rejected_path: Path | None = None, stopped_path: Path | None = None
    ) -> TokenizedDataset:
        module = None if self.trainer is None else self.trainer.lightning_module
        return tokenize_sources(
            self._sources[split],
            tokenizer=self.tokenizer,
            options=self.options,
            cache_dir=self.cache_dir,
            num_proc=self.num_proc or _usable_cores(),
            max_reject_share=self.max_reject_share,
            rejected_path=rejected_path,
            stopped_path=stopped_path,
            vocab_size=getattr(module, "vocab_size", None),
            images=self._image_encoder(),
            show_progress=self.show_progress,
        )

    def _choose_subsets(self, stage: str) -> None:
        """Cut the held-out part from the training data where it is asked for, and pack what this stage needs."""
        datasets = {split: self._tokenized[split][1] for split in self._splits_of(stage)}
        for split, dataset in datasets.items():
            self._check_formats(split, dataset)
        subsets = {
            # Predictions are of the completions that a row has.
            split: self._make_subset(dataset, may_add=split != "predict")
            for split, dataset in datasets.items()
        }
        if self.val_share and "train" in datasets:
            is_held_out_N = _choose_held_out(len(datasets["train"]), share=self.val_share, seed=self.seed)
            subsets["train"] = self._make_subset(datasets["train"], np.flatnonzero(~is_held_out_N))
            subsets["val"] = self._make_subset(datasets["train"], np.flatnonzero(is_held_out_N))
        for split, subset in subsets.items():
            held = self._subsets.get(split)
            if held is not None and held.is_like(subset):
                continue
            if int(subset.length_N.max(initial=0)) > self.max_tokens:
                prompts = "its prompt once" if subset.shares_prompts else "its prompt for each completion"
                raise DataError(
                    f"An example of the {split} data takes {int(subset.length_N.max())} tokens in a pack ({prompts}), "
                    f"and max_tokens is {self.max_tokens}. Raise max_tokens, or set too_long='truncate'."
                )
            if len(subset) == 0:
                raise DataError(
                    f"val_share={self.val_share} of {len(datasets['train'])} examples leaves none to {split}."
                )
            self._subsets[split] = subset
            self._packs[split] = pack_best_fit_decreasing(subset.length_N, max_tokens=self.max_tokens)

    @property
    def _module(self) -> LightningModule | None:
        return None if self.trainer is None else self.trainer.lightning_module

    @property
    def _needs(self) -> DataNeeds | None:
        """What the LightningModule asks of the data; None for a module that does not say."""
        return getattr(self._module, "data_needs", None)

    def _make_subset(
        self, dataset: TokenizedDataset, index_N: np.ndarray | None = None, *, may_add: bool = True
    ) -> DocumentSubset:
        """Return documents of a data set as the LightningModule needs them."""
        if dataset.completions is None:
            return DocumentSubset(dataset, index_N=index_N)
        return DocumentSubset(
            dataset,
            index_N=index_N,
            shares_prompts=shares_prompts(self.share_prompts, self._module, name=self._given_tokenizer),
            adds_mismatched=may_add and self._needs is not None and self._needs.adds_mismatched,
        )

    def _check_formats(self, split: str, dataset: TokenizedDataset) -> None:
        """Refuse rows that the LightningModule does not train on.

        Raises:
            DataError: A tuner for completions got plain rows, or another module got rows with completions.
        """
        module, needs = self._module, self._needs
        if module is None:
            return
        found = sorted(dataset.report.rows_per_format)
        name, source = type(module).__name__, _name_source(self._sources[split])
        if needs is not None and needs.formats and not needs.formats.issuperset(found):
            raise DataError(
                f"{name} trains on rows of format {' or '.join(sorted(needs.formats))}, and the {split} data {source} "
                f"has {', '.join(found)}."
            )
        foreign = [format for format in found if format in TUNERS]
        # Rows of the other formats have no column completion.
        plain = "format='prompt_completion', or " if {"labelled", "scored"}.issuperset(foreign) else ""
        if foreign and not (needs is not None and needs.formats) and self.options.format == "auto":
            raise DataError(
                f"The {split} data {source} has rows of format {foreign[0]}, whose completions {name} would all train "
                f"alike. Use {TUNERS[foreign[0]]}; or give {plain}format={foreign[0]!r} for a module of your own that "
                "reads batch.context.completions."
            )

    def _weights(self, subset: DocumentSubset) -> np.ndarray:
        """Return what each document counts in the mean of a loss, int64."""
        unit = "token" if self._needs is None else self._needs.loss_unit
        store = subset.documents.completions
        if unit == "token" or store is None:
            return subset.num_labelled_N
        count_N = (
            np.ones(len(store.num_completions_N), dtype=np.int64) if unit == "example" else store.num_completions_N
        )
        return count_N if subset.index_N is None else count_N[subset.index_N]

    def _make_plan(self, *, sizes: tuple[int, int] | None = None, packs: Packs | None = None) -> StepPlan:
        """Return the plan of the training packs, or of some of them, for the ranks and accumulation of this run or of
        another.
        """
        world_size, accumulate = sizes or (_ranks(self.trainer)[0], _planned_accumulation(self.trainer))
        subset, packs = self._subsets["train"], packs or self._packs["train"]
        plan = StepPlan(
            packs,
            length_N=subset.length_N,
            num_labelled_N=self._weights(subset),
            seed=self.seed,
            world_size=world_size,
            accumulate=accumulate,
            limit=None if self.trainer is None else self.trainer.limit_train_batches,
        )
        if sizes is None and plan.num_extra_packs:
            log.info(
                "%d packs, and %d more by splitting, so that windows and ranks are whole.",
                len(packs),
                plan.num_extra_packs,
            )
        return plan

    def _plan_identity(self) -> dict[str, Any]:
        """Return the settings without which a position has no meaning, under the names that a user sets."""
        plan = self.plan
        return {
            # By content: the same rows elsewhere, or touched, are the same data.
            "data": f"{_BY_CONTENT}{self._subsets['train'].documents.content_digest}",
            "val_share": self.val_share,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "world_size": plan.world_size,
            "accumulate_grad_batches": plan.accumulate,
            "micro_batches_per_epoch": plan.num_micro_batches,
            "plan_version": PLAN_VERSION,
            **self._completion_identity(),
        }

    def _completion_identity(self) -> dict[str, Any]:
        """Return the settings that change packs of completions; empty for other data."""
        subset = self._subsets["train"]
        if subset.documents.completions is None:
            return {}
        return {"share_prompts": subset.shares_prompts, "adds_mismatched": subset.adds_mismatched}

    def _agree_with_other_ranks(self) -> None:
        """Stop all ranks before the first step where one of them read other data: uneven ranks hang until a timeout."""
        if (
            not (torch.distributed.is_available() and torch.distributed.is_initialized())
            or torch.distributed.get_world_size() == 1
        ):
            return
        identities: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(identities, self._plan_identity())
        for rank, identity in enumerate(identities):
            if identity != identities[0]:
                raise DataError(
                    f"Rank 0 plans {identities[0]}, rank {rank} plans {identity}. Give all ranks the same data."
                )

    def _open_training_stream(self) -> PlannedStream:
        """Find the position at the moment when the first batch of an epoch, or of a resumed run, is wanted."""
        if self.trainer is not None:
            self._follow_trainer(self.trainer)
        return PlannedStream(
            self._subsets["train"],
            self.plan,
            rank=_ranks(self.trainer)[1],
            start=self.position,
            pad_to=self.max_tokens if self.pad_to_max else None,
            pad_token_id=self._pad_token_id(),
            repeat_first_epoch=getattr(self.trainer, "overfit_batches", 0) > 0,
            encode_images=self._document_images("train"),
        )

    def _follow_trainer(self, trainer: Trainer) -> None:
        """Bring the run's position and Lightning's progress to the same micro-batch, at a border of an
        accumulation window.
        """
        progress = batch_progress(trainer)
        position = self.position
        in_epoch = position % self.plan.num_micro_batches
        if self._moves_progress:
            set_batches_of_epoch(trainer, in_epoch)
            self._moves_progress = False
        num_behind = progress.current.ready % self.plan.num_micro_batches
        if num_behind == 0 and in_epoch:
            # The last epoch was cut short (a second fit, or on_train_batch_start returned -1): an epoch of the trainer
            # is an epoch of the plan.
            position += self.plan.num_micro_batches - in_epoch
        elif num_behind != in_epoch:
            raise ResumeError(
                f"The plan stands at micro-batch {in_epoch} of its epoch and the trainer at {num_behind}; the "
                "checkpoint is of another run."
            )
        elif num_replayed := in_epoch % self.plan.accumulate:
            # No checkpoint keeps half-summed gradients: the window is trained again from its beginning, as if it had
            # not begun.
            log.warning(
                "The checkpoint lies inside an accumulation window; its %d micro-batches are trained again.",
                num_replayed,
            )
            take_back_batches(trainer, num_replayed)
            position -= num_replayed
        self._position, self._anchor = position, progress.total.processed

    def _check_step(self) -> None:
        self._check_prepared()
        if self.trainer is not None and self.trainer.accumulate_grad_batches != self.plan.accumulate:
            raise OptionError(
                f"accumulate_grad_batches changed from {self.plan.accumulate} to "
                f"{self.trainer.accumulate_grad_batches} during the run. "
                "The plan weighs whole windows of one length; keep it constant, or begin a new fit."
            )

    def _check_prepared(self) -> None:
        """Refuse a module in which nobody gave a transformers model packed attention; asked once per run, before the
        first batch.

        Raises:
            ContextError: Documents of a pack would see each other.
        """
        # Without an import of transformers there is no transformers model.
        if self._is_model_checked or self.trainer is None or "transformers" not in sys.modules:
            return
        from lightning_fastft.patches.packed import describe_unprepared

        unprepared = describe_unprepared(self.trainer.lightning_module)
        if unprepared:
            raise ContextError(
                f"Packed documents would see each other: nobody gave {unprepared} packed attention. "
                f'{type(self.trainer.strategy).__name__} does not: use Trainer(strategy="fastft"), or add '
                "PackedTraining() to the callbacks."
            )
        self._is_model_checked = True

    def _count_by_hand(self) -> None:
        """Without a trainer, a batch is trained when the next one is asked for."""
        if self.trainer is None:
            self._position += 1

    def _evaluation_loader(self, split: str) -> PackedLoader | list[PackedLoader]:
        if split not in self._subsets:
            return []
        stream = self._evaluation_stream(split, self._subsets[split], self._packs[split])
        return PackedLoader(
            lambda: stream,
            num_batches=stream.plan.num_micro_batches,
            num_workers=self.num_workers,
            pin_memory=self._pins_memory(),
            before_batch=self._check_prepared,
        )

    def _evaluation_stream(
        self, split: str, subset: DocumentSubset, packs: Packs, *, ranks: tuple[int, int] | None = None
    ) -> PlannedStream:
        """Return this rank's packs of some documents, in their order; ranks: how many share them, and which this is."""
        world_size, rank = ranks or _ranks(self.trainer)
        plan = StepPlan(
            packs,
            length_N=subset.length_N,
            num_labelled_N=subset.num_labelled_N,
            seed=self.seed,
            world_size=world_size,
            accumulate=1,
            shuffle=False,
        )
        return PlannedStream(
            subset,
            plan,
            rank=rank,
            pad_to=self.max_tokens if self.pad_to_max else None,
            pad_token_id=self._pad_token_id(),
            weigh_by_window=False,
            encode_images=self._document_images(split),
        )

    def whole_stream(self, split: str, *, is_shared: bool = True) -> PlannedStream:
        """Return packs of all documents of the data set that a split is from, once and in their order.

        Args:
            split: "train", "val" or "test", after its setup.
            is_shared: Whether each rank gets a share of the packs; else it gets all of them.
        """
        dataset = self._subsets[split].documents
        assert isinstance(dataset, TokenizedDataset)
        subset = self._make_subset(dataset)
        packs = pack_best_fit_decreasing(subset.length_N, max_tokens=self.max_tokens)
        return self._evaluation_stream(split, subset, packs, ranks=None if is_shared else (1, 0))

    def _pins_memory(self) -> bool:
        if isinstance(self.pin_memory, bool):
            return self.pin_memory
        return torch.cuda.is_available() if self.trainer is None else self.trainer.strategy.root_device.type == "cuda"

    def _pad_token_id(self) -> int:
        tokenizer = self.tokenizer
        for name in ("pad_token_id", "eos_token_id"):
            token_id = getattr(tokenizer, name, None)
            if token_id is not None:
                return int(token_id)
        return 0

    def _rejected_file(self, split: str) -> Path | None:
        """Where this split's rejected rows go; rank 0 writes for all."""
        if self.trainer is not None and self.trainer.global_rank != 0:
            return None
        if self.rejected_path is not None:
            path = Path(self.rejected_path)
        elif self.trainer is not None:
            path = _run_folder(self.trainer) / REJECTED
        else:
            return None
        path = path if split == "train" else path.with_stem(f"{path.stem}_{split}")
        return check_replaceable("The file of rejected rows (rejected_path)", path, is_ours=is_rejects)


def _run_folder(trainer: Trainer) -> Path:
    """Return what Trainer.log_dir is on rank 0, without the broadcast in it: prepare_data runs on one rank, which
    would wait for the others.
    """
    logger = next(iter(trainer.loggers), None)
    folder = logger.log_dir if isinstance(logger, (CSVLogger, TensorBoardLogger)) else getattr(logger, "save_dir", None)
    return Path(folder or trainer.default_root_dir)


def _ranks(trainer: Trainer | None) -> tuple[int, int]:
    """Return how many processes train different data, and which of them this one is."""
    if trainer is None:
        return 1, 0
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy) and torch.distributed.is_initialized():
        # Tensor-parallel ranks share their data; the mesh, which exists once processes do, knows which.
        data_parallel = strategy.distributed_sampler_kwargs
        return int(data_parallel["num_replicas"]), int(data_parallel["rank"])
    return trainer.world_size, trainer.global_rank


def _planned_accumulation(trainer: Trainer | None) -> int:
    if trainer is None:
        return 1
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, GradientAccumulationScheduler):
            raise OptionError(
                f"GradientAccumulationScheduler({callback.scheduling}) changes accumulate_grad_batches during a run; "
                "the plan weighs whole windows "
                "of one length. Remove the callback and set Trainer(accumulate_grad_batches=...)."
            )
    return int(trainer.accumulate_grad_batches)


def _trained_before(trainer: Trainer | None) -> bool:
    return trainer is not None and batch_progress(trainer).total.processed > 0


def _choose_held_out(num_documents: int, *, share: float, seed: int) -> np.ndarray:
    """Mark held-out documents by position and seed, so that rows added later change no earlier choice; at least one."""
    mixed_N = mix_bits(np.arange(num_documents, dtype=np.uint64), seed=seed, stream=HELD_OUT_STREAM)
    is_held_out_N = mixed_N < np.uint64(min(share * 2.0**64, 2.0**64 - 2048))
    is_held_out_N[np.argmin(mixed_N)] = True
    return is_held_out_N


def _user_cache_dir() -> str:
    """Return this package's folder where the platform keeps caches."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(base / "lightning_fastft")


def _usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_PROCESSES, cores)


def check_source(name: str, source: object) -> None:
    """Refuse values that cannot be data; the content of lists and files is checked when it is read."""
    if isinstance(source, (str, os.PathLike)):
        check_path(name, source)
    elif source is not None and not isinstance(source, (list, tuple)) and not hasattr(source, "column_names"):
        raise OptionError(
            f"{name} must be a file, a folder, a data set, a list of them, or rows, got {source!r} "
            f"({type(source).__name__})."
        )


def shares_prompts(option: bool | str, module: LightningModule | None, *, name: object = None) -> bool:
    """Return whether completions share their prompt in a pack; log why not where the model forbids it.

    Args:
        option: True, False, or "auto" for what the model computes exactly.
        module: The LightningModule; None without a Trainer.
        name: Hub id or folder of the model, where the module holds none.
    """
    if isinstance(option, bool):
        return option
    from lightning_fastft.hf.families import find_sharing_obstacle
    from lightning_fastft.hf.images import find_config

    if module is None:
        return True
    obstacle = find_sharing_obstacle(find_config(module, name=name))
    if obstacle:
        rank_zero_info(f"Prompts are repeated for each completion: {obstacle}.")
    return not obstacle


def _name_source(source: object) -> str:
    return repr(source) if isinstance(source, (str, Path)) else type(source).__name__
