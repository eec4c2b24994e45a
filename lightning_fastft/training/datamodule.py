"""PackedDataModule: from files or rows to planned, packed micro-batches for any Trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fastft.checkpoint.lightning_internals import batch_progress
from lightning_fastft.core.checks import check_choice, check_replaceable, check_share, check_tokenizer, tokenizer_of
from lightning_fastft.core.errors import DataError, OptionError, ResumeError, printable
from lightning_fastft.packing.packs import Packs, pack_best_fit_decreasing
from lightning_fastft.packing.reading.sources import REJECTED
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.rows.rejects import is_rejects
from lightning_fastft.packing.step_plan import StepPlan
from lightning_fastft.packing.store.cache import tokenize_sources
from lightning_fastft.packing.store.dataset import TokenizedDataset
from lightning_fastft.packing.store.report import render_counts
from lightning_fastft.packing.stream import DocumentSubset, PackedLoader, PlannedStream, ResumedLoader
from lightning_fastft.training.data.images import find_image_encoder, make_document_images
from lightning_fastft.training.data.mixtures import MixedSource, mix_sources
from lightning_fastft.training.data.options import (
    check_paths,
    check_plan_options,
    check_reading_options,
    check_sources,
    count_processes,
    find_cache_dir,
    find_weights,
)
from lightning_fastft.training.data.position import align_position, check_ranks_agree, compare_plans, describe_plan
from lightning_fastft.training.data.resizing import Resized, plan_rest, read_resized, resize
from lightning_fastft.training.data.subsets import (
    can_share_prompts,
    check_formats,
    check_lengths,
    choose_held_out,
    count_items,
    find_needs,
    name_source,
)
from lightning_fastft.training.data.trainer_facts import (
    check_accumulation,
    check_prepared,
    find_accumulation,
    find_context_size,
    find_ranks,
    find_run_folder,
    has_trained,
    repeats_first_epoch,
    uses_cuda,
)

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test", "predict")


class PackedDataModule(LightningDataModule):
    """Read, tokenise, pack and plan; yield PackedBatch objects that any model takes as ``model(**batch)``.

    Every example is trained once per epoch; packs are shuffled by seed and epoch, ranks get equal numbers of packs of
    like cost, and accumulation windows are whole. The position of a run is one integer in the checkpoint, from which
    training goes on bit for bit.

    Args:
        paths: Training data: a file (.jsonl, .json, .csv, also compressed with .gz, .bz2, .xz or .zst; .parquet), a
            folder of files or of ``save_to_disk``, a glob pattern such as ``data/*.jsonl.gz``, a hub data set id, a
            list of them, rows, or a datasets.Dataset. Files of a folder or pattern are sorted by name. A mapping such
            as ``{a.jsonl: 0.7, b.jsonl: 0.3}`` mixes sources: the weights are shares of the tokens of an epoch, which
            trains each example at least once and repeats examples of the sources whose weight asks for more.
        val_paths: Validation data, in the same forms.
        test_paths: Test data, in the same forms.
        predict_paths: Data for ``trainer.predict``, in the same forms. Packs come in the same order every time, each
            rank has its share of them, and ``batch.numbers`` are the numbers of a pack's examples, from 0, among those
            that were accepted.
        val_share: Share of the training examples held out for validation; chosen by position and seed. Unused where
            val_paths is given.
        tokenizer: Tokenizer or processor, its hub id or its folder; None takes ``tokenizer`` (and for images
            ``processor``) of the LightningModule.
        max_tokens: Length of a pack in tokens.
        format: "messages", "conversations" (ShareGPT's ``from`` and ``value``), "prompt_completion", "instruction",
            "text" or "input_ids"; for tuners of completions "preference" (chosen, rejected), "labelled" (label),
            "scored" (score), "stepwise" (completions, labels) or "rollouts" (completions, rewards). "auto" finds it by
            columns.
        columns: Our column names to those of the data, for example {"prompt": "question", "completion": "answer"}.
        chat_template: Jinja text, or a file that ends in .jinja, in place of the tokenizer's own.
        loss_on: "completion" trains assistant turns and completions; "all" trains every token.
        add_eos: Append, and train, the end-of-sequence token where the format does not bring one.
        separator: Put between a prompt and a completion.
        step_separator: Put behind each step of format "stepwise"; a step is scored at its last token.
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
        paths: str | list[str] | dict[str, float] | list[dict[str, Any]] | Any,
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
        step_separator: str = "\n",
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
        check_plan_options(seed=seed, pad_to_max=pad_to_max, share_prompts=share_prompts)
        check_reading_options(
            num_workers=num_workers,
            pin_memory=pin_memory,
            cache_dir=cache_dir,
            num_proc=num_proc,
            max_reject_share=max_reject_share,
            rejected_path=rejected_path,
            show_progress=show_progress,
        )
        check_paths(paths)
        check_sources({"val_paths": val_paths, "test_paths": test_paths, "predict_paths": predict_paths})
        check_tokenizer(tokenizer)
        if val_share and val_paths is not None:
            rank_zero_info(f"val_paths replaces val_share={val_share}: no training example is held out.")
            val_share = 0.0
        self.options = FormatOptions(
            format=format,
            columns=columns,
            loss_on=loss_on,
            chat_template=chat_template,
            add_eos=add_eos,
            too_long=too_long,
            max_tokens=max_tokens,
            separator=separator,
            step_separator=step_separator,
            extra_columns=extra_columns,
        )
        self.max_tokens = max_tokens
        self.val_share = val_share
        self.pad_to_max = pad_to_max
        self.share_prompts = share_prompts
        self.seed = seed
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.cache_dir = find_cache_dir() if cache_dir == "auto" else cache_dir
        self.num_proc = num_proc
        self.max_reject_share = max_reject_share
        self.rejected_path = rejected_path
        self.show_progress = show_progress
        self._sources = {"train": paths, "val": val_paths, "test": test_paths, "predict": predict_paths}
        self._given_tokenizer = tokenizer
        self._tokenizer: Any = tokenizer_of(tokenizer)
        self._weights = find_weights(paths)
        self._mixture: list[MixedSource] = []
        self._tokenized: dict[str, tuple[Any, TokenizedDataset]] = {}
        self._subsets: dict[str, DocumentSubset] = {}
        self._packs: dict[str, Packs] = {}
        self._plan: StepPlan | None = None
        # The position at which the rest of the run, or its next epoch, begins; and Lightning's own count there.
        self._position = 0
        self._anchor: int | None = None
        # Runs with other sizes before this one, in the epoch of the position.
        self._resized: list[Resized] = []
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

    @property
    def _module(self) -> LightningModule | None:
        return None if self.trainer is None else self.trainer.lightning_module

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

    @property
    def mixture(self) -> list[MixedSource]:
        """What each source of a mixture has of an epoch, after ``setup("fit")``; empty without a mixture."""
        return self._mixture

    def find_examples(self, index: int) -> tuple[str, list[int]]:
        """Return where the examples of one micro-batch of this rank come from, and their numbers, from 0, among those
        that were accepted there.

        Args:
            index: Global number of the micro-batch in the plan, as ``PackedBatch.index`` has it.
        """
        epoch, micro_batch = divmod(index, self.plan.num_micro_batches)
        number_S = self.plan.epoch(0 if repeats_first_epoch(self.trainer) else epoch).documents(
            rank=find_ranks(self.trainer)[1], micro_batch=micro_batch
        )
        chosen_N = self._subsets["train"].index_N
        return name_source(self._sources["train"]), (number_S if chosen_N is None else chosen_N[number_S]).tolist()

    def report(self, split: str) -> Any:
        """Return the ingest report of a split; None where there is no such data of its own."""
        entry = self._tokenized.get(check_choice("split", split, SPLITS))
        return None if entry is None else entry[1].report

    def prepare_data(self) -> None:
        """Fill the tokenised cache once per node, before the other ranks read it.

        Rejected rows are written in ``setup``, when the loggers have their folders.
        """
        if self.cache_dir is not None and self.trainer is not None and self.trainer.world_size > 1:
            for split in self._splits_of(self.trainer.state.fn):
                self._read_rows(split, stopped_path=self.rejected_file(split))

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
            self._position, self._anchor = self.position if has_trained(self.trainer) else 0, None
            self._plan = self._make_plan()
            check_ranks_agree(self._describe_plan())

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

    # The position.

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the description of its plan: plain numbers and strings."""
        if self._plan is None:
            return {}
        state = {"micro_batches": self.position, "plan": self._describe_plan()}
        epoch = self.position // self.plan.num_micro_batches
        resized = [entry._asdict() for entry in self._resized if entry.epoch == epoch]
        return {**state, "resized": resized} if resized else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the position of a checkpoint.

        With another number of ranks or another accumulation, what is left of an epoch is planned anew: every example is
        still trained once.

        Args:
            state_dict: The result of state_dict when the checkpoint was written.

        Raises:
            ResumeError: The position belongs to another plan; the message names the changes. Or its sizes are others,
                and its epochs were cut by limit_train_batches.
        """
        if self._plan is None or not state_dict:
            return
        changes = compare_plans(state_dict["plan"], self._describe_plan())
        position = int(state_dict["micro_batches"])
        if not changes.lines:
            self._position, self._resized = position, read_resized(state_dict)
            if self._resized:
                self._plan_rest()
        elif changes.is_sizes_only:
            length_N = self._subsets["train"].length_N
            epoch, self._resized = resize(
                state_dict, make_plan=self._make_plan, length_N=length_N, max_tokens=self.max_tokens
            )
            self._position = epoch * self.plan.num_micro_batches + (self._plan_rest() if self._resized else 0)
            self._moves_progress = True
            rank_zero_info(
                f"The checkpoint is of a run with other sizes ({changes}): the rest of its epoch is planned anew."
            )
        else:
            raise ResumeError(
                f"The checkpoint is at micro-batch {position} of another plan: {changes}. Resume with the values of "
                "the checkpoint, or begin a new run from its weights without resuming."
            )
        self._anchor = None

    def _plan_rest(self) -> int:
        """Plan what earlier runs left of an epoch, and return the micro-batch of the epoch at which it begins."""
        rest = plan_rest(
            self._resized,
            sizes=(self.plan.world_size, self.plan.accumulate),
            make_plan=self._make_plan,
            length_N=self._subsets["train"].length_N,
            max_tokens=self.max_tokens,
        )
        return self.plan.continue_epoch(self._resized[-1].epoch, rest)

    def _describe_plan(self) -> dict[str, Any]:
        subset = self._subsets["train"]
        options: dict[str, Any] = {"val_share": self.val_share, "max_tokens": self.max_tokens, "seed": self.seed}
        if subset.documents.completions is not None:
            options |= {"share_prompts": subset.shares_prompts, "adds_mismatched": subset.adds_mismatched}
        if self._weights is not None:
            options["weights"] = list(self._weights.values())
        return describe_plan(self.plan, content_digest=subset.documents.content_digest, **options)

    def _make_plan(self, *, sizes: tuple[int, int] | None = None, packs: Packs | None = None) -> StepPlan:
        """Return the plan of the training packs, or of some of them, for the world size and accumulation of this run or
        of another.
        """
        world_size, accumulate = sizes or (find_ranks(self.trainer)[0], find_accumulation(self.trainer))
        subset, packs = self._subsets["train"], packs or self._packs["train"]
        plan = StepPlan(
            packs,
            length_N=subset.length_N,
            num_labelled_N=count_items(subset, needs=find_needs(self._module)),
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

    # Reading.

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
        """Read a split once for each tokenizer."""
        if split in self._tokenized and self._tokenized[split][0] is self.tokenizer:
            return
        path = self.rejected_file(split)
        dataset = self._read_rows(split, rejected_path=path)
        report = dataset.report
        if path is not None and report.num_rejected:
            rank_zero_info(
                f"{split} data: {report.num_rejected} of {report.num_rows} rows are rejected "
                f"({render_counts(report.rejects)}); they are in {printable(str(path))}"
            )
        if len(dataset) == 0:
            raise DataError(f"The {split} data {name_source(self._sources[split])} holds no usable example.")
        self._tokenized[split] = (self.tokenizer, dataset)

    def _read_rows(
        self, split: str, *, rejected_path: Path | None = None, stopped_path: Path | None = None
    ) -> TokenizedDataset:
        return tokenize_sources(
            self._sources[split],
            tokenizer=self.tokenizer,
            options=self.options,
            cache_dir=self.cache_dir,
            num_proc=self.num_proc or count_processes(),
            max_reject_share=self.max_reject_share,
            rejected_path=rejected_path,
            stopped_path=stopped_path,
            vocab_size=getattr(self._module, "vocab_size", None),
            images=find_image_encoder(self._given_tokenizer, module=self._module),
            show_progress=self.show_progress,
        )

    def rejected_file(self, split: str) -> Path | None:
        """Return the file of this split's rejected rows; None on ranks that write none."""
        if self.trainer is not None and self.trainer.global_rank != 0:
            return None
        if self.rejected_path is not None:
            path = Path(self.rejected_path)
        elif self.trainer is not None:
            path = find_run_folder(self.trainer) / REJECTED
        else:
            return None
        path = path if split == "train" else path.with_stem(f"{path.stem}_{split}")
        return check_replaceable("The file of rejected rows (rejected_path)", path, is_ours=is_rejects)

    def _choose_subsets(self, stage: str) -> None:
        """Take the held-out part from the training data where it is asked for, and pack what this stage needs."""
        datasets = {split: self._tokenized[split][1] for split in self._splits_of(stage)}
        for split, dataset in datasets.items():
            source = name_source(self._sources[split])
            check_formats(split, dataset, module=self._module, source=source, format=self.options.format)
        subsets = {
            # Predictions are of the completions that a row has.
            split: self._make_subset(dataset, may_add=split != "predict")
            for split, dataset in datasets.items()
        }
        if self.val_share and "train" in datasets:
            is_held_out_N = choose_held_out(len(datasets["train"]), share=self.val_share, seed=self.seed)
            subsets["train"] = self._make_subset(datasets["train"], np.flatnonzero(~is_held_out_N))
            subsets["val"] = self._make_subset(datasets["train"], np.flatnonzero(is_held_out_N))
        if self._weights is not None and len(subsets.get("train", ())):
            subsets["train"] = self._mix(subsets["train"], weights=self._weights)
        for split, subset in subsets.items():
            held = self._subsets.get(split)
            if held is not None and held.is_like(subset):
                continue
            check_lengths(split, subset, max_tokens=self.max_tokens)
            if len(subset) == 0:
                raise DataError(
                    f"val_share={self.val_share} of {len(datasets['train'])} examples leaves none to {split}."
                )
            self._subsets[split] = subset
            self._packs[split] = pack_best_fit_decreasing(subset.length_N, max_tokens=self.max_tokens)

    def _mix(self, subset: DocumentSubset, *, weights: Mapping[str, float]) -> DocumentSubset:
        """Return the documents that an epoch of a mixture trains, repeats included."""
        dataset = self._tokenized["train"][1]
        number_N = np.arange(len(dataset)) if subset.index_N is None else subset.index_N
        source_N = np.repeat(np.arange(len(weights)), dataset.report.documents_per_entry)[number_N]
        index_M, self._mixture = mix_sources(weights, length_N=subset.length_N, source_N=source_N, seed=self.seed)
        for source in self._mixture:
            rank_zero_info(f"mixture: {printable(str(source))}")
        return self._make_subset(dataset, number_N[index_M])

    def _make_subset(
        self, dataset: TokenizedDataset, index_N: np.ndarray | None = None, *, may_add: bool = True
    ) -> DocumentSubset:
        """Return documents of a data set as the LightningModule needs them."""
        if dataset.completions is None:
            return DocumentSubset(dataset, index_N=index_N)
        needs = find_needs(self._module)
        return DocumentSubset(
            dataset,
            index_N=index_N,
            shares_prompts=can_share_prompts(self.share_prompts, self._module, name=self._given_tokenizer),
            adds_mismatched=may_add and needs is not None and needs.adds_mismatched,
        )

    # Streams and loaders.

    def _open_training_stream(self) -> PlannedStream:
        """Open the stream when the first batch of an epoch, or of a resumed run, is wanted."""
        if self.trainer is not None:
            self._position = align_position(
                self.trainer, self.plan, position=self.position, moves_progress=self._moves_progress
            )
            self._anchor, self._moves_progress = batch_progress(self.trainer).total.processed, False
        return PlannedStream(
            self._subsets["train"],
            self.plan,
            rank=find_ranks(self.trainer)[1],
            start=self.position,
            repeat_first_epoch=repeats_first_epoch(self.trainer),
            **self._batch_options("train"),
        )

    def _check_step(self) -> None:
        self._check_prepared()
        if self.trainer is not None:
            check_accumulation(self.trainer, planned=self.plan.accumulate)

    def _check_prepared(self) -> None:
        """Check packed attention once per run, before the first batch."""
        if self.trainer is not None and not self._is_model_checked:
            check_prepared(self.trainer)
            self._is_model_checked = True

    def _count_by_hand(self) -> None:
        """Count a batch as trained when the next one is asked for, where no trainer counts."""
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
        world_size, rank = ranks or find_ranks(self.trainer)
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
            weigh_by_window=False,
            **self._batch_options(split),
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

    def _batch_options(self, split: str) -> dict[str, Any]:
        """Return what the streams of all stages have in common: padding and images."""
        has_images = self._subsets[split].documents.images is not None
        return {
            "pad_to": self.max_tokens if self.pad_to_max else None,
            "pad_to_multiple_of": find_context_size(self.trainer),
            "pad_token_id": self._pad_token_id(),
            "encode_images": make_document_images(self._given_tokenizer, module=self._module) if has_images else None,
        }

    def _pins_memory(self) -> bool:
        return self.pin_memory if isinstance(self.pin_memory, bool) else uses_cuda(self.trainer)

    def _pad_token_id(self) -> int:
        tokenizer = self.tokenizer
        for name in ("pad_token_id", "eos_token_id"):
            token_id = getattr(tokenizer, name, None)
            if token_id is not None:
                return int(token_id)
        return 0
