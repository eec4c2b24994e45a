"""The options of a DataModule: which values are allowed, and their defaults on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fastft.core.checks import check_bool, check_choice, check_float, check_int, check_path, check_share
from lightning_fastft.core.cores import count_usable_cores
from lightning_fastft.core.errors import OptionError
from lightning_fastft.packing.reading.sources import is_mixture
from lightning_fastft.packing.reading.streams import is_stream

MAX_PROCESSES = 8
# More than any machine has cores: a larger number is a slip.
MOST_WORKERS = 1024


def check_sources(sources: Mapping[str, object]) -> None:
    """Check the values that name data, by their option."""
    for name, source in sources.items():
        check_source(name, source)


def check_paths(paths: object) -> None:
    """Check the training data, which may be a stream, or a mixture: a mapping from sources to weights."""
    if is_stream(paths):
        return
    if not is_mixture(paths):
        check_source("paths", paths)
        return
    if not paths:
        raise OptionError("paths is an empty mapping. Give each source with its weight, such as {a.jsonl: 0.7}.")
    for source, weight in paths.items():
        check_path("A source in paths", source)
        check_float(f"The weight of {source} in paths", weight, low=1e-9)


def find_weights(paths: Any) -> dict[str, float] | None:
    """Return the weights of a mixture; None for other training data."""
    return dict(paths) if is_mixture(paths) else None


def check_source(name: str, source: object) -> None:
    """Refuse values that cannot be data; the content of lists and files is checked when it is read."""
    if isinstance(source, (str, os.PathLike)):
        check_path(name, source)
    elif source is not None and not isinstance(source, (list, tuple)) and not hasattr(source, "column_names"):
        raise OptionError(
            f"{name} must be a file, a folder, a data set, a list of them, or rows, got {source!r} "
            f"({type(source).__name__})."
        )


def check_plan_options(*, seed: int, pad_to_max: bool, share_prompts: bool | str) -> None:
    """Check the options of a plan of packs."""
    # The shuffle mixes 64 bits: a larger seed would give the order of a smaller one.
    check_int("seed", seed, low=0, high=2**64 - 1)
    check_bool("pad_to_max", pad_to_max)
    check_choice("share_prompts", share_prompts, ("auto", True, False))


def check_reading_options(
    *,
    num_workers: int,
    pin_memory: bool | str,
    cache_dir: str | None,
    num_proc: int | None,
    max_reject_share: float,
    rejected_path: str | None,
    show_progress: bool,
) -> None:
    """Check the options of reading and tokenising."""
    check_int("num_workers", num_workers, low=0, high=MOST_WORKERS)
    check_choice("pin_memory", pin_memory, ("auto", True, False))
    check_share("max_reject_share", max_reject_share)
    check_bool("show_progress", show_progress)
    for name, path in (("cache_dir", cache_dir), ("rejected_path", rejected_path)):
        if path is not None:
            check_path(name, path)
    if num_proc is not None:
        check_int("num_proc", num_proc, low=1, high=MOST_WORKERS)


def find_cache_dir() -> str:
    """Return this package's folder in the user's cache folder."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(base / "lightning_fastft")


def count_processes() -> int:
    """Return one process per usable core, 8 at most."""
    return min(MAX_PROCESSES, count_usable_cores())
