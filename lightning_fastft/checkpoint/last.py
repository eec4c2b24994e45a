"""ckpt_path="last": the newest intact checkpoint of the run's folders, those of stopped runs included."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.checkpoint.files import find_damage, load_file

if TYPE_CHECKING:
    import lightning.pytorch as pl

LAST = "last"
STOPPED = "stopped-step="
_SUFFIX = ".ckpt"


def find_last(trainer: pl.Trainer) -> Path | None:
    """Return the checkpoint that ``ckpt_path="last"`` means; None where there is none yet.

    That is the newest of ``last*.ckpt`` and ``stopped-step=N.ckpt``, and of what OnExceptionCheckpoint wrote, in the
    folders of the run. Where the newest is damaged it is the newest intact checkpoint of these folders, whatever its
    name, and a warning says so.

    Cost:
        Rank 0 reads the newest checkpoint once, for its digest, and every damaged one; the strategy hands its choice to
        the other ranks.
    """
    folders = _folders(trainer)
    extra = [Path(callback.ckpt_path) for callback in trainer.callbacks if isinstance(callback, OnExceptionCheckpoint)]  # type: ignore[attr-defined]
    places = {place for folder in folders for place in _checkpoints(folder)} | {
        place for place in extra if place.exists()
    }
    by_age = sorted(places, key=lambda place: place.stat().st_mtime_ns, reverse=True)
    newest = next((place for place in by_age if place.name.startswith((LAST, STOPPED)) or place in extra), None)
    if newest is None or trainer.global_rank != 0:
        return newest
    damage = find_damage(newest)
    if damage is None:
        return newest
    for place in by_age:
        if (
            place != newest
            and find_damage(place, needs_digest=True) is None
            and (trainer.state.fn != TrainerFn.FITTING or _is_resumable(place))
        ):
            rank_zero_warn(
                f'ckpt_path="last": {newest} is damaged ({damage}). The newest intact checkpoint is taken: {place}.'
            )
            return place
    # The strategy refuses it, on all ranks.
    return newest


def with_last(launcher: _Launcher | None) -> _Launcher:
    """Return a launcher that does what the given one does, and gives ``"last"`` our meaning in the processes that
    it starts.
    """
    if launcher is None:
        return _Here()
    kinds: dict[type, type] = {_SubprocessScriptLauncher: _Scripts, _MultiProcessingLauncher: _Processes}
    if type(launcher) in kinds:
        # The strategy has just made it, and nobody else holds it.
        launcher.__class__ = kinds[type(launcher)]
    return launcher


def run_with_last(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an entry point of the Trainer with the path that ``"last"`` means."""
    given = inspect.signature(function).bind(*args, **kwargs)
    trainer = getattr(function, "__self__", None)
    if given.arguments.get("ckpt_path") == LAST and trainer is not None:
        found = find_last(trainer)
        # Without one Lightning goes on without, and says so.
        given.arguments["ckpt_path"] = LAST if found is None else str(found)
    return function(*given.args, **given.kwargs)


class _Here(_Launcher):
    """Runs in this process."""

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        return run_with_last(function, *args, **kwargs)

    def kill(self, signum: int) -> None:
        """Nothing was started."""


class _Scripts(_SubprocessScriptLauncher):
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        return super().launch(functools.partial(run_with_last, function), *args, trainer=trainer, **kwargs)


class _Processes(_MultiProcessingLauncher):
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        return super().launch(functools.partial(run_with_last, function), *args, trainer=trainer, **kwargs)


def _folders(trainer: pl.Trainer) -> list[Path]:
    """Return the folders that the run saves to: those of its ModelCheckpoints, else the Trainer's."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    # Lightning's own rule for a callback without a folder, which depends on the logger.
    named = [str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer)) for callback in callbacks]  # type: ignore[attr-defined]
    folders = dict.fromkeys(named or [str(trainer.default_root_dir)])
    return [Path(folder) for folder in folders if "://" not in folder and Path(folder).is_dir()]


def _checkpoints(folder: Path) -> Iterable[Path]:
    return [
        place
        for place in folder.iterdir()
        if place.suffix == _SUFFIX and not place.name.startswith(".") and place.exists()
    ]


def _is_resumable(place: Path) -> bool:
    """Whether an intact checkpoint holds the state of the optimizers, and not the weights alone; folders always do."""
    return place.is_dir() or "optimizer_states" in load_file(place)
