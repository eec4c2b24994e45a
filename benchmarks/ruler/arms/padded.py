"""Peers that never pack a model train on length-grouped batches of documents, padded at the right.

A batch of the ruler is one row of the trainer's data set, so that the judged one may have as many documents as the
first pack. Collator, model, loss, optimizer and step are those of the trainer; only real tokens are counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.ruler.arms import sft
from benchmarks.ruler.cases import Case, CaseLog, CaseRecorder, run_case
from benchmarks.ruler.judge import load_start
from benchmarks.ruler.workloads import Pack, WorkloadFiles

_GOLDEN = (5**0.5 - 1) / 2


def parse_unsloth_mode(mode: str) -> tuple[str, int]:
    """Return the mode of the ruler's arm, and the documents of a padded batch; 0 to pack.

    Raises:
        ValueError: There is no such mode.

    Example:
        >>> parse_unsloth_mode("off+padded32")
        ('off', 32)
    """
    name, _, added = mode.partition("+")
    size = added.removeprefix("padded")
    if name not in ("unsloth", "off", "skip-auto", "skip-max") or (
        added and not (added.startswith("padded") and size.isdecimal() and int(size))
    ):
        raise ValueError(
            f"A mode of unsloth is unsloth, off, skip-auto or skip-max, and +paddedN with N documents; got {mode!r}."
        )
    return name, int(size) if added else 0


def run_padded_cases(
    cases: list[Case],
    *,
    trainer: Any,
    files: WorkloadFiles,
    log: CaseLog,
    is_cuda: bool,
    batch_size: int,
    recorder: Callable[..., CaseRecorder] = CaseRecorder,
) -> None:
    """Train on padded batches with the trainer's own collator, model, loss and step.

    A row of the data set is a whole batch, so that the judged one may have as many documents as the first pack.
    """
    driver, start, packs = sft.install_driver(trainer), files.read_trained(), files.read_packs()
    own_collator = trainer.data_collator
    for case in cases:
        groups = padded_batches(packs, batch_size=batch_size, num_warmup=case.num_warmup, num_steps=case.num_steps)
        case = replace(case, num_steps=len(groups) - case.num_warmup)
        one = recorder(case, files=files, packs=groups, is_cuda=is_cuda)
        rows = _batches_data_set(groups, share=case.label_share)

        def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
            ((_, ids), (_, labels)) = sorted(rows[0].items())
            return own_collator([{"input_ids": one, "labels": other} for one, other in zip(ids, labels)])

        def body(
            recorder: CaseRecorder, *, rows: Any = rows, groups: list[Pack] = groups, collate: Any = collate
        ) -> None:
            is_padded = check_padded(collate([rows[0]]), groups[0].documents(recorder.case.label_share))
            share = real_share(groups[recorder.case.num_warmup :]) if is_padded else 1.0
            recorder.record["real_share"] = share
            driver.expected, trainer.data_collator = {}, collate
            load_start(trainer.model, start)
            sft.train(trainer, rows, driver=driver, recorder=recorder, is_cuda=is_cuda)

        run_case(one, body, log=log)
        trainer.model.zero_grad(set_to_none=True)


def _batches_data_set(groups: Sequence[Pack], *, share: float) -> Any:
    from datasets import Dataset

    documents = [group.documents(share) for group in groups]
    return Dataset.from_dict(
        {
            name: [[pair[place].tolist() for pair in group] for group in documents]
            for place, name in enumerate(("input_ids", "labels"))
        }
    )


def padded_batches(packs: Sequence[Pack], *, batch_size: int, num_warmup: int, num_steps: int) -> list[Pack]:
    """Return the documents of each step, one after the other as a Pack: the first pack's, then length-grouped batches.

    Args:
        packs: Packs of the token file; all their documents are grouped.
        batch_size: Documents in a batch; the batch of the shortest ones may have fewer.
        num_warmup: Steps before the first timed one, with the judged one.
        num_steps: Maximum of timed steps; no batch is timed twice.
    """
    documents = [pack.input_id_T[start:end] for pack in packs for start, end in pack.borders()]
    documents.sort(key=len, reverse=True)
    groups = [documents[start : start + batch_size] for start in range(0, len(documents), batch_size)]
    made = [Pack(input_id_T=np.concatenate(group), lengths=[len(ids) for ids in group]) for group in groups]
    # Steps of the golden ratio from the middle: every prefix of the order is spread over all lengths, and the mean of
    # 10 batches is within 10 % of that of all.
    places = (int((0.5 + number * _GOLDEN) % 1 * len(made)) for number in itertools.count())
    order: dict[int, None] = {}
    while len(order) < len(made):
        order[next(places)] = None
    spread = [made[place] for place in order]
    # The longest batch is a warm-up step, so that its allocations and compilation are not in a timed step.
    warmup = [made[0], *itertools.islice(itertools.cycle(spread), max(0, num_warmup - 2))][: num_warmup - 1]
    return [packs[0], *warmup, *spread[:num_steps]]


def real_share(groups: Sequence[Pack]) -> float:
    """Return the share of real tokens in padded batches."""
    padded = sum(len(group.lengths) * max(group.lengths) for group in groups)
    return sum(group.input_id_T.size for group in groups) / max(1, padded)


def check_padded(batch: dict[str, Any], documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Check that a collated batch has exactly the given documents; return whether it is padded.

    Some collators make no attention mask. Padding is then after a document, where causal attention does not read it,
    and has no labels. Others concatenate the documents in one row without padding, with positions that restart.

    Raises:
        ValueError: Tokens, labels or mask are not those of the documents.
    """
    ids, labels = (batch[name].cpu().numpy() for name in ("input_ids", "labels"))
    lengths = np.asarray([len(own_ids) for own_ids, _ in documents])
    given = batch.get("attention_mask")
    if ids.shape[0] == 1 < len(documents) and "position_ids" in batch:
        _check_one_row(batch, documents)
        return False
    if ids.shape[0] != len(documents):
        raise ValueError(f"The trainer's batch has {ids.shape[0]} rows for {len(documents)} documents.")
    if ids.shape != labels.shape or ids.shape[1] < lengths.max():
        raise ValueError(f"The trainer's batch is {ids.shape} for documents of up to {lengths.max()} tokens.")
    mask = np.arange(ids.shape[1]) < lengths[:, None] if given is None else given.cpu().numpy()
    for row, (own_ids, own_labels) in enumerate(documents):
        length = len(own_ids)
        # The first label of a document is never a target.
        same = np.array_equal(ids[row, :length], own_ids) and np.array_equal(labels[row, 1:length], own_labels[1:])
        if (
            not same
            or mask[row].sum() != length
            or not mask[row, :length].all()
            or (labels[row, length:] != -100).any()
        ):
            raise ValueError(f"Row {row} of the trainer's batch is not document {row} with padding behind it.")
    return True


def _check_one_row(batch: dict[str, Any], documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Check that the only row has the documents one after the other, each with its own positions."""
    ids_T, label_T, position_T = (batch[name].cpu().numpy()[0] for name in ("input_ids", "labels", "position_ids"))
    wanted_T = np.concatenate([own_labels for _, own_labels in documents])
    places_T = np.concatenate([np.arange(len(own_ids)) for own_ids, _ in documents])
    if not np.array_equal(ids_T, np.concatenate([own_ids for own_ids, _ in documents])):
        raise ValueError("The only row of the trainer's batch is not the documents one after the other.")
    if not np.array_equal(position_T, places_T):
        raise ValueError("The positions of the trainer's batch do not begin anew with each document.")
    # The first label of a document is never a target.
    is_target_T = places_T > 0
    if not np.array_equal(label_T[is_target_T], wanted_T[is_target_T]):
        raise ValueError("The labels of the trainer's batch are not those of the documents.")
