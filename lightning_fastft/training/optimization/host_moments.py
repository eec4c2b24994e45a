"""Moments of FusedAdamW in pinned host memory: a step copies them through slots on the device, piece by piece.

While one piece is stepped, the next one is copied in and the one before is copied out, on two copy streams. Weights and
gradients stay on the device, so the norm of all gradients is known before the first piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lightning_fastft.activations.slots import PinnedSlab, align
from lightning_fastft.activations.streams import CopyStreams, Mark, make_copy_streams
from lightning_fastft.core.errors import HostMemoryError
from lightning_fastft.kernels.adamw_step.codes import BLOCK, num_blocks
from lightning_fastft.kernels.adamw_step.op import TensorTable
from lightning_fastft.kernels.adamw_step.rows import TableRow
from lightning_fastft.kernels.adamw_step.table import CHUNK
from lightning_fastft.training.optimization.adamw_shards import block_shape
from lightning_fastft.training.optimization.adamw_state import ABSMAXS, MIN_8BIT_SIZE, state_dtypes

# Moments of one piece: 128 MiB take 2.7 ms at 50 GB/s, much longer than the launches of four copies.
PIECE_BYTES = 2**27
# One slot is copied in, one is stepped, one is copied out.
NUM_SLOTS = 3


class Piece(NamedTuple):
    """Values of one parameter whose moments share a slot: their table, and each host tensor with its place in the
    slot.
    """

    table: TensorTable
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    slot: int


class HostMoments:
    """Pinned memory for the moments of some parameters, and the slots and streams of their steps."""

    def __init__(self, params: Sequence[torch.Tensor], *, optim_bits: int) -> None:
        self.optim_bits = optim_bits
        # Names and host tensors of each parameter; empty until open.
        self._held: dict[torch.Tensor, dict[str, torch.Tensor]] = {param: {} for param in params}
        # Parameters whose moments a state has held: others are zeros.
        self._taken: set[torch.Tensor] = set()
        self._slab: PinnedSlab | None = None
        self._streams: CopyStreams | None = None
        self.release()

    def release(self) -> None:
        """Free the slots and tables after all copies; a later step creates them again.

        Cost:
            One host sync after a step.
        """
        self.synchronize()
        self._slots: list[torch.Tensor] = []
        self._slot_marks: list[list[Mark]] = []
        self._pieces: dict[torch.Tensor, tuple[TableRow, list[Piece]]] = {}
        self._meta: dict[torch.Tensor, torch.Tensor] = {}
        self._num_pieces = 0

    def __contains__(self, param: torch.Tensor) -> bool:
        """Return whether the moments of a parameter are on the host."""
        return param in self._held

    def device_bytes(self, param: torch.Tensor) -> int:
        """Return the bytes of the slots for the first parameter, and 0 for the others."""
        return NUM_SLOTS * self._slot_bytes() if param is next(iter(self._held)) else 0

    def host_bytes(self) -> int:
        """Return the bytes of all moments, which each step copies to the device and back."""
        return sum(num_bytes for *_, num_bytes in self._wanted())

    def take(self, state: dict[str, torch.Tensor], param: torch.Tensor) -> None:
        """Put the host tensors of a parameter into its state; moments on another device are copied, and a state without
        moments begins with zeros.

        Raises:
            HostMemoryError: The memory cannot be allocated or pinned.

        Cost:
            About one second per GiB for CUDA, at the first call.
        """
        if self._slab is None:
            self._open()
        for name, host in self._held[param].items():
            given = state.get(name)
            if given is not None and given is not host:
                self.synchronize()
                host.copy_(given.view(host.shape))
            elif given is None and param in self._taken:
                # The state was reset, as by a checkpoint from before the first step.
                self.synchronize()
                host.zero_()
            state[name] = host
        self._taken.add(param)

    def split(self, row: TableRow) -> tuple[TableRow, list[Piece]]:
        """Return the row without moments, which counts for the norm, and the pieces that are stepped."""
        param = row.owner
        if not self._slots:
            self._make_slots(param.device)
        if param not in self._meta:
            self._meta[param] = torch.empty_like(row.exp_avg, device="meta")
        meta = self._meta[param]
        kept, pieces = self._pieces.get(param, (None, []))
        if kept is None or any(one is not other for one, other in zip(kept[:5], row[:5])):
            pieces = list(self._make_pieces(row))
            self._pieces[param] = row, pieces
        return row._replace(exp_avg=meta, exp_avg_sq=meta, exp_avg_absmax=None, exp_avg_sq_absmax=None), pieces

    def step(self, piece: Piece, run: Callable[[TensorTable], None]) -> None:
        """Copy the moments of a piece in, run a step on its table, and copy them out; no host sync."""
        assert self._streams is not None
        marks: list[Mark] = self._slot_marks[piece.slot]
        for host, device in piece.pairs:
            marks = [self._streams.copy_in(device, host, after=marks)]
        self._streams.wait_compute(marks[0])
        run(piece.table)
        marks = [self._streams.mark_compute()]
        for host, device in piece.pairs:
            marks = [self._streams.copy_out(host, device, after=marks)]
        self._slot_marks[piece.slot] = marks

    def synchronize(self) -> None:
        """Wait until the host tensors hold the moments of the last step."""
        if self._streams is not None:
            self._streams.synchronize()

    def _wanted(self) -> list[tuple[torch.Tensor, str, torch.dtype, tuple[int, ...], int]]:
        """Return parameter, name, dtype, shape and bytes of each host tensor."""
        shapes = [
            (param, name, dtype, tuple(block_shape(param) if name in ABSMAXS else param.shape))
            for param in self._held
            for name, dtype in state_dtypes(param, optim_bits=self.optim_bits).items()
        ]
        return [(*each, torch.Size(each[3]).numel() * each[2].itemsize) for each in shapes]

    def _open(self) -> None:
        wanted = self._wanted()
        sizes = [num_bytes for *_, num_bytes in wanted]
        device = next(iter(self._held)).device
        try:
            slab = PinnedSlab(sum(map(align, sizes)), device=device)
        except HostMemoryError as error:
            raise HostMemoryError(f"{error} These are moments: lower FusedAdamW(offload=...).") from error
        for param, name, dtype, shape, num_bytes in wanted:
            region = slab.reserve(num_bytes)
            assert region is not None
            # A storage of its own: torch.save writes whole storages, and only one dtype of each.
            own = torch.from_numpy(region.tensor[:num_bytes].numpy())
            self._held[param][name] = own.zero_().view(dtype).view(shape)
        self._slab = slab

    def _make_slots(self, device: torch.device) -> None:
        if self._streams is None:
            self._streams = make_copy_streams(device)
        self._slots = [torch.empty(self._slot_bytes(), dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        # The allocator may return memory that queued work of the compute stream still uses.
        self._slot_marks = [[self._streams.mark_compute()] for _ in self._slots]

    def _make_pieces(self, row: TableRow) -> list[Piece]:
        held = self._held[row.owner]
        num_values, step = row.param.numel(), _piece_values(optim_bits=self.optim_bits)
        pieces = []
        for start in range(0, num_values, step):
            end = min(start + step, num_values)
            # Consecutive pieces use the slots in turn.
            slot, self._num_pieces = self._num_pieces % NUM_SLOTS, self._num_pieces + 1
            pairs, placed, offset = [], {}, 0
            for name, whole in held.items():
                span = (start // BLOCK, num_blocks(end)) if name in ABSMAXS else (start, end)
                host = whole.view(-1)[slice(*span)]
                num_bytes = host.nbytes
                placed[name] = self._slots[slot][offset : offset + num_bytes].view(host.dtype)
                pairs.append((host, placed[name]))
                offset += align(num_bytes)
            lists = {f"{name}s": [tensor] for name, tensor in placed.items()}
            table = TensorTable(
                [row.param.view(-1)[start:end]],
                copies=[None if row.copy is None else row.copy.view(-1)[start:end]],
                owners=[row.owner],
                numbers=[row.number],
                firsts=[row.first + start],
                starts=[start],
                **lists,  # type: ignore[arg-type]
            )
            pieces.append(Piece(table, pairs, slot))
        return pieces

    def _slot_bytes(self) -> int:
        values = min(_piece_values(optim_bits=self.optim_bits), max(param.numel() for param in self._held))
        if self.optim_bits == 8:
            return 2 * align(values) + 2 * align(4 * num_blocks(values))
        return 2 * align(4 * values)


def choose_offloaded(params: Sequence[torch.Tensor], *, share: float) -> list[torch.Tensor]:
    """Return the first parameters that hold this share of all values; small ones stay on their device.

    Example:
        >>> params = [torch.zeros(5000), torch.zeros(7), torch.zeros(5000)]
        >>> [len(choose_offloaded(params, share=share)) for share in (0.0, 0.5, 0.6, 1.0)]
        [0, 1, 2, 2]
    """
    fit = [param for param in params if param.numel() >= MIN_8BIT_SIZE]
    wanted, chosen, num_values = share * sum(param.numel() for param in fit), [], 0
    for param in fit:
        if num_values >= wanted:
            break
        chosen.append(param)
        num_values += param.numel()
    return chosen


def _piece_values(*, optim_bits: int) -> int:
    bytes_per_value = 2 if optim_bits == 8 else 8
    return max(PIECE_BYTES // bytes_per_value // CHUNK, 1) * CHUNK
