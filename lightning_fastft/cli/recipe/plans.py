"""Choose method, pack length and steps of a run from the lengths of its data and a GPU.

Axes: N examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.estimate.costs import MeteredStep, meter_step
from lightning_fastft.estimate.graph_plan import plan_step
from lightning_fastft.estimate.meta_model import Swaps
from lightning_fastft.packing.packs import pack_best_fit_decreasing
from lightning_fastft.planner.step import Plan

if TYPE_CHECKING:
    from lightning_fastft.estimate.machines import Gpu
    from lightning_fastft.hf.loading.source import ModelSource

Method = Literal["qlora", "lora", "full"]
METHODS: tuple[Method, ...] = ("qlora", "lora", "full")
LORA_RANK = 16
# Tokens of a pack and of an optimizer step; small data sets get less, so that an epoch has this many steps.
PACK_TOKENS, STEP_TOKENS, LEAST_STEPS = 8192, 32_768, 50
LEAST_PACK_TOKENS = 512
EPOCHS_OF_FEW = 3
_ROUNDED_TO = 1024
# Validation: share of the examples, and bounds of their number and share.
_VAL_SHARE, _LEAST_VAL, _MOST_VAL, _MOST_VAL_SHARE = 0.02, 16, 1000, 0.1
# A method is preferred to a later one that is faster by less than this.
_AS_FAST = 1.05
# Lengths that were not counted with the tokenizer may be this much larger.
ASSUMED_MARGIN = 1.25


class Planned(NamedTuple):
    """A plan of activations on a GPU, with the memory of weights and optimizer."""

    method: Method
    max_tokens: int
    held_bytes: int
    plan: Plan

    @property
    def step_ms(self) -> float:
        """Predicted time of a pack."""
        return self.plan.prediction.step_ms


class Steps(NamedTuple):
    """Packs and optimizer steps of an epoch.

    Args:
        max_tokens: Length of a pack.
        accumulate: Packs per optimizer step.
        num_packs: Packs of an epoch.
        num_cut: Examples of more tokens than a pack has.
        num_tokens: Tokens of an epoch, as far as they fit.
        val_share: Share of the examples that is held out; 0 for a few examples.
    """

    max_tokens: int
    accumulate: int
    num_packs: int
    num_cut: int
    num_tokens: int
    val_share: float

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an epoch."""
        return -(-self.num_packs // self.accumulate)

    @property
    def num_epochs(self) -> int:
        """Epochs of a run: more than one where an epoch has few steps."""
        return 1 if self.num_steps >= LEAST_STEPS else EPOCHS_OF_FEW


def choose_pack_tokens(length_N: np.ndarray, *, most: int) -> int:
    """Return the length of a pack: the longest example, and at least 8,192 tokens unless that leaves too few steps.

    Example:
        >>> choose_pack_tokens(np.full(100_000, 300), most=40_960)
        8192
        >>> choose_pack_tokens(np.full(200, 300), most=40_960), choose_pack_tokens(np.array([20_100]), most=40_960)
        (1024, 20480)
    """
    longest, total = int(length_N.max()), int(length_N.sum())
    # The next power of two, or, beyond the usual pack, the next multiple of _ROUNDED_TO.
    whole = 1 << (longest - 1).bit_length() if longest <= PACK_TOKENS else -(-longest // _ROUNDED_TO) * _ROUNDED_TO
    preferred = min(PACK_TOKENS, 1 << max(1, total // LEAST_STEPS).bit_length() - 1)
    return min(most, max(whole, preferred, LEAST_PACK_TOKENS))


def count_steps(length_N: np.ndarray, *, max_tokens: int) -> Steps:
    """Return packs, accumulation and validation share for a length of pack."""
    num_all = len(length_N)
    share = min(max(_VAL_SHARE, _LEAST_VAL / num_all), _MOST_VAL / num_all, _MOST_VAL_SHARE)
    if num_all * share < 1:
        share = 0.0
    kept_N = np.minimum(length_N, max_tokens)
    num_packs = len(pack_best_fit_decreasing(kept_N, max_tokens=max_tokens))
    accumulate = max(1, min(STEP_TOKENS // max_tokens, num_packs // LEAST_STEPS))
    return Steps(
        max_tokens,
        accumulate,
        max(1, round(num_packs * (1 - share))),
        int((length_N > max_tokens).sum()),
        int(kept_N.sum() * (1 - share)),
        round(share, 4),
    )


def plan_run(
    source: ModelSource,
    *,
    gpu: Gpu,
    methods: Sequence[Method],
    length_N: np.ndarray,
    max_tokens: int,
    host_bytes: int,
    meter: Callable[..., MeteredStep] = meter_step,
) -> Planned:
    """Return the plan of the first method that fits the GPU and is about as fast as any; shorten packs if none fits.

    Args:
        source: The model.
        gpu: The GPU.
        methods: Methods, the preferred one first.
        length_N: Lengths of the examples.
        max_tokens: Length of a pack.
        host_bytes: Pinned host memory.
        meter: ``meter_step``; one that caches serves many GPUs, because its steps are the same for all.

    Raises:
        OptionError: Nothing fits; the message has what the smallest run takes.
    """
    reason: OptionError | None = None
    for tokens in _halves(max_tokens):
        found = []
        for method in methods:
            try:
                step = meter(source, **_step_options(method, length_N=length_N, max_tokens=tokens))
                found.append(_plan(step, gpu, method, max_tokens=tokens, host_bytes=host_bytes))
            except OptionError as error:
                reason = error
        if found:
            fastest_ms = min(planned.step_ms for planned in found)
            return next(planned for planned in found if planned.step_ms <= _AS_FAST * fastest_ms)
    others = "a smaller model" if "qlora" in methods else "--method qlora, a smaller model"
    raise OptionError(
        f"{source.name} does not fit {gpu.name} by {' or '.join(methods)}: {reason} Give {others}, or a larger --gpu."
    )


def token_mean_length(length_N: np.ndarray, *, max_tokens: int) -> float:
    """Return the length of the example of a token, averaged over tokens.

    Example:
        >>> token_mean_length(np.array([1, 3]), max_tokens=8)
        2.5
    """
    kept_N = np.minimum(length_N, max_tokens).astype(np.float64)
    return float((kept_N**2).sum() / kept_N.sum())


def _step_options(method: Method, *, length_N: np.ndarray, max_tokens: int) -> dict[str, Any]:
    """Return the options of ``meter_step``."""
    return {
        "num_tokens": max_tokens,
        "mean_document_tokens": token_mean_length(length_N, max_tokens=max_tokens),
        "quantization": "nf4" if method == "qlora" else None,
        "lora": None if method == "full" else LORA_RANK,
        "dtype": torch.bfloat16,
        "has_masters": method == "full",
        "swaps": Swaps(is_graphed="auto"),
    }


def _plan(step: MeteredStep, gpu: Gpu, method: Method, *, max_tokens: int, host_bytes: int) -> Planned:
    _, plan = plan_step(step, gpu=gpu, vram_budget_bytes=None, host_budget_bytes=host_bytes)
    return Planned(method, max_tokens, step.held_bytes, plan)


def _halves(max_tokens: int) -> Iterator[int]:
    """Yield a length of pack and its halves down to the smallest."""
    yield max_tokens
    while max_tokens // 2 >= LEAST_PACK_TOKENS:
        max_tokens //= 2
        yield max_tokens
