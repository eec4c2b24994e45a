"""Dtypes and seeds for building a model, and a check that the Trainer precision does not change them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lightning_fastft.core.checks import check_choice
from lightning_fastft.core.errors import OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(dtype: str, *, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and compute: "auto" is bf16 if the device supports it, else fp32.

    Raises:
        OptionError: dtype is not one of auto, bfloat16, float16, float32.
    """
    check_choice("dtype", dtype, ("auto", *DTYPES))
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


def find_wide_names(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Return the names of the parameters and buffers that transformers reads in fp32 for a model of this dtype."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return set()
    kept = build_glob_alternation(list(plan))[0]
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name for name, _ in tensors if kept.search(name)}


def check_precision(
    precision: str, *, dtype: str, adapter_dtype: torch.dtype, has_adapters: bool, is_fit: bool
) -> None:
    """Raise on a Trainer precision that would silently change a dtype.

    Raises:
        OptionError: The precision would change a dtype; the message names the line to change.
    """
    keep = "Set Trainer(precision='32-true'), where Lightning changes no dtype"
    if precision == "32-true":
        if dtype == "float16" and is_fit:
            raise OptionError(
                "dtype='float16' needs loss scaling to train. Set Trainer(precision='16-mixed'), or dtype='auto'."
            )
        return
    if precision == "bf16-true":
        if dtype != "bfloat16":
            raise OptionError(f"precision='bf16-true' would cast a model with dtype={dtype!r} to bf16. {keep}.")
        if has_adapters and adapter_dtype != torch.bfloat16:
            raise OptionError(
                f"precision='bf16-true' would cast the fp32 adapters to bf16. {keep}, or "
                "FineTuner(adapter_dtype='bfloat16')."
            )
        return
    if precision == "16-mixed":
        if dtype != "float16":
            raise OptionError(
                f"precision='16-mixed' would compute in fp16 a model with dtype={dtype!r}. {keep}, or "
                "FineTuner(dtype='float16')."
            )
        if not has_adapters or adapter_dtype != torch.float32:
            raise OptionError(
                "precision='16-mixed' needs fp32 adapters (lora=..., adapter_dtype='float32') for its loss scaler. "
                f"Give them, or: {keep}."
            )
        return
    raise OptionError(f"precision={precision!r} is not supported. {keep}, and choose FineTuner(dtype=...).")


@contextmanager
def seeded(seed: int, *, device: torch.device) -> Iterator[None]:
    """Seed the global generators inside the block and restore their state afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make dtype the default of new floating tensors inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
