"""Meter a step on the meta device: list its kernels, with the time of each on a GPU by published rates, and memory."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten
from torch.utils.flop_counter import flop_registry

from lightning_fastft.activations.probe import Meter as DeviceMeter
from lightning_fastft.estimate.machines import Gpu
from lightning_fastft.kernels.attention.cudnn_backend import backward_bytes
from lightning_fastft.kernels.attention.op import CUDNN_HEAD_WIDTH, CUDNN_MIN_DOCUMENT_LENGTH
from lightning_fastft.kernels.fp8_linear.reference import FP8
from lightning_fastft.kernels.grouped_mm.reference import THIN_COLUMNS
from lightning_fastft.kernels.launch import run_on_meta

# Shares are relative to what one H200 reaches, where most were measured: 4.3 TB/s, and 690 TFLOP/s in dense bf16
# products. Causal attention in TFLOP/s, forward and backward, by document length: flash attention, and cuDNN
# for long documents.
_DENSE_TFLOPS = 690
_FLASH_RATES = ((512, 133, 124), (2048, 273, 231), (8192, 325, 289), (32_768, 350, 317))
_CUDNN_RATES = ((2048, 291, 236), (8192, 438, 489), (32_768, 556, 503))
# Rate of heads of width 64 relative to heads of 128: 84 of 133 TFLOP/s forward, at documents of 512.
_NARROW_HEAD_SHARE = 84 / 133
# Dequantisation by bitsandbytes: 13.2 G weights twice in 32 ms, 2.5 bytes each, relative to 4.3 TB/s.
_BITSANDBYTES_SHARE = 0.48
# Kernels that are not products, relative to 4.3 TB/s: row_kernels in benchmarks/results.csv (2.8 to 4.0 TB/s), and
# eager element-wise operators, fitted to Qwen3-14B QLoRA with all activations kept (1,234 ms).
_ROWS_SHARE = 0.8
# Products with the rows scaled to fp8, relative to bf16: 1,281 and 778 TFLOP/s for 8,192 x 17,408 x 5,120.
_FP8_SPEEDUP = 1281 / 778
# The loss of logits, read and then overwritten by their gradient: 0.49 ms for 2,048 x 151,936 values (row_kernels).
_LOSS_SHARE = 0.29
# The backward of a norm whose weight is trained: 1.9 TB/s (row_kernels).
_TRAINED_NORM_SHARE = 1.9 / 4.3
# Grouped products of experts in TFLOP/s, bf16 and fp8, by the smaller width of a matrix: on an H100, with adapters of
# rank 16, for Qwen3-30B-A3B (down, gate_up) and gpt-oss-20b (grouped_products in benchmarks/results.csv).
_GROUPED_RATES = ((768, 474, 753), (1536, 521, 913), (2880, 597, 857))
# Where a result or an operand is as thin as the rank of an adapter, relative to 4.3 TB/s: 0.1 ms for 32,768 x 2,880
# values.
_THIN_SHARE = 0.45
# Time from the end of a kernel to the start of the next one.
_KERNEL_MS = 0.002
# Kernels of fla-core relative to 4.3 TB/s, fitted to Qwen3.5-9B LoRA with all activations kept (514 ms): they wait for
# small products, and states pass from chunk to chunk.
_FLA_SHARE = 0.35
# The backward of attention computes two and a half times the products of its forward.
_BACKWARD_PRODUCTS = 2.5
# Flash attention sums the gradient of the queries in fp32, in rows padded to this many per document.
_FLASH_ROWS = 128
_ATEN = torch.ops.aten
_ATTENTION = (_ATEN._flash_attention_forward, _ATEN._flash_attention_backward)


class Kernel(NamedTuple):
    """Work of a kernel, which takes as long as the larger one of its two parts.

    Args:
        num_bytes: Bytes that the full bandwidth moves in the time of this kernel.
        flops: FLOPs that dense bf16 products compute in this time.
    """

    num_bytes: float
    flops: float

    def ms_on(self, gpu: Gpu) -> float:
        """Return the time on a GPU, and from the end of this kernel to the start of the next one."""
        return _KERNEL_MS + 1e3 * max(self.num_bytes / gpu.reached_bytes_per_s, self.flops / gpu.sustained_flops_per_s)


class Meter(TorchDispatchMode):
    """List the kernels of what runs on the meta device, and sum its memory.

    A kernel is an operator, or a call of a function marked ``one_kernel``, which counts as a whole. A product takes its
    FLOPs at the sustained rate or its bytes at the memory rate, whichever is longer; any other kernel its bytes. Views
    and allocations take no time.

    Args:
        document_tokens: Document length, for the cost of attention.
        resident: Tensors that always exist; not counted as live memory.

    Attributes:
        kernels: Kernels so far.
    """

    def __init__(self, *, document_tokens: float, resident: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.live_bytes = self.peak_bytes = 0
        self._document_tokens = document_tokens
        # Weak references keep a storage's id from being reused, without keeping its memory.
        self._resident: dict[int, StorageWeakRef] = {}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._results: dict[Any, _Result | None] = {}
        self.add_resident(resident)

    def add_resident(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors no longer as live memory."""
        for tensor in tensors:
            key = _storage_of(tensor)
            self._resident[key] = StorageWeakRef(tensor.untyped_storage())
            self.live_bytes -= self._live.pop(key, (None, 0))[1]

    def count_live(self) -> int:
        """Return the live bytes."""
        self._drop_dead()
        return self.live_bytes

    def start_peak(self) -> int:
        """Start a new peak; return the live bytes."""
        self.peak_bytes = self.count_live()
        return self.peak_bytes

    def run_kernel(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function as one kernel, which reads its arguments and writes its result once.

        Arguments with "out" or "outs" in their names are written, not read.
        """
        with _disable_current_modes():
            out = self._run_once(function, args, kwargs)
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        written = [name for name in given if not {"out", "outs"}.isdisjoint(name.split("_"))]
        inputs = _tensors([value for name, value in given.items() if name not in written])
        results = _tensors(out)
        outputs = {id(tensor): tensor for tensor in (*results, *_tensors([given[name] for name in written]))}.values()
        count = _KERNEL_COSTS.get(function.__name__)
        flops, share = (0.0, _ROWS_SHARE) if count is None else count(*args, **kwargs)
        self._charge(sum(tensor.nbytes for tensor in (*inputs, *outputs)), flops, share=share)
        # The reference may return views of memory that the kernel does not have.
        self._track(results, _tensors((args, kwargs)), count=lambda tensor: tensor.nbytes)
        self._note_peak()
        return out

    def _run_once(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function, or return new tensors like those that it returned for inputs of the same form."""
        given, structure = tree_flatten((args, kwargs))
        key = (function, structure, *map(_form_of, given))
        try:
            result = self._results.get(key)
        except TypeError:
            # An argument has no hash.
            return function(*args, **kwargs)
        if result is not None:
            return result.again(given)
        out = function(*args, **kwargs)
        self._results[key] = _result_of(out, given)
        return out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on the meta device and add its cost."""
        kwargs = kwargs or {}
        out = run_on_meta(func, args, kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        extra_bytes = self._charge_operator(func, (args, kwargs), out, inputs, outputs)
        self._track(outputs, inputs, count=lambda tensor: tensor.untyped_storage().nbytes())
        self._note_peak(extra_bytes)
        return out

    def _charge_operator(
        self, func: Any, given: tuple[Any, Any], out: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> int:
        """Add the time of an operator; return the bytes of its temporary memory."""
        if not _is_work(func, outputs):
            return 0
        packet = func._overloadpacket
        if packet in _ATTENTION:
            return self._charge_attention(packet, *given)
        if packet is getattr(torch.ops.bitsandbytes, "gemm_4bit", None):
            # The weight is dequantised into memory that is freed after a dense product.
            num_weights = inputs[0].shape[-1] * out.shape[-1]
            dense_bytes = num_weights * out.element_size()
            self._charge(num_weights // 2 + dense_bytes, 0.0, share=_BITSANDBYTES_SHARE)
            self._charge(0, 2.0 * out.numel() * inputs[0].shape[-1], share=1.0)
            return dense_bytes
        flops = _count_flops(packet, *given, out)
        share = 1.0 if flops else _BITSANDBYTES_SHARE if func.namespace == "bitsandbytes" else _ROWS_SHARE
        self._charge(sum(tensor.nbytes for tensor in (*inputs, *outputs)), flops, share=share)
        return 0

    def _charge_attention(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Add the time of attention, which sees half of a document on average, or its window."""
        is_backward = packet is _ATEN._flash_attention_backward
        query = args[1] if is_backward else args[0]
        num_tokens, num_heads, width = query.shape
        window = kwargs.get("window_size_left", -1)
        mean_keys = self._document_tokens / 2
        num_keys = mean_keys if window is None or window < 0 else min(mean_keys, window + 1.0)
        flops = 4.0 * num_heads * width * num_tokens * num_keys * (_BACKWARD_PRODUCTS if is_backward else 1.0)
        is_long = self._document_tokens >= CUDNN_MIN_DOCUMENT_LENGTH and num_keys == mean_keys
        has_cudnn = is_long and width == CUDNN_HEAD_WIDTH
        rates = _CUDNN_RATES if has_cudnn else _FLASH_RATES
        tflops = _interpolate(rates, 2 * num_keys, column=2 if is_backward else 1)
        self.kernels.append(
            Kernel(0.0, flops * _DENSE_TFLOPS / (tflops * (_NARROW_HEAD_SHARE if width <= 64 else 1.0)))
        )
        if not is_backward:
            return 0
        if has_cudnn:
            return backward_bytes(query.numel(), num_kv_heads=args[2].shape[1])
        num_documents = num_tokens / self._document_tokens
        return int(4 * (num_tokens + _FLASH_ROWS * num_documents) * num_heads * width)

    def _charge(self, num_bytes: int, flops: float, *, share: float) -> None:
        self.kernels.append(Kernel(num_bytes / share, flops))

    def _track(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, count: Callable[[torch.Tensor], int]
    ) -> None:
        """Count the memory that is new: the inputs of a view, or of a write, may be older than the meter."""
        old = {_storage_of(tensor) for tensor in inputs}
        for tensor in outputs:
            storage, key = tensor.untyped_storage(), _storage_of(tensor)
            if key in self._live and self._live[key][0].expired():
                # New memory has the id of memory that was freed.
                self.live_bytes -= self._live.pop(key)[1]
            if key not in old and key not in self._live and key not in self._resident:
                self._live[key] = (StorageWeakRef(storage), count(tensor))
                self.live_bytes += self._live[key][1]

    def _note_peak(self, extra_bytes: int = 0) -> None:
        # Until freed memory is looked for, live_bytes has it too, so this is an upper bound.
        if self.live_bytes + extra_bytes > self.peak_bytes:
            self._drop_dead()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + extra_bytes)

    def _drop_dead(self) -> None:
        dead = [key for key, (reference, _) in self._live.items() if reference.expired()]
        for key in dead:
            self.live_bytes -= self._live.pop(key)[1]


