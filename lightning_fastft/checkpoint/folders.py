"""Save and load checkpoints of sharded models: a folder with the shards of all ranks, verified as a whole."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader, load, save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_fastft.checkpoint.atomic import part_beside, remove_empty
from lightning_fastft.checkpoint.digests import hash_file
from lightning_fastft.checkpoint.files import check_folder, commit_folder, load_file, replace_folder, save_file
from lightning_fastft.checkpoint.ranks import on_all_ranks
from lightning_fastft.checkpoint.settings import check_optimizer, values_of_settings
from lightning_fastft.core.errors import (
    CheckpointNotSavedError,
    DamagedCheckpointError,
    OptionError,
    ResumeError,
    UnsafeCheckpointError,
)

# Lightning's names: without the commit record, the folder is a checkpoint of Lightning.
METADATA = "meta.pt"
_WEIGHTS = "state_dict"
_INDEX = ".metadata"
# Classes in torch's index of the shards. Any other class could run foreign code.
_INDEX_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_INDEX_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def save_folder(checkpoint: dict[str, Any], path: Path) -> None:
    """Write the shards of all ranks to a temporary folder, then the commit record, then rename the folder.

    Every rank must call this.

    Args:
        checkpoint: Lightning's checkpoint, with sharded ``state_dict`` and ``optimizer_states``.
        path: The same on all ranks; a shared folder.

    Raises:
        CheckpointNotSavedError: A rank failed; raised on all ranks, with its number. An earlier
            checkpoint at path is untouched.

    Cost:
        Each rank reads its shard once more for the SHA-256, from the page cache.
    """
    pieces = take_pieces(checkpoint)
    with ExitStack() as stack:
        part = begin_folder(checkpoint, path, stack)
        write_folder(pieces, part, path)


def take_pieces(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Remove the sharded states from a checkpoint and return them by their name in the index."""
    pieces = {_WEIGHTS: checkpoint.pop(_WEIGHTS)}
    pieces.update({f"optimizer_{number}": state for number, state in enumerate(checkpoint.pop("optimizer_states", []))})
    return pieces


def begin_folder(checkpoint: dict[str, Any], path: Path, stack: ExitStack, *, holds_name: bool = False) -> Path:
    """Create the temporary folder of a save with the rest of the checkpoint, and return it; all ranks must call this.

    The checkpoint is that after ``take_pieces``, without its shards. The stack removes the temporary folder on rank 0.
    With holds_name an empty folder at the path reserves the name until the rename.

    Raises:
        CheckpointNotSavedError: On all ranks.
    """

    def begin() -> str:
        if dist.get_rank() != 0:
            return ""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = stack.enter_context(part_beside(path, is_folder=True))
        save_file(checkpoint, part / METADATA)
        if holds_name and not (path.exists() or path.is_symlink()):
            path.mkdir()
            stack.callback(remove_empty, path)
        return str(part)

    return Path(on_all_ranks(begin, error=CheckpointNotSavedError)[0])


def write_folder(pieces: dict[str, Any], part: Path, path: Path, *, group: dist.ProcessGroup | None = None) -> None:
    """Write the shards, then the commit record once every rank has written, then rename; all ranks must call this.

    Args:
        pieces: Shards from ``take_pieces``; they must not change until this returns.
        part: Temporary folder from ``begin_folder``.
        path: The final folder.
        group: All ranks; None is the default group.

    Raises:
        CheckpointNotSavedError: A rank failed; raised on all ranks, with its number.
    """
    rank = dist.get_rank()
    try:
        save(pieces, checkpoint_id=part, process_group=group)
    except CheckpointException as error:
        raise CheckpointNotSavedError(f"The checkpoint {path} was not saved: {error}") from error
    own = [
        file
        for file in part.iterdir()
        if file.name.startswith(f"__{rank}_") or (rank == 0 and file.name in (METADATA, _INDEX))
    ]
    reported = on_all_ranks(
        lambda: {file.name: hash_file(file) for file in own}, error=CheckpointNotSavedError, group=group
    )

    def end() -> None:
        if rank == 0:
            commit_folder(part, {name: digest for digests in reported for name, digest in digests.items()})
            replace_folder(part, path)

    on_all_ranks(end, error=CheckpointNotSavedError, group=group)


