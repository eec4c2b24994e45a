"""Training data that is read whole: the plan of its micro-batches, and a position that resumes exactly.

Axes: N documents of the training data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fastft.checkpoint.lightning_internals import batch_progress, set_batches_of_epoch, take_back_batches
from lightning_fastft.core.errors import ResumeError
from lightning_fastft.packing.loader import DocumentSubset
from lightning_fastft.packing.needs import DataNeeds
from lightning_fastft.packing.packs import Packs, pack_best_fit_decreasing
from lightning_fastft.packing.step_plan import StepPlan
from lightning_fastft.training.data.position import BY_CONTENT, EPOCH_SIZE, SIZES, compare_plans
from lightning_fastft.training.data.subsets import count_items
from lightning_fastft.training.data.trainer_facts import LoopFacts, find_accumulation, find_ranks

log = logging.getLogger(__name__)

# Goes up when the same arguments give another plan: a position saved under the old rule is refused.
PLAN_VERSION = 1


class TrainingPlan:
    """Hold the plan of the training packs for the ranks and the accumulation of a run.

    Args:
        subset: The training documents.
        packs: Their packs.
        run: The Trainer, the facts of the user's own loop, or None.
        needs: What the loss asks of the data; None for a module that does not say.
        options: Settings that change the packs, under the names that a user sets.
    """

    def __init__(
        self,
        subset: DocumentSubset,
        packs: Packs,
        *,
        run: Trainer | LoopFacts | None,
        needs: DataNeeds | None,
        options: dict[str, Any],
    ) -> None:
        self._subset, self._packs, self._options = subset, packs, options
        self._num_items_N = count_items(subset, needs=needs)
        self._limit = getattr(run, "limit_train_batches", None)
        # Runs with other sizes before this one, in the epoch of the position, as checkpoints keep them.
        self._resized: list[dict[str, int]] = []
        self._moves_progress = False
        self._has_begun = False
        self.plan = self._make((find_ranks(run)[0], find_accumulation(run)))
        if self.plan.num_extra_packs:
            log.info(
                "%d packs, and %d more by splitting, so that windows and ranks are whole.",
                len(packs),
                self.plan.num_extra_packs,
            )

    def describe(self) -> dict[str, Any]:
        """Return the settings without which a position has no meaning; the same rows in another file are the same
        data.
        """
        return {
            "data": f"{BY_CONTENT}{self._subset.documents.content_digest}",
            **self._options,
            SIZES[0]: self.plan.world_size,
            SIZES[1]: self.plan.accumulate,
            EPOCH_SIZE: self.plan.num_micro_batches,
            "plan_version": PLAN_VERSION,
        }

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return the position and the description of its plan: plain numbers and strings."""
        state = {"micro_batches": position, "plan": self.describe()}
        epoch = position // self.plan.num_micro_batches
        resized = [entry for entry in self._resized if entry["epoch"] == epoch]
        return {**state, "resized": resized} if resized else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> int:
        """Return the position of a checkpoint; with other sizes, plan anew what is left of its epoch.

        Raises:
            ResumeError: The position belongs to another plan or to a stream.
        """
        if "stream" in state_dict:
            raise ResumeError(
                "The checkpoint is of a run on a stream, and this data is read whole. Resume with the stream, or begin "
                "a new run from its weights without resuming."
            )
        changes, is_sizes_only = compare_plans(state_dict["plan"], self.describe())
        position = int(state_dict["micro_batches"])
        if changes and not is_sizes_only:
            raise ResumeError(
                f"The checkpoint is at micro-batch {position} of another plan: {changes}. Resume with the values of "
                "the checkpoint, or begin a new run from its weights without resuming."
            )
        self._resized = [dict(entry) for entry in state_dict.get("resized", ())]
        if not changes:
            self._continue_epoch()
            return position
        epoch = self._resize(state_dict)
        position = epoch * self.plan.num_micro_batches + self._continue_epoch()
        self._moves_progress = True
        rank_zero_info(
            f"The checkpoint is of a run with other sizes ({changes}): the rest of its epoch is planned anew."
        )
        return position

    def align(self, trainer: Trainer, position: int) -> int:
        """Bring a position and Lightning's progress to the same micro-batch, at the start of an accumulation window.

        After a change of sizes the position counts and the progress follows.

        Returns:
            The position.

        Raises:
            ResumeError: The two are of different runs.
        """
        plan = self.plan
        in_epoch = position % plan.num_micro_batches
        if self._moves_progress:
            set_batches_of_epoch(trainer, in_epoch)
            self._moves_progress = False
        num_behind = batch_progress(trainer).current.ready % plan.num_micro_batches
        if num_behind == 0 and in_epoch:
            # The last epoch was cut short (by max_steps, in a run before this one, or on_train_batch_start returned
            # -1): an epoch of the trainer is an epoch of the plan.
            if not self._has_begun:
                log.warning(
                    "The run before ended at micro-batch %d of the %d of an epoch, which the Trainer counts as "
                    "complete: the rest of that epoch is not trained. With Trainer(max_steps=...) a checkpoint "
                    "continues inside of it.",
                    in_epoch,
                    plan.num_micro_batches,
                )
            self._has_begun = True
            return position + plan.num_micro_batches - in_epoch
        self._has_begun = True
        if num_behind != in_epoch:
            raise ResumeError(
                f"The plan is at micro-batch {in_epoch} of its epoch and the trainer at {num_behind}: the checkpoint "
                "is of another run."
            )
        if num_replayed := in_epoch % plan.accumulate:
            # No checkpoint keeps half-summed gradients: the window is trained again from its start.
            log.warning(
                "The checkpoint is inside an accumulation window; its %s trained again.",
                "1 micro-batch is" if num_replayed == 1 else f"{num_replayed} micro-batches are",
            )
            take_back_batches(trainer, num_replayed)
        return position - num_replayed

    def _resize(self, state_dict: Mapping[str, Any]) -> int:
        """Return the epoch of a checkpoint of other sizes, and note what was trained of it.

        Raises:
            ResumeError: The saved plan was cut by limit_train_batches, so that the rest would train examples that it
                left out.
        """
        saved = state_dict["plan"]
        sizes = (int(saved[SIZES[0]]), int(saved[SIZES[1]]))
        before = self._make(sizes)
        if before.num_micro_batches != saved[EPOCH_SIZE] or before.num_micro_batches < before.num_uncut_micro_batches:
            raise ResumeError(
                f"The checkpoint belongs to a run with {SIZES[0]}={sizes[0]} and {SIZES[1]}={sizes[1]}, whose epochs "
                "were cut by limit_train_batches. Resume with its sizes."
            )
        epoch, in_epoch = divmod(int(state_dict["micro_batches"]), before.num_micro_batches)
        if self._resized:
            in_epoch -= before.num_micro_batches - self._plan_rest(sizes).num_micro_batches
        # No checkpoint keeps half-summed gradients.
        in_epoch -= in_epoch % sizes[1]
        if in_epoch or self._resized:
            trained = {"world_size": sizes[0], "accumulate": sizes[1], "micro_batches": in_epoch}
            self._resized.append({"epoch": epoch, **trained})
        return epoch

    def _continue_epoch(self) -> int:
        """Plan what earlier runs left of an epoch, and return the micro-batch of the epoch at which it begins."""
        if not self._resized:
            return 0
        rest = self._plan_rest((self.plan.world_size, self.plan.accumulate))
        return self.plan.continue_epoch(self._resized[-1]["epoch"], rest)

    def _plan_rest(self, sizes: tuple[int, int]) -> StepPlan:
        """Return the plan of the documents that earlier runs with other sizes left of an epoch."""
        packs, length_N = self._packs, self._subset.length_N
        is_left_N = np.ones(len(length_N), dtype=bool)
        for entry in self._resized:
            plan = self._make((entry["world_size"], entry["accumulate"]), packs)
            is_left_N[plan.epoch(entry["epoch"]).trained(num_micro_batches=entry["micro_batches"])] = False
            (number_N,) = np.nonzero(is_left_N)
            chosen = pack_best_fit_decreasing(length_N[number_N], max_tokens=packs.max_tokens)
            packs = Packs(document_N=number_N[chosen.document_N], start_P1=chosen.start_P1, max_tokens=packs.max_tokens)
        return self._make(sizes, packs)

    def _make(self, sizes: tuple[int, int], packs: Packs | None = None) -> StepPlan:
        """Return the plan of all packs, or of some of them, for a world size and an accumulation."""
        world_size, accumulate = sizes
        return StepPlan(
            self._packs if packs is None else packs,
            length_N=self._subset.length_N,
            num_labelled_N=self._num_items_N,
            seed=self._options["seed"],
            world_size=world_size,
            accumulate=accumulate,
            limit=self._limit,
        )
