"""PackedDataModule: from files or rows to planned, packed micro-batches for any Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_fastft.checkpoint.lightning_internals import batch_progress
from lightning_fastft.core.checks import check_bool
from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.core.phases import phase
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.loader import ENDLESS, PackedLoader, PlannedStream
from lightning_fastft.packing.reading.streams import is_stream, open_stream
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.rows.template_options import check_template_options
from lightning_fastft.packing.step_plan import StepPlan
from lightning_fastft.packing.tokens.answer_end import find_answer_end, find_text_end
from lightning_fastft.packing.tokens.chat import read_template, with_template
from lightning_fastft.training.data.images import find_image_encoder
from lightning_fastft.training.data.options import check_paths, count_processes
from lightning_fastft.training.data.planned import TrainingPlan
from lightning_fastft.training.data.position import check_ranks_agree
from lightning_fastft.training.data.splits import SPLITS, SplitDataModule
from lightning_fastft.training.data.streams import TrainingStream, check_stream_run
from lightning_fastft.training.data.subsets import find_needs, name_source, tell_shared
from lightning_fastft.training.data.trainer_facts import (
    check_accumulation,
    find_accumulation,
    find_ranks,
    has_trained,
    repeats_first_epoch,
)

if TYPE_CHECKING:
    from lightning_fastft.hf.images import ImageEncoder


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
        val_paths: Validation data, in the same forms, read whole; or a mapping from names to such data, for example
            ``{math: a.jsonl, chat: [b.jsonl, c.jsonl]}`` or a ``datasets.DatasetDict``: one loader for each name.
            Tuners log ``val_loss/math`` and ``val_loss/chat`` (every metric so), and ``val_loss`` over all sets,
            weighted by their labelled tokens.
        test_paths: Test data, in the same forms, names included.
        predict_paths: Data for ``trainer.predict``, in the same forms, names included: the predictions of several
            named sets are a list for each, in their order. Packs come in the same order every time, each rank has its
            share of them, and ``batch.numbers`` are the numbers of a pack's examples, from 0, among those of the set
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
        chat_template: Jinja text, or a file that ends in .jinja, in place of the tokenizer's own. Checkpoints and saved
            models keep it.
        chat_template_kwargs: Variables of the chat template for all rows, for example {"enable_thinking": False}; the
            column of that name adds to them and takes precedence. Checkpoints keep them for texts and samples.
        loss_on: "completion" trains assistant turns and completions; "all" trains every token.
        add_eos: Append, and train, the end-of-sequence token unless the format ends with one. A last answer that the
            chat template ends without a token (GLM-4) gets the one at which generation stops.
        separator: Text between a prompt and a completion.
        step_separator: Text appended to each step of format "stepwise"; a step is scored at its last token.
        extra_columns: "refuse" rejects a row with a column that the first 100 rows of its file lack; "ignore" takes it.
        too_long: What happens to an example of more than max_tokens: "refuse", "truncate" or "split"; always counted.
        pad_to_max: Pad every pack to max_tokens, for static shapes. cuDNN attention is chosen only for packs whose
            length is a multiple of 512.
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
        val_paths: str | list[str] | dict[str, Any] | list[dict[str, Any]] | Any = None,
        test_paths: str | list[str] | dict[str, Any] | list[dict[str, Any]] | Any = None,
        predict_paths: str | list[str] | dict[str, Any] | list[dict[str, Any]] | Any = None,
        streaming: bool = False,
        val_share: float = 0.0,
        tokenizer: str | Any = None,
        max_tokens: int = 4096,
        format: str = "auto",
        columns: dict[str, str] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
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
        check_paths(paths)
        # Only training data; the other splits are read whole.
        self.is_streamed = check_bool("streaming", streaming) or is_stream(paths)
        self._streamed_paths = paths
        super().__init__(
            sources=dict(zip(SPLITS, (None if self.is_streamed else paths, val_paths, test_paths, predict_paths))),
            options=FormatOptions(
                format=format, columns=columns, loss_on=loss_on, chat_template=chat_template, add_eos=add_eos,
                too_long=too_long, max_tokens=max_tokens, separator=separator, step_separator=step_separator,
                extra_columns=extra_columns, chat_template_kwargs=chat_template_kwargs,
            ),
            tokenizer=tokenizer, val_share=val_share, share_prompts=share_prompts, seed=seed, pad_to_max=pad_to_max,
            num_workers=num_workers, pin_memory=pin_memory, cache_dir=cache_dir, num_proc=num_proc,
            max_reject_share=max_reject_share, rejected_path=rejected_path, show_progress=show_progress,
        )  # fmt: skip
        self.record_options(locals())
        # The tokenizer, and its copy with the chat template of the options; its file is read once.
        self._templated: tuple[Any, Any] | None = None
        self._training: TrainingPlan | TrainingStream | None = None
        # The position at which the rest of the run, or its next epoch, begins; and Lightning's own count there.
        self._position = 0
        self._anchor: int | None = None

    @property
    def trained_tokenizer(self) -> Any:
        """``tokenizer`` with the template of ``chat_template``, which the trained model needs for conversations."""
        tokenizer, chosen = self.tokenizer, self.options.chat_template
        if tokenizer is None or chosen is None:
            return tokenizer
        if self._templated is None or self._templated[0] is not tokenizer:
            self._templated = (tokenizer, with_template(tokenizer, read_template(tokenizer, chosen)))
        return self._templated[1]

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template for all rows, without nulls."""
        return check_template_options(self.options.chat_template_kwargs)

    @property
    def answer_end(self) -> int | None:
        """The token that ends trained answers, or texts if no row is a chat, if generation does not stop there."""
        stop_ids = getattr(self._module, "stop_ids", None)
        if stop_ids is None:
            return None
        find = find_text_end if self._has_only_texts else find_answer_end
        return find(self.trained_tokenizer, options=self.options, stop_ids=stop_ids)

    @property
    def _has_only_texts(self) -> bool:
        """Whether no training row (of a stream: of the first ones) is formatted by a chat template, or has ids."""
        report = self.report("train")
        formats = set(() if report is None else report.rows_per_format) if self.stream is None else {self.stream.format}
        if self.is_plain or formats == {"instruction"}:
            return True
        has_template = getattr(self.trained_tokenizer, "chat_template", None) or self.image_encoder is not None
        return not has_template and "input_ids" not in formats

    @property
    def image_encoder(self) -> ImageEncoder | None:
        """The processor of images, given here or by the LightningModule; None if there is none."""
        return find_image_encoder(self._given_tokenizer, module=self._module)

    @property
    def plan(self) -> StepPlan:
        """The plan of the training micro-batches; there after ``setup("fit")``."""
        if self.is_streamed:
            raise OptionError("A stream has no plan of an epoch: its packs are formed while it is read.")
        if not isinstance(self._training, TrainingPlan):
            raise OptionError('There is no training plan yet; call setup("fit") first.')
        return self._training.plan

    @property
    def stream(self) -> TrainingStream | None:
        """The streamed training data; None before setup, and if the data is read whole."""
        return self._training if isinstance(self._training, TrainingStream) else None

    @property
    def is_plain(self) -> bool:
        """Whether the training rows (of a stream: the first ones) are plain text, although there is a chat template."""
        report = self.report("train")
        return self.stream.is_plain if self.stream is not None else report is not None and report.is_plain

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
        if self.stream is not None:
            return self.stream.name, []
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
        if stage == "fit":
            tell_shared(self._subsets)
            self._position, self._anchor = self.position if has_trained(self.trainer) else 0, None
            self._training = self._open_stream() if self.is_streamed else self._plan_training()

    def train_dataloader(self) -> PackedLoader:
        """Return the micro-batches of this rank, from the run's position on."""
        is_planned = self.stream is None
        return PackedLoader(
            self._open_training_stream,
            # Uncut: the trainer applies limit_train_batches to this length itself.
            num_batches=self.plan.num_uncut_micro_batches if is_planned else ENDLESS,
            # A stream has its own threads, and pins in them; collectives run in the training thread.
            num_workers=self.num_workers if is_planned else 0,
            pin_memory=is_planned and self._pins_memory(),
            before_batch=self._check_step,
            after_batch=self.count_by_hand,
            find_run=lambda: self._run,
        )

    # The position.

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the description of its plan: plain numbers and strings.

        For a stream, also the state of every rank, with the tokens that wait for a pack. All ranks must call this.
        """
        return {} if self._training is None else self._training.state_dict(self.position)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the position of a checkpoint.

        With another number of ranks or another accumulation, what is left of an epoch is planned anew: every example is
        still trained once.

        Raises:
            ResumeError: The position belongs to another plan or stream, and the message names the changes; or sizes
                changed and limit_train_batches cut its epochs.
        """
        if self._training is not None and state_dict:
            self._position, self._anchor = self._training.load_state_dict(state_dict), None

    # Plans, streams and loaders.

    def _plan_training(self) -> TrainingPlan:
        """Plan the training packs of this run."""
        if "train" not in self._subsets:
            raise DataError("There is no training data: paths is None.")
        subset = self._subsets["train"]
        options: dict[str, Any] = {"val_share": self.val_share, "max_tokens": self.max_tokens, "seed": self.seed}
        if subset.documents.completions is not None:
            options |= {"share_prompts": subset.shares_prompts, "adds_mismatched": subset.adds_mismatched}
            # Runs of earlier versions took mismatched completions from the next example, whatever its prompt.
            options |= {"mismatched_of": "other prompts"} if subset.adds_mismatched else {}
        if self._weights is not None:
            options["weights"] = list(self._weights.values())
        with phase("planning packs"):
            planned = TrainingPlan(
                subset, self._packs["train"], run=self._run, needs=find_needs(self._module), options=options
            )
        check_ranks_agree(planned.describe())
        return planned

    def _open_stream(self) -> TrainingStream:
        """Open the streamed training data."""
        accumulate = find_accumulation(self._run)
        has_validation = "val" in self._subsets
        check_stream_run(self.trainer, val_share=self.val_share, has_validation=has_validation)
        needs = find_needs(self._module)
        if needs is not None and needs.formats:
            raise OptionError(f"{type(self._module).__name__} needs data that is read whole. Remove streaming.")
        rows = open_stream(self._streamed_paths, seed=self.seed)
        return TrainingStream(
            rows,
            setup=self._make_setup(),
            ranks=find_ranks(self._run),
            accumulate=accumulate,
            seed=self.seed,
            num_proc=self.num_proc or count_processes(),
            num_workers=self.num_workers,
            pin_memory=self._pins_memory(),
            max_reject_share=self.max_reject_share,
            rejected_path=self.rejected_file("train", is_of_rank=True),
            padding=self._padding(),
        )

    def _open_training_stream(self) -> Iterable[PackedBatch]:
        """Open the stream when the first batch of an epoch, or of a resumed run, is wanted."""
        if self.trainer is not None and self._training is not None:
            self._position = self._training.align(self.trainer, self.position)
            self._anchor = batch_progress(self.trainer).total.processed
        elif not self.is_streamed:
            # Checkpoints hold no partial gradients: a window is trained again from its start.
            self._position -= self._position % self.plan.num_micro_batches % self.plan.accumulate
        if self.stream is not None:
            return self.stream.batches(self.position)
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
        if self.trainer is not None and not self.is_streamed:
            check_accumulation(self.trainer, planned=self.plan.accumulate)

    def count_by_hand(self, batch: PackedBatch) -> None:
        """Count a batch as trained without a Trainer: when the next one is requested, or as soon as the loop reports
        it.
        """
        if self.trainer is None:
            self._position = batch.index + 1
