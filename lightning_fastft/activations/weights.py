"""Stream frozen weights from the host: copy the tensors of each decoder layer into a device slot before use."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, NoReturn

import torch

from lightning_fastft.activations.host_parameter import COPY_MESSAGE, hide_values, show_values
from lightning_fastft.activations.slots import align
from lightning_fastft.activations.streams import CopyStreams, Mark
from lightning_fastft.core.checks import check_int
from lightning_fastft.core.errors import HostMemoryError, OptionError, SwapError

DEFAULT_NUM_SLOTS = 3


# An instance attribute of modules whose tensors are in slots, which hold other layers outside of this layer's pass.
STREAMED_ATTRIBUTE = "fastft_streamed"


class _Piece(NamedTuple):
    """A tensor, where it was, and its position in the bytes of its layer."""

    tensor: torch.Tensor
    device: torch.device
    begin: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, bytes_of_layer: torch.Tensor) -> torch.Tensor:
        """Return its bytes as a tensor of its shape and dtype."""
        flat = bytes_of_layer[self.begin : self.begin + self.num_bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class _Layer(NamedTuple):
    """Tensors of a layer and their size on the host."""

    pieces: list[_Piece]
    num_bytes: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors."""
        return [piece.tensor for piece in self.pieces]


class WeightStreamer:
    """Keep the frozen tensors of layers on the host, and copy each layer into a device slot before its use.

    The tensors of layer k point into slot k mod num_slots while the streamer is attached, so a view taken in the
    forward is valid again in the backward once the layer has been copied in. A slot is overwritten only after compute
    has left its layer. Call ``use`` before each layer, on one compute stream at a time. Reads of the parameters of
    other layers than the one in use raise (``HostParameter``).

    Args:
        layers: Frozen leaf tensors of each layer, on the compute device or on the host, without shared memory.
        streams: Copy streams of the compute device.
        num_slots: Number of device slots, at least 2; with 3 a copy can start one layer earlier.
        allocate_host: Called with the number of bytes of each layer; returns host memory (uint8), pinned for a CUDA
            device. None for pageable memory, on a CPU only.
        free_host: Called by detach with the memory of each layer whose tensors are back on the host, so that it does
            not hold all of them twice.

    Raises:
        OptionError: A tensor is trained or not a leaf, or two tensors share memory.

    Cost:
        Host memory for all tensors, device memory for num_slots layers, one copy of every layer per forward and per
        backward. No host sync except in attach and detach.

    Example:
        >>> from lightning_fastft.activations.streams import CopyStreams
        >>> layers = [[torch.full((2,), float(k))] for k in range(4)]
        >>> streamer = WeightStreamer(layers, streams=CopyStreams(), num_slots=2)
        >>> streamer.attach()
        >>> for k in range(4):
        ...     streamer.use(k, direction=1)
        >>> layers[3][0]
        tensor([3., 3.])
        >>> streamer.detach()
        >>> layers[0][0]
        tensor([0., 0.])
    """

    def __init__(
        self,
        layers: Sequence[Sequence[torch.Tensor]],
        *,
        streams: CopyStreams,
        num_slots: int = DEFAULT_NUM_SLOTS,
        allocate_host: Callable[[int], torch.Tensor] | None = None,
        free_host: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        check_int("num_slots", num_slots, low=2)
        _check_tensors(layers)
        self.streams = streams
        self._allocate_host = allocate_host or functools.partial(torch.empty, dtype=torch.uint8)
        self._free_host = free_host
        self._layers = [_lay_out(tensors) for tensors in layers]
        self._num_slots = min(num_slots, len(self._layers))
        self._is_attached = False
        self._host: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._addresses: list[list[int]] = []
        # Per slot: its layer, a mark after that copy, and a mark where compute has left the previous layer.
        self._content: list[int | None] = []
        self._arrived: list[Mark] = []
        self._left: list[Mark] = []
        self._current: int | None = None

    def __getstate__(self) -> NoReturn:
        """Refuse to copy a model whose weights are streamed."""
        raise SwapError(COPY_MESSAGE)

    @property
    def num_host_bytes(self) -> int:
        """Size of the tensors on the host."""
        return sum(layer.num_bytes for layer in self._layers)

    @property
    def num_slot_bytes(self) -> int:
        """Total size of the device slots."""
        return sum(self._slot_sizes())

    def attach(self) -> None:
        """Move all tensors to host memory of the streamer and point them into their slots; a second call does nothing.

        If it fails, every tensor is where it was.

        Raises:
            HostMemoryError: allocate_host returned too little memory, or unpinned memory for a CUDA device.

        Cost:
            One synchronous copy of all tensors, layer by layer: each layer leaves its old memory before the next one
            is copied.
        """
        if self._is_attached:
            return
        sizes = self._slot_sizes()
        slots: list[torch.Tensor] = []
        # A training step could not write to memory allocated in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            try:
                for index, layer in enumerate(self._layers):
                    host = self._copy_to_host(layer)
                    if len(slots) < self._num_slots:
                        slots.append(torch.empty(sizes[index], dtype=torch.uint8, device=self.streams.device))
                    self._host.append(host)
                    self._targets.append(slots[index % self._num_slots][: layer.num_bytes])
                    for piece in layer.pieces:
                        piece.tensor.data = piece.view(self._targets[index])
                    hide_values(layer.tensors)
            except BaseException:
                self._restore(None)
                self._host, self._targets = [], []
                raise
        self._is_attached = True
        self._addresses = [[piece.tensor.data_ptr() for piece in layer.pieces] for layer in self._layers]
        self._content = [None] * self._num_slots
        # The allocator may return memory that queued work of the compute stream still uses.
        self._left = [self.streams.mark_compute()] * self._num_slots
        self._arrived = list(self._left)
        self._current = None

    def detach(self, *, device: torch.device | None = None) -> None:
        """Restore every tensor with its own memory; a second call does nothing.

        It can be called at any time, also after an exception in a step. Autograd graphs built before cannot run their
        backward afterwards. Without a device each tensor returns to where it was before attach, or to host memory, with
        a warning, if they do not fit there.

        Cost:
            One copy of all tensors, with a host sync.
        """
        if not self._is_attached:
            return
        self.streams.synchronize()
        with torch.inference_mode(mode=False), torch.no_grad():
            try:
                self._restore(device)
            except torch.OutOfMemoryError:
                if device is not None:
                    raise
                self._restore(torch.device("cpu"))
                warnings.warn(
                    f"{self.streams.device} cannot hold the {self.num_host_bytes / 2**30:.1f} GiB of weights that were "
                    "streamed, so they are in host memory now. Move the model to a device that can hold it before you "
                    "use it.",
                    stacklevel=2,
                )
        self._is_attached = False
        self._host, self._targets = [], []

    def use(self, index: int, *, direction: int) -> None:
        """Make a layer available to compute, and start the copy of the next layer.

        No-op for the layer in use, so that a recompute inside its backward does not change the direction. direction is
        1 in a forward, -1 in a backward.

        Raises:
            SwapError: The streamer is not attached, or a tensor of the layer was moved or replaced.

        Cost:
            Two marks and at most two copies, without a host sync; compute waits for the layer unless it was prefetched.
        """
        if not self._is_attached:
            raise SwapError(
                f"Layer {index} runs after the streaming of its weights has ended: the backward of a step must end "
                "before teardown."
            )
        if index == self._current:
            return
        show_values(self._layers[index].tensors)
        self._check_place(index)
        # No layer is in use until its copy is queued, so that an exception leaves no wrong state.
        previous, self._current = self._current, None
        if previous is not None:
            hide_values(self._layers[previous].tensors)
            self._left[previous % self._num_slots] = self.streams.mark_compute()
        self._fetch(index)
        self.streams.wait_compute(self._arrived[index % self._num_slots])
        self._current = index
        if 0 <= index + direction < len(self._layers):
            self._fetch(index + direction)

    def host_views(self, index: int) -> list[torch.Tensor]:
        """Return the read-only host tensors of a layer, in the given order.

        Raises:
            SwapError: The streamer is not attached; read the tensors themselves.
        """
        if not self._is_attached:
            raise SwapError("The weights are not streamed now: read the tensors themselves.")
        return [piece.view(self._host[index]) for piece in self._layers[index].pieces]

    def _fetch(self, index: int) -> None:
        """Start the copy of a layer into its slot, unless it is there."""
        slot = index % self._num_slots
        if self._content[slot] == index:
            return
        # The slot holds no layer if the copy fails.
        self._content[slot] = None
        self._arrived[slot] = self.streams.copy_in(self._targets[index], self._host[index], after=[self._left[slot]])
        self._content[slot] = index

    def _check_place(self, index: int) -> None:
        for number, (piece, address) in enumerate(zip(self._layers[index].pieces, self._addresses[index])):
            if piece.tensor.data_ptr() != address:
                raise SwapError(
                    f"Frozen tensor {number} of layer {index} (shape {tuple(piece.shape)}) was moved or replaced while "
                    "it was streamed, for example by model.to() or by merging adapters. Undo the streaming (its "
                    "patcher) before you change the model."
                )

    def _slot_sizes(self) -> list[int]:
        """Return slots that fit the largest of their layers."""
        sizes = [0] * self._num_slots
        for index, layer in enumerate(self._layers):
            slot = index % self._num_slots
            sizes[slot] = max(sizes[slot], layer.num_bytes)
        return sizes

    def _copy_to_host(self, layer: _Layer) -> torch.Tensor:
        """Return a copy of the bytes of a layer in host memory."""
        num_bytes = layer.num_bytes
        region = self._allocate_host(num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
        if (
            region.dtype is not torch.uint8
            or region.ndim != 1
            or region.numel() < num_bytes
            or region.device.type != "cpu"
        ):
            raise HostMemoryError(
                f"allocate_host({num_bytes}) returned {region.numel()} elements of {region.dtype} on {region.device}; "
                "it must return at least as many bytes (uint8, one axis) of host memory."
            )
        if self.streams.device.type == "cuda" and num_bytes and not region.is_pinned():
            raise HostMemoryError(
                f"Weights are streamed to {self.streams.device} from pinned memory only, and "
                f"allocate_host({num_bytes}) returned pageable memory: pass a region of a PinnedSlab, or keep the "
                "weights on the device."
            )
        for piece in layer.pieces:
            piece.view(region).copy_(piece.tensor)
        return region[:num_bytes]

    def _restore(self, device: torch.device | None) -> None:
        """Give the tensors of the layers on the host their own memory, on a device or where they were."""
        for index, bytes_of_layer in enumerate(self._host):
            pieces = self._layers[index].pieces
            show_values(self._layers[index].tensors)
            if not len(bytes_of_layer):
                # Back on the host before another layer found no memory on the device.
                continue
            for piece in pieces:
                piece.tensor.data = piece.view(bytes_of_layer).to(device or piece.device, copy=True)
            if all(piece.tensor.device.type == "cpu" for piece in pieces):
                if self._free_host is not None:
                    self._free_host(bytes_of_layer)
                self._host[index] = bytes_of_layer.new_empty(0)


def _lay_out(tensors: Sequence[torch.Tensor]) -> _Layer:
    """Assign aligned positions to the tensors; gaps in their memory are removed, the order of axes stays."""
    pieces, end = [], 0
    for tensor in tensors:
        num_bytes = tensor.nbytes
        stride = torch.empty_like(tensor, device="meta", requires_grad=False).stride()
        pieces.append(_Piece(tensor, tensor.device, end, num_bytes, tensor.dtype, tensor.shape, stride))
        end += align(num_bytes)
    return _Layer(pieces, end)


def _check_tensors(layers: Sequence[Sequence[torch.Tensor]]) -> None:
    """Refuse tensors that cannot be moved: trained tensors, non-leaf tensors, shared memory."""
    if not layers:
        raise OptionError("There is no layer whose weights could be streamed.")
    stretches = []
    for index, tensors in enumerate(layers):
        for number, tensor in enumerate(tensors):
            name = f"tensor {number} of layer {index} (shape {tuple(tensor.shape)})"
            if tensor.requires_grad or not tensor.is_leaf:
                raise OptionError(
                    f"Only frozen leaf tensors can be streamed; {name} is trained or the result of an operation."
                )
            if tensor.layout is not torch.strided or tensor.device.type == "meta":
                raise OptionError(
                    f"Only dense tensors with memory can be streamed; {name} has layout {tensor.layout} on "
                    f"{tensor.device}."
                )
            if tensor.numel():
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
                stretches.append(
                    (
                        str(tensor.device),
                        tensor.data_ptr(),
                        tensor.data_ptr() + (last + 1) * tensor.element_size(),
                        name,
                    )
                )
    stretches.sort()
    for (device, _, end, name), (other_device, start, _, other_name) in pairwise(stretches):
        if device == other_device and start < end:
            raise OptionError(
                f"{name} shares memory with {other_name}: tied weights cannot be streamed, because each layer is "
                "copied to its own memory. Untie them, or keep the weights on the device."
            )
