"""Restrict the output paths of config files, so that a run never overwrites files of others.

Paths on the command line or in Python are trusted. For paths in a config file:

- a file must be inside the current folder and have the suffix of its kind;
- a folder must be inside the current folder, or be new, empty, or contain a run;
- no part of a path may be hidden (begin with a dot); links are resolved first;
- names that are joined to a folder (``filename``, ``name``, ``version``) must not leave it.

An existing file that no run wrote is never replaced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import Namespace
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.cli import SaveConfigCallback

from lightning_fastft.cli.imports import is_within
from lightning_fastft.cli.words import load_text
from lightning_fastft.core.checks import check_replaceable
from lightning_fastft.core.errors import OptionError

# Options with an output folder.
FOLDERS = frozenset(
    {
        "artifact_location",
        "cache_dir",
        "default_root_dir",
        "dir",
        "dirpath",
        "log_dir",
        "nvme_path",
        "offline_directory",
        "root_dir",
        "save_dir",
        "tb_log_dir",
    }
)
# Options with an output file, and its suffix.
FILES = {"rejected_path": ".jsonl", "path": ".html", "exclude_batches_path": ".json"}
# Options that are only read, or are not paths.
_READ = frozenset({"class_path", "config", "dict_kwargs"})
# Options that are joined to a folder.
_JOINED = ("filename", "name", "version", "sub_dir")
# Patterns of files in a folder with a run or a cache.
_MARKS = (
    "*.ckpt",
    "checkpoints",
    "hparams.yaml",
    "events.out.tfevents.*",
    "lightning_logs",
    "version_*",
    "wandb",
    "mlruns",
    "run_report.html",
    "rejected.jsonl",
    "[0-9a-f]" * 32,
)
_HIDDEN_ALLOWED = frozenset({".", "..", ".cache"})
# Remote stores.
_REMOTE = re.compile(r"^(s3|s3a|gs|gcs|az|abfs|abfss|adl|hdfs|http|https|databricks)://", re.IGNORECASE)
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*:")
# Home folders, Windows shares, and local stores.
_ELSEWHERE = re.compile(r"^(~[^/ ]*(/|$)|\\\\|(file|local|sqlite):)", re.IGNORECASE)
# First bytes of a file of SaveConfigCallback.
_CONFIG_HEAD = b"# lightning"


class _Value(NamedTuple):
    """A string of a config with its last and full option name; is_joined if it joins several options."""

    name: str
    text: str
    key: str
    is_joined: bool = False


def given_on_command_line(words: Sequence[str]) -> set[tuple[str, str]]:
    """Return last option name and text of every value on a command line, including those in YAML values.

    Example:
        >>> words = ["fit", "--config", "a.yaml", "--data.cache_dir", "/x", "--trainer.logger={save_dir: /y}"]
        >>> sorted(given_on_command_line(words))
        [('cache_dir', '/x'), ('save_dir', '/y')]
    """
    given: set[tuple[str, str]] = set()
    for word, following in zip(words, [*words[1:], ""]):
        option, equals, text = word.partition("=")
        if not option.startswith("-") or option in ("--config", "-c"):
            continue
        text = text if equals else following
        name = option.lstrip("-").rstrip("+").rpartition(".")[2]
        given.add((name, text))
        content = load_text(text)
        if isinstance(content, (dict, list)):
            given |= {(value.name, value.text) for value in _strings(content, name)}
            given.discard((name, text))
    return given


def check_outputs(config: Namespace | Mapping[str, Any], *, words: Sequence[str], allowed: Sequence[str] = ()) -> None:
    """Reject output paths of a config file that break the rules of this module.

    Values on the command line, and classes of allowed packages, are trusted.

    Raises:
        OptionError: A path breaks a rule; the message says how to give it on the command line.
    """
    given = given_on_command_line(words)
    data = config.get("data")
    values = [
        *_strings(config.get("trainer"), "trainer", allowed=allowed),
        *(value for value in _strings(data, "data", allowed=allowed) if value.name in ("rejected_path", "cache_dir")),
    ]
    for value in values:
        # Plain words such as Trainer(profiler="simple") pass all checks.
        if (value.name, value.text) not in given and not (
            value.is_joined and value.name in {name for name, _ in given}
        ):
            _check_value(value)


class SaveConfig(SaveConfigCallback):
    """Save the config of a run as Lightning does, but replace only files that were saved this way."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Choose the file name, then save."""
        if self.save_to_log_dir and not self.already_saved:
            # trainer.log_dir broadcasts, so all ranks must read it.
            folder = trainer.log_dir
            # The logger of a tracking server has no folder, and Lightning saves only into one.
            self.save_to_log_dir = folder is not None
            folder = trainer.default_root_dir if folder is None else folder
            if trainer.is_global_zero and not _REMOTE.match(str(folder)):
                self._find_place(Path(folder))
            if trainer.is_global_zero and not self.save_to_log_dir:
                get_filesystem(folder).makedirs(folder, exist_ok=True)
                place = os.path.join(folder, self.config_filename)
                self.parser.save(self.config, place, skip_unset=False, overwrite=True, multifile=self.multifile)
        super().setup(trainer, pl_module, stage)

    def _find_place(self, folder: Path) -> None:
        """Use another name if a config of the user exists, as happens without a logger."""
        try:
            check_replaceable("The config of the run", folder / self.config_filename, is_ours=_is_saved_config)
        except OptionError:
            self.config_filename = f"saved_{self.config_filename}"
            check_replaceable("The config of the run", folder / self.config_filename, is_ours=_is_saved_config)


