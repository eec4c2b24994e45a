"""Meter the step of an optimizer on the meta device: its state, its temporary memory and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from lightning_fastft.core.optimizer_twin import REFUSALS, OptimizerTwin
from lightning_fastft.estimate.machines import Gpu
from lightning_fastft.estimate.metering import Kernel, Meter

# Host time of a kernel that an optimizer of PyTorch launches in a loop over parameters: assumed.
_HOST_MS = 0.01
# The same of bitsandbytes, which waits for the device after each parameter: Qwen3-8B QLoRA, 504 tensors, takes 626 ms
# with its AdamW8bit and 578 ms with FusedAdamW.
_WAIT_MS = 0.095
# Kernels relative to 4.3 TB/s: element-wise ones (estimate/metering.py). Those of bitsandbytes for moments in 8 bits:
# all weights of Qwen3-8B, 8.2 billion, take 907 ms with its AdamW8bit and 676 ms with FusedAdamW. Ours for such moments
# take as long as fused AdamW with moments in bf16 (696 ms each).
_ROWS_SHARE, _BITSANDBYTES_8BIT_SHARE, _OUR_8BIT_SHARE = 0.8, 0.09, 0.6
_8BIT_UPDATE = "bitsandbytes::optimizer_update_8bit_blockwise"
# Clipping reads each gradient for the norm, then reads and writes it.
_CLIPPING_PASSES = 3


class OptimizerCost(NamedTuple):
    """Costs of the step of an optimizer.

    Args:
        state_bytes: State on the device, with masters.
        kernels: Kernels of a step, with clipping.
        copied_bytes: State on the host, which a step copies to the device and back.
        peak_bytes: Transient memory of a step.
        host_ms: Host time per kernel.
        waits: Whether the host waits for the device within the step, so that the times of host and device add up.
        is_paged: Whether the driver keeps what fits of copied_bytes on the device, so that a step copies less.
    """

    state_bytes: int
    kernels: Sequence[Kernel]
    copied_bytes: int = 0
    peak_bytes: int = 0
    host_ms: float = 0.0
    waits: bool = False
    is_paged: bool = False

    def ms_on(self, gpu: Gpu) -> float:
        """Return the time of a step on a GPU."""
        device_ms = [kernel.ms_on(gpu) for kernel in self.kernels]
        if self.waits:
            step_ms = sum(max(ms, self.host_ms) for ms in device_ms)
        else:
            step_ms = max(sum(device_ms), len(device_ms) * self.host_ms)
        link = gpu.machine
        if link.is_unified:
            return step_ms
        return max(step_ms, self.copied_bytes / min(link.d2h_bytes_per_s, link.h2d_bytes_per_s) * 1e3)


def meter_optimizer(
    make: Callable[[list[nn.Parameter]], Optimizer] | None,
    parameters: list[nn.Parameter],
    *,
    default_state_bytes: int,
    of_tokens: Sequence[nn.Parameter] = (),
) -> OptimizerCost:
    """Return the costs of the step of an optimizer: that of the default one if it does not run on the meta device.

    Args:
        make: Returns the optimizer; None for AdamW in one pass over memory. One with a method ``state_bytes`` counts
            its state itself, and ``host_bytes`` is what it copies.
        parameters: Trained parameters, on the meta device.
        default_state_bytes: State of the default optimizer.
        of_tokens: Parameters of embeddings and the output layer, for an optimizer with a method ``use_adamw``.
    """
    if make is None:
        return _one_pass(parameters, state_bytes=default_state_bytes)
    optimizer = make(parameters)
    if use_adamw := getattr(optimizer, "use_adamw", None):
        use_adamw(of_tokens)
    if count := getattr(optimizer, "state_bytes", None):
        share = _OUR_8BIT_SHARE if getattr(optimizer, "optim_bits", 32) == 8 else _ROWS_SHARE
        copied_bytes = getattr(optimizer, "host_bytes", int)()
        return _one_pass(parameters, state_bytes=sum(map(count, parameters)), copied_bytes=copied_bytes, share=share)
    return _meter(optimizer) or _one_pass(parameters, state_bytes=default_state_bytes)


def is_metered(optimizer: Optimizer) -> bool:
    """Return whether the costs of an optimizer are its own, not those of AdamW.

    Example:
        >>> is_metered(torch.optim.SGD([nn.Parameter(torch.ones(3))]))
        True
    """
    return hasattr(optimizer, "state_bytes") or _meter(optimizer) is not None


def _one_pass(
    parameters: list[nn.Parameter], *, state_bytes: int, copied_bytes: int = 0, share: float = _ROWS_SHARE
) -> OptimizerCost:
    """Return the costs of a step that reads gradients twice, for their norm too, and reads and writes all else once."""
    num_bytes = 2 * (state_bytes + copied_bytes) + 4 * sum(parameter.nbytes for parameter in parameters)
    return OptimizerCost(state_bytes, [Kernel(num_bytes / share, 0.0)], copied_bytes)


def _meter(optimizer: Optimizer) -> OptimizerCost | None:
    """Return the costs of the second step of an optimizer, or None if it does not run on the meta device."""
    twin = OptimizerTwin(optimizer)
    parameters = twin.parameters
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    meter = _StepMeter(document_tokens=1.0, resident=[*parameters, *gradients])
    try:
        with meter:
            # The first step makes the state.
            twin.step()
            num_kernels, live_bytes = len(meter.kernels), meter.start_peak()
            num_reads = twin.step()
    except REFUSALS:
        return None
    state = twin.state_bytes()
    is_bitsandbytes = type(optimizer).__module__.startswith("bitsandbytes.")
    gradient_bytes = sum(gradient.nbytes for gradient in gradients)
    state_bytes, paged_bytes = sum(each.device for each in state), sum(each.paged for each in state)
    kernels, peak_bytes = meter.kernels[num_kernels:], meter.peak_bytes - live_bytes
    if any(group.get("fused") for group in optimizer.param_groups):
        # The twin has no fused step: state and parameters in and out, and gradients once.
        kernels, peak_bytes = [Kernel((2 * state_bytes + 3 * gradient_bytes) / _ROWS_SHARE, 0.0)], 0
    return OptimizerCost(
        state_bytes,
        [Kernel(_CLIPPING_PASSES * gradient_bytes / _ROWS_SHARE, 0.0), *kernels],
        copied_bytes=paged_bytes,
        peak_bytes=peak_bytes,
        host_ms=_WAIT_MS if is_bitsandbytes else _HOST_MS,
        waits=is_bitsandbytes or num_reads > 0,
        is_paged=paged_bytes > 0,
    )


class _StepMeter(Meter):
    """Meter operators that write their arguments and return nothing, of lists of tensors and of bitsandbytes."""

    def _charge_operator(
        self, func: Any, given: tuple[Any, Any], out: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> int:
        if outputs or not func._schema.is_mutable:
            return super()._charge_operator(func, given, out, inputs, outputs)
        names = [argument.name for argument in func._schema.arguments if _is_written(argument)]
        bound = dict(zip((argument.name for argument in func._schema.arguments), given[0])) | given[1]
        written = [item for item in tree_iter([bound.get(name) for name in names]) if isinstance(item, torch.Tensor)]
        share = _BITSANDBYTES_8BIT_SHARE if func._schema.name == _8BIT_UPDATE else _ROWS_SHARE
        self._charge(sum(tensor.nbytes for tensor in (*inputs, *written)), 0.0, share=share)
        return 0


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
