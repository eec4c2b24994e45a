"""Keep the two ends of a model in host memory: its input embedding and its output layer.

Each forward reads the embedding's rows of its tokens over the bus. The output layer is copied to the device for the
head of a pass and freed after it, so its memory is free while the decoder layers run their backward.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_fastft.activations.host_parameter import COPY_MESSAGE, hide_values, show_values
from lightning_fastft.activations.streams import CopyStreams, Mark
from lightning_fastft.core.errors import HostMemoryError, SwapError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher, share_state
from lightning_fastft.core.status import Status
from lightning_fastft.kernels.host_gather.op import host_gather
from lightning_fastft.patches.head import LazyHead, has_own_forward
from lightning_fastft.patches.weight_streaming import AllocateHost, check_kind, serve_state_dict
from lightning_fastft.planner.step import EndBytes

EMBEDDING_STATUS_NAME = "input embedding"
HEAD_STATUS_NAME = "output layer"
# Plain attribute of a swapped module: neither parameter nor buffer.
_MATRIX_ATTRIBUTE = "fastft_host_matrix"


class HostHead(NamedTuple):
    """An output layer in host memory.

    Args:
        status: Where it is, or why it stays on the device.
        prefetch: Starts the copy of the next of this many parts for the head of this pass; None if it stays on the
            device.
        drop: Frees a copy that no head has taken; None if it stays on the device.
    """

    status: Status
    prefetch: Callable[[int], None] | None = None
    drop: Callable[[], None] | None = None


def install_host_embedding(
    model: PreTrainedModel,
    patcher: ModelPatcher,
    *,
    streams: CopyStreams,
    allocate_host: AllocateHost | None = None,
    root: nn.Module | None = None,
) -> Status:
    """Move the weight of the input embedding to the host; each forward reads the rows of its tokens over the bus.

    The parameter keeps shape, dtype and device, but has no storage, and reads of its values raise; a state dict has
    them in host memory. Additions of the model's own class to the lookup (Gemma's factor) are kept.

    Args:
        model: A Hugging Face causal language model, also inside a PEFT model, on its training device or on the host.
        patcher: Records the change; undo returns the weight to where it was.
        streams: The copy streams of the device.
        allocate_host: Takes a number of bytes and returns pinned host memory (uint8). None for pageable memory, on a
            CPU only.
        root: The module around the model, which may use the weight elsewhere; None for the model alone.

    Returns:
        Active; or inactive with the reason if nothing was changed.

    Raises:
        UnsupportedModelError: The weight is sharded (DTensor).
        HostMemoryError: allocate_host returned too little memory, or memory that is not pinned.

    Cost:
        One copy of the weight and a probe of one lookup, both with a host sync. Then T x D values over the bus per
        forward, without a host sync.
    """
    embedding = model.get_input_embeddings()
    obstacle = _embedding_obstacle(root or model, embedding)
    if obstacle:
        return Status(EMBEDDING_STATUS_NAME, "inactive", obstacle)
    matrix = _HostMatrix(embedding.weight, name=EMBEDDING_STATUS_NAME, streams=streams, allocate_host=allocate_host)
    probe = torch.arange(min(2, embedding.num_embeddings), device=embedding.weight.device)[None]
    changes = ModelPatcher()
    with ExitStack() as stack, torch.no_grad():
        stack.callback(changes.undo)
        expected = embedding(probe)
        new = _swap(model, embedding, _host_class(type(embedding)), matrix, changes)
        try:
            is_equal = torch.equal(new(probe.to(streams.device)), expected.to(streams.device))
        except SwapError:
            is_equal = False
        if not is_equal:
            return Status(
                EMBEDDING_STATUS_NAME, "inactive", f"{type(embedding).__name__} reads its weight in another way"
            )
        stack.pop_all()
    patcher.add_undo(changes.undo)
    return Status(
        EMBEDDING_STATUS_NAME, "active", f"{matrix.num_bytes / 2**30:.2f} GiB on the host, rows read over the bus"
    )


def install_host_head(
    model: PreTrainedModel,
    patcher: ModelPatcher,
    *,
    streams: CopyStreams,
    allocate_host: AllocateHost | None = None,
    root: nn.Module | None = None,
) -> HostHead:
    """Move the weight of the output layer to the host; each pass copies it to the device for its head.

    The parameter is treated like that of the embedding. Call ``prefetch`` in the forwards of the last decoder layers,
    so that the copy overlaps with them; a head copies the parts that were not prefetched, and waits for them. The
    arguments are those of ``install_host_embedding``.

    Raises:
        UnsupportedModelError: As for the embedding.
        HostMemoryError: As for the embedding.

    Cost:
        One copy of the weight, with a host sync. Then V x D values over the bus, and as much device memory, from the
        prefetch to the end of the loss, without a host sync.
    """
    head = model.get_output_embeddings()
    obstacle = _head_obstacle(root or model, head)
    if obstacle:
        return HostHead(Status(HEAD_STATUS_NAME, "inactive", obstacle))
    matrix = _HostMatrix(head.weight, name=HEAD_STATUS_NAME, streams=streams, allocate_host=allocate_host)
    _swap(model, head, HostLazyHead if isinstance(head, LazyHead) else HostLinear, matrix, patcher)
    patcher.add_undo(matrix.drop)
    reason = f"{matrix.num_bytes / 2**30:.2f} GiB on the host, on the device during the head"
    return HostHead(Status(HEAD_STATUS_NAME, "active", reason), matrix.prefetch, matrix.drop)


class HostEmbedding(nn.Embedding):
    """An embedding whose weight is in host memory."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of the tokens on the training device."""
        matrix: _HostMatrix = vars(self)[_MATRIX_ATTRIBUTE]
        rows_TD = host_gather(matrix.weight_VD, input.to(matrix.device, non_blocking=True).reshape(-1))
        return rows_TD.view(*input.shape, rows_TD.shape[1])


