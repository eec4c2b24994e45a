"""RolloutDataModule: prompts in, packed rollouts out, sampled while the policy or the student trains.

Axes: N rollouts of a round (a prompt with its group of completions each).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_fastft.checkpoint.lightning_internals import batch_progress, take_back_batches
from lightning_fastft.checkpoint.ranks import on_all_ranks
from lightning_fastft.checkpoint.rng import drawing_apart
from lightning_fastft.core.checks import check_bool, check_choice, check_float, check_int, check_share
from lightning_fastft.core.errors import OptionError, ResumeError
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.document import Document
from lightning_fastft.packing.loader import ENDLESS, PackedLoader
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.rows.template_options import check_template_options
from lightning_fastft.packing.step_plan import mix_bits
from lightning_fastft.packing.tokens.answer_end import find_answer_end, find_text_end
from lightning_fastft.packing.tokens.formatter import Formatter
from lightning_fastft.training.data.options import check_source
from lightning_fastft.training.data.position import SIZES, from_plain, to_plain
from lightning_fastft.training.data.recorded import RecordedDataModule
from lightning_fastft.training.data.rollouts import (
    PROMPT,
    encode_given,
    encode_prompt_ids,
    find_end_ids,
    read_prompts,
    require_end_ids,
)
from lightning_fastft.training.data.rounds import (
    check_prompts_per_round,
    check_rollout_tuner,
    check_room,
    check_rounds,
    choose_prompts,
    digest_prompts,
    draw_sampled,
    find_tuner,
    pack_round,
    weigh_rollouts,
)
from lightning_fastft.training.data.sampled import check_columns, check_reward_weights, judge, make_rollouts
from lightning_fastft.training.data.subsets import can_share_prompts
from lightning_fastft.training.data.tools import Tools, check_tool_functions
from lightning_fastft.training.data.trainer_facts import check_rollout_run, has_trained
from lightning_fastft.training.data.turns import sample_turns
from lightning_fastft.training.samplers import (
    FunctionSampler,
    Sampled,
    VllmSampler,
    check_sampling_options,
    sample_with_model,
)

if TYPE_CHECKING:
    from lightning_fastft.training.distillation import DistillationTuner
    from lightning_fastft.training.policy import PolicyTuner

# Samplers keep this import path.
__all__ = ["FunctionSampler", "RolloutDataModule", "Sampled", "VllmSampler", "sample_with_model"]
# Settings of the sampling in checkpoints.
_SETTINGS = (
    "num_completions", "max_new_tokens", "temperature", "sampling_options", "sampled_share", "mask_truncated",
    "max_tool_turns",
)  # fmt: skip


class RolloutDataModule(RecordedDataModule):
    """Sample completions of prompts with the policy or the student that trains, and yield them as packed batches.

    A round samples a group of completions for each of ``prompts_per_round`` prompts, and becomes as many optimizer
    steps as its packs need. For a PolicyTuner completions are scored, and with more than one step in a round the
    log-probabilities before the first are kept for the importance ratios. For a DistillationTuner the teacher is the
    judge: there are no rewards. Epochs have no end: the Trainer needs ``max_steps`` or ``max_time``.

    Args:
        prompts: Rows with a column "prompt" (text, or messages for the chat template, which also gets the columns
            "tools" and "chat_template_kwargs"): a file, a folder, a data set or a list of rows, as in
            ``PackedDataModule``. All columns except "prompt" are passed to the rewards.
        rewards: A function or several, whose numbers are added; called with the keywords of TRL's reward functions:
            prompts, completions (texts), one list for each other column of the rows, and if the function takes them
            completion_ids (lists of token ids) and, with tools, completion_messages (lists of messages). Returns for
            each completion a finite number, or None where the function does not apply. A completion without any number
            is left out. None for a DistillationTuner.
        reward_weights: Factor of each reward function; 1 by default.
        tools: A function or several that completions may call, each with a docstring and types of its arguments. The
            chat template shows them to the model, unless a row has a column "tools". The model reads their results,
            which are not trained. Only for prompts of messages.
        max_tool_turns: Most turns of a completion whose calls are answered; None for as many as max_new_tokens holds.
        sampler: Samples the completions; ``sample_with_model``, a ``VllmSampler``, a ``FunctionSampler`` of your own
            function, or a function like ``sample_with_model``.
        sampled_share: Share of prompts whose completions are sampled, drawn anew in each round (lmbda of GKD). The
            others get the completion of their row (column "completion"). Below 1 only without rewards.
        num_completions: Sampled completions of each prompt: the size of a group; at least 2 with rewards.
        prompts_per_round: Prompts of a round, on all ranks together.
        max_new_tokens: Most tokens of a completion, with the results of its tools.
        temperature: Temperature of the sampling; that of a PolicyTuner must be the same.
        sampling_options: "top_p", "top_k", "min_p" and "repetition_penalty" of the sampling, as in transformers and
            vLLM; by default none. Log-probabilities of a PolicyTuner are without them, as in TRL.
        max_tokens: Length of a pack in tokens.
        chat_template_kwargs: Variables of the chat template for all prompts; as in ``PackedDataModule``.
        pad_to_max: Pad every pack to max_tokens, for static shapes.
        share_prompts: Whether a pack holds the prompt of a group once; as in ``PackedDataModule``.
        mask_truncated: Keep completions without an end out of the loss; their rewards count in their group.
        seed: Seed of the order of the prompts and of the sampling.

    Raises:
        OptionError: An option is not allowed.
    """

    # A checkpoint written inside an accumulation window resumes at the start of the window.
    repeats_windows = True

    def __init__(
        self,
        prompts: str | list[str] | list[dict[str, Any]] | Any,
        *,
        # Lists first: jsonargparse saves a list of functions by the first type that takes one.
        rewards: list[Callable[..., Any]] | Callable[..., Any] | None = None,
        reward_weights: list[float] | None = None,
        tools: list[Callable[..., Any]] | Callable[..., Any] | None = None,
        max_tool_turns: int | None = None,
        sampler: Callable[..., Any] = sample_with_model,
        sampled_share: float = 1.0,
        num_completions: int = 8,
        prompts_per_round: int = 8,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        sampling_options: dict[str, Any] | None = None,
        max_tokens: int = 4096,
        chat_template_kwargs: dict[str, Any] | None = None,
        pad_to_max: bool = False,
        share_prompts: bool | str = "auto",
        mask_truncated: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.record_options(locals())
        if prompts is None:
            raise OptionError("prompts is None: give a file, a folder, a data set or rows.")
        check_source("prompts", prompts)
        self.rewards = list(rewards) if isinstance(rewards, (list, tuple)) else [] if rewards is None else [rewards]
        is_empty = rewards is not None and not self.rewards
        if is_empty or not all(map(callable, self.rewards)) or not callable(sampler):
            raise OptionError("rewards must be a function or a list of functions, and sampler a function.")
        self.reward_weights = check_reward_weights(reward_weights, num_rewards=len(self.rewards))
        self.tools = check_tool_functions(tools)
        self.max_tool_turns = None if max_tool_turns is None else check_int("max_tool_turns", max_tool_turns, low=1)
        if max_tool_turns is not None and not self.tools:
            raise OptionError(
                f"max_tool_turns={max_tool_turns} has no effect without tools: give tools, or leave it out."
            )
        self.sampler = sampler
        self.sampling_options = check_sampling_options(sampling_options, sampler=sampler)
        self.sampled_share = check_share("sampled_share", sampled_share)
        if self.rewards and sampled_share < 1:
            raise OptionError(
                f"sampled_share={sampled_share} takes completions from rows, and rewards compare sampled ones: "
                "remove one of the two."
            )
        self.num_completions = check_int("num_completions", num_completions, low=1 if rewards is None else 2)
        self.prompts_per_round = check_int("prompts_per_round", prompts_per_round, low=1)
        self.max_new_tokens = check_int("max_new_tokens", max_new_tokens, low=1)
        self.temperature = check_float("temperature", temperature, low=1e-3, high=1e3)
        self.max_tokens = check_int("max_tokens", max_tokens, low=2)
        self.chat_template_kwargs = check_template_options(chat_template_kwargs)
        self.pad_to_max = check_bool("pad_to_max", pad_to_max)
        self.share_prompts = check_choice("share_prompts", share_prompts, ("auto", True, False))
        self.mask_truncated = check_bool("mask_truncated", mask_truncated)
        self.seed = check_int("seed", seed, low=0, high=2**64 - 1)
        self._source = prompts
        self._shares_prompts = share_prompts is True
        self._rows: list[dict[str, Any]] = []
        self._columns: tuple[str, ...] = ()
        self._prompt_ids: list[list[int]] = []
        self._tools: Tools | None = None
        # The token that ends completions, if generation does not stop there.
        self.answer_end: int | None = None
        # The rows' own completions behind their prompts; empty if all are sampled.
        self._given: list[Document] = []
        # Digests of the prompts and of these completions, by name.
        self._digests: dict[str, str] = {}
        # Finished rounds, and the micro-batches of the present one.
        self._num_rounds = 0
        self._num_yielded = self._num_in_round = 0
        self._documents: list[Document] | None = None
        self._old: list[torch.Tensor] | None = None

    def setup(self, stage: str) -> None:
        """Read and tokenise the prompts.

        Raises:
            DataError: A row has no usable prompt, or no usable completion where it needs one.
            OptionError: A prompt leaves no room for completions, options do not fit, or nothing ends the run.
        """
        check_rollout_run(self.trainer)
        if not has_trained(self.trainer):
            # A new run does not continue with rollouts of an earlier one.
            self._num_rounds = self._num_yielded = self._num_in_round = 0
            self._documents = self._old = None
        tuner = self._tuner()
        check_rollout_tuner(tuner, has_rewards=bool(self.rewards), temperature=self.temperature)
        if tuner.tokenizer is None:
            raise OptionError("Prompts are text and need a tokenizer: give the tuner one.")
        format_options = FormatOptions(
            max_tokens=self.max_tokens, format="rollouts", chat_template_kwargs=self.chat_template_kwargs
        )
        formatter = Formatter(
            tuner.tokenizer, options=format_options, vocab_size=tuner.vocab_size, stop_ids=tuner.stop_ids
        )
        self._rows, places = read_prompts(self._source)
        find_end = find_text_end if self.is_plain else find_answer_end
        self.answer_end = find_end(tuner.tokenizer, options=format_options, stop_ids=tuner.stop_ids or ())
        shown = self._rows
        if self.tools:
            end_ids = [*find_end_ids(tuner), *([] if self.answer_end is None else [self.answer_end])]
            self._tools = Tools(self.tools, formatter=formatter, tokenizer=tuner.tokenizer, end_ids=end_ids)
            shown = [self._tools.describe(row) for row in self._rows]
        self._prompt_ids = [encode_prompt_ids(formatter, row, place=place) for row, place in zip(shown, places)]
        # A row may lack a column that others have.
        self._columns = tuple(dict.fromkeys(name for row in self._rows for name in row if name != PROMPT))
        if self.rewards:
            check_columns(self._columns)
        if self.sampled_share < 1:
            self._given = encode_given(
                formatter, self._rows, places, max_tokens=self.max_tokens, sampled_share=self.sampled_share
            )
        self._digests = digest_prompts(self._prompt_ids, self._given)
        self._shares_prompts = can_share_prompts(self.share_prompts, tuner)
        check_room(
            max(map(len, self._prompt_ids)), num_completions=self.num_completions, max_new_tokens=self.max_new_tokens,
            max_tokens=self.max_tokens, shares_prompts=self._shares_prompts,
        )  # fmt: skip
        check_prompts_per_round(
            self.prompts_per_round, num_prompts=len(self._rows),
            world_size=1 if self.trainer is None else self.trainer.world_size,
        )  # fmt: skip

    @property
    def rollout_facts(self) -> dict[str, Any]:
        """The source and the number of prompts, and how they are completed, as plain values."""
        return {
            "source": self._source if isinstance(self._source, str) else type(self._source).__name__,
            "prompts": len(self._rows),
            **self._settings(),
        }

    @property
    def is_plain(self) -> bool:
        """Whether all prompts are plain text, to which the chat template is not applied."""
        return all(isinstance(row[PROMPT], str) for row in self._rows)

    def train_dataloader(self) -> PackedLoader:
        """Return the micro-batches of this rank, round after round, each sampled when it is requested."""
        return PackedLoader(self._open_rounds, num_batches=ENDLESS, find_run=lambda: self.trainer)

    def _open_rounds(self) -> Iterator[PackedBatch]:
        """Begin at the start of a window of accumulation, also after a checkpoint or an epoch that ended in one."""
        self._num_yielded -= self._num_yielded % self._accumulate
        if self.trainer is not None:
            take_back_batches(self.trainer, batch_progress(self.trainer).current.ready % self._accumulate)
        return self._rounds()

    def _rounds(self) -> Iterator[PackedBatch]:
        while True:
            # A save since the last step may have left a schedule-free optimizer at its average.
            self._tuner().use_gradient_point()
            # Samplers and rewards draw between two batches.
            with drawing_apart(self._round_seed(self._num_rounds, stream=-2), device=self._tuner().device):
                if self._documents is None:
                    self._documents = self._sample_round(self._num_rounds)
                batches = self._pack(self._documents)
                self._note_old(batches)
            self._num_in_round = len(batches)
            for number in range(self._num_yielded, len(batches)):
                self._num_yielded = number + 1
                yield batches[number]
            self._num_rounds, self._num_yielded = self._num_rounds + 1, 0
            self._documents = self._old = None

    def _pack(self, documents: Sequence[Document]) -> list[PackedBatch]:
        weight_N = weigh_rollouts(documents, unit=self._tuner().data_needs.loss_unit)
        return pack_round(
            documents, weight_N, max_tokens=self.max_tokens, pad_to_max=self.pad_to_max,
            shares_prompts=self._shares_prompts, accumulate=self._accumulate, seed=self.seed,
            device=self._tuner().device,
        )  # fmt: skip

    def _round_seed(self, number: int, *, stream: int) -> int:
        """Return the seed of a round on this rank for one kind of random numbers."""
        world_size, rank = (1, 0) if self.trainer is None else (self.trainer.world_size, self.trainer.global_rank)
        place_1 = np.array([number * world_size + rank], dtype=np.uint64)
        return int(mix_bits(place_1, seed=self.seed, stream=stream)[0] >> np.uint64(1))

    def _sample_round(self, number: int) -> list[Document]:
        """Return this rank's rollouts of a round, with rewards as scores; given completions where none are sampled."""
        world_size, rank = (1, 0) if self.trainer is None else (self.trainer.world_size, self.trainer.global_rank)
        options = {"prompts_per_round": self.prompts_per_round, "seed": self.seed}
        chosen = choose_prompts(number, num_prompts=len(self._rows), **options)[rank::world_size]
        is_sampled = draw_sampled(number, share=self.sampled_share, **options)[rank::world_size]
        asked = [index for index, drawn in zip(chosen, is_sampled) if drawn]
        rollouts = iter(self._sample(asked, seed=self._round_seed(number, stream=1)))
        found = [next(rollouts) if drawn else self._given[index] for index, drawn in zip(chosen, is_sampled)]
        return [rollout for rollout in found if rollout is not None]

    def _sample(self, chosen: Sequence[int], *, seed: int) -> list[Document | None]:
        """Return the rollouts of some prompts; None where no completion has a reward."""
        if not chosen:
            return []
        tuner = self._tuner()
        prompts = [self._prompt_ids[index] for index in chosen]
        rows = [self._rows[index] for index in chosen]
        groups, messages = sample_turns(
            self.sampler, tuner, prompts, rows, tools=self._tools, max_tool_turns=self.max_tool_turns,
            num_completions=self.num_completions, max_new_tokens=self.max_new_tokens, temperature=self.temperature,
            seed=seed, **self.sampling_options,
        )  # fmt: skip
        rewards = judge(
            rows, groups, rewards=self.rewards, weights=self.reward_weights, columns=self._columns,
            tokenizer=tuner.tokenizer, messages=messages,
        )  # fmt: skip
        sampler_clip = getattr(tuner, "sampler_clip", None)
        end_ids = require_end_ids(tuner) if self.mask_truncated else None
        return make_rollouts(prompts, groups, rewards, end_ids=end_ids, sampler_clip=sampler_clip, sampler=self.sampler)

    def _note_old(self, batches: Sequence[PackedBatch]) -> None:
        """Give every batch of a policy's round with several steps the log-probabilities before the first."""
        from lightning_fastft.training.policy import PolicyTuner

        tuner = self._tuner()
        if not isinstance(tuner, PolicyTuner) or len(batches) <= self._accumulate:
            return
        if self._old is None:
            assert self.trainer is not None
            for batch in batches:
                # It is there already; ranks that own experts agree on their longest pack in this call.
                self.trainer.strategy.batch_to_device(batch, tuner.device)
                tuner.note_old_log_probs(batch)
            # They stay on the device; only a checkpoint reads them.
            self._old = [_old_of(batch) for batch in batches]
            return
        for batch, old_R in zip(batches, self._old):
            assert batch.context.completions is not None
            batch.context.completions.old_log_prob_R = old_R.to(batch.context.device)

    @property
    def _accumulate(self) -> int:
        return 1 if self.trainer is None else int(self.trainer.accumulate_grad_batches)

    def _describe(self) -> dict[str, Any]:
        """Return the settings without which the number of a round has no meaning."""
        return {**self._digests, "prompts_per_round": self.prompts_per_round, "seed": self.seed}

    def _sizes(self) -> dict[str, Any]:
        """Return the settings without which a place in a round has no meaning."""
        sizes = (1 if self.trainer is None else self.trainer.world_size, self._accumulate)
        return {**dict(zip(SIZES, sizes)), "max_tokens": self.max_tokens, "share_prompts": self._shares_prompts}

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the sampling, which may change between rounds."""
        return {name: getattr(self, name) for name in _SETTINGS}

    def _tuner(self) -> PolicyTuner | DistillationTuner:
        return find_tuner(None if self.trainer is None else self.trainer.lightning_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the round, the place in it, and the rollouts of every rank, from which the run resumes bit for bit.

        The place is the start of an accumulation window, because no checkpoint keeps half-summed gradients. All ranks
        must call this.
        """
        num_trained = self._num_yielded
        if self.trainer is not None:
            # A micro-batch whose step failed was yielded and not trained.
            progress = batch_progress(self.trainer).current
            num_trained -= progress.ready - progress.processed
        num_trained -= num_trained % self._accumulate
        state: dict[str, Any] = {"plan": self._describe(), "settings": self._settings(), "sizes": self._sizes()}
        if self._documents is None or 0 < self._num_in_round == num_trained:
            return {**state, "round": self._num_rounds + (self._documents is not None), "in_round": 0, "ranks": []}
        own = {
            "rollouts": [to_plain(document) for document in self._documents],
            "old_log_probs": [old_R.cpu() for old_R in self._old or ()],
        }
        ranks = on_all_ranks(lambda: own, error=ResumeError)
        return {**state, "round": self._num_rounds, "in_round": num_trained, "ranks": ranks}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint.

        Raises:
            ResumeError: It is of other prompts or rounds; or it was saved inside a round with other ranks or packs.
        """
        check_rounds(state_dict, plan=self._describe(), sizes=self._sizes(), settings=self._settings())
        ranks = state_dict["ranks"]
        self._num_rounds, self._num_yielded, self._num_in_round = int(state_dict["round"]), state_dict["in_round"], 0
        self._documents = self._old = None
        if ranks:
            own = ranks[0 if self.trainer is None else self.trainer.global_rank]
            self._documents = [from_plain(values) for values in own["rollouts"]]
            self._old = list(own["old_log_probs"]) or None


def _old_of(batch: PackedBatch) -> torch.Tensor:
    completions = batch.context.completions
    assert completions is not None
    assert completions.old_log_prob_R is not None
    return completions.old_log_prob_R
