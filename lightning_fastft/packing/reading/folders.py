"""Find the data files of folders and of glob patterns, in an order that no file system changes."""

from __future__ import annotations

import glob
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_fastft.core.errors import DataError, printable
from lightning_fastft.packing.reading.text_files import COMPRESSED, file_kind

_LOGGER = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
ALLOWED = f"{', '.join(SUFFIXES)} (text files also compressed: {', '.join(COMPRESSED)})"
# Suffixes of unsupported data files. A folder with such a file is an error; other files are skipped.
_OTHER_DATA = (
    ".zip",
    ".tar",
    ".tgz",
    ".7z",
    ".arrow",
    ".feather",
    ".orc",
    ".xls",
    ".xlsx",
    ".pkl",
    ".pickle",
    ".db",
    ".sqlite",
)
# Files of datasets.Dataset.save_to_disk.
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
# Written by litdata.optimize into its folder.
LITDATA_INDEX = "index.json"
# Names in the error on a pattern that matches nothing.
_MAX_NAMES = 12


def is_pattern(given: str) -> bool:
    """Return whether a text is a glob pattern; a file or folder of that very name is none."""
    return glob.has_magic(given) and not os.path.lexists(Path(given).expanduser())


def is_local(given: str) -> bool:
    """Return whether a text names files of this machine, and cannot be the id of a hub data set."""
    path = Path(given).expanduser()
    is_named = file_kind(path) in SUFFIXES or path.is_absolute() or given.startswith((".", "~"))
    # A hub id has one slash, inside.
    is_named |= given.endswith("/") or given.partition(":")[0].count("/") > 1
    return is_named or glob.has_magic(given) or path.exists()


def is_saved(folder: Path) -> bool:
    """Return whether ``datasets`` saved a data set, or its splits, into a folder."""
    return (folder / SAVED).is_file() or (folder / SAVED_SPLITS).is_file()


def is_litdata(folder: Path) -> bool:
    """Return whether ``litdata.optimize`` wrote a folder."""
    index = folder / LITDATA_INDEX
    if not index.is_file():
        return False
    try:
        return "chunks" in json.loads(index.read_bytes())
    except ValueError:
        return False


def find_in_folder(path: Path, *, given: str) -> list[Path]:
    """Return the data files of a folder tree, sorted; skip hidden files and outputs of this package.

    Raises:
        DataError: There is none, or one in an unsupported format.
    """
    chosen = _choose(_walk_files(path), root=path, given=f"The folder {given}")
    if not chosen:
        raise DataError(f"The folder {given} has no file that ends in {ALLOWED}.")
    return chosen


def find_matches(given: str) -> list[Path]:
    """Return the data files and saved data sets that a glob pattern matches, sorted; of other folders, their files.

    Raises:
        DataError: There is none, or one in an unsupported format.
    """
    pattern = os.path.expanduser(given)
    root = _fixed_part(pattern)
    found = [Path(match) for match in glob.glob(pattern, recursive=True)]
    saved = {path for path in found if path.is_dir() and is_saved(path)}
    files = {
        file
        for path in found
        for file in (_walk_files(path) if path.is_dir() else _check_regular([path]))
        if saved.isdisjoint(file.parents)
    }
    matches = sorted([*saved, *_choose(files, root=root, given=given)])
    if not matches:
        raise DataError(f"No data file matches {given}. {_describe_content(root)} Supported are {ALLOWED}.")
    return matches


def _fixed_part(pattern: str) -> Path:
    """Return the folder at the beginning of a glob pattern."""
    parts = Path(pattern).parts
    return Path(*parts[: next(number for number, part in enumerate(parts) if glob.has_magic(part))])


def _describe_content(folder: Path) -> str:
    """Return a sentence on the files and folders of a folder."""
    if not folder.is_dir():
        return f"There is no folder {folder} (searched from {Path.cwd()})."
    try:
        names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in folder.iterdir())
    except OSError as error:
        return f"The folder {folder} cannot be read: {error.strerror}."
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"The folder {folder.resolve()} has: {', '.join(names[:_MAX_NAMES]) or 'nothing'}{more}."


def _choose(found: Iterable[Path], *, root: Path, given: str) -> list[Path]:
    """Return the files to read, sorted; log the others."""
    files = sorted(file for file in found if not _is_no_data(file, root=root))
    chosen = [file for file in files if file_kind(file) in SUFFIXES]
    others = [file.relative_to(root) for file in files if file_kind(file) not in SUFFIXES]
    unread = [str(file) for file in others if file.suffix.lower() in (*_OTHER_DATA, *COMPRESSED)]
    if unread:
        raise DataError(
            f"{given} has {len(unread)} files in an unsupported format, for example {unread[0]}. Supported are "
            f"{ALLOWED}. Convert or remove the others, or list the files to train on."
        )
    if others:
        _LOGGER.info(
            "%s: skipped %d files that are not data, for example %s.",
            printable(given),
            len(others),
            printable(str(others[0])),
        )
    return chosen


def _walk_files(folder: Path) -> Iterator[Path]:
    """Yield all files of a folder tree; follow links, and visit each folder once."""
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        place = os.path.realpath(root)
        # Sorted: which of two links to one folder is followed must not depend on the file system.
        folders[:] = [] if place in seen else sorted(folders)
        if place not in seen:
            yield from _check_regular(Path(root, name) for name in names)
        seen.add(place)


def _check_regular(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield regular files; skip others unless they have the name of a data file."""
    for path in paths:
        if path.is_file():
            yield path
        elif file_kind(path) in SUFFIXES and not path.name.startswith((".", "_")):
            raise DataError(f"{path} is not a regular file (a broken link or a device). Repair or remove it.")


def _refuse_folder(error: OSError) -> None:
    raise DataError(f"The folder {error.filename} cannot be read: {error.strerror}.") from error


def _is_no_data(file: Path, *, root: Path) -> bool:
    """Return whether a file is hidden, or an output of this package: rejected rows or a cache entry."""
    is_hidden = any(part.startswith((".", "_")) for part in file.relative_to(root).parts)
    is_index = file.name == SAVED_SPLITS
    return is_hidden or is_index or file.match("rejected*.jsonl") or (file.parent / "ids.bin").exists()
