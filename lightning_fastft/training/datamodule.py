"""PackedDataModule: from files or rows to planned, packed micro-batches for any Trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fastft.checkpoint.lightning_internals import batch_progress
from lightning_fastft.core.checks import check_bool, check_share, check_tokenizer
from lightning_fastft.core.errors import DataError, OptionError, ResumeError
from lightning_fastft.core.phases import phase
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.packs import Packs, pack_best_fit_decreasing
from lightning_fastft.packing.reading.streams import is_stream, open_stream
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.step_plan import StepPlan
from lightning_fastft.packing.store.dataset import TokenizedDataset
from lightning_fastft.packing.stream import ENDLESS, DocumentSubset, PackedLoader, PlannedStream
from lightning_fastft.packing.tokens.tokenisation import Setup
from lightning_fastft.training.data.images import find_image_encoder, make_document_images
from lightning_fastft.training.data.options import (
    check_paths,
    check_plan_options,
    check_reading_options,
    check_sources,
    count_processes,
)
from lightning_fastft.training.data.position import align_position, check_ranks_agree, compare_plans, describe_plan
from lightning_fastft.training.data.resizing import Resized, plan_rest, read_resized, resize
from lightning_fastft.training.data.splits import SplitDataModule
from lightning_fastft.training.data.streams import StreamOptions, TrainingStream, align_stream, check_stream_run
from lightning_fastft.training.data.subsets import (
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
    has_trained,
    repeats_first_epoch,
    uses_cuda,
)

log = logging.getLogger(__name__)


class PackedDataModule(SplitDataModule):
    """Read, tokenise, pack and plan; yield PackedBatch objects that any model takes as ``model(**batch)``.

    Every example is trained once per epoch; packs are shuffled by seed and epoch, ranks get equal numbers of packs of
    similar cost, and accumulation windows are whole. The position of a run is one integer in the checkpoint, from which
    training resumes bit for bit.

    Args:
        paths: Training data: a file (.jsonl, .json, .csv or .tsv, also in .gz, .bz2, .xz or .zst; .parquet), a folder
            of files or of ``save_to_disk``, a glob pattern such as ``data/*.jsonl.gz``, a hub data set id, a list of
            them, rows, or a datasets.Dataset. Files of a folder or pattern are sorted by name. A mapping such
            as ``{a.jsonl: 0.7, b.jsonl: 0.3}`` mixes sources: the weights are shares of the tokens of an epoch, which
            trains each example at least once and repeats examples of the sources whose weight asks for more. A
            ``datasets.IterableDataset`` or a LitData ``StreamingDataset`` is read while it is trained: see streaming.
        streaming: Read ``paths`` (also ``hf://`` URLs and a folder of LitData) while training, for data larger than
            the disk or the memory. Packs are formed within look-ahead windows of 64 packs on each rank, passes repeat,
            and ``Trainer(max_steps=)`` ends the run. Weights of a mixture are then shares of the rows.
        val_paths: Validation data, in the same forms, read whole.
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
        add_eos: Append, and train, the end-of-sequence token unless the format ends with one.
        separator: Text between a prompt and a completion.
        step_separator: Text appended to each step of format "stepwise"; a step is scored at its last token.
        extra_columns: "refuse" rejects a row with a column that the first 100 rows of its file lack; "ignore" takes it.
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
        num_proc: Processes that tokenise what is left after 10 s; None for one per core, 8 at most.
        max_reject_share: Largest share of rejected rows before the run stops.
        rejected_path: Where rejected rows are written, if there are any; None for ``rejected.jsonl`` in the folder of
            the run: the logger's, or the Trainer's default_root_dir where there is no logger. Validation and test write
            to the same folder (``rejected_val.jsonl``, ``rejected_test.jsonl``). The path is logged. A file that holds
            anything but rejected rows is not replaced.
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
        streaming: bool = False,
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
        check_share("val_share", val_share)
        check_bool("streaming", streaming)
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
        # Only training data; the other splits are read whole.
        self.is_streamed = streaming or is_stream(paths)
        self._streamed_paths = paths
        self._stream: TrainingStream | None = None
        super().__init__(
            sources={
                "train": None if self.is_streamed else paths,
                "val": val_paths,
                "test": test_paths,
                "predict": predict_paths,
            },
            options=FormatOptions(
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
            ),
            tokenizer=tokenizer,
            val_share=val_share,
            share_prompts=share_prompts,
            seed=seed,
            cache_dir=cache_dir,
            num_proc=num_proc,
            max_reject_share=max_reject_share,
            rejected_path=rejected_path,
            show_progress=show_progress,
        )
        self.pad_to_max = pad_to_max
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self._plan: StepPlan | None = None
        # The position at which the rest of the run, or its next epoch, begins; and Lightning's own count there.
        self._position = 0
        self._anchor: int | None = None
        # Runs with other sizes before this one, in the epoch of the position.
        self._resized: list[Resized] = []
        self._moves_progress = False
        self._is_model_checked = False

    @property
    def plan(self) -> StepPlan:
        """The plan of the training micro-batches; there after ``setup("fit")``."""
        if self.is_streamed:
            raise OptionError("A stream has no plan of an epoch: its packs are formed while it is read.")
        if self._plan is None:
            raise OptionError('There is no training plan yet; call setup("fit") first.')
        return self._plan

    @property
    def stream(self) -> TrainingStream | None:
        """The streamed training data; None before setup, and if the data is read whole."""
        return self._stream

    @property
    def position(self) -> int:
        """Micro-batches of the plan that are behind this run: the one integer that a checkpoint keeps."""
        if self.trainer is None or self._anchor is None:
            return self._position
        return self._position + batch_progress(self.trainer).total.processed - self._anchor

    def find_examples(self, index: int) -> tuple[str, list[int]]:
        """Return where the examples of one micro-batch of this rank come from, and their numbers, from 0, among those
        that were accepted there; a stream has no numbers.

        The index is that of the micro-batch in the plan, as ``PackedBatch.index`` has it.
        """
        if self._stream is not None:
            return self._stream.name, []
        epoch, micro_batch = divmod(index, self.plan.num_micro_batches)
        number_S = self.plan.epoch(0 if repeats_first_epoch(self.trainer) else epoch).documents(
            rank=find_ranks(self._run)[1], micro_batch=micro_batch
        )
        chosen_N = self._subsets["train"].index_N
        return name_source(self._sources["train"]), (number_S if chosen_N is None else chosen_N[number_S]).tolist()

    def prepare_data(self) -> None:
        """Fill the tokenised cache once per node, before the other ranks read it.

        Rejected rows are written in ``setup``, when the loggers have their folders.
        """
        if self.cache_dir is not None and self._run is not None and self._run.world_size > 1:
            for split in self._splits_of("fit" if self.trainer is None else self.trainer.state.fn):
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
        if stage == "fit" and self.is_streamed:
            self._position, self._anchor = self.position if has_trained(self.trainer) else 0, None
            self._stream = self._open_stream()
        elif stage == "fit":
            if "train" not in self._subsets:
                raise DataError("There is no training data: paths is None.")
            self._position, self._anchor = self.position if has_trained(self.trainer) else 0, None
            with phase("planning packs"):
                self._plan = self._make_plan()
            check_ranks_agree(self._describe_plan())

    def train_dataloader(self) -> PackedLoader:
        """Return the micro-batches of this rank, from the run's position on."""
        if self._stream is not None:
            # The stream has its own threads; collectives run in the training thread.
            return PackedLoader(
                self._continue_stream,
                num_batches=ENDLESS,
                before_batch=self._check_prepared,
                after_batch=self.count_by_hand,
            )
        return PackedLoader(
            self._open_training_stream,
            # Uncut: the trainer applies limit_train_batches to this length itself.
            num_batches=self.plan.num_uncut_micro_batches,
            num_workers=self.num_workers,
            pin_memory=self._pins_memory(),
            before_batch=self._check_step,
            after_batch=self.count_by_hand,
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
        """Return the position and the description of its plan: plain numbers and strings.

        For a stream, also the state of every rank, with the tokens that wait for a pack. All ranks must call this.
        """
        if self._stream is not None:
            return self._stream.state_dict(self.position)
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

        Raises:
            ResumeError: The position belongs to another plan or stream, and the message names the changes; or sizes
                changed and limit_train_batches cut its epochs.
        """
        if self._stream is not None and state_dict:
            self._position, self._anchor = self._stream.load_state_dict(state_dict), None
            return
        if "stream" in state_dict:
            raise ResumeError(
                "The checkpoint is of a run on a stream, and this data is read whole. Resume with the stream, or begin "
                "a new run from its weights without resuming."
            )
        if self._plan is None or not state_dict:
            return
        changes, is_sizes_only = compare_plans(state_dict["plan"], self._describe_plan())
        position = int(state_dict["micro_batches"])
        if not changes:
            self._position, self._resized = position, read_resized(state_dict)
            if self._resized:
                self._plan_rest()
        elif is_sizes_only:
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
        world_size, accumulate = sizes or (find_ranks(self._run)[0], find_accumulation(self._run))
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

    # Streams and loaders.

    def _open_stream(self) -> TrainingStream:
        """Open the streamed training data."""
        accumulate = find_accumulation(self._run)
        check_stream_run(self.trainer, val_share=self.val_share, accumulate=accumulate)
        needs = find_needs(self._module)
        if needs is not None and needs.formats:
            raise OptionError(f"{type(self._module).__name__} needs data that is read whole. Remove streaming.")
        rows = open_stream(self._streamed_paths, seed=self.seed)
        setup = Setup(
            self.tokenizer,
            self.options,
            getattr(self._module, "vocab_size", None),
            find_image_encoder(self._given_tokenizer, module=self._module),
        )
        batch_options = {
            "pad_to": self.max_tokens if self.pad_to_max else None,
            "pad_to_multiple_of": find_context_size(self._run),
            "pad_token_id": self._pad_token_id(),
        }
        options = StreamOptions(
            ranks=find_ranks(self._run),
            accumulate=accumulate,
            seed=self.seed,
            num_proc=self.num_proc or count_processes(),
            num_workers=self.num_workers,
            pin_memory=self._pins_memory(),
            max_reject_share=self.max_reject_share,
            rejected_path=self.rejected_file("train", is_of_rank=True),
            batch_options=batch_options,
        )
        return TrainingStream(rows, setup=setup, options=options)

    def _continue_stream(self) -> Iterator[PackedBatch]:
        """Continue the stream at the position when the first batch of an epoch, or of a resumed run, is requested."""
        assert self._stream is not None
        if self.trainer is not None:
            accumulate = self._stream.options.accumulate
            self._position = align_stream(self.trainer, position=self.position, accumulate=accumulate)
            self._anchor = batch_progress(self.trainer).total.processed
        return self._stream.batches(self.position)

    def _open_training_stream(self) -> PlannedStream:
        """Open the stream when the first batch of an epoch, or of a resumed run, is wanted."""
        if self.trainer is not None:
            self._position = align_position(
                self.trainer, self.plan, position=self.position, moves_progress=self._moves_progress
            )
            self._anchor, self._moves_progress = batch_progress(self.trainer).total.processed, False
        else:
            # Checkpoints hold no partial gradients: a window is trained again from its start.
            self._position -= self._position % self.plan.num_micro_batches % self.plan.accumulate
        return PlannedStream(
            self._subsets["train"],
            self.plan,
            rank=find_ranks(self._run)[1],
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

    def count_by_hand(self, batch: PackedBatch) -> None:
        """Count a batch as trained without a Trainer: when the next one is requested, or as soon as the loop reports
        it.
        """
        if self.trainer is None:
            self._position = batch.index + 1

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
        world_size, rank = ranks or find_ranks(self._run)
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

        Each rank gets all packs, or with is_shared a share of them.
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
            "pad_to_multiple_of": find_context_size(self._run),
            "pad_token_id": self._pad_token_id(),
            "encode_images": make_document_images(self._given_tokenizer, module=self._module) if has_images else None,
        }

    def _pins_memory(self) -> bool:
        return self.pin_memory if isinstance(self.pin_memory, bool) else uses_cuda(self._run)

    def _pad_token_id(self) -> int:
        tokenizer = self.tokenizer
        for name in ("pad_token_id", "eos_token_id"):
            token_id = getattr(tokenizer, name, None)
            if token_id is not None:
                return int(token_id)
        return 0
