"""The state of FusedAdamW: what it holds for a parameter, what it takes, and which state it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_fastft.core.checks import check_float
from lightning_fastft.core.errors import OptionError, ResumeError
from lightning_fastft.core.shards import local_values
from lightning_fastft.training.optimization.adamw_shards import (
    block_shape,
    has_whole_blocks,
    is_sharded,
    zeros_beside,
)

DTYPES = (torch.float32, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq")
# Of moments in 8 bits: the largest magnitude of each block of 256.
ABSMAXS = ("exp_avg_absmax", "exp_avg_sq_absmax")
MASTER = "master"
# Smaller parameters keep moments in fp32, as with bitsandbytes: norms and biases, whose few values differ much in size.
MIN_8BIT_SIZE = 4096
# Options of torch.optim.AdamW that change its numbers, and those that only choose how it computes them.
OTHER_RULES = ("amsgrad", "maximize")
OTHER_WAYS = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


def is_steppable(param: torch.Tensor) -> bool:
    """Whether FusedAdamW takes a parameter: a plain, contiguous tensor in fp32 or bf16, or a DTensor of such shards.

    Example:
        >>> is_steppable(torch.nn.Parameter(torch.ones(2))), is_steppable(torch.nn.Parameter(torch.ones(2).double()))
        (True, False)
    """
    if is_sharded(param):
        # A partial sum is not the value of the parameter.
        return not any(each.is_partial() for each in param.placements) and is_steppable(local_values(param))  # type: ignore[attr-defined]
    is_plain = type(param) in (torch.Tensor, torch.nn.Parameter) and param.layout is torch.strided
    return is_plain and param.dtype in DTYPES and param.is_contiguous()


def is_in_8_bits(param: torch.Tensor, *, optim_bits: int) -> bool:
    """Return whether a parameter has moments in 8 bits."""
    return optim_bits == 8 and param.numel() >= MIN_8BIT_SIZE and has_whole_blocks(param)


def state_dtypes(param: torch.Tensor, *, optim_bits: int) -> dict[str, torch.dtype]:
    """Return the names and dtypes of the state of a parameter, without its count and master."""
    if is_in_8_bits(param, optim_bits=optim_bits):
        return dict.fromkeys(MOMENTS, torch.uint8) | dict.fromkeys(ABSMAXS, torch.float32)
    return dict.fromkeys(MOMENTS, torch.float32)


def make_state(param: torch.Tensor, *, optim_bits: int) -> dict[str, torch.Tensor]:
    """Return the state of a parameter before its first step, without a master."""
    # The count stays on the host, where bias corrections are computed.
    state = {"step": torch.tensor(0.0, dtype=torch.float32)}
    for name, dtype in state_dtypes(param, optim_bits=optim_bits).items():
        shape = block_shape(param) if name in ABSMAXS else param.shape
        # With a largest magnitude of 0 every code means 0.
        state[name] = zeros_beside(param, shape, dtype=dtype)
    return state


def check_group(group: dict[str, Any]) -> None:
    """Refuse parameters and options that AdamW in one pass has not."""
    for index, param in enumerate(group["params"]):
        if not is_steppable(param):
            raise OptionError(
                f"params[{index}] is a {type(param).__name__} of {param.dtype} and shape {tuple(param.shape)}; "
                "FusedAdamW takes plain, contiguous "
                "tensors in fp32 or bf16, whole or sharded. Use torch.optim.AdamW for it."
            )
    rate = group["lr"]
    if not isinstance(rate, torch.Tensor):
        check_float("lr", rate, low=0.0)
    for beta in group["betas"]:
        if check_float("betas", beta, low=0.0) >= 1.0:
            raise OptionError(f"betas must lie in [0, 1), got {group['betas']}.")
    check_float("eps", group["eps"], low=0.0)
    check_float("weight_decay", group["weight_decay"], low=0.0)
    wanted = [name for name in OTHER_RULES if group.get(name)]
    if wanted:
        raise OptionError(f"FusedAdamW has no {', '.join(wanted)}. Use torch.optim.AdamW for it.")


def check_rules(group: Mapping[str, Any]) -> None:
    """Refuse a group of a state whose AdamW has options that FusedAdamW has not.

    Raises:
        ResumeError: The group has one.
    """
    wanted = [name for name in OTHER_RULES if group.get(name)]
    if wanted:
        raise ResumeError(
            f"The state is of AdamW with {', '.join(wanted)}, which FusedAdamW has not: resume with torch.optim.AdamW."
        )


def check_state(number: Any, state: dict[str, Any], param: torch.Tensor, *, names: set[str], has_masters: bool) -> None:
    """Refuse the state of a parameter that holds other things than its steps would write."""
    found = set(state) - {MASTER, "step"}
    if is_sharded(param) and not all(is_sharded(state[name]) for name in found):
        raise ResumeError(
            f"The state of parameter {number} is whole, and the parameter is sharded. Load it with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
        )
    if MASTER in state and not has_masters:
        raise ResumeError(
            f"The state of parameter {number} has an fp32 master: resume with "
            "FusedAdamW(master_weights=True), in a FineTuner "
            "master_dtype='float32'."
        )
    if state and found != names and found in ({*MOMENTS}, {*MOMENTS, *ABSMAXS}):
        held, other = (8, 32) if ABSMAXS[0] in found else (32, 8)
        raise ResumeError(
            f"The state of parameter {number} holds moments in {held} bits, and this optimizer holds {other} bits for "
            f"it: resume with FusedAdamW(optim_bits={held}), and sharded as it was saved if rows of the parameter are "
            "no multiple of 256 values."
        )
    if state and (found != names or "step" not in state):
        raise ResumeError(
            f"The state of parameter {number} holds {sorted(state)}, AdamW's holds "
            f"{sorted(('step', *names))}: resume with the "
            "optimizer that wrote it."
        )


def copy_state(
    state: dict[str, Any], param: torch.Tensor, *, dtypes: dict[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Return a state of one's own: the count on the host, all else on the device of its parameter."""
    copied = {"step": torch.tensor(float(state["step"]), dtype=torch.float32)}
    for name, dtype in (dtypes | ({MASTER: torch.float32} if MASTER in state else {})).items():
        copied[name] = (
            state[name].detach().to(device=param.device, dtype=dtype, memory_format=torch.contiguous_format, copy=True)
        )
        if name in ABSMAXS and copied[name].shape != block_shape(param):
            # States of earlier versions have magnitudes with one axis.
            copied[name] = copied[name].view(block_shape(param))
    return copied
