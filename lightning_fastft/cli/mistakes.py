"""Answer certain mistakes of a command line within a second, before torch and Lightning are imported.

The parser judges every line afterwards. What is not certain to be refused is left to it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from lightning_fastft.cli.answers import PLACES, explain_refusal
from lightning_fastft.cli.option_order import check_order
from lightning_fastft.cli.signatures import passes_on_options, read_options
from lightning_fastft.cli.types import find_wrong_type
from lightning_fastft.cli.usage import parser_options
from lightning_fastft.cli.words import (
    DEFAULT_CLASSES,
    TRAINER_CLASS,
    TRAINER_COMMANDS,
    Option,
    check_checkpoint,
    find_configs,
    load_text,
    options_of,
    take_allowed_imports,
    take_option,
)
from lightning_fastft.cli.yaml_text import check_size
from lightning_fastft.core.errors import OptionError, printable
from lightning_fastft.packing.reading.sources import check_exists, list_sources

# Options that the parser does not know, by command.
PLAN_OPTIONS = ("--gpu", "--vram-gib", "--host-gib", "--document-tokens")
CLUSTER_OPTIONS = ("--gpus", "--nodes", "--node-link", "--network", "--step-ms")
_OWN_OPTIONS = {"data": ("--out",), "plan": (*PLAN_OPTIONS, *CLUSTER_OPTIONS)}
# Data that a command opens, by data module and option. Example paths of a config may be missing where doctor reads it.
_OPENED: dict[str, dict[str, tuple[str, ...]]] = {
    "PackedDataModule": {
        "paths": ("fit", "data", "doctor"),
        "val_paths": ("fit", "validate", "data", "doctor"),
        "test_paths": ("test", "doctor"),
    },
    "RolloutDataModule": {"prompts": ("fit", "doctor")},
}
# Help, the whole config, and -cFILE.
_LEFT_TO_PARSER = re.compile(r"-h|-c[^=]|--(.*\.)?help\b|--print_")
# Files of a model, of a tokenizer (enough for fastft data), of adapters and of LitGPT; other answers are theirs.
_MODEL_FILES = ("config.json", "tokenizer_config.json", "adapter_config.json", "lit_model.pth")
# Parts of a value that names a class.
_CLASS_KEYS = frozenset({"class_path", "init_args", "dict_kwargs"})


class _Line(NamedTuple):
    """Contents of a command line and its configs: options, import paths of classes, values, and keys of sections.

    Args:
        options: In their order.
        classes: Import paths by "model" and "data"; None for one that only the parser can tell.
        values: By (key, name of the argument), with whether a config file has it; the last one counts.
        sections: Of config files, in their order: the key, the class if it is one of ours, and the content.
    """

    options: list[Option]
    classes: dict[str, list[str | None]]
    values: dict[tuple[str, str], tuple[Any, bool]]
    sections: list[tuple[str, str, dict[str, Any]]]


def check_words(command: str, words: Sequence[str]) -> None:
    """Refuse a config, an option, a checkpoint or data that is not there.

    Raises:
        OptionError: There is no such config or checkpoint, or a config replaces options before it.
        DataError: There is no such file or folder of data.
        SystemExit: An option or a key of a config is unknown, or a value has another type; the answer is written as
            the parser writes it.
    """
    for name in _OWN_OPTIONS.get(command, ()):
        _, words = take_option(words, name, default="")
    words, allowed = take_allowed_imports(words)
    words = [*(("--config", "demo") if command == "demo" else ()), *words]
    check_order(words)
    found = find_configs(words)
    # A package of the user may have classes of our names, and make files. Help is the parser's.
    if allowed or any(_LEFT_TO_PARSER.match(word) for word in found):
        return
    line = _read_line(found)
    if line is None:
        return
    for key, owner, content in line.sections:
        _check_section(command, key, owner=owner, content=content)
    _check_options(command, line)
    if command in TRAINER_COMMANDS and isinstance(path := line.values.get(("", "ckpt_path"), (None,))[0], str):
        check_checkpoint(path)
    _check_model(line)
    _check_sources(command, line)


def _read_line(words: Sequence[str]) -> _Line | None:
    """Return what the words say, or None where only the parser can tell."""
    line = _Line(list(options_of(words)), {"model": [], "data": []}, {}, [])
    for option in line.options:
        head, _, name = option.key.partition(".")
        name = name.removeprefix("init_args.")
        if head in ("config", "c"):
            if not _read_config(option.value, line):
                return None
        elif head in line.classes and name in ("", "class_path"):
            line.classes[head].append(_class_path(option.value))
        elif head in line.classes and name in _CLASS_KEYS:
            line.classes[head].append(None)
        elif option.key == "ckpt_path":
            line.values["", "ckpt_path"] = (_value_of(option), False)
        elif head in line.classes and "." not in name:
            line.values[head, name] = (_value_of(option), False)
    for head, paths in line.classes.items():
        if not paths:
            paths.append(DEFAULT_CLASSES[head])
    return line


def _read_config(name: str | None, line: _Line) -> bool:
    """Add the classes and values of a config; return whether it is as simple as configs are."""
    try:
        text = Path(name or "").read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return False
    _refuse_broken(name or "", text)
    content = load_text(text)
    if content is None and not text.strip():
        _refuse(f"The config {name} is empty", "fit")
    if isinstance(content, (list, str)):
        _refuse(f"The config {name} must be a mapping with the keys model, data and trainer", "fit")
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        return False
    line.sections.append(("", "", content))
    if "ckpt_path" in content:
        line.values["", "ckpt_path"] = (content["ckpt_path"], True)
    for head, paths in line.classes.items():
        section = content.get(head)
        if isinstance(section, dict) and set(section) <= _CLASS_KEYS:
            if "class_path" in section:
                paths.append(_class_path(section["class_path"]))
            arguments = section.get("init_args")
            line.values.update(
                {(head, key): (value, True) for key, value in arguments.items()} if isinstance(arguments, dict) else {}
            )
            _add_section(line, head, section)
        elif section is not None:
            paths.append(None)
    _add_trainer(line, content.get("trainer"))
    return True


def _refuse_broken(name: str, text: str) -> None:
    """Refuse a text that is not YAML, with the place."""
    try:
        check_size(text)
        twice = _find_twice(yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        place = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        advice = " YAML is indented with spaces, not tabs." if "'\\t'" in str(error.problem) else ""
        if Path(name).suffix in (".jsonl", ".csv", ".tsv", ".parquet"):
            advice = f" Did you mean --data.paths {name}?"
        _refuse(f"Problems parsing config {name}{place}: {error.problem}.{advice}", "fit")
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    if twice:
        _refuse(f"Problems parsing config {name}, line {twice[1]}: {twice[0]} is there twice. Keep one of them.", "fit")


def _find_twice(node: yaml.Node | None) -> tuple[str, int] | None:
    """Return a key that a mapping has twice, with its line: YAML takes the last of them without a word."""
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    return key.value, key.start_mark.line + 1
                seen.add(key.value)
            parts.append(value)
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    return next(filter(None, map(_find_twice, parts)), None)


def _add_trainer(line: _Line, trainer: object) -> None:
    """Add the section of the Trainer, and those of its strategy and callbacks."""
    if isinstance(trainer, dict):
        line.sections.append(("trainer", TRAINER_CLASS, trainer))
        for name in ("strategy", "callbacks"):
            entries = trainer.get(name)
            for entry in entries if isinstance(entries, list) else [entries]:
                _add_section(line, f"trainer.{name}", entry)


def _add_section(line: _Line, key: str, entry: object) -> None:
    """Add the arguments of an entry that names a class of ours."""
    if not isinstance(entry, dict) or not set(entry) <= _CLASS_KEYS or not isinstance(entry.get("init_args"), dict):
        return
    owner = _class_path(entry.get("class_path"))
    if owner is not None:
        line.sections.append((key, owner, entry["init_args"]))


def _value_of(option: Option) -> str | list[Any] | dict[Any, Any] | None:
    """Return a text, a list or a mapping that the parser takes as such; None for other values."""
    value = load_text(option.value or "")
    return value if not option.appends and (value == option.value or isinstance(value, (list, dict))) else None


def _class_path(name: object) -> str | None:
    """Return the public path of a class of ours; None for others, which only the parser can judge."""
    root, _, last = str(name).rpartition(".")
    path = f"lightning_fastft.{last}"
    return path if root.partition(".")[0] in ("", "lightning_fastft") and read_options(path) else None


def _check_section(command: str, key: str, *, owner: str, content: dict[str, Any]) -> None:
    """Refuse an unknown key of a section of a config file, and a value of another type than its option."""
    options = read_options(owner) if owner else {}
    known = options or parser_options(command)
    for name, value in content.items():
        if name not in known and owner and passes_on_options(owner):
            # Of a base class; the parser knows.
            continue
        if name not in known:
            _refuse_key(command, key, name=name, owner=owner)
        if name in options and (reason := find_wrong_type(options[name].type, value)):
            _refuse(_locate(key, owner, name=name, reason=reason), command)


def _refuse_key(command: str, key: str, *, name: str, owner: str) -> NoReturn:
    """Refuse an unknown key of a config file."""
    if key not in ("", "trainer"):
        _refuse(
            f"Parser key \"{key}\":\nProblem with given class_path '{owner}':\nOption '{name}' is not accepted", command
        )
    dotted = f"{key}.{name}".lstrip(".")
    if command in TRAINER_COMMANDS:
        _refuse(f"Subcommand '{command}' does not accept option '{dotted}'", command, _names_of(command))
    group = f"Group '{key}' does not accept option '{name}'" if key else f"Option '{name}' is not accepted"
    _refuse(group, command, _names_of(command))


def _locate(key: str, owner: str, *, name: str, reason: str) -> str:
    """Return the error for a value, with its option as in the parser's messages."""
    if key == "trainer":
        return f'Parser key "trainer.{name}":\n{reason}'
    return f'Parser key "{key}":\nProblem with given class_path \'{owner}\':\nParser key "{name}":\n{reason}'


