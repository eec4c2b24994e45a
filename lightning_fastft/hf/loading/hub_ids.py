"""Tell a path to nothing from a hub id, before transformers asks the hub for it."""

from __future__ import annotations

from pathlib import Path

from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.hub import ask_hub


def refuse_missing_path(name: str, *, option: str = "model") -> None:
    """Refuse a path to nothing, which the hub would be asked for; a hub id has one slash at most, inside.

    Raises:
        OptionError: There is no such folder or file; and if it may be a hub id, the hub cannot be asked for it.
    """
    if Path(name).exists():
        return
    is_path = name.startswith((".", "/", "~")) or name.endswith(("/", ".json")) or name.count("/") > 1
    parent, slash, _ = name.partition("/")
    if is_path or (slash and Path(parent).is_dir()):
        reason = "" if is_path else ask_hub(name, kind="model")
        if is_path or reason:
            raise OptionError(
                f"There is no folder or file {name!r} (searched from {Path.cwd()}){reason}. Correct {option}."
            )
