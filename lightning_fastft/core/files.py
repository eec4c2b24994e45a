"""Files that must survive a crash."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lightning_fastft.core.errors import OptionError


def sync_file(file: IO[bytes]) -> None:
    """Flush a file and wait until its content is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def find_write_obstacle(folder: Path) -> str:
    """Return why a folder cannot be created or written to; "" if it can. No folder is left behind.

    Example:
        >>> find_write_obstacle(Path("/proc/runs"))
        '/proc/runs cannot be created (No such file or directory)'
    """
    place, missing = folder.absolute(), Path()
    while not place.exists() and place != place.parent:
        place, missing = place.parent, place
    if not place.is_dir():
        return f"{place} is a file"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} is not writable"
    if missing != Path():
        # A file system such as /proc refuses although its permissions allow.
        try:
            missing.mkdir()
            missing.rmdir()
        except FileExistsError:
            return ""
        except OSError as error:
            return f"{missing} cannot be created ({error.strerror})"
    return ""


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file that holds an object.

    Raises:
        OptionError: It is not JSON, or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OptionError(f"{file} is not JSON: {error}. Copy the file again.") from error
    if not isinstance(content, dict):
        raise OptionError(f"{file} must hold a JSON object, got {type(content).__name__}.")
    return content


@contextmanager
def edited_json(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of a JSON file, which the block changes, and write it in the form of transformers."""
    content = json.loads(file.read_text(encoding="utf-8"))
    yield content
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
