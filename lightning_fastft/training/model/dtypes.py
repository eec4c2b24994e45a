"""The dtypes of a tuner: of the base and its arithmetic, and of fp32 masters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_fastft.core.errors import OptionError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def resolve_compute_dtype(
    name: str,
    *,
    present: torch.dtype | None,
    adapter_dtype: torch.dtype,
    has_adapters: bool,
    trainer: Trainer | None,
    device: torch.device,
) -> torch.dtype:
    """Return the dtype of the base and the arithmetic.

    Raises:
        OptionError: The model has another dtype, the Trainer's precision would change it, or TF32 is on with
            "float32".
    """
    from lightning_fastft.hf.dtypes import check_precision, resolve_dtype

    precision = "32-true" if trainer is None else str(trainer.precision)
    wanted = name
    if present is not None:
        wanted = str(present).removeprefix("torch.")
        if name not in ("auto", wanted):
            raise OptionError(
                f"dtype={name!r} was given, and the model has {wanted}: cast it yourself, or remove dtype."
            )
    elif name == "auto" and precision in ("bf16-true", "16-mixed"):
        wanted = "bfloat16" if precision == "bf16-true" else "float16"
    is_fit = trainer is not None and trainer.state.fn == "fit"
    check_precision(precision, dtype=wanted, adapter_dtype=adapter_dtype, has_adapters=has_adapters, is_fit=is_fit)
    matmul_precision = torch.get_float32_matmul_precision()
    if name == "float32" and matmul_precision != "highest":
        raise OptionError(
            "dtype='float32' is fp32 to the last bit, and torch.get_float32_matmul_precision() is "
            f"{matmul_precision!r}. Remove torch.set_float32_matmul_precision(...) or set it to 'highest'; for speed "
            "use dtype='bfloat16'."
        )
    return resolve_dtype(wanted, device=device)


def check_unsharded_masters(master_dtype: str, *, dtype: str) -> None:
    """Check that weights that are not sharded can have the masters asked for.

    The optimizer holds fp32 masters of bf16 weights; loss scaling of fp16 is not part of its pass.

    Raises:
        OptionError: They need a sharded model.
    """
    is_served = master_dtype == "float32" and dtype in ("auto", "bfloat16")
    if master_dtype not in ("auto", dtype) and not is_served:
        raise OptionError(
            f"master_dtype={master_dtype!r} with dtype={dtype!r} needs a sharded model, "
            "Trainer(strategy='fastft_fsdp'); or leave master_dtype at 'auto'."
        )


def resolve_sharded_masters(master_dtype: str, *, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which shards of trained weights are held: fp32 for "auto".

    Raises:
        OptionError: It is narrower than the arithmetic.
    """
    from lightning_fastft.hf.dtypes import DTYPES

    dtype = torch.float32 if master_dtype == "auto" else DTYPES[master_dtype]
    if dtype.itemsize < compute_dtype.itemsize:
        raise OptionError(
            f"master_dtype={master_dtype!r} is narrower than the {compute_dtype} of the arithmetic: set dtype too."
        )
    return dtype
