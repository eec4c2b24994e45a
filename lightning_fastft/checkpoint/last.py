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
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.checkpoint.files import find_damage
from lightning_fastft.errors import DamagedCheckpointError

if TYPE_CHECKING:
    import lightning.pytorch as pl

LAST = "last"
STOPPED = "stopped-step="
_SUFFIX = ".ckpt"


def find_last(trainer: pl.Trainer) -> Path | None:
    """Return the checkpoint that ``ckpt_path="last"`` means; None where there is none yet.

    That is the newest of ``last*.ckpt`` and ``stopped-step=N.ckpt``, and of what OnExceptionCheckpoint wrote, in the folders of the run. Where the
    newest is damaged it is the newest intact checkpoint of these folders, whatever its name, and a warning says so.

    Raises:
        DamagedCheckpointError: There are checkpoints, and none is intact.

    Cost:
        Reads the newest checkpoint once, for its digest, and every damaged one.
    """
    everything = [place for folder in _folders(trainer) for place in _checkpoints(folder)]
    extra = [callback.ckpt_path for callback in trainer.callbacks if isinstance(callback, OnExceptionCheckpoint)]  # type: ignore[attr-defined]
    everything += [place for path in extra if (place := Path(path)).exists()]
    by_age = sorted(set(everything), key=lambda place: place.stat().st_mtime_ns, reverse=True)
    newest = next((place for place in by_age if place.name.startswith((LAST, STOPPED)) or str(place) in extra), None)
    if newest is None:
        return None
    damages = {}
    for place in [newest, *(place for place in by_age if place != newest)]:
        damages[place] = find_damage(place, needs_digest=place != newest)
        if damages[place] is None:
            if place != newest:
                rank_zero_warn(f'ckpt_path="last": {newest} is damaged ({damages[newest]}). The run goes on from the newest intact one, {place}.')
            elif newest.name.startswith(STOPPED):
                rank_zero_info(f'ckpt_path="last": the run goes on from {newest}.')
            return place
    listed = "; ".join(f"{place.name}: {damage}" for place, damage in list(damages.items())[:3])
    raise DamagedCheckpointError(
        f'ckpt_path="last": none of {len(damages)} checkpoints in {newest.parent} is intact ({listed}). Begin without ckpt_path, or bring an intact one.'
    )


def with_last(launcher: _Launcher | None) -> _Launcher:
    """Return a launcher that does what the given one does, and gives ``"last"`` our meaning in the processes that it starts."""
    if launcher is None:
        return _Here()
    kinds: dict[type, type] = {_SubprocessScriptLauncher: _Scripts, _MultiProcessingLauncher: _Processes}
    if type(launcher) in kinds:
        # The strategy has just made it, and nobody else holds it.
        launcher.__class__ = kinds[type(launcher)]
    return launcher


def run_with_last(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - an entry point of the Trainer
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

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        return run_with_last(function, *args, **kwargs)

    def kill(self, signum: int) -> None:
        """Nothing was started."""


class _Scripts(_SubprocessScriptLauncher):
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        return super().launch(functools.partial(run_with_last, function), *args, trainer=trainer, **kwargs)


class _Processes(_MultiProcessingLauncher):
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        return super().launch(functools.partial(run_with_last, function), *args, trainer=trainer, **kwargs)


def _folders(trainer: pl.Trainer) -> Iterable[Path]:
    """Return the folders that the run saves to, as far as they are known before its set-up."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    # Lightning's own rule for a callback without a folder, which depends on the logger.
    named = [str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer)) for callback in callbacks]  # type: ignore[attr-defined]
    folders = dict.fromkeys([*named, str(trainer.default_root_dir)])
    return [Path(folder) for folder in folders if "://" not in folder and Path(folder).is_dir()]


def _checkpoints(folder: Path) -> Iterable[Path]:
    return [place for place in folder.iterdir() if place.suffix == _SUFFIX and not place.name.startswith(".") and place.exists()]
