"""Prove that timed steps train: by the tokens that entered the model, the gradients of every step, and the parameters
that the optimizer changed.

Timed steps have no host sync: counts and norms stay on the device until the last step has ended. A fingerprint of the
bits of a tensor, computed on its device before and after, shows whether it changed; a copy of all weights would take as
much memory as the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.ruler.judge import trainable_tensors
from benchmarks.ruler.tensors import pieces
from benchmarks.ruler.workloads import FIRST_WORD, IGNORED_LABEL, Pack

# The backward reaches this layer last, so a backward that stops early is detected here. All other layers are checked
# in the last timed step.
WATCHED_LAYER = "0."
# AdamW changes a weight by about the learning rate at the peak of its schedule. Every system that trains exceeds a
# tenth of it in some weight of a tensor over the timed steps, with any schedule.
SURE_STEP_SHARE = 0.1
# Knuth's multiplier for 64 bits, odd, as a signed number.
_MULTIPLIER = 6364136223846793005
_INTEGERS = {2: torch.int16, 4: torch.int32}


def count_batch(batch: Any) -> torch.Tensor:
    """Count the tokens that enter a model.

    Args:
        batch: input_ids and labels of shape (B, T), unshifted labels, and optionally attention_mask and position_ids
            of the same shape.

    Returns:
        Shape (4,), int64, on the device of the batch: real tokens (words of the ruler, not masked), labelled tokens,
        sum of the ids of real tokens, sum of their positions, -1 if the batch has no positions.

    Example:
        >>> batch = {"input_ids": torch.tensor([[7, 9, 5, 0]]), "labels": torch.tensor([[-100, 9, 5, -100]])}
        >>> count_batch(batch).tolist()
        [3, 2, 21, -1]
    """
    keys, ids, labels = batch.keys(), batch["input_ids"], batch["labels"]
    is_real = ids >= FIRST_WORD
    mask = batch["attention_mask"] if "attention_mask" in keys else None
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        is_real = is_real & mask.bool()
    position = batch["position_ids"] if "position_ids" in keys else None
    if isinstance(position, torch.Tensor) and position.shape == ids.shape:
        position_sum = torch.where(is_real, position, 0).sum()
    else:
        position_sum = ids.new_full((), -1)
    # The first label of a row is never a target.
    num_labelled = (labels[..., 1:] != IGNORED_LABEL).sum()
    return torch.stack([is_real.sum(), num_labelled.to(ids.device), torch.where(is_real, ids, 0).sum(), position_sum])


def count_problem(count: Sequence[int], pack: Pack, *, share: float) -> str:
    """Return the difference between a batch and its pack; empty if they agree.

    Args:
        count: Result of count_batch.
        pack: The pack whose tokens the step is credited with.
        share: Share of labelled tokens.
    """
    num_real, num_labelled, id_sum, position_sum = count
    num_credited = pack.input_id_T.size
    if num_real != num_credited:
        return f"{num_credited} tokens are credited, {num_real} real ones entered the model"
    credited_labels = int((pack.label_T(share) != IGNORED_LABEL).sum())
    if num_labelled != credited_labels:
        return f"{credited_labels} labelled tokens are credited, {num_labelled} entered the model"
    if id_sum != int(pack.input_id_T.sum()):
        return "the tokens that entered the model are not those of the pack"
    if position_sum not in (-1, int(pack.position_T().sum())):
        return "positions do not restart with every document of the pack"
    return ""


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit fingerprint of the bits of a tensor; int64, shape ().

    It is the sum of all elements' bits, each times an odd number of its index. A single change always changes it; many
    changes cancel each other only by chance.

    Cost:
        One pass over the tensor on its device, no host sync; 0.1 GB for the values of one chunk.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    for piece in pieces(tensor):
        place = torch.arange(start, start + piece.numel(), device=tensor.device)
        # Integers wrap around, which keeps odd numbers odd.
        total += (piece.view(_INTEGERS[piece.element_size()]) * place.mul_(_MULTIPLIER).bitwise_or_(1)).sum()
        start += piece.numel()
    return total


def smallest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Return the smallest absolute value of a tensor, fp32, shape (); no host sync."""
    return torch.stack([piece.abs().min().float() for piece in pieces(tensor)]).min()


