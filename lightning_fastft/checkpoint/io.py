"""VerifiedCheckpointIO: write Lightning checkpoints atomically and verify them before loading."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.checkpoint import remote
from lightning_fastft.checkpoint.atomic import saving, sweep
from lightning_fastft.checkpoint.digests import read_comment
from lightning_fastft.checkpoint.files import is_own, load_file, remove, save_file
from lightning_fastft.core.checks import local_path
from lightning_fastft.core.errors import OptionError

_FORCED_OPEN = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class VerifiedCheckpointIO(CheckpointIO):
    """Write checkpoints atomically with a SHA-256, and verify it before a checkpoint is unpickled.

    Only tensors and plain types are unpickled, regardless of the options of the caller and of the environment.

    The strategies of this package install it unless another CheckpointIO is given. Its files are ``torch.save`` files.
    A path may be a URL of any fsspec file system (``s3://``, ``gs://``, ``hf://``). The file is then staged in a
    temporary folder and uploaded, and a record with its size and SHA-256 is uploaded last. A save without a valid
    record is not loaded. ``checkpoint/remote.py`` describes the layout.

    Raises:
        CheckpointNotSavedError: From a save that failed.
        DamagedCheckpointError: From a load, with the newest intact checkpoint of the folder.
        UnsafeCheckpointError: From a load of more than tensors and plain types.

    Cost:
        SHA-256 at about 1.2 GB/s when a file is written and when it is read. A URL adds one pass, one copy in the
        temporary folder (``TMPDIR``) during the save or load, and the bytes over the network once for a save and once
        for each rank that loads.

    Source:
        own.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[VerifiedCheckpointIO()], accelerator="cpu", logger=False)
        >>> type(trainer.strategy.checkpoint_io).__name__
        'VerifiedCheckpointIO'
    """

    def __init__(self) -> None:
        if os.name != "posix":
            raise OptionError(
                "VerifiedCheckpointIO needs POSIX file locks and folder syncs. On this system use Lightning's "
                "CheckpointIO."
            )
        self._swept: set[Path] = set()
        self._homes: set[Path] = set()
        self._remote_homes: set[str] = set()
        # Loaded files may be removed too: Lightning's launchers pass weights between processes in a file.
        self._loaded: set[Path] = set()
        self._has_looked = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; it is complete when this returns.

        Raises:
            CheckpointNotSavedError: The save failed, and an earlier checkpoint at path is untouched.
        """
        if storage_options is not None:
            raise OptionError(
                f"storage_options={storage_options!r} is not supported. Configure fsspec instead (~/.config/fsspec), "
                "or use a CheckpointIO that accepts it."
            )
        if remote.is_remote(path):
            url = str(path)
            with remote.uploading(url) as file:
                save_file(checkpoint, file)
                self._warn_of_objects(file, url)
            self.own_remote(url.rpartition("/")[0])
            return
        place = local_path(path, use="saved to")
        with saving(place):
            self.prepare(place.parent)
            self.own(place.parent)
        save_file(checkpoint, place)
        self._warn_of_objects(place, str(place))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return a verified checkpoint.

        Args:
            path: A local file or a URL.
            map_location: As in ``torch.load``; the default keeps tensors on the host.
            weights_only: Ignored; checkpoints are always loaded with True.
        """
        if remote.is_remote(path):
            warn_of_options(weights_only)
            with remote.downloaded(str(path)) as file:
                fetched: dict[str, Any] = load_file(file, map_location=map_location, origin=str(path))
                warn_without_digest(file, name=str(path))
            return fetched
        place = local_path(path, use="loaded from")
        self.prepare(place.parent)
        warn_of_options(weights_only)
        if place.is_dir():
            raise OptionError(
                f"{place} is a folder with the shards of several ranks. Resume it with strategy='fastft_fsdp'."
            )
        if not place.is_file():
            raise FileNotFoundError(f"Checkpoint file not found: {place}.")
        content: dict[str, Any] = load_file(place, map_location=map_location)
        self._loaded.add(place.resolve())
        warn_without_digest(place)
        return content

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint of this package from a folder that this object saves to.

        Other paths are kept with a warning, because ModelCheckpoint reads the paths to remove from the checkpoint that
        it resumed from.
        """
        if remote.is_remote(path):
            self._remove_remote(str(path))
            return
        place = local_path(path, use="removed from")
        if not (place.exists() or place.is_symlink()):
            return
        reason = self._why_kept(place)
        if reason:
            rank_zero_warn(f"{place} is not removed: {reason}.")
        else:
            remove(place)

    def own(self, folder: Path) -> None:
        """Allow this object to remove checkpoints in a folder and below it."""
        self._homes.add(folder.resolve())

    def own_remote(self, folder: str) -> None:
        """Allow this object to remove checkpoints below a URL."""
        self._remote_homes.add(folder.rstrip("/"))

    def _remove_remote(self, url: str) -> None:
        """Remove a checkpoint at a URL by the rules of local checkpoints."""
        is_below = ".." not in url.split("/") and any(url.startswith(f"{home}/") for home in self._remote_homes)
        if not remote.is_there(url):
            return
        if not is_below:
            rank_zero_warn(f"{url} is not removed: it is outside of the folders that this run saves to.")
        elif not remote.is_own(url):
            rank_zero_warn(f"{url} is not removed: this package did not write it.")
        else:
            remote.remove(url)

    def _warn_of_objects(self, place: Path, name: str) -> None:
        """Warn at the first save if it has objects that cannot be loaded."""
        if self._has_looked:
            return
        self._has_looked = True
        kinds = torch.serialization.get_unsafe_globals_in_checkpoint(str(place))
        if kinds:
            rank_zero_warn(
                f"{name} holds objects of {', '.join(sorted(kinds))}. Checkpoints are read as tensors and plain types "
                "only, so it cannot be resumed. Remove such objects from hyperparameters and state, or add their "
                "classes with torch.serialization.add_safe_globals."
            )

    def _why_kept(self, place: Path) -> str:
        """Return the reason to keep a path; "" if it may be removed."""
        folder = place.parent.resolve()
        if place.resolve() not in self._loaded and not any(
            folder == home or home in folder.parents for home in self._homes
        ):
            return "it is outside of the folders that this run saves to"
        return "" if is_own(place) else "this package did not write it"

    def prepare(self, folder: Path) -> None:
        """Remove leftovers of killed saves from a folder before its first use."""
        folder = folder.absolute()
        if folder not in self._swept:
            self._swept.add(folder)
            sweep(folder)


def warn_of_options(weights_only: bool | None) -> None:
    """Warn that options which would let a checkpoint run code have no effect."""
    if weights_only is False:
        rank_zero_warn(
            "weights_only=False is ignored: checkpoints are read as tensors and plain types only. To load a class that "
            "you trust, add it with torch.serialization.add_safe_globals([...])."
        )
    if os.environ.get(_FORCED_OPEN, "0").lower() in ("1", "y", "yes", "true"):
        rank_zero_warn(
            f"{_FORCED_OPEN} is set. It is ignored here, but other calls of torch.load can then run code of a file. "
            "Unset it."
        )


def warn_without_digest(place: Path, *, name: str = "") -> None:
    """Warn that damage of a checkpoint cannot be detected, because this package did not write it."""
    with place.open("rb") as file:
        if read_comment(file) is None:
            rank_zero_warn(
                f"{name or place} has no digest (it was not written by this package), so damage cannot be detected."
            )