def _names_of(command: str) -> list[str]:
    own = (name.removeprefix("--") for name in _OWN_OPTIONS.get(command, ()))
    return [*parser_options(command), *own, *(f"trainer.{name}" for name in read_options(TRAINER_CLASS))]


def _check_options(command: str, line: _Line) -> None:
    known, in_trainer = parser_options(command), read_options(TRAINER_CLASS)
    unknown: list[str] = []
    for option in line.options:
        head, _, rest = option.key.partition(".")
        name = rest.removeprefix("init_args.").partition(".")[0]
        if head not in known or (head == "trainer" and name and name not in in_trainer):
            unknown += option.words
        elif option.value is None:
            _refuse(f"argument --{option.key}: expected one argument", command)
        elif option.key in line.classes and (meant := _option_meant(option)):
            _refuse(
                f"argument --{option.key}: it names a class, and {option.value} is none. "
                f"Did you mean --{meant} {option.value}?",
                command,
            )
        elif head == "trainer":
            _check_value(command, option, head=head, name=rest, owner=TRAINER_CLASS)
        elif head in line.classes and name and not _may_accept(name, head, line):
            owner = line.classes[head][-1]
            _refuse(
                f"Parser key \"{head}\":\nProblem with given class_path '{owner}':\nOption '{name}' is not accepted",
                command,
            )
        elif head in line.classes and len(set(line.classes[head])) == 1:
            owner = line.classes[head][-1] or ""
            _check_value(command, option, head=head, name=rest.removeprefix("init_args."), owner=owner)
    if unknown:
        _refuse(f"unrecognized arguments: {' '.join(unknown)}", command, _names_of(command))