class _Result(NamedTuple):
    """What a function returned: its structure, its values, and the place of each among the inputs or None."""

    structure: Any
    values: list[Any]
    places: list[int | None]

    def again(self, given: list[Any]) -> Any:
        """Return the result for other inputs of the same form."""
        found = [_like(value) if place is None else given[place] for value, place in zip(self.values, self.places)]
        return tree_unflatten(found, self.structure)


class MeteredDevice(DeviceMeter):
    """Clock and allocator of a meter.

    Args:
        meter: The meter.

    Attributes:
        ms_of: Returns the time of a kernel; assign it before times are read.
    """

    ms_of: Callable[[Kernel], float]

    def __init__(self, meter: Meter) -> None:
        super().__init__(torch.device("meta"))
        self._meter, self.is_counted = meter, True

    def now(self) -> int:  # type: ignore[override]
        """Return the number of kernels so far."""
        return len(self._meter.kernels)

    def ms_between(self, begin: int, end: int) -> float:  # type: ignore[override]
        """Return the time of the kernels between two moments."""
        return sum(map(self.ms_of, self._meter.kernels[begin:end]))

    def allocated(self) -> int:
        """Return the live bytes."""
        return self._meter.count_live()

    def start_peak(self) -> int:
        """Start a new peak; return the live bytes."""
        return self._meter.start_peak()

    def peak(self) -> int:
        """Return the peak since then."""
        return self._meter.peak_bytes

    def reserved(self) -> int:
        """Return 0: there is no allocator."""
        return 0