def can_move(smallest: float, *, dtype: torch.dtype, learning_rate: float) -> bool:
    """Return whether a step of AdamW changes the smallest weight of a tensor, if the sum is rounded to dtype.

    A change below half of the last digit of a weight is lost. At a learning rate of 1e-5 bf16 weights above 0.004 do
    not change in any system: matrices have many smaller weights, but norms, which start at 1, lose every step. So bf16
    norms are not required to change, because this would refuse systems that train. Their gradients are judged like all
    others; fp32 norms must change too.

    Example:
        >>> [can_move(1.0, dtype=dtype, learning_rate=1e-5) for dtype in (torch.bfloat16, torch.float32)]
        [False, True]
        >>> can_move(1e-6, dtype=torch.bfloat16, learning_rate=1e-5)
        True
    """
    return smallest * torch.finfo(dtype).eps / 2 < SURE_STEP_SHARE * learning_rate


def may_train_in(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor has an allowed dtype: the requested one, or fp32 if it is wider and the tensor has fewer
    than two axes.

    fp32 norms next to bf16 matrices are a ten-thousandth of a model's values and save no work; fp32 matrices would be
    another training.

    Example:
        >>> [may_train_in(torch.ones(shape), torch.bfloat16) for shape in ((4,), (4, 4))]
        [True, False]
        >>> may_train_in(torch.ones(4, dtype=torch.bfloat16), torch.float32)
        False
    """
    return tensor.dtype == dtype or (tensor.ndim < 2 and tensor.dtype == torch.promote_types(dtype, torch.float32))


class TrainingProof:
    """Check the trained tensors of one case in its timed steps.

    Args:
        share: Share of labelled tokens.
        learning_rate: Peak of the schedule.
        dtype: Requested dtype of the trained tensors, as in may_train_in; None for any.
    """

    def __init__(self, *, share: float, learning_rate: float, dtype: torch.dtype | None = None) -> None:
        self._share = share
        self._learning_rate = learning_rate
        self._dtype = dtype
        self._counts: list[torch.Tensor | None] = []
        self._norms: list[torch.Tensor | None] = []
        self._trained: dict[str, torch.nn.Parameter] = {}
        self._before: dict[str, int] = {}

    def see_batch(self, batch: Any) -> None:
        """Count a batch; None if a system provides none."""
        self._counts.append(None if batch is None else count_batch(batch))

    def see_model(self, model: torch.nn.Module, reference: Mapping[str, torch.Tensor] | None) -> str:
        """Store the trained tensors of a model and return their differences from those of the plain arm; empty if there
        are none.

        Args:
            model: The model after its first backward.
            reference: Gradients of the plain arm; None for the plain arm itself.
        """
        self._trained = trainable_tensors(model)
        dtype = self._dtype
        refused = (
            []
            if dtype is None
            else [name for name, parameter in self._trained.items() if not may_train_in(parameter, dtype)]
        )
        if refused:
            dtypes = sorted({str(parameter.dtype) for parameter in self._trained.values()})
            return (
                f"it trains weights in {dtypes}, and not all of them in {dtype}: {len(refused)} tensors, {refused[:3]}"
            )
        if reference is None:
            return ""
        different = sorted(set(self._trained) ^ set(reference))
        count, expected = self.num_trained, sum(tensor.numel() for tensor in reference.values())
        if not different and count == expected:
            return ""
        own, plain = f"{len(self._trained)} tensors of {count} values", f"{len(reference)} of {expected}"
        return f"it trains {own}, the plain arm {plain}; names that differ: {different[:3]}"

    @property
    def num_trained(self) -> int:
        """Number of trained values."""
        return sum(parameter.numel() for parameter in self._trained.values())

    @property
    def dtypes(self) -> dict[str, dict[str, int]]:
        """Number of trained tensors of each dtype: "matrices" with two or more axes, and "vectors"."""
        counts: dict[str, Counter[str]] = {"matrices": Counter(), "vectors": Counter()}
        for parameter in self._trained.values():
            counts["vectors" if parameter.ndim < 2 else "matrices"][str(parameter.dtype).removeprefix("torch.")] += 1
        return {kind: dict(count) for kind, count in counts.items()}

    @property
    def num_movable(self) -> int:
        """Tensors that a step can change in their dtype."""
        return len(self._before)

    def batch_problem(self, pack: Pack) -> str:
        """Return the fault of the last batch, empty if there is none; one device sync."""
        return self._problems(self._counts[-1:], [pack])

    def begin(self) -> None:
        """Discard the records of the warm-up, and record every tensor that can change.

        Cost:
            Two passes over the trained tensors and one device sync; a tenth of a second for 8 billion weights on an
            H200, by its bandwidth.
        """
        self._counts.clear()
        self._norms.clear()
        smallest = _read([smallest_magnitude(parameter) for parameter in self._trained.values()])
        movable = [
            name
            for value, (name, parameter) in zip(smallest, self._trained.items())
            if can_move(value, dtype=parameter.dtype, learning_rate=self._learning_rate)
        ]
        self._before = dict(zip(movable, self._fingerprints(movable)))

    def see_gradients(self, *, is_last: bool) -> None:
        """Record the gradient norms of the first layer, or of all layers in the last timed step; no host sync."""
        watched = [parameter for name, parameter in self._trained.items() if is_last or name.startswith(WATCHED_LAYER)]
        gradients = [parameter.grad for parameter in watched if parameter.grad is not None]
        is_whole = bool(watched) and len(gradients) == len(watched)
        self._norms.append(torch.stack(torch._foreach_norm(gradients)) if is_whole else None)

    def problem(self, packs: Sequence[Pack]) -> str:
        """Return why the timed steps did not train, empty if they did; one device sync.

        Args:
            packs: The packs of the timed steps, in order.
        """
        return self._problems(self._counts, packs) or self._dead_steps() or self._unmoved()

    def release(self) -> None:
        """Drop the references to the model."""
        self._trained, self._before = {}, {}

    def _problems(self, counts: Sequence[torch.Tensor | None], packs: Sequence[Pack]) -> str:
        if len(counts) != len(packs):
            return f"{len(counts)} batches were seen in {len(packs)} steps"
        for number, (count, pack) in enumerate(zip(counts, packs)):
            fault = (
                "the batch was not shown" if count is None else count_problem(count.tolist(), pack, share=self._share)
            )
            if fault:
                return f"step {number}: {fault}" if len(packs) > 1 else fault
        return ""

    def _dead_steps(self) -> str:
        dead = [
            number
            for number, norms in enumerate(self._norms)
            if norms is None or not bool(((norms > 0) & norms.isfinite()).all())
        ]
        return (
            f"{len(dead)} of {len(self._norms)} timed steps had gradients that are missing, zero or not finite: "
            f"{dead[:5]}"
            if dead
            else ""
        )

    def _unmoved(self) -> str:
        if not self._before:
            return "the learning rate is below the last digit of every weight"
        after = self._fingerprints(list(self._before))
        unmoved = [name for (name, before), now in zip(self._before.items(), after) if now == before]
        return (
            f"the optimizer moved {len(self._before) - len(unmoved)} of {len(self._before)} tensors, not {unmoved[:3]}"
            if unmoved
            else ""
        )

    def _fingerprints(self, names: Sequence[str]) -> list[int]:
        return _read([fingerprint(self._trained[name]) for name in names])


def _read(values: Sequence[torch.Tensor]) -> list[Any]:
    """Return the values of tensors without axes, with one device sync."""
    return torch.stack(list(values)).tolist() if values else []