def _option_meant(option: Option) -> str:
    """Return the option for a model or a file that was given where a class is expected; "" for a class or a config."""
    value = option.value or ""
    if Path(value).suffix in (".yaml", ".yml"):
        return ""
    is_place = "/" in value or Path(value).exists()
    return PLACES[option.key] if is_place else ""


def _check_value(command: str, option: Option, *, head: str, name: str, owner: str) -> None:
    """Refuse a value of another type than its option."""
    if name not in read_options(owner) or option.value is None or option.appends:
        return
    reason = find_wrong_type(read_options(owner)[name].type, load_text(option.value), text=option.value)
    if reason:
        _refuse(_locate(head, owner, name=name, reason=reason), command)


def _may_accept(name: str, head: str, line: _Line) -> bool:
    """Return whether one of the named classes accepts an option, or the default class before another is named."""
    return name in _CLASS_KEYS or any(
        path is None or name in read_options(path) for path in (*line.classes[head], DEFAULT_CLASSES[head])
    )


def _refuse(message: str, command: str, options: Sequence[str] = ()) -> NoReturn:
    """Answer as the parser does: the reason and hints on standard error, and status 2."""
    program = f"fastft {command if command in TRAINER_COMMANDS else 'fit'}"
    answer = explain_refusal(message, options=options, program=program)
    sys.stderr.write(printable(answer, keeps_lines=True))
    sys.exit(2)


def _check_model(line: _Line) -> None:
    """Refuse a file or a folder that holds no model, in place of a model."""
    value, _ = line.values.get(("model", "model"), (None, False))
    path = Path(value) if isinstance(value, str) and len(value) < 256 else Path("/")
    if path.suffix == ".ckpt" and path.exists():
        raise OptionError(
            f"model.model: {value} is a checkpoint. Continue its run with --ckpt_path {value}, or write it as a model "
            f"first: fastft export {value} FOLDER --merge."
        )
    if path.is_file() and path.suffix != ".json":
        raise OptionError(f"model.model: {value} is a file. Give the folder of a model, or its name on huggingface.co.")
    if path != Path("/") and path.is_dir() and not any((path / name).exists() for name in _MODEL_FILES):
        raise OptionError(f"model.model: the folder {value} has no config.json, so it holds no model.")


def _check_sources(command: str, line: _Line) -> None:
    paths = set(line.classes["data"])
    owner = paths.pop() if len(paths) == 1 else None
    for name, commands in _OPENED.get((owner or "").rpartition(".")[2], {}).items():
        value, is_in_file = line.values.get(("data", name), (None, False))
        if command not in commands or (is_in_file and command == "doctor"):
            continue
        sources = list_sources(value)
        if all(isinstance(source, str) for source in sources):
            for source in sources:
                check_exists(source)