def _product_cost(x_NI: Any, weight_EIO: torch.Tensor, *_: Any, **__: Any) -> tuple[float, float]:
    return _grouped(x_NI.shape[0], *weight_EIO.shape[1:], is_fp8=weight_EIO.dtype is FP8)


def _gradient_cost(x_NI: Any, d_NO: Any, *_: Any, **__: Any) -> tuple[float, float]:
    return _grouped(x_NI.shape[0], x_NI.shape[1], d_NO.shape[1])


def _grouped(num_rows: int, num_inputs: int, num_outputs: int, *, is_fp8: bool = False) -> tuple[float, float]:
    width = min(num_inputs, num_outputs)
    tflops = _interpolate(_GROUPED_RATES, width, column=2 if is_fp8 else 1)
    flops = 2.0 * num_rows * num_inputs * num_outputs * _DENSE_TFLOPS / tflops
    return flops, _THIN_SHARE if width <= THIN_COLUMNS else _ROWS_SHARE


def _fp8_cost(rows: Any, weight_OI: torch.Tensor, *_: Any, **__: Any) -> tuple[float, float]:
    return 2.0 * rows.values_TI.shape[0] * weight_OI.numel() / _FP8_SPEEDUP, _ROWS_SHARE


def _norm_cost(*_: Any, needs_weight: bool, **__: Any) -> tuple[float, float]:
    return 0.0, _TRAINED_NORM_SHARE if needs_weight else _ROWS_SHARE


