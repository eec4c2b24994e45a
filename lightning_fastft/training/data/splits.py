"""The data of each split: read and tokenised once, divided into subsets, packed, and yielded for evaluation."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fastft.core.checks import (
    check_bool,
    check_choice,
    check_int,
    check_share,
    check_tokenizer,
    tokenizer_of,
)
from lightning_fastft.core.errors import DataError, OptionError, printable
from lightning_fastft.core.phases import phase
from lightning_fastft.packing.loader import DocumentSubset, PackedLoader, PlannedStream
from lightning_fastft.packing.packs import Packs, pack_best_fit_decreasing
from lightning_fastft.packing.reading.sources import is_mapping
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.step_plan import StepPlan
from lightning_fastft.packing.store.cache import tokenize_sources
from lightning_fastft.packing.store.dataset import TokenizedDataset
from lightning_fastft.packing.store.ingest import describe_lost
from lightning_fastft.packing.store.report import render_counts
from lightning_fastft.packing.tokens.tokenisation import Setup
from lightning_fastft.training.data.images import find_image_encoder, make_document_images
from lightning_fastft.training.data.mixtures import MixedSource, mix_sources
from lightning_fastft.training.data.options import (
    MOST_WORKERS,
    check_evaluated,
    check_optional_path,
    count_processes,
    find_cache_dir,
)
from lightning_fastft.training.data.recorded import RecordedDataModule
from lightning_fastft.training.data.subsets import (
    can_share_prompts,
    check_formats,
    check_lengths,
    choose_held_out,
    find_needs,
    name_source,
    pack_named,
    warn_of_scores,
)
from lightning_fastft.training.data.trainer_facts import (
    LoopFacts,
    check_not_evaluated,
    check_prepared,
    find_context_size,
    find_ranks,
    find_rejected_file,
    uses_cuda,
)

SPLITS = ("train", "val", "test", "predict")
Loaders = PackedLoader | dict[str, PackedLoader] | list[PackedLoader]


class SplitDataModule(RecordedDataModule):
    """A DataModule that reads, tokenises and packs the rows of each split, and yields those that are not trained.

    Args:
        sources: Data of each split of ``SPLITS``; None where there is none.
        options: Form of the rows; it and ``sources`` are made of options of PackedDataModule, which has all others.
    """

    def __init__(
        self,
        *,
        sources: dict[str, Any],
        options: FormatOptions,
        tokenizer: str | Any,
        val_share: float,
        share_prompts: bool | str,
        seed: int,
        pad_to_max: bool,
        num_workers: int,
        pin_memory: bool | str,
        cache_dir: str | None,
        num_proc: int | None,
        max_reject_share: float,
        rejected_path: str | None,
        show_progress: bool,
    ) -> None:
        super().__init__()
        self.options = options
        self.max_tokens = options.max_tokens
        self.val_share = check_share("val_share", val_share)
        self.share_prompts = check_choice("share_prompts", share_prompts, ("auto", True, False))
        # The shuffle mixes 64 bits: a larger seed would give the order of a smaller one.
        self.seed = check_int("seed", seed, low=0, high=2**64 - 1)
        self.pad_to_max = check_bool("pad_to_max", pad_to_max)
        self.num_workers = check_int("num_workers", num_workers, low=0, high=MOST_WORKERS)
        self.pin_memory = check_choice("pin_memory", pin_memory, ("auto", True, False))
        self.cache_dir = find_cache_dir() if cache_dir == "auto" else check_optional_path("cache_dir", cache_dir)
        self.num_proc = None if num_proc is None else check_int("num_proc", num_proc, low=1, high=MOST_WORKERS)
        self.max_reject_share = check_share("max_reject_share", max_reject_share)
        self.rejected_path = check_optional_path("rejected_path", rejected_path)
        self.show_progress = check_bool("show_progress", show_progress)
        for split in SPLITS[1:]:
            check_evaluated(f"{split}_paths", sources[split])
        check_tokenizer(tokenizer)
        if val_share and sources["val"] is not None:
            rank_zero_info(f"val_paths replaces val_share={val_share}: no training example is held out.")
            self.val_share = 0.0
        self._sources = sources
        self._given_tokenizer = tokenizer
        self._tokenizer: Any = tokenizer_of(tokenizer)
        self._weights: dict[str, float] | None = dict(sources["train"]) if is_mapping(sources["train"]) else None
        # What each source of a mixture has of an epoch, after ``setup("fit")``; empty without a mixture.
        self.mixture: list[MixedSource] = []
        self._tokenized: dict[str, tuple[Any, TokenizedDataset]] = {}
        self._subsets: dict[str, DocumentSubset] = {}
        self._packs: dict[str, Packs] = {}
        # Documents and packs of each named set of a split.
        self._named: dict[str, dict[str, tuple[DocumentSubset, Packs]]] = {}
        self._is_model_checked = False
        # Facts of a loop without a Trainer, such as one under Fabric.
        self.loop: LoopFacts | None = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given here, else the one of the LightningModule; None if neither has one."""
        if isinstance(self._tokenizer, str):
            from lightning_fastft.hf.loading.source import load_given_tokenizer

            self._tokenizer = load_given_tokenizer(self._tokenizer)
        return getattr(self._module, "tokenizer", None) if self._tokenizer is None else self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._given_tokenizer = tokenizer
        self._tokenizer = tokenizer_of(tokenizer)

    @property
    def _module(self) -> LightningModule | None:
        return None if self._run is None else self._run.lightning_module

    @property
    def _run(self) -> Trainer | LoopFacts | None:
        """The Trainer, else the facts of the user's own loop."""
        return self.loop if self.trainer is None else self.trainer

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

    def named_sets(self, split: str) -> dict[str, tuple[DocumentSubset, Packs]]:
        """Return documents and packs of each named set of a split; empty for data without names."""
        return self._named.get(check_choice("split", split, SPLITS), {})

    def report(self, split: str) -> Any:
        """Return the ingest report of a split; None where there is no such data of its own."""
        entry = self._tokenized.get(check_choice("split", split, SPLITS))
        return None if entry is None else entry[1].report

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
        for what in describe_lost(report):
            rank_zero_info(f"{split} data: {printable(what)}")
        if len(dataset) == 0:
            raise DataError(f"The {split} data {name_source(self._sources[split])} holds no usable example.")
        self._tokenized[split] = (self.tokenizer, dataset)

    def _read_rows(
        self, split: str, *, rejected_path: Path | None = None, stopped_path: Path | None = None
    ) -> TokenizedDataset:
        with phase(f"reading {split} data"):
            return tokenize_sources(
                self._sources[split],
                **self._make_setup()._asdict(),
                cache_dir=self.cache_dir,
                num_proc=self.num_proc or count_processes(),
                max_reject_share=self.max_reject_share,
                rejected_path=rejected_path,
                stopped_path=stopped_path,
                show_progress=self.show_progress,
            )

    def _make_setup(self) -> Setup:
        """Return what turns rows into tokens in this run."""
        module = self._module
        return Setup(
            self.tokenizer,
            self.options,
            vocab_size=getattr(module, "vocab_size", None),
            images=find_image_encoder(self._given_tokenizer, module=module),
            stop_ids=getattr(module, "stop_ids", ()),
        )

    def rejected_file(self, split: str, *, is_of_rank: bool = False) -> Path | None:
        """Return the file of this split's rejected rows, or of those of this rank; None on ranks that write none."""
        rank = 0 if self._run is None else self._run.global_rank
        if rank and not is_of_rank:
            return None
        return find_rejected_file(self.trainer, path=self.rejected_path, split=split, rank=rank)

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
            if split == "train":
                warn_of_scores(datasets["train"], module=self._module)
            if len(subset) == 0:
                raise DataError(
                    f"val_share={self.val_share} of {len(datasets['train'])} examples leaves none to {split}."
                )
            self._subsets[split] = subset
            sources = self._sources[split]
            if split == "train" or not is_mapping(sources):
                self._packs[split] = pack_best_fit_decreasing(subset.length_N, max_tokens=self.max_tokens)
                continue
            make_subset = functools.partial(self._make_subset, may_add=split != "predict")
            self._named[split], self._packs[split] = pack_named(
                split, [*sources], datasets[split], make_subset=make_subset, max_tokens=self.max_tokens
            )

    def _mix(self, subset: DocumentSubset, *, weights: Mapping[str, float]) -> DocumentSubset:
        """Return the documents that an epoch of a mixture trains, repeats included."""
        dataset = self._tokenized["train"][1]
        number_N = np.arange(len(dataset)) if subset.index_N is None else subset.index_N
        source_N = np.repeat(np.arange(len(weights)), dataset.report.documents_per_entry)[number_N]
        index_M, self.mixture = mix_sources(weights, length_N=subset.length_N, source_N=source_N, seed=self.seed)
        for source in self.mixture:
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

    # Loaders of the splits that are evaluated.

    def val_dataloader(self) -> Loaders:
        """Return a loader of this rank's packs, shuffled alike for all seeds, or one for each name; [] without data."""
        return self._evaluation_loader("val")

    def test_dataloader(self) -> Loaders:
        """Return the test packs of this rank, in the form of val_dataloader."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> Loaders:
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

    def _evaluation_loader(self, split: str) -> Loaders:
        if split not in self._subsets:
            check_not_evaluated(self.trainer, split=split)
            return []
        if named := self.named_sets(split):
            return {name: self._load(split, subset, packs) for name, (subset, packs) in named.items()}
        return self._load(split, self._subsets[split], self._packs[split])

    def _load(self, split: str, subset: DocumentSubset, packs: Packs) -> PackedLoader:
        # limit_val_batches takes the first packs, and packing puts those with the longest examples first.
        stream = self._evaluation_stream(split, subset, packs, ranks=find_ranks(self._run), shuffle=split != "predict")
        return PackedLoader(
            lambda: stream,
            num_batches=stream.plan.num_micro_batches,
            num_workers=self.num_workers,
            pin_memory=self._pins_memory(),
            before_batch=self._check_prepared,
        )

    def _evaluation_stream(
        self, split: str, subset: DocumentSubset, packs: Packs, *, ranks: tuple[int, int], shuffle: bool
    ) -> PlannedStream:
        """Return this rank's packs of some documents; ranks: how many share them, and which this is."""
        plan = StepPlan(
            packs,
            length_N=subset.length_N,
            num_labelled_N=subset.num_labelled_N,
            seed=0,
            world_size=ranks[0],
            accumulate=1,
            shuffle=shuffle,
        )
        # Predictions are found by their number in the set that the user has named.
        first_number = subset.number_of(0) if split == "predict" else 0
        return PlannedStream(
            subset, plan, rank=ranks[1], weigh_by_window=False, first_number=first_number, **self._batch_options(split)
        )

    def whole_stream(self, split: str, *, is_shared: bool = True) -> PlannedStream:
        """Return packs of all documents of the data set that a split is from, once and in their order.

        Each rank gets all packs, or with is_shared a share of them.
        """
        dataset = self._subsets[split].documents
        assert isinstance(dataset, TokenizedDataset)
        subset = self._make_subset(dataset)
        packs = pack_best_fit_decreasing(subset.length_N, max_tokens=self.max_tokens)
        ranks = find_ranks(self._run) if is_shared else (1, 0)
        return self._evaluation_stream(split, subset, packs, ranks=ranks, shuffle=False)

    def _batch_options(self, split: str) -> dict[str, Any]:
        """Return what the streams of all stages have in common: padding and images."""
        if self._subsets[split].documents.images is None:
            return self._padding()
        return self._padding() | {"encode_images": make_document_images(self._given_tokenizer, module=self._module)}

    def _padding(self) -> dict[str, Any]:
        return {
            "pad_to": self.max_tokens if self.pad_to_max else None,
            "pad_to_multiple_of": find_context_size(self._run),
            "pad_token_id": self._pad_token_id(),
        }

    def _pins_memory(self) -> bool:
        return self.pin_memory if isinstance(self.pin_memory, bool) else uses_cuda(self._run)

    def _pad_token_id(self) -> int:
        found = (getattr(self.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        return next((int(token_id) for token_id in found if token_id is not None), 0)

    def _check_prepared(self) -> None:
        """Check packed attention once per run, before the first batch."""
        if self.trainer is not None and not self._is_model_checked:
            check_prepared(self.trainer)
            self._is_model_checked = True
