"""Meter modules on the meta device: estimate the time and memory of their operators on a GPU from published rates."""

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
# Attribute of an attention module that ran: its window, None if it sees the whole document.
WINDOW_ATTRIBUTE = "fastft_metered_window"
# All shares were measured on one H200 (measured.md). Causal attention, forward and backward, by document length, as a
# share of the published 989.5 TFLOP/s in bf16: torch's flash attention, and cuDNN for documents of 8192 and more.
_ATTENTION_SHARES = (
    (512, 133 / 989.5, 124 / 989.5),
    (2048, 273 / 989.5, 231 / 989.5),
    (8192, 438 / 989.5, 489 / 989.5),
    (32768, 556 / 989.5, 503 / 989.5),
)
# Rate of heads of width 64 relative to heads of 128 (84 of 133 TFLOP/s at documents of 512).
_NARROW_HEAD_SHARE = 84 / 133
# Dequantisation by bitsandbytes: 13.2 G weights twice in 32 ms, 2.5 bytes each, relative to 4.3 TB/s.
_NF4_SHARE = 0.48
NF4_BYTES_PER_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)
# Eager element-wise operators, relative to 4.3 TB/s: fitted to Qwen3-14B QLoRA, 8,192 tokens, all kept
# (benchmarks/results.csv: 1,234 ms).
_ELEMENTWISE_SHARE = 0.8
# Host time per operator of transformers and PEFT, Python included: fitted to Qwen3-0.6B LoRA, all kept, which is
# launch-bound (265 ms for 28 layers of some 215 operators). Another host may be several times faster.
_HOST_MS_PER_OPERATOR = 0.04
# The backward of attention computes two and a half times the products of its forward.
_BACKWARD_PRODUCTS = 2.5


class Reading(NamedTuple):
    """Time on the device in ms, and number of launched operators."""

    device_ms: float
    num_operators: int

    def since(self, start: Reading) -> Reading:
        """Return the difference to an earlier reading."""
        return Reading(self.device_ms - start.device_ms, self.num_operators - start.num_operators)

    def ms(self) -> float:
        """Return elapsed time: device time, or host time if launch-bound."""
        return max(self.device_ms, self.num_operators * _HOST_MS_PER_OPERATOR)


class Meter(TorchDispatchMode):
    """Sum the estimated GPU time and memory of operators on the meta device.

    The time of a product is its FLOPs at the sustained rate or its bytes at the memory rate, whichever is longer. The
    time of another operator is its bytes at the memory rate; views and allocations take no time. NF4 weights are
    dequantised before each product, into memory that is freed after it.

    Args:
        gpu: Rates.
        document_tokens: Document length, for the cost of attention.
        resident: Tensors that always exist; not counted as live memory.
        quantized: Weights stored in NF4.
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
        # Called with the readings before and after an attention operator, and the bytes of its output.
        self.on_attention: Callable[[Reading, Reading, int], None] | None = None
        self._gpu, self._document_tokens = gpu, document_tokens
        # Weak references keep a storage's id from being reused, without keeping its memory.
        self._resident = {_storage_of(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in resident}
        self._quantized = {_storage_of(tensor) for tensor in quantized}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._device_ms, self._num_operators = 0.0, 0

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor as live memory."""
        self._resident[_storage_of(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def read(self) -> Reading:
        """Return the sums so far."""
        return Reading(self._device_ms, self._num_operators)

    def limit_window(self, window: int | None) -> None:
        """Limit the keys per query from now on; None for the whole document."""
        mean = self._document_tokens / 2
        self.num_keys = mean if window is None else min(mean, float(window))

    def start_peak(self) -> int:
        """Start a new peak; return the live bytes."""
        self._drop_dead()
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on the meta device and add its cost."""
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
        """Add the time of an operator; return the bytes of its temporary memory."""
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
    """Set the attention of a model to an operator that the meter knows, without masks."""
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
    """Compute attention, with the signature of transformers; on the meta device only shapes matter."""
    vars(module)[WINDOW_ATTRIBUTE] = options.get("sliding_window")
    value_width = value.shape[-1]
    if value_width < query.shape[-1]:
        value = nn.functional.pad(value, (0, query.shape[-1] - value_width))
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    return out[..., :value_width].transpose(1, 2), None


def _is_work(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Return whether an operator reads or writes elements, unlike views and allocations."""
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
    """Return the share at a document length, interpolated between measured lengths on a logarithmic scale."""
    column = 2 if is_backward else 1
    length = min(max(document_tokens, _ATTENTION_SHARES[0][0]), _ATTENTION_SHARES[-1][0])
    for low, high in pairwise(_ATTENTION_SHARES):
        if length <= high[0]:
            weight = math.log2(length / low[0]) / math.log2(high[0] / low[0])
            return low[column] + weight * (high[column] - low[column])
    return _ATTENTION_SHARES[-1][column]


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the id of a tensor's storage, which tensors that share memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