def _is_saved_config(head: bytes) -> bool:
    return head.startswith(_CONFIG_HEAD)


def _strings(value: Any, key: str, *, allowed: Sequence[str] = ()) -> Iterator[_Value]:
    """Yield the strings of a config and the joined folders of loggers; skip classes under allowed."""
    if isinstance(value, (Namespace, Mapping)):
        content = vars(value) if isinstance(value, Namespace) else value
        if is_within(str(content.get("class_path")), allowed):
            return
        for name, item in content.items():
            yield from _strings(item, f"{key}.{name}", allowed=allowed)
        yield from _logger_folders(content, key)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _strings(item, key, allowed=allowed)
    elif isinstance(value, (str, os.PathLike)) or hasattr(value, "relative"):
        # Path objects of jsonargparse keep the given text.
        text = str(getattr(value, "relative", value))
        yield _Value(key.rpartition(".")[2], text, key)


def _logger_folders(content: Mapping[str, Any], key: str) -> Iterator[_Value]:
    """Yield the folder of a logger with a fixed version, whose files would be replaced."""
    version = content.get("version")
    if version is None:
        return
    parts = [content.get("name"), f"version_{version}" if isinstance(version, int) else version, content.get("sub_dir")]
    for name in ("save_dir", "root_dir"):
        folder = content.get(name)
        if isinstance(folder, (str, os.PathLike)):
            yield _Value(
                name, os.path.join(folder, *(str(part) for part in parts if part)), f"{key}.{name}", is_joined=True
            )


def _check_value(value: _Value) -> None:
    if value.name in _READ or _REMOTE.match(value.text) or not value.text:
        return
    if "\0" in value.text:
        raise OptionError(f"{value.key} has a NUL character: {value.text!r}.")
    if value.name in FOLDERS:
        _check_folder(value)
    elif value.name in FILES and (value.name != "path" or ".callbacks" in value.key):
        _check_file(value)
    elif _leaves(value.text) or (value.name in _JOINED and value.text.startswith(".")):
        raise _refusal(value, "leaves the folder that it is joined to")


def _check_folder(value: _Value) -> None:
    place = _place_of(value)
    if os.path.lexists(place) and not place.is_dir():
        raise _refusal(value, "is not a folder")
    if _is_inside(place, Path.cwd()) and not value.is_joined:
        return
    try:
        is_foreign = (
            place.is_dir() and any(place.iterdir()) and not any(next(place.glob(mark), None) for mark in _MARKS)
        )
    except OSError as error:
        raise _refusal(value, f"cannot be read ({error.strerror})") from error
    if is_foreign:
        raise _refusal(value, "is a folder of other files, with no run in it")


def _check_file(value: _Value) -> None:
    suffix = FILES[value.name]
    place = _place_of(value)
    if place.suffix != suffix:
        raise _refusal(value, f"does not end in {suffix}")
    if not _is_inside(place, Path.cwd()):
        raise _refusal(value, f"is outside of the current folder, {Path.cwd()}")
    if place.is_dir() or Path(value.text).is_symlink():
        raise _refusal(value, "is a folder or a link")
    if value.name == "exclude_batches_path":
        # Lightning replaces this list; other files are checked by their classes.
        check_replaceable(value.key, place, is_ours=lambda head: head.lstrip().startswith(b"["))


def _place_of(value: _Value) -> Path:
    """Return the resolved path; reject local URLs and hidden parts."""
    if "::" in value.text or (_URL.match(value.text) and not Path(value.text).drive):
        raise _refusal(value, "is a URL")
    place = Path(os.path.realpath(os.path.expanduser(value.text)))
    here = Path.cwd().resolve()
    shown = place.relative_to(here) if _is_inside(place, here) else place
    written = () if os.path.isabs(value.text) else Path(value.text).parts
    for part in (*shown.parts, *written):
        if part.startswith(".") and part not in _HIDDEN_ALLOWED:
            raise _refusal(value, f"has the hidden part {part!r}")
    return place


def _is_inside(place: Path, folder: Path) -> bool:
    return place.is_relative_to(folder.resolve())


def _leaves(text: str) -> bool:
    """Return whether a name that is joined to a folder would leave it or be hidden in it."""
    parts = re.split(r"[/\\]", text)
    is_hidden = len(parts) > 1 and any(part.startswith(".") and part != "." for part in parts)
    return is_hidden or ".." in parts or os.path.isabs(text) or _ELSEWHERE.match(text) is not None


def _refusal(value: _Value, reason: str) -> OptionError:
    option = value.key.partition(" ")[0].replace(".init_args", "")
    return OptionError(
        f"{value.key}: {value.text!r} {reason}; a config file may not write there. "
        f"Give it on the command line, which is trusted: --{option} PATH. Or give a new folder, or a path in the "
        "current folder."
    )
