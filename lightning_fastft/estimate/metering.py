"""A meter for modules that run on the meta device: what their operators would take on a GPU in time and memory,
by its published rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface

from lightning_fastft.estimate.machines import Gpu

ATTENTION_NAME = "fastft_metered"
# Plain attribute of an attention module that ran: the window it passes on, None where it sees its whole document.
WINDOW_ATTRIBUTE = "fastft_metered_window"
# All shares are of one H200 (measured.md). Causal flash attention, forward and backward, of the published bf16 rate, by
# the length of documents: 133 / 124, 273 / 231 and 325 / 289 of 989.5 TFLOP/s.
_ATTENTION_SHARES = (
    (512, 133 / 989.5, 124 / 989.5),
    (2048, 273 / 989.5, 231 / 989.5),
    (8192, 325 / 989.5, 289 / 989.5),
)
# Heads of 64 reach this much of what heads of 128 do (84 of 133 TFLOP/s at documents of 512).
_NARROW_HEAD_SHARE = 84 / 133
# bitsandbytes' dequantisation: 13.2 G weights twice in 32 ms, 2.5 bytes each, of 4.3 TB/s.
_NF4_SHARE = 0.48
NF4_BYTES_PER_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)
# Eager element-wise operators, of 4.3 TB/s: fitted to Qwen3-14B QLoRA, 8,192 tokens, all kept (benchmarks/results.csv:
# 1,234 ms).
_ELEMENTWISE_SHARE = 0.8
# What the host needs for an operator of transformers and PEFT, Python included: fitted to Qwen3-0.6B LoRA, all kept,
# which waits for its host (265 ms for 28 layers of some 215 operators). Another host may be several times faster.
_HOST_MS_PER_OPERATOR = 0.04
# A backward of attention does two and a half times the products of its forward.
_BACKWARD_PRODUCTS = 2.5


class Reading(NamedTuple):
    """Time on the device in ms, and operators given to it."""

    device_ms: float
    num_operators: int

    def since(self, start: Reading) -> Reading:
        """Return what was added since another reading."""
        return Reading(self.device_ms - start.device_ms, self.num_operators - start.num_operators)

    def ms(self) -> float:
        """Time that passes: that of the device, or of the host where it cannot keep up."""
        return max(self.device_ms, self.num_operators * _HOST_MS_PER_OPERATOR)


class Meter(TorchDispatchMode):
    """Add up what operators on the meta device would take on a GPU.

    A product takes its FLOPs at the sustained rate or its bytes at the rate of memory, whichever is longer; every other
    operator its bytes; views and allocations take nothing. Weights in NF4 are dequantised before each product, into
    memory that lives as long as the product.

    Args:
        gpu: Rates.
        document_tokens: Length of documents, which decides the cost of attention.
        resident: Tensors that are there all the time, and not counted among what lives.
        quantized: Weights that are held in NF4.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        document_tokens: float,
        resident: Collection[torch.Tensor] = (),
        quantized: Collection[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self.num_keys = document_tokens / 2
        self.live_bytes = self.peak_bytes = 0
        # Called with the name "attention", its reading before and after, and its bytes.
        self.on_attention: Callable[[Reading, Reading, int], None] | None = None
        self._gpu, self._document_tokens = gpu, document_tokens
        # References keep a storage's number from being used again; they do not keep its memory.
        self._resident = {_storage_of(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in resident}
        self._quantized = {_storage_of(tensor) for tensor in quantized}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._device_ms, self._num_operators = 0.0, 0

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave a tensor out of what lives."""
        self._resident[_storage_of(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def read(self) -> Reading:
        """Return what was added up so far."""
        return Reading(self._device_ms, self._num_operators)

    def limit_window(self, window: int | None) -> None:
        """Let a query see this many keys at most from now on; None for its whole document."""
        mean = self._document_tokens / 2
        self.num_keys = mean if window is None else min(mean, float(window))

    def start_peak(self) -> int:
        """Begin a new peak; return the bytes that live now."""
        self._drop_dead()
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on the meta device and charge for it."""
        kwargs = kwargs or {}
        before = self.read()
        out = func(*args, **kwargs)
        inputs = [item for item in tree_iter((args, kwargs)) if isinstance(item, torch.Tensor)]
        outputs = [item for item in tree_iter(out) if isinstance(item, torch.Tensor)]
        extra_bytes = self._charge(func, (args, kwargs), out, inputs, outputs)
        for tensor in outputs:
            self._track(tensor)
        self._drop_dead()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + extra_bytes)
        if self.on_attention is not None and func is torch.ops.aten._scaled_dot_product_flash_attention.default:
            self.on_attention(before, self.read(), _num_bytes(out[0]) + _num_bytes(out[1]))
        return out

    def _charge(
        self, func: Any, given: tuple[Any, Any], out: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> int:
        """Add the time of an operator; return the bytes that it needs for itself."""
        if not _is_work(func, inputs, outputs):
            return 0
        self._num_operators += 1
        packet = func._overloadpacket
        if packet in (
            torch.ops.aten._scaled_dot_product_flash_attention,
            torch.ops.aten._scaled_dot_product_flash_attention_backward,
        ):
            self._device_ms += self._attention_ms(packet, inputs)
            return 0
        num_bytes = sum(map(_num_bytes, (*inputs, *outputs)))
        flops = _count_flops(packet, *given, out)
        memory_ms = num_bytes / (self._gpu.reached_bytes_per_s * (1.0 if flops else _ELEMENTWISE_SHARE)) * 1e3
        self._device_ms += max(memory_ms, flops / self._gpu.sustained_flops_per_s * 1e3)
        dense_bytes = sum(_num_bytes(tensor) for tensor in inputs if flops and _storage_of(tensor) in self._quantized)
        if dense_bytes:
            packed_bytes = dense_bytes / 2 * NF4_BYTES_PER_WEIGHT
            self._device_ms += (dense_bytes + packed_bytes) / (_NF4_SHARE * self._gpu.reached_bytes_per_s) * 1e3
        return dense_bytes

    def _attention_ms(self, packet: Any, inputs: list[torch.Tensor]) -> float:
        is_backward = packet is torch.ops.aten._scaled_dot_product_flash_attention_backward
        query = inputs[1] if is_backward else inputs[0]
        _, num_heads, num_tokens, width = query.shape
        flops = 4.0 * num_heads * width * num_tokens * self.num_keys * (_BACKWARD_PRODUCTS if is_backward else 1.0)
        share = _attention_share(2 * self.num_keys, is_backward=is_backward) * (
            _NARROW_HEAD_SHARE if width <= 64 else 1.0
        )
        return flops / (share * self._gpu.bf16_flops_per_s) * 1e3

    def _track(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), _storage_of(tensor)
        if key not in self._live and key not in self._resident:
            self._live[key] = (StorageWeakRef(storage), storage.nbytes())
            self.live_bytes += storage.nbytes()

    def _drop_dead(self) -> None:
        dead = [key for key, (reference, _) in self._live.items() if reference.expired()]
        for key in dead:
            self.live_bytes -= self._live.pop(key)[1]


def set_metered_attention(model: nn.Module) -> None:
    """Let a model compute attention by an operator that the meter knows, without masks."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' form; on the meta device only shapes count."""
    vars(module)[WINDOW_ATTRIBUTE] = options.get("sliding_window")
    value_width = value.shape[-1]
    if value_width < query.shape[-1]:
        value = nn.functional.pad(value, (0, query.shape[-1] - value_width))
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    return out[..., :value_width].transpose(1, 2), None


def _is_work(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether an operator reads or writes elements: no view, no bare allocation."""
    name = func._schema.name.split("::")[-1]
    if name.startswith(("empty", "new_empty")) or name in ("detach", "_unsafe_view", "lift_fresh") or not outputs:
        return False
    return not func.is_view


def _count_flops(packet: Any, args: Any, kwargs: Any, out: Any) -> float:
    if packet is torch.ops.aten._grouped_mm:
        first, second = args[0], args[1]
        return 2.0 * math.prod(first.shape[-2:]) * second.shape[-1]
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


def _attention_share(document_tokens: float, *, is_backward: bool) -> float:
    """Interpolate between the lengths that were measured, on a scale of doublings; beyond them the nearest holds."""
    column = 2 if is_backward else 1
    length = min(max(document_tokens, _ATTENTION_SHARES[0][0]), _ATTENTION_SHARES[-1][0])
    for low, high in pairwise(_ATTENTION_SHARES):
        if length <= high[0]:
            weight = math.log2(length / low[0]) / math.log2(high[0] / low[0])
            return low[column] + weight * (high[column] - low[column])
    return _ATTENTION_SHARES[-1][column]


def _storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors have in common while they share their memory."""
    return int(tensor.untyped_storage()._cdata)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