class HostLinear(nn.Linear):
    """A linear layer whose weight is in host memory."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product with a copy of the weight on the device."""
        matrix: _HostMatrix = vars(self)[_MATRIX_ATTRIBUTE]
        return nn.functional.linear(input, matrix.take_copy(), self.bias)


class HostLazyHead(LazyHead, HostLinear):
    """A lazy output layer whose weight is in host memory."""

    def device_weight(self) -> torch.Tensor:
        """Return a copy of the weight on the device."""
        matrix: _HostMatrix = vars(self)[_MATRIX_ATTRIBUTE]
        return matrix.take_copy()


class _Copy(NamedTuple):
    """A copy of a matrix on the device: how many of its first rows were copied, and when they have arrived."""

    weight_VD: torch.Tensor
    num_rows: int
    arrived: Mark


class _HostMatrix:
    """The weight of a module in host memory; it moves the weight there and back, and copies it to the device."""

    def __init__(
        self, parameter: torch.Tensor, *, name: str, streams: CopyStreams, allocate_host: AllocateHost | None
    ) -> None:
        self.parameter, self.name = parameter, name
        self.device, self._home = streams.device, parameter.device
        self.num_bytes = parameter.numel() * parameter.element_size()
        self._streams = streams
        # The copy that the next head takes, or its first rows.
        self._copy: _Copy | None = None
        # Whether a head took the last copy.
        self._is_taken = True
        bytes_of_matrix = (
            torch.empty(self.num_bytes, dtype=torch.uint8)
            if allocate_host is None
            else allocate_host(self.num_bytes)[: self.num_bytes]
        )
        if bytes_of_matrix.numel() < self.num_bytes or (self.device.type == "cuda" and not bytes_of_matrix.is_pinned()):
            raise HostMemoryError(
                f"The {name} needs {self.num_bytes} bytes of host memory, pinned for a CUDA device; "
                "allocate_host returned "
                f"{bytes_of_matrix.numel()}{'' if bytes_of_matrix.is_pinned() else ', pageable'}."
            )
        self.weight_VD = bytes_of_matrix.view(parameter.dtype).view(parameter.shape)

    def __getstate__(self) -> NoReturn:
        """Refuse to copy a model whose weights are streamed."""
        raise SwapError(COPY_MESSAGE)

    def take(self) -> None:
        """Copy the weight to the host, replace it by a single expanded NaN, and let reads of its values raise."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self.weight_VD.copy_(self.parameter)
            self.parameter.data = torch.full(
                (1, 1), float("nan"), dtype=self.parameter.dtype, device=self.device
            ).expand(self.parameter.shape)
        hide_values([self.parameter])

    def give_back(self) -> None:
        """Give the parameter its own storage again where it was, or on the host if the device has no free memory."""
        show_values([self.parameter])
        with torch.inference_mode(mode=False), torch.no_grad():
            try:
                self.parameter.data = self.weight_VD.to(self._home, copy=True)
            except torch.OutOfMemoryError:
                self.parameter.data = self.weight_VD.clone()
                warnings.warn(
                    f"{self.device} has no free memory for the {self.name}; its weight stays in host memory.",
                    stacklevel=2,
                )

    def values(self) -> dict[str, torch.Tensor]:
        """Return the weight, keyed by its name in a state dict of its module."""
        return {"weight": self.weight_VD}

    def prefetch(self, num_parts: int) -> None:
        """Start the copy of the next of num_parts equal parts to the device, for the next ``take_copy``.

        No-op if all parts are there, or if the last copy was not taken.
        """
        if self._copy is not None or self._is_taken:
            self._copy_rows(math.ceil(len(self.weight_VD) / num_parts))

    def take_copy(self) -> torch.Tensor:
        """Return a copy of the weight on the device, which the caller owns; compute waits until it has arrived."""
        copy = self._copy_rows(len(self.weight_VD))
        self._streams.wait_compute(copy.arrived)
        self._copy, self._is_taken = None, True
        return copy.weight_VD

    def drop(self) -> None:
        """Free a copy that no head took, as in a tuner without the head; the next one is made on demand."""
        if self._copy is not None:
            # Compute, which gets its memory next, must not run before the copy has ended.
            self._streams.wait_compute(self._copy.arrived)
            self._copy, self._is_taken = None, False

    def _copy_rows(self, num_rows: int) -> _Copy:
        """Start the copy of the next rows, as far as there are any; return the copy."""
        copy = self._copy
        if copy is None:
            # Not an inference tensor, also in an evaluation: a training step may take the copy.
            with torch.inference_mode(mode=False), torch.no_grad():
                weight_VD = torch.empty_like(self.weight_VD, device=self.device)
            # Queued work may still use the memory that the allocator returned.
            copy = _Copy(weight_VD, 0, self._streams.mark_compute())
        rows = slice(copy.num_rows, copy.num_rows + num_rows)
        if len(self.weight_VD[rows]):
            arrived = self._streams.copy_in(copy.weight_VD[rows], self.weight_VD[rows], after=[copy.arrived])
            copy = _Copy(copy.weight_VD, copy.num_rows + len(self.weight_VD[rows]), arrived)
        self._copy = copy
        return copy


def movable_bytes(model: PreTrainedModel, root: nn.Module | None = None) -> EndBytes:
    """Return the sizes of the input embedding and of the output layer of a model inside root that would move."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    try:
        obstacles = _embedding_obstacle(root or model, embedding), _head_obstacle(root or model, head)
    except UnsupportedModelError:
        return EndBytes()
    return EndBytes(_movable(embedding, obstacles[0]), _movable(head, obstacles[1]))


