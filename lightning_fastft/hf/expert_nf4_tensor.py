"""A stack of expert weights in NF4 with the interface of a dense stack.

It is a tensor subclass, because PEFT reads shape, dtype and device of a stack by its name.

Axes: E experts, X weights of one expert in memory order; the rest as in the kernel of nf4_experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from lightning_fastft.core.errors import MissingDependencyError, UnsupportedModelError
from lightning_fastft.core.extras import pip_line
from lightning_fastft.kernels.nf4_experts.op import dequantise_stack
from lightning_fastft.kernels.nf4_experts.reference import BLOCK_WEIGHTS, GROUP_BLOCKS, NF4Stack

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Fields with one entry per expert; the other fields are tables shared by all experts.
_OF_EACH_EXPERT = NF4Stack._fields[:4]


def quantise_stack(weight: torch.Tensor) -> ExpertsNF4:
    """Return a stack of expert weights in NF4, each expert quantised separately by bitsandbytes.

    The weight, shape (E, ., .), is bf16, fp16 or fp32, with a multiple of 64 numbers per expert.

    Returns:
        The frozen stack with shape, dtype and device of weight.

    Raises:
        UnsupportedModelError: The number of weights of an expert is not a multiple of 64, or the dtype is not
            supported.

    Cost:
        One read of weight, and about ten small launches and the host syncs of bitsandbytes per expert.
    """
    check_weight("The stack", weight)
    num_experts, num_weights = weight.shape[0], weight.shape[1] * weight.shape[2]
    stack = _empty_stack(num_experts, num_weights, device=weight.device)
    if weight.is_meta:
        return ExpertsNF4(stack, shape=weight.shape, dtype=weight.dtype)
    bnb = _bitsandbytes()
    for expert, weight_X in enumerate(weight.detach()):
        packed, state = bnb.quantize_4bit(
            weight_X.contiguous(), blocksize=BLOCK_WEIGHTS, compress_statistics=True, quant_type="nf4"
        )
        parts = (packed.view(-1), state.absmax, state.state2.absmax, state.offset)
        for part, value in zip(stack, parts):
            part[expert] = value
        if expert == 0:
            stack.quant_map_M.copy_(state.code)
            stack.nested_quant_map_M.copy_(state.state2.code)
    return ExpertsNF4(stack, shape=weight.shape, dtype=weight.dtype)


def check_weight(title: str, weight: torch.Tensor) -> None:
    """Raise on weights that NF4 cannot represent.

    Raises:
        UnsupportedModelError: The shape or dtype is not supported; the message begins with title.
    """
    if weight.ndim != 3 or weight.dtype not in _DTYPES:
        raise UnsupportedModelError(
            f"{title} has shape {tuple(weight.shape)} in {weight.dtype}; NF4 needs stacks (E, ., .) in bf16, fp16 or "
            "fp32. Load fp8 and "
            "MXFP4 checkpoints dequantised, for MXFP4 with Mxfp4Config(dequantize=True)."
        )
    num_weights = weight.shape[1] * weight.shape[2]
    if num_weights % BLOCK_WEIGHTS:
        raise UnsupportedModelError(
            f"{title} has {weight.shape[1]} x {weight.shape[2]} = {num_weights} weights per expert, and NF4 needs "
            f"multiples of {BLOCK_WEIGHTS}, so that no block spans two experts. Load this model without quantization."
        )


class _Lazy(torch.Tensor):
    """A stack with shape, dtype and device of a dense tensor, without its memory; unknown operators dequantise it."""

    def dense(self, *, expert: int | None = None) -> torch.Tensor:
        """Return the stack or one of its experts as a plain tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if not torch.is_inference_mode_enabled():
            return cls._answer(func, args, kwargs or {})
        # The result of a view operator shares the version counter of its base; inference tensors have none.
        with torch.inference_mode(mode=False), torch.no_grad():
            return cls._answer(func, args, kwargs or {})

    @classmethod
    def _answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator on arguments with at least one lazy stack."""
        known = _KNOWN.get(func)
        if known is not None and isinstance(args[0], ExpertsNF4):
            return known(*args, **kwargs)
        if func is torch.ops.aten.detach.default:
            return args[0]._again()
        if func is torch.ops.aten.select.int and args[1] == 0:
            # transformers' loops index one expert at a time.
            return args[0].dense(expert=args[2] % args[0].shape[0])
        if func._schema.is_mutable and isinstance(args[0], _Lazy):
            raise UnsupportedModelError(
                f"{func} would write to experts in NF4, which cannot be trained or merged with adapters. "
                "Train adapters (target_parameters) and save them, or load the model without quantization to merge "
                "them."
            )
        return func(*tree_map(_densify, args), **tree_map(_densify, kwargs))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class ExpertsNF4(_Lazy):
    """A stack of expert weights in NF4: a frozen parameter with the shape, dtype, device and name of the dense stack.

    Moves, copies, state dicts and pickles contain the quantised values; ``.to(dtype)`` changes the dtype of
    dequantisation. Indexing the first axis dequantises one expert; any other operator dequantises the whole stack. Only
    a state dict or another such stack can write to it.

    Args:
        stack: The quantised weights of E experts.
        shape: Shape of the dense stack, (E, ., .).
        dtype: Dtype of the dequantised weights.
    """

    stack: NF4Stack

    @staticmethod
    def __new__(  # noqa: D102 - the class says it
        cls: type[ExpertsNF4], stack: NF4Stack, *, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
    ) -> ExpertsNF4:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=stack.packed_EC.device)  # type: ignore[attr-defined]
        self.stack = stack
        return self

    def dense(self, *, expert: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the stack or one of its experts as a plain tensor, written to out if given."""
        stack, shape = self.stack, self.shape
        if expert is not None:
            own = {name: getattr(stack, name)[expert : expert + 1] for name in _OF_EACH_EXPERT}
            stack, shape = stack._replace(**own), self.shape[1:]
        if out is None:
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
        dequantise_stack(stack, out.view(stack.packed_EC.shape[0], -1))
        return out

    def on(self, device: torch.device) -> ExpertsNF4:
        """Return the same stack on a device, with the tensors that are there already and copies of the others."""
        return self._again(lambda part: part.to(device))

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the stack in memory; shape and dtype describe the dense stack."""
        return sum(part.nbytes for part in self.stack)

    def _again(
        self, change: Callable[[torch.Tensor], torch.Tensor] | None = None, *, dtype: torch.dtype | None = None
    ) -> ExpertsNF4:
        """Return the same stack with transformed tensors, or with the same tensors."""
        stack = self.stack if change is None else NF4Stack(*map(change, self.stack))
        return ExpertsNF4(stack, shape=self.shape, dtype=dtype or self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ExpertsNF4(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(
            id(self),
            _rebuild(
                NF4Stack(*(part.clone() for part in self.stack)),
                self.shape,
                self.dtype,
                is_parameter=_is_parameter(self),
            ),
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return functools.partial(_rebuild, is_parameter=_is_parameter(self)), (self.stack, self.shape, self.dtype)

    @property
    def data(self) -> ExpertsNF4:  # type: ignore[override]
        """Return the same stack without a graph; modules assign to it when they move, so it has a setter."""
        return self._again()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, ExpertsNF4):
            raise UnsupportedModelError(
                f"A plain tensor of shape {tuple(value.shape)} cannot replace experts in NF4; load a state dict."
            )
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.stack = value.stack


class _AdaptedExperts(_Lazy):
    """Lazy ``weight + alpha * lhs @ rhs``; PEFT builds it twice per product, once only for its shape."""

    parts: tuple[ExpertsNF4, torch.Tensor, torch.Tensor, float]

    @staticmethod
    def __new__(
        cls: type[_AdaptedExperts], weight: ExpertsNF4, lhs: torch.Tensor, rhs: torch.Tensor, alpha: float
    ) -> _AdaptedExperts:
        self = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)  # type: ignore[attr-defined]
        self.parts = (weight, lhs, rhs, alpha)
        return self

    def dense(self, *, expert: int | None = None) -> torch.Tensor:
        weight, lhs, rhs, alpha = self.parts
        if expert is None:
            return torch.baddbmm(weight.dense(), lhs, rhs, alpha=alpha)
        return torch.addmm(weight.dense(expert=expert), lhs[expert], rhs[expert], alpha=alpha)

    def _again(self) -> _AdaptedExperts:
        return _AdaptedExperts(*self.parts)


def _densify(value: Any) -> Any:
    return value.dense() if isinstance(value, _Lazy) else value


def _clone(weight: ExpertsNF4, **kwargs: Any) -> ExpertsNF4:
    return weight._again(torch.clone)


def _to_copy(
    weight: ExpertsNF4,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    **kwargs: Any,
) -> ExpertsNF4:
    return weight._again(lambda part: part.to(device or part.device, non_blocking=non_blocking, copy=True), dtype=dtype)


def _empty_like(
    weight: ExpertsNF4, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> ExpertsNF4:
    return weight._again(lambda part: torch.empty_like(part, device=device), dtype=dtype)


def _copy_(weight: ExpertsNF4, source: torch.Tensor, non_blocking: bool = False) -> ExpertsNF4:
    """Copy the numbers of another stack in NF4."""
    if not isinstance(source, ExpertsNF4):
        # DistributedDataParallel would broadcast every frozen weight this way: dequantised on one rank and quantised
        # again on all, with other values.
        raise UnsupportedModelError(
            f"Dense values of shape {tuple(source.shape)} would be copied into experts in NF4. Load them as a state "
            "dict, which quantises them. Under DDP exclude these parameters from the broadcast "
            "(_set_params_and_buffers_to_ignore_for_model)."
        )
    for part, value in zip(weight.stack, source.stack):
        part.copy_(value, non_blocking=non_blocking)
    return weight


def _set_(weight: ExpertsNF4, source: ExpertsNF4) -> ExpertsNF4:
    """Share the tensors of another stack; parametrizations set a parameter to itself."""
    weight.data = source
    return weight


def _baddbmm(
    weight: ExpertsNF4, lhs: torch.Tensor, rhs: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return (
        _AdaptedExperts(weight, lhs, rhs, alpha)
        if beta == 1
        else torch.baddbmm(weight.dense(), lhs, rhs, beta=beta, alpha=alpha)
    )


def _record_stream(weight: ExpertsNF4, stream: Any) -> None:
    for part in weight.stack:
        part.record_stream(stream)


_KNOWN: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.aten.clone.default: _clone,
        torch.ops.aten._to_copy.default: _to_copy,
        torch.ops.aten.empty_like.default: _empty_like,
        torch.ops.aten.copy_.default: _copy_,
        torch.ops.aten.set_.source_Tensor: _set_,
        torch.ops.aten.baddbmm.default: _baddbmm,
        torch.ops.aten.record_stream.default: _record_stream,
    }
)


def _rebuild(stack: NF4Stack, shape: torch.Size, dtype: torch.dtype, *, is_parameter: bool) -> torch.Tensor:
    """Return a frozen stack from its tensors."""
    weight = ExpertsNF4(stack, shape=shape, dtype=dtype)
    return nn.Parameter(weight, requires_grad=False) if is_parameter else weight


def _is_parameter(weight: torch.Tensor) -> bool:
    return isinstance(weight, nn.Parameter)


def _empty_stack(num_experts: int, num_weights: int, *, device: torch.device) -> NF4Stack:
    num_blocks = num_weights // BLOCK_WEIGHTS
    shapes = (
        (num_experts, num_weights // 2),
        (num_experts, num_blocks),
        (num_experts, -(-num_blocks // GROUP_BLOCKS)),
        (num_experts,),
        (16,),
        (256,),
    )
    dtypes = (torch.uint8, torch.uint8, *[torch.float32] * 4)
    return NF4Stack(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes)))


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes.functional
    except ImportError as error:
        message = f"Experts in NF4 need bitsandbytes. Install it with: {pip_line('qlora')}"
        raise MissingDependencyError(message) from error
    return bitsandbytes.functional
