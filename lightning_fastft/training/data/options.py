"""The options of a DataModule: which values are allowed, and their defaults on this machine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from lightning_fastft.core.checks import check_float, check_path
from lightning_fastft.core.cores import count_usable_cores
from lightning_fastft.core.errors import OptionError
from lightning_fastft.packing.reading.sources import is_dataset, is_mapping
from lightning_fastft.packing.reading.streams import is_stream

MAX_PROCESSES = 8
# More than any machine has cores: a larger number is a slip.
MOST_WORKERS = 1024
# Names of data sets are parts of the names of metrics, of files and of tables.
_SET_NAME = re.compile(r"[\w.-]+")


def check_paths(paths: object) -> None:
    """Check the training data, which may be a stream, or a mixture: a mapping from sources to weights."""
    if is_stream(paths):
        return
    if not is_mapping(paths) or is_dataset(paths):
        check_source("paths", paths)
        return
    if not paths:
        raise OptionError("paths is an empty mapping. Give each source with its weight, such as {a.jsonl: 0.7}.")
    for source, weight in paths.items():
        check_path("A source in paths", source)
        check_float(f"The weight of {source} in paths", weight, low=1e-9)


def check_source(name: str, source: object) -> None:
    """Refuse values that cannot be data; the content of lists and files is checked when it is read."""
    if isinstance(source, (str, os.PathLike)):
        check_path(name, source)
    elif is_mapping(source) and is_dataset(source):
        raise OptionError(
            f"{name} is a {type(source).__name__} with the splits {', '.join(map(repr, source))}. Give one of them, "
            f"such as data[{next(iter(source), 'train')!r}]; val_paths, test_paths and predict_paths take all of them."
        )
    elif source is not None and not isinstance(source, (list, tuple)) and not is_dataset(source):
        kind, advice = type(source).__name__, ""
        if hasattr(source, "columns"):
            advice = (
                " Give a table as datasets.Dataset.from_pandas(table), or a pyarrow.Table as datasets.Dataset(table)."
            )
        elif isinstance(source, Iterable):
            advice = " Give the rows of an iterable as list(rows)."
        # The text of a table is long.
        found = f"{source!r} ({kind})" if isinstance(source, (int, float, bytes)) else kind
        raise OptionError(f"{name} must be a file, a folder, a data set, a list of them, or rows, got {found}.{advice}")


def check_evaluated(name: str, sources: object) -> None:
    """Check data that is not trained: one data set, or a mapping from names to data sets, such as a DatasetDict."""
    if not is_mapping(sources):
        check_source(name, sources)
        return
    if not sources:
        raise OptionError(f"{name} is an empty mapping. Give each data set with its name, such as {{math: a.jsonl}}.")
    for key, source in sources.items():
        if isinstance(source, (int, float)) or source is None:
            raise OptionError(
                f"{name} maps the name {key!r} to {source!r}. Give each name its data, such as {{math: a.jsonl}}; only "
                "paths takes weights, and null in place of the mapping is no data."
            )
        if not isinstance(key, str) or not _SET_NAME.fullmatch(key):
            raise OptionError(f"{name} names a data set {key!r}. Names have letters, digits, '_', '-' and '.'.")
        check_source(f"{name}[{key!r}]", source)


def check_optional_path(name: str, path: str | None) -> str | None:
    """Return path if it is None or can name a file or folder."""
    if path is not None:
        check_path(name, path)
    return path


def find_cache_dir() -> str:
    """Return this package's folder in the user's cache folder.

    Raises:
        OptionError: The user has no home folder, as in a container with a user id that it does not know.
    """
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise OptionError(
            "This user has no home folder, in which tokens would be cached. Set HOME, or give a folder with "
            "--data.cache_dir FOLDER (fastft init: --cache-dir FOLDER)."
        ) from error
    return str(base / "lightning_fastft")


def count_processes() -> int:
    """Return one process per usable core, 8 at most."""
    return min(MAX_PROCESSES, count_usable_cores())