def _movable(module: Any, obstacle: str) -> int:
    return 0 if obstacle else int(module.weight.numel() * module.weight.element_size())


def _swap(
    model: PreTrainedModel, old: nn.Module, new_class: type[nn.Module], matrix: _HostMatrix, patcher: ModelPatcher
) -> nn.Module:
    """Move the weight of a module to the host, and replace the module by one of a class that reads it there."""
    name = next(name for name, module in model.named_modules() if module is old)
    new = share_state(old, new_class)
    patcher.add_undo(matrix.give_back)
    matrix.take()
    patcher.replace_module(model, name, new)
    patcher.set_attribute(new, _MATRIX_ATTRIBUTE, matrix)
    serve_state_dict(new, matrix.values, patcher)
    return new


def _host_class(old: type[nn.Module]) -> type[nn.Module]:
    """Return a class between old and nn.Embedding, which keeps the additions of old to the lookup."""
    if old is nn.Embedding:
        return HostEmbedding
    return type(f"Host{old.__name__}", (old, HostEmbedding), {"__module__": __name__, "__doc__": HostEmbedding.__doc__})


def _embedding_obstacle(root: nn.Module, embedding: nn.Module) -> str:
    """Return why an embedding has to stay on the device; an empty string if it can move."""
    if not isinstance(embedding, nn.Embedding) or isinstance(embedding, HostEmbedding):
        return f"the input embedding is a {type(embedding).__name__}, not a plain embedding"
    if embedding.max_norm is not None:
        return "max_norm rewrites its rows in every forward"
    return _weight_obstacle(root, embedding.weight, name=EMBEDDING_STATUS_NAME)


def _head_obstacle(root: nn.Module, head: Any) -> str:
    """Return why an output layer has to stay on the device; an empty string if it can move."""
    if type(head) not in (nn.Linear, LazyHead):
        return f"the output layer is a {type(head).__name__}, not a plain linear layer"
    if has_own_forward(head):
        return "its forward was replaced or compiled on this instance"
    return _weight_obstacle(root, head.weight, name=HEAD_STATUS_NAME)


def _weight_obstacle(root: nn.Module, weight: Any, *, name: str) -> str:
    check_kind(weight, name=f"the {name}")
    if weight.requires_grad:
        return "it is trained"
    # The swapped module takes the place of one of them only.
    places = [
        f"{path}.{leaf}".removeprefix(".")
        for path, parent in root.named_modules()
        for leaf, child in parent._modules.items()
        if child is not None and any(parameter is weight for parameter in child._parameters.values())
    ]
    return f"its weight is tied: {', '.join(places)}" if len(places) > 1 else ""
