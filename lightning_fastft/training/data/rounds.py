"""Rounds of rollouts: which prompts are sampled, how their rollouts are packed on all ranks, and how a run resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.checkpoint.ranks import on_all_ranks
from lightning_fastft.core.errors import DataError, FastFTError, OptionError, ResumeError
from lightning_fastft.packing.collate import PackedBatch, collate
from lightning_fastft.packing.completions import Completions
from lightning_fastft.packing.document import IGNORED_LABEL, Document, split_document
from lightning_fastft.packing.loader import EMPTY_PACK_TOKENS
from lightning_fastft.packing.needs import LossUnit
from lightning_fastft.packing.packs import Packs, pack_best_fit_decreasing, split_to_multiple
from lightning_fastft.packing.step_plan import mix_bits
from lightning_fastft.training.data.position import BY_CONTENT, SIZES, compare_plans

if TYPE_CHECKING:
    from lightning_fastft.training.distillation import DistillationTuner
    from lightning_fastft.training.policy import PolicyTuner


def draw_sampled(number: int, *, share: float, prompts_per_round: int, seed: int) -> list[bool]:
    """Return for each prompt of a round whether its completions are sampled; the same for any number of ranks."""
    place_N = np.arange(prompts_per_round, dtype=np.uint64) + np.uint64(number * prompts_per_round)
    # The highest 53 bits, a fraction below 1 that a double holds exactly.
    draw_N = (mix_bits(place_N, seed=seed, stream=-1) >> np.uint64(11)) * 2.0**-53
    drawn: list[bool] = (draw_N < share).tolist()
    return drawn


def choose_prompts(number: int, *, num_prompts: int, prompts_per_round: int, seed: int) -> list[int]:
    """Return the prompts of a round: each epoch over the prompts has its own order."""
    begin = number * prompts_per_round
    chosen: list[int] = []
    orders: dict[int, np.ndarray] = {}
    for place in range(begin, begin + prompts_per_round):
        epoch, within = divmod(place, num_prompts)
        if epoch not in orders:
            key_N = mix_bits(np.arange(num_prompts, dtype=np.uint64), seed=seed, stream=2 + epoch)
            orders[epoch] = np.argsort(key_N, kind="stable")
        chosen.append(int(orders[epoch][within]))
    return chosen


def pack_round(
    documents: Sequence[Document],
    weight_N: np.ndarray,
    *,
    max_tokens: int,
    pad_to_max: bool,
    shares_prompts: bool,
    accumulate: int,
    seed: int,
    device: torch.device,
) -> list[PackedBatch]:
    """Return the packs of a round on the device: equally many on every rank, in whole accumulation windows.

    Raises:
        DataError: There is no rollout on any rank.
    """
    if not _gather(len(documents)).any():
        raise DataError(
            "All reward functions returned None for all completions of a round, so there is nothing to train. Return a "
            "number for at least some."
        )
    parts_N = [split_document(document, shares_prompt=shares_prompts) for document in documents]
    length_N = np.array([sum(len(part.input_ids) for part in parts) for parts in parts_N], dtype=np.int64)
    own = pack_best_fit_decreasing(length_N, max_tokens=max_tokens) if documents else None
    num_packs = -(-int(_gather(0 if own is None else len(own)).max()) // accumulate) * accumulate
    if own is None:
        # Rewards judged no completion of this rank.
        none_N, start_P1 = np.zeros(0, dtype=np.int64), np.zeros(num_packs + 1, dtype=np.int64)
        packs = Packs(document_N=none_N, start_P1=start_P1, max_tokens=max_tokens)
    else:
        packs = split_to_multiple(own, length_N, multiple=num_packs)
    # Best fit puts the longest rollouts first; the shuffle spreads them over the windows.
    order = np.argsort(mix_bits(np.arange(num_packs, dtype=np.uint64), seed=seed, stream=0), kind="stable")
    # Loggers read the last micro-batch of a window: the empty packs of each come first.
    is_filled_WA = np.array([len(packs[int(number)]) > 0 for number in order]).reshape(-1, accumulate)
    order = np.take_along_axis(order.reshape(-1, accumulate), np.argsort(is_filled_WA, kind="stable"), axis=1).ravel()
    weights = np.array([packs.sum_per_pack(weight_N)[number] for number in order])
    window_RW = _gather(weights.reshape(-1, accumulate).sum(axis=1))
    world_size, total_W = len(window_RW), window_RW.sum(axis=0)
    batches = []
    for place, number in enumerate(order):
        chosen = [documents[index] for index in packs[int(number)]]
        total = float(total_W[place // accumulate])
        batch = collate(
            chosen,
            pad_to=max_tokens if pad_to_max else None if chosen else EMPTY_PACK_TOKENS,
            num_items=total / (accumulate * world_size) if total else 1.0,
            shares_prompts=shares_prompts,
        )
        if not chosen:
            batch.context.completions = Completions.none()
        batches.append(batch.to(device))
    return batches


def weigh_rollouts(documents: Sequence[Document], *, unit: LossUnit) -> np.ndarray:
    """Return what each rollout counts in the mean of the loss: its labelled tokens, or its completions."""
    if unit == "token":
        return np.array([int((document.labels != IGNORED_LABEL).sum()) for document in documents], dtype=np.int64)
    return np.array([len(document.scores) for document in documents], dtype=np.int64)


def check_room(
    longest: int, *, num_completions: int, max_new_tokens: int, max_tokens: int, shares_prompts: bool
) -> None:
    """Refuse a longest prompt whose group does not fit a pack.

    Raises:
        OptionError: It does not.
    """
    num_prompt = longest - 1 + num_completions if shares_prompts else longest * num_completions
    if num_prompt + num_completions * max_new_tokens > max_tokens:
        raise OptionError(
            f"A prompt of {longest} tokens with {num_completions} completions of {max_new_tokens} does not fit "
            f"max_tokens={max_tokens}. Raise max_tokens, or lower one of the others."
        )


def check_prompts_per_round(prompts_per_round: int, *, num_prompts: int, world_size: int) -> None:
    """Refuse rounds that ranks cannot share evenly, or of more prompts than there are.

    Raises:
        OptionError: They are.
    """
    if prompts_per_round % world_size or prompts_per_round > num_prompts:
        raise OptionError(
            f"prompts_per_round={prompts_per_round} must be a multiple of the {world_size} ranks and at most the "
            f"{num_prompts} prompts."
        )


def digest_prompts(prompts: Sequence[Sequence[int]], given: Sequence[Document]) -> dict[str, str]:
    """Return digests of the tokens of prompts, and of their given completions if there are any, by name."""
    found = {"prompts": [np.asarray(ids, dtype=np.int64) for ids in prompts]}
    if given:
        found["completions"] = [document.input_ids for document in given]
    digests = {}
    for name, rows in found.items():
        lengths = np.array([len(ids) for ids in rows], dtype=np.int64)
        digests[name] = f"{BY_CONTENT}{hashlib.sha256(np.concatenate([lengths, *rows]).tobytes()).hexdigest()}"
    return digests


def check_rounds(
    state: Mapping[str, Any], *, plan: Mapping[str, Any], sizes: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Check that a checkpoint of a ``RolloutDataModule`` is of the same rounds; warn of another sampling.

    Args:
        state: Its state.
        plan: Settings of this run without which the number of a round has no meaning.
        sizes: Settings without which a place in a round has no meaning; compared inside a round alone.
        settings: Settings of the sampling, which may change.

    Raises:
        ResumeError: Settings that may not change differ.
    """
    # Older versions kept only the world size and the accumulation.
    saved_sizes = state["sizes"] if isinstance(state["sizes"], Mapping) else dict(zip(SIZES, state["sizes"]))
    changed = _compare(state.get("plan", {}), plan)
    what = f"round {state['round'] + 1} of other rollouts"
    if not changed and state["ranks"]:
        changed, what = _compare(saved_sizes, sizes), "the middle of a round of rollouts, which is packed anew"
    if changed:
        raise ResumeError(
            f"The checkpoint is in {what}: {changed}. Resume with the values of the checkpoint, or begin a "
            "new run from its weights without resuming."
        )
    if changed := _compare(state.get("settings", {}), settings):
        rank_zero_warn(f"Resumed with another sampling than that of the checkpoint: {changed} (this run's is used).")