def load_folder(
    path: Path,
    *,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool,
    judge: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Load a folder into a sharded module and its optimizers, and return the rest of the checkpoint.

    Every rank must call this. The folder may be from any number of ranks. ``judge`` is called with the rest of the
    checkpoint before a shard is loaded, and raises if it does not fit.

    Raises:
        DamagedCheckpointError: On all ranks, if a file is missing or does not match its digest.
        UnsafeCheckpointError: The index or a shard has more than tensors and plain types.
        ResumeError: The saved state is that of another kind of optimizer, or its tensors differ.

    Cost:
        Together the ranks read the folder once more, for the digests.

    Source:
        Lightning's ModelParallelStrategy.load_checkpoint (2.6.6), whose readers unpickle anything.
    """
    share = (dist.get_rank(), dist.get_world_size())

    def check() -> None:
        check_folder(path, share=share)
        check_index(path / _INDEX)

    on_all_ranks(check, error=DamagedCheckpointError)
    content: dict[str, Any] = load_file(path / METADATA)
    judge(content)
    stored = FileSystemReader(path).read_metadata().state_dict_metadata if optimizers else {}
    settings = values_of_settings(content, module)
    for number, optimizer in enumerate(optimizers):
        check_optimizer(optimizer, _read_groups(path, stored, name=f"optimizer_{number}"), settings=settings)
    state = {_WEIGHTS: get_model_state_dict(module)}
    load(state, checkpoint_id=path, planner=_PlainPlanner())
    module.load_state_dict(state[_WEIGHTS], strict=strict)
    for number, optimizer in enumerate(optimizers):
        name = f"optimizer_{number}"
        moments: dict[str, Any] = {name: get_optimizer_state_dict(module, optimizer)}
        _check_moments(moments[name]["state"], stored, name=name)
        load(moments, checkpoint_id=path, planner=_PlainPlanner())
        set_optimizer_state_dict(
            module, optimizer, optim_state_dict=moments[name], options=StateDictOptions(cpu_offload=True)
        )
    return content


def read_folder(path: Path) -> dict[str, Any]:
    """Return the whole weights and the rest of a folder's checkpoint on the host, without its optimizer states.

    One process calls this, without a process group. The folder may be from any number of ranks.

    Raises:
        DamagedCheckpointError: A file is missing or does not match its digest.
        UnsafeCheckpointError: The index has more than tensors and plain types.

    Cost:
        Reads the folder once for the digests, and its weights once more.
    """
    check_folder(path)
    check_index(path / _INDEX)
    content: dict[str, Any] = load_file(path / METADATA)
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    weights = {
        key.removeprefix(f"{_WEIGHTS}."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith(f"{_WEIGHTS}.") and isinstance(entry, TensorStorageMetadata)
    }
    load({_WEIGHTS: weights}, checkpoint_id=path, planner=_PlainPlanner(), no_dist=True)
    return {**content, _WEIGHTS: weights}


@contextmanager
def as_one_file(path: Path) -> Iterator[BinaryIO]:
    """Yield an open temporary file with what ``read_folder`` returns.

    Raises:
        OptionError: The folder is not a checkpoint.
    """
    if not (path / METADATA).is_file():
        raise OptionError(
            f"{path} is a folder and not a checkpoint. Give a checkpoint file, or a folder that fastft_fsdp wrote."
        )
    with TemporaryFile() as file:
        torch.save(read_folder(path), file)
        file.seek(0)
        yield file


def _read_groups(path: Path, stored: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """Return the groups of a saved optimizer with their options."""
    groups: dict[str, dict[str, Any]] = {}
    for key in stored:
        if key.startswith(f"{name}.param_groups."):
            number, _, option = key.removeprefix(f"{name}.param_groups.").partition(".")
            groups.setdefault(number, {})[option] = None
    found = {name: {"param_groups": [groups[number] for number in sorted(groups, key=int)]}}
    load(found, checkpoint_id=path, planner=_PlainPlanner())
    return found[name]


def _check_moments(held: Mapping[str, Any], stored: Mapping[str, Any], *, name: str) -> None:
    """Refuse an optimizer state whose tensors would be dropped or misread.

    torch copies 8-bit codes into floating-point tensors, and skips tensors that the optimizer does not hold.
    """
    kinds: dict[str, dict[str, bool]] = {}
    for key, entry in stored.items():
        place, _, last = key.rpartition(".")
        if hasattr(entry, "properties"):
            kinds.setdefault(place, {})[last] = entry.properties.dtype.is_floating_point
    for parameter, state in held.items():
        found = kinds.get(f"{name}.state.{parameter}")
        own = {key: value.is_floating_point() for key, value in state.items() if isinstance(value, torch.Tensor)}
        if found is not None and found != own:
            raise ResumeError(
                f"The checkpoint holds {_describe(found)} for {parameter}, and this optimizer holds {_describe(own)}. "
                "Resume with the optimizer that wrote it, FusedAdamW with its optim_bits and master_weights."
            )


def _describe(kinds: Mapping[str, bool]) -> str:
    return ", ".join(key if is_float else f"{key} as integers" for key, is_float in sorted(kinds.items()))


def check_index(file: Path) -> None:
    """Reject an index of shards with classes other than torch's own.

    Raises:
        UnsafeCheckpointError: With the name of the first such class.
    """
    with file.open("rb") as opened:
        _IndexUnpickler(opened).load()


class _IndexUnpickler(pickle.Unpickler):
    """Unpickle only the index of torch.distributed.checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_record = module in _INDEX_MODULES and "." not in name and name.lstrip("_")[:1].isupper()
        if is_dtype or is_record or (module, name) in _INDEX_NAMES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise UnsafeCheckpointError(
            f"The index {_INDEX} of the checkpoint names {module}.{name}, which is not allowed; it is not loaded."
        )


def _enum_member(kind: Any, name: Any) -> enum.Enum:
    """Replace getattr in pickles of enum members, as early releases of Python 3.11 write them; reject other uses."""
    if not (
        isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(name, str) and name in kind.__members__
    ):
        raise UnsafeCheckpointError(
            f"The index {_INDEX} of the checkpoint reads {name!r} of {kind!r}, which is not allowed; it is not loaded."
        )
    return kind[name]


class _PlainPlanner(DefaultLoadPlanner):
    """Load entries other than tensors as plain types only."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        # torch unpickles these bytes without restrictions, so check them with weights_only first.
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).partition("\n")[0]
            raise UnsafeCheckpointError(
                f"{read_item.dest_index.fqn} of the checkpoint is no tensor and no plain type: {reason}"
            ) from error
        value.seek(0)
        super().load_bytes(read_item, value)
