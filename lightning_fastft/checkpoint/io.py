"""VerifiedCheckpointIO: Lightning's checkpoints in files that are whole or refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.checkpoint import remote
from lightning_fastft.checkpoint.files import is_own, load_file, read_comment, remove, save_file, saving, sweep
from lightning_fastft.core.errors import OptionError, UnsafeCheckpointError

_FORCED_OPEN = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class VerifiedCheckpointIO(CheckpointIO):
    """Write checkpoints beside their place with a SHA-256 and rename them; judge them by it before they are unpickled.

    What is unpickled is tensors and plain types only, whatever the caller and the environment say.

    The strategies of this package install it where no other CheckpointIO was given. Its files are plain files of
    ``torch.save``. A path may be a URL of any file system of fsspec (``s3://``, ``gs://``, ``hf://``). The file is then
    staged in a temporary folder and uploaded, and a record with its size and SHA-256 is uploaded last. A save without a
    valid record is not loaded. ``checkpoint/remote.py`` describes the layout.

    Raises:
        CheckpointNotSavedError: From a save that did not happen.
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
        >>> Trainer(plugins=[VerifiedCheckpointIO()], accelerator="cpu", logger=False).strategy.checkpoint_io.__class__.__name__
        'VerifiedCheckpointIO'
    """

    def __init__(self) -> None:
        if os.name != "posix":
            raise OptionError(
                "VerifiedCheckpointIO needs the file locks and folder syncs of POSIX; on this system leave checkpoints "
                "to Lightning."
            )
        self._swept: set[Path] = set()
        self._homes: set[Path] = set()
        self._remote_homes: set[str] = set()
        # What this object loaded it may remove: Lightning's launchers hand weights over in a file.
        self._loaded: set[Path] = set()
        self._has_looked = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; it stands at path in full when this returns.

        Raises:
            CheckpointNotSavedError: It does not, and what stood at path stands there still.
        """
        if storage_options is not None:
            raise OptionError(
                f"storage_options={storage_options!r} is not supported: leave it out and configure fsspec instead "
                "(~/.config/fsspec), or give a CheckpointIO that takes it."
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
        """Return a checkpoint whose bytes are those that were written.

        Args:
            path: A local file or a URL.
            map_location: As torch.load's; the default leaves tensors on the host.
            weights_only: True, whatever is given here.
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
                f"{place} is a folder with the pieces of several ranks: resume it with strategy='fastft_fsdp'."
            )
        if not place.is_file():
            raise FileNotFoundError(f"Checkpoint file not found: {place}.")
        content: dict[str, Any] = load_file(place, map_location=map_location)
        self._loaded.add(place.resolve())
        warn_without_digest(place)
        return content

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint of this package from a folder that this object saves to.

        Anything else stays, with a warning: ModelCheckpoint takes the paths that it removes from the checkpoint it
        resumed from.
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
        """Note a folder in which, and below which, this object may remove checkpoints."""
        self._homes.add(folder.resolve())

    def own_remote(self, folder: str) -> None:
        """Note a URL below which this object may remove checkpoints."""
        self._remote_homes.add(folder.rstrip("/"))

    def _remove_remote(self, url: str) -> None:
        """Remove a checkpoint at a URL by the rules of local checkpoints."""
        is_below = ".." not in url.split("/") and any(url.startswith(f"{home}/") for home in self._remote_homes)
        if not remote.is_there(url):
            return
        if not is_below:
            rank_zero_warn(f"{url} is not removed: it is outside of the folders that this run saves to.")
        elif not remote.is_own(url):
            rank_zero_warn(f"{url} is not removed: it is no checkpoint that this package wrote.")
        else:
            remote.remove(url)

    def _warn_of_objects(self, place: Path, name: str) -> None:
        """Check once, on the first save, for content that cannot be loaded again."""
        if not self._has_looked:
            self._has_looked = True
            warn_of_objects(place, name=name)

    def _why_kept(self, place: Path) -> str:
        """Return why a path is not removed; nothing where it may be."""
        folder = place.parent.resolve()
        if place.resolve() not in self._loaded and not any(
            folder == home or home in folder.parents for home in self._homes
        ):
            return "it lies outside of the folders that this run saves to"
        return "" if is_own(place) else "it is no checkpoint that this package wrote"

    def prepare(self, folder: Path) -> None:
        """Take away what killed saves left in a folder, before its first use by this object."""
        folder = folder.absolute()
        if folder not in self._swept:
            self._swept.add(folder)
            sweep(folder)


def local_path(path: str | Path, *, use: str) -> Path:
    """Return the path of a local file or folder.

    Raises:
        UnsafeCheckpointError: It names a URL or an object store.

    Example:
        >>> local_path("file:///tmp/a.ckpt", use="loaded from")
        PosixPath('/tmp/a.ckpt')
    """
    text = str(path)
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "file":
        return Path(rest)
    # Path("s3://a") has lost a slash.
    if separator or (":/" in text and not Path(text).exists() and text.partition(":/")[0].isalnum()):
        raise UnsafeCheckpointError(
            f"Here checkpoints are {use} local or mounted folders only, got {text!r}. A Trainer with strategy='fastft' "
            "or 'fastft_ddp' takes URLs, given as text (a Path loses a slash). Elsewhere copy the checkpoint first."
        )
    return Path(text)


def warn_of_options(weights_only: bool | None) -> None:
    """Say that options which would let a checkpoint run code have no effect."""
    if weights_only is False:
        rank_zero_warn(
            "weights_only=False is ignored: checkpoints are read as tensors and plain types only. To load a class that "
            "you trust, name it in "
            "torch.serialization.add_safe_globals([...])."
        )
    if os.environ.get(_FORCED_OPEN, "0").lower() in ("1", "y", "yes", "true"):
        rank_zero_warn(
            f"{_FORCED_OPEN} is set and is ignored here; everywhere else torch.load now runs what a file asks it to "
            "run. Unset it."
        )


def warn_without_digest(place: Path, *, name: str = "") -> None:
    """Say that a checkpoint was not written by this package, so that its damage is not noticed."""
    with place.open("rb") as file:
        if read_comment(file) is None:
            rank_zero_warn(
                f"{name or place} carries no digest (it was not written by this package): damage in it cannot be noticed."
            )


def warn_of_objects(place: Path, *, name: str) -> None:
    """Say now, and not when a run is to go on, that a checkpoint holds what is not loaded again."""
    kinds = torch.serialization.get_unsafe_globals_in_checkpoint(str(place))
    if kinds:
        rank_zero_warn(
            f"{name} holds objects of {', '.join(sorted(kinds))}. Checkpoints are read as tensors and plain types "
            "only, so it cannot be resumed: keep such objects out of hyperparameters and state, or name their classes "
            "in torch.serialization.add_safe_globals."
        )
