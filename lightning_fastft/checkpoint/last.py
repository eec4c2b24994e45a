"""Resolve ckpt_path="last" to the newest intact checkpoint in the run's folders, including those of stopped runs."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.checkpoint import remote
from lightning_fastft.checkpoint.files import find_damage, load_file
from lightning_fastft.checkpoint.slurm import is_requeued

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

LAST = "last"
STOPPED = "stopped-step="
_SUFFIX = ".ckpt"
_RESOLVE_FOLDER = "_ModelCheckpoint__resolve_ckpt_dir"


def find_last(trainer: Trainer) -> str | None:
    """Return the checkpoint for ``ckpt_path="last"``; None if there is none yet.

    It is the newest of ``last*.ckpt``, ``stopped-step=N.ckpt`` and the files of OnExceptionCheckpoint in the folders of
    the run. If it is damaged, the newest intact checkpoint with any name is used, with a warning.

    Cost:
        Rank 0 reads the newest checkpoint once, for its digest, and every damaged one (URLs are downloaded). The
        strategy broadcasts its choice to the other ranks.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    written = [str(callback.ckpt_path) for callback in callbacks if isinstance(callback, OnExceptionCheckpoint)]
    # "./a" and "a" are one path.
    extra = [place if remote.is_remote(place) else str(Path(place)) for place in written]
    times: dict[str, int] = {}
    for folder in _folders(trainer):
        times |= _list_times(folder)
    for place in extra:
        beside = _list_times(os.path.dirname(place) or ".")
        times |= {place: beside[place]} if place in beside else {}
    by_age = sorted(times, key=times.__getitem__, reverse=True)
    if all(_is_unfinished(place) for place in by_age):
        return None
    last = (place for place in by_age if os.path.basename(place).startswith((LAST, STOPPED)) or place in extra)
    newest = next(last, None)
    if newest is None or trainer.global_rank != 0:
        return newest
    damage = _find_damage(newest)
    if damage is None:
        return newest
    is_fit = trainer.state.fn == TrainerFn.FITTING
    for place in by_age:
        is_intact = place != newest and _find_damage(place, needs_digest=True) is None
        if is_intact and (not is_fit or _is_resumable(place)):
            rank_zero_warn(
                f'ckpt_path="last": {newest} is damaged ({damage}). The newest intact checkpoint is used: {place}.'
            )
            return place
    # The strategy raises the error on all ranks.
    return newest


def with_last(launcher: _Launcher | None) -> _Launcher:
    """Return the launcher with ``ckpt_path="last"`` resolved by ``find_last`` in the processes that it starts."""
    if launcher is None:
        return _Here()
    kinds: dict[type, type] = {_SubprocessScriptLauncher: _Scripts, _MultiProcessingLauncher: _Processes}
    if type(launcher) in kinds:
        # The strategy has just created it, and nothing else references it.
        launcher.__class__ = kinds[type(launcher)]
    return launcher


def run_with_last(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an entry point of the Trainer with ``ckpt_path="last"`` replaced by a path.

    A fit without a checkpoint in a job that SLURM has requeued continues from the last one too.
    """
    given = inspect.signature(function).bind(*args, **kwargs)
    trainer = getattr(function, "__self__", None)
    wanted = given.arguments.get("ckpt_path")
    is_new_fit = trainer is not None and wanted is None and trainer.state.fn == TrainerFn.FITTING
    if trainer is not None and (wanted == LAST or (is_new_fit and is_requeued(trainer))):
        # Without a checkpoint, Lightning starts from the beginning, and warns if "last" was given.
        given.arguments["ckpt_path"] = found = find_last(trainer) or wanted
        if wanted is None:
            rank_zero_info(f"SLURM requeued the job. It continues from: {found or 'the beginning (no checkpoint)'}")
    return function(*given.args, **given.kwargs)


class _Here(_Launcher):
    """Run in this process."""

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        return run_with_last(function, *args, **kwargs)

    def kill(self, signum: int) -> None:
        """Do nothing: there is no child process."""


class _Scripts(_SubprocessScriptLauncher):
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        return super().launch(functools.partial(run_with_last, function), *args, trainer=trainer, **kwargs)


class _Processes(_MultiProcessingLauncher):
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        return super().launch(functools.partial(run_with_last, function), *args, trainer=trainer, **kwargs)


def _folders(trainer: Trainer) -> list[str]:
    """Return the folders of the run's ModelCheckpoints, else the Trainer's default_root_dir."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    # Lightning's private method has its rule for a callback without a folder, which depends on the logger.
    named = [str(getattr(callback, _RESOLVE_FOLDER)(trainer)) for callback in callbacks]
    return list(dict.fromkeys(named or [str(trainer.default_root_dir)]))


def _list_times(folder: str) -> dict[str, int]:
    """Return the modification time of each checkpoint of a folder, in nanoseconds."""
    if remote.is_remote(folder):
        return remote.list_committed(folder)
    place = Path(folder)
    entries = [entry for entry in place.iterdir() if entry.suffix == _SUFFIX] if place.is_dir() else []
    shown = [entry for entry in entries if not entry.name.startswith(".") and entry.exists()]
    return {str(entry): entry.stat().st_mtime_ns for entry in shown}


def _is_unfinished(place: str) -> bool:
    """Return whether a path is the empty folder of a save that was killed, or a link to one."""
    return not remote.is_remote(place) and Path(place).is_dir() and not any(Path(place).iterdir())


def _find_damage(place: str, *, needs_digest: bool = False) -> str | None:
    return remote.find_damage(place) if remote.is_remote(place) else find_damage(Path(place), needs_digest=needs_digest)


def _is_resumable(place: str) -> bool:
    """Return whether an intact checkpoint has optimizer states and not only weights; folders always have them."""
    if remote.is_remote(place):
        with remote.downloaded(place) as file:
            return "optimizer_states" in load_file(file, origin=place)
    return Path(place).is_dir() or "optimizer_states" in load_file(Path(place))