# By name of the reference: FLOPs, as many dense bf16 ones take the same time, and share of the bandwidth.
_KERNEL_COSTS: dict[str, Callable[..., tuple[float, float]]] = {
    "grouped_mm": _product_cost,
    "grouped_weight_grad": _gradient_cost,
    "multiply": _fp8_cost,
    "row_losses": lambda *_, **__: (0.0, _LOSS_SHARE),
    "rms_norm_backward": _norm_cost,
    "fla_kernel": lambda *_, **__: (0.0, _FLA_SHARE),
}


def _is_work(func: Any, outputs: list[torch.Tensor]) -> bool:
    """Return whether an operator reads or writes elements, unlike views and allocations."""
    name = func._schema.name.split("::")[-1]
    if name.startswith(("empty", "new_empty")) or name in ("detach", "_unsafe_view", "lift_fresh", "set_"):
        return False
    return bool(outputs) and not func.is_view


def _count_flops(packet: Any, args: Any, kwargs: Any, out: Any) -> float:
    if packet is _ATEN._grouped_mm:
        first, second = args[0], args[1]
        # Rows times a matrix each, or rows of each expert times each other.
        num_inputs, num_rows = reversed(first.shape) if second.ndim == 3 else first.shape
        return _grouped(num_rows, num_inputs, second.shape[-1])[0]
    count = flop_registry.get(packet)
    # The count of a product takes no dtype of its result.
    operands = [arg for arg in args if not isinstance(arg, torch.dtype)]
    given = {name: value for name, value in kwargs.items() if name not in ("out", "out_dtype")}
    return 0.0 if count is None else float(count(*operands, **given, out_val=out))


def _interpolate(rates: tuple[tuple[int, int, int], ...], size: float, *, column: int) -> float:
    """Return the rate at a size, interpolated between measured sizes on a logarithmic scale."""
    size = min(max(size, rates[0][0]), rates[-1][0])
    low, high = next(pair for pair in pairwise(rates) if size <= pair[1][0])
    weight = math.log2(size / low[0]) / math.log2(high[0] / low[0])
    return low[column] + weight * (high[column] - low[column])


def _form_of(value: Any) -> Any:
    """Return what decides about the sizes of a result."""
    if not isinstance(value, torch.Tensor):
        return type(value), value
    return value.shape, value.stride(), value.dtype, value.requires_grad and torch.is_grad_enabled()


def _result_of(out: Any, given: list[Any]) -> _Result | None:
    """Return a result that can be made again: of inputs, and of whole tensors with memory of their own."""
    values, structure = tree_flatten(out)
    places = [next((place for place, each in enumerate(given) if each is value), None) for value in values]
    new = _tensors([value for value, place in zip(values, places) if place is None])
    storages = {_storage_of(tensor) for tensor in new}
    is_own = len(storages) == len(new) and storages.isdisjoint(map(_storage_of, _tensors(given)))
    is_whole = all(tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in new)
    if not (is_own and is_whole) or any(tensor.requires_grad for tensor in new):
        return None
    # The meter watches when the tensors of the result themselves are freed.
    return _Result(structure, list(map(_like, values)), places)


def _like(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, torch.Tensor) else value


def _tensors(found: Any) -> list[torch.Tensor]:
    return [item for item in tree_iter(found) if isinstance(item, torch.Tensor)]


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the id of a tensor's storage, which tensors that share memory have in common."""
    return int(tensor.untyped_storage()._cdata)