def _compare(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return the values that differ, of those that both have."""
    return compare_plans({**current, **saved}, current)[0]


def _gather(value: Any) -> np.ndarray:
    """Return the values of all ranks, stacked."""
    return np.stack(on_all_ranks(lambda: np.asarray(value), error=FastFTError))


def find_tuner(module: Any) -> PolicyTuner | DistillationTuner:
    """Return the module of a run as the tuner that rollouts are sampled for.

    Raises:
        OptionError: It is none.
    """
    from lightning_fastft.training.distillation import DistillationTuner
    from lightning_fastft.training.policy import PolicyTuner

    if not isinstance(module, (PolicyTuner, DistillationTuner)):
        raise OptionError(
            f"RolloutDataModule samples for a PolicyTuner or a DistillationTuner, got {type(module).__name__}."
        )
    return module


def check_rollout_tuner(tuner: PolicyTuner | DistillationTuner, *, has_rewards: bool, temperature: float) -> None:
    """Refuse a tuner that needs other options of the RolloutDataModule.

    Raises:
        OptionError: It has other ones.
    """
    from lightning_fastft.training.distillation import DistillationTuner

    if isinstance(tuner, DistillationTuner):
        if tuner.store is not None:
            raise OptionError(
                "DistillationTuner(store=...) holds the teacher's tokens of given rows, and completions that are "
                "sampled are in no store. Leave store out, so that the live teacher reads them; or give the rows "
                "to PackedDataModule."
            )
        if has_rewards:
            raise OptionError("A DistillationTuner learns from its teacher, without rewards: remove rewards.")
        return
    if not has_rewards:
        raise OptionError(
            "A PolicyTuner learns from rewards: give RolloutDataModule(rewards=...) a function of yours. On the "
            "command line: --allow-import my_rewards --data.rewards my_rewards.score."
        )
    if tuner.temperature != temperature:
        raise OptionError(
            f"RolloutDataModule samples at temperature={temperature}, and the PolicyTuner takes "
            f"log-probabilities at temperature={tuner.temperature}. Give both the same one."
        )
