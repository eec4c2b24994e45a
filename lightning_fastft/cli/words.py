"""Words of the command line: options, names of configs, checkpoints, and options that the parser does not know.

Imports nothing heavy, because the command answers mistakes from here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_fastft.cli.yaml_text import check_size
from lightning_fastft.core.errors import OptionError

# Commands that call a method of the Trainer.
TRAINER_COMMANDS = ("fit", "validate", "test")
ALLOW_IMPORT_OPTION = "--allow-import"
# Values of ckpt_path that Lightning resolves itself.
CHECKPOINT_WORDS = ("last", "hpc", "registry")
# Classes that are used where no other is named, and what differs from the Trainer's own defaults.
DEFAULT_CLASSES = {"model": "lightning_fastft.FineTuner", "data": "lightning_fastft.PackedDataModule"}
TRAINER_CLASS = "lightning_fastft.cli.trainer.FastFTTrainer"
TRAINER_DEFAULTS = {"strategy": "fastft"}
CONFIG_FOLDER = Path(__file__).parents[1] / "configs"
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(\+?)(?:=(.*))?", re.DOTALL)


class Option(NamedTuple):
    """An option as it was written, its dotted name, and its value; None where no word is its value."""

    words: tuple[str, ...]
    key: str
    value: str | None
    appends: bool


def config_names() -> list[str]:
    """Return the names of the shipped configs."""
    return sorted(path.stem for path in CONFIG_FOLDER.glob("*.yaml"))


def find_configs(words: Sequence[str]) -> list[str]:
    """Return the arguments with names of shipped configs replaced by file paths.

    What follows ``--config`` or ``-c`` is a file, or else the name of a shipped config.

    Raises:
        OptionError: There is neither a file nor a shipped config of that name.
    """
    found, is_config = [], False
    for word in words:
        option, equals, value = word.partition("=")
        if option == "-config":
            raise OptionError("-config has one dash. Did you mean --config?")
        if is_config:
            word = _find_config(word)
        elif equals and option in ("--config", "-c"):
            word = f"{option}={_find_config(value)}"
        is_config = not is_config and word in ("--config", "-c")
        found.append(word)
    return found


def options_of(words: Sequence[str]) -> Iterator[Option]:
    """Yield the options among words, as argparse takes them."""
    remaining = list(words)
    while remaining and remaining[0] != "--":
        word = remaining.pop(0)
        found = _OPTION.fullmatch(word)
        if not found or not (word.startswith("--") or found[1] == "c"):
            continue
        following = [remaining.pop(0)] if found[3] is None and remaining and not remaining[0].startswith("--") else []
        yield Option((word, *following), found[1], following[0] if following else found[3], bool(found[2]))


def load_text(text: str) -> Any:
    """Return the value of a YAML text; None where it has none."""
    try:
        check_size(text)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def take_option(words: Sequence[str], name: str, *, default: str) -> tuple[str, list[str]]:
    """Return the value of an option that the parser does not know, and the arguments without it.

    Raises:
        OptionError: The option has no value.

    Example:
        >>> take_option(["--out", "here", "--config", "demo"], "--out", default=".")
        ('here', ['--config', 'demo'])
    """
    values, rest = _split_option(words, name)
    if "" in values:
        raise OptionError(f"{name} needs a value.")
    return values[-1] if values else default, rest


def _split_option(words: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """Return the values of an option, "" for one without a value, and the arguments without it."""
    values, rest, remaining = [], [], iter(words)
    for word in remaining:
        option, equals, text = word.partition("=")
        if option == name:
            values.append(text if equals else next(remaining, ""))
        else:
            rest.append(word)
    return values, rest


def _find_config(name: str) -> str:
    if not name:
        raise OptionError("--config has no value. Give a file or the name of a shipped config: --config NAME|FILE.")
    if Path(name).is_file():
        return name
    path = CONFIG_FOLDER / f"{name}.yaml"
    if name in config_names():
        return str(path)
    path = Path(name)
    if path.is_dir():
        raise OptionError(f"{name} is a folder; --config takes a file or the name of a shipped config.")
    files = [str(file) for file in path.parent.glob("*.y*ml")] if path.suffix in (".yaml", ".yml") else []
    near = difflib.get_close_matches(name, [*files, *config_names()], n=1)
    advice = f" Did you mean {near[0]}?" if near else ""
    raise OptionError(
        f"There is no file and no shipped config named {name!r}.{advice} Shipped configs: {', '.join(config_names())}."
    )


def take_allowed_imports(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without ``--allow-import``, and the packages that it names.

    ``--allow-import name`` and ``--allow-import=name`` may occur anywhere and repeatedly.

    Raises:
        OptionError: The option has no value, or the value is not a dotted import path.

    Example:
        >>> take_allowed_imports(["fit", "--allow-import", "my_package"])
        (['fit'], ['my_package'])
    """
    allowed, rest = _split_option(args, ALLOW_IMPORT_OPTION)
    for path in allowed:
        if not all(part.isidentifier() for part in path.split(".")):
            raise OptionError(
                f"{ALLOW_IMPORT_OPTION} takes a dotted import path such as my_package or my_package.models, got "
                f"{path!r}."
            )
    return rest, allowed


def check_checkpoint(path: object) -> None:
    """Check that a ckpt_path exists, or is a word for one.

    Raises:
        OptionError: There is no such file or folder.
    """
    if path == "best":
        raise OptionError(
            "ckpt_path: 'best' is known only to the process that trained. Name the file that ModelCheckpoint wrote."
        )
    if path is None:
        return
    place, is_word = Path(str(path)), str(path) in CHECKPOINT_WORDS
    if ":" in str(path) and not place.exists():
        raise OptionError(
            f"ckpt_path must be a local file or folder, or 'last', got {path!r}. Copy the checkpoint to a "
            "local folder first."
        )
    if not is_word and not place.exists():
        raise OptionError(f"ckpt_path: there is nothing at {path} (searched from {Path.cwd()}).")
    if not is_word and (kind := _kind_of_other(place)):
        raise OptionError(f"ckpt_path: {path} is no checkpoint, but {kind}.")
    if inside := name_checkpoint(place):
        raise OptionError(f"ckpt_path: {path} is a folder with checkpoints. Name one of them: --ckpt_path {inside}")


def _kind_of_other(path: Path) -> str:
    """Return what a file or folder is that is certainly no checkpoint, and the option for it; "" for others."""
    if path.suffix in (".safetensors", ".gguf"):
        return f"a file of weights. Train its model with --model.model {path.parent}"
    if (path / "adapter_config.json").is_file():
        return f"a folder of adapters. Train them further with --model.adapter {path}"
    if (path / "config.json").is_file():
        return f"the folder of a model. Train it with --model.model {path}"
    return "an empty folder" if path.is_dir() and not any(path.iterdir()) else ""


def name_checkpoint(folder: Path) -> str:
    """Return the checkpoint that a folder of checkpoints was probably named for; "" if it holds none or is itself one.

    Sharded checkpoints are folders with a ``meta.pt``.
    """
    if not folder.is_dir() or (folder / "meta.pt").is_file():
        return ""
    found = sorted(folder.glob("*.ckpt"), key=lambda file: (file.name != "last.ckpt", -file.stat().st_mtime))
    return str(found[0]) if found else ""
