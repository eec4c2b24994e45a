"""Refuse options that a config after them replaces: to the parser the last value counts, whichever it is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fastft.cli.signatures import read_options
from lightning_fastft.cli.words import DEFAULT_CLASSES, Option, find_configs, load_text, options_of
from lightning_fastft.core.errors import OptionError

_CONFIG_OPTIONS = ("config", "c")
# Options that also take a file with their part of a config.
_SECTIONS = ("model", "data", "trainer")


def check_order(words: Sequence[str]) -> None:
    """Refuse options that a later config sets to another value, unless they are given again after it.

    Args:
        words: Words of a command line.

    Raises:
        OptionError: A config replaces options before it, or there is no such config, or it is no text.
    """
    options = list(options_of(words))
    for position, config in enumerate(options):
        content = _read_config(config)
        if content is None:
            continue
        repeated = {option.key for option in options[position + 1 :]}
        replaced = [
            f"{shlex.join(option.words)} ({found})"
            for option in options[:position]
            if option.key not in repeated and (found := _find_replacement(option, content, given=options[:position]))
        ]
        if replaced:
            name = shlex.join(config.words)
            raise OptionError(
                f"{name} must come before options that it decides: {', '.join(replaced)}. Write it first: {name} "
                f"{' '.join(shlex.join(option.words) for option in options[:position])}"
            )


def _read_config(option: Option) -> Mapping[str, Any] | None:
    """Return the content of a config that an option names; None for other options, and for what the parser refuses."""
    if option.key in _CONFIG_OPTIONS:
        (file,) = find_configs([f"--config={option.value or ''}"])
        path = file.removeprefix("--config=")
    elif _is_section(option):
        path = option.value or ""
    else:
        return None
    try:
        content = load_text(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text ({error.reason}). Configs are YAML files.") from error
    except OSError:
        return None
    content = {option.key: content} if _is_section(option) else content
    return content if isinstance(content, dict) else None


def _find_replacement(option: Option, content: Mapping[str, Any], *, given: Sequence[Option]) -> str:
    """Return the value of a config that replaces an option's, as text; "" where the option keeps its effect.

    A config replaces an argument of the model, the data module or the Trainer as a whole: ``lora`` with all its fields,
    and all callbacks. Only the arguments of a class inside an argument are replaced one by one.
    """
    head, _, rest = option.key.partition(".")
    if head not in _SECTIONS:
        return _name_other(option, content, head)
    section = content.get(head)
    if not isinstance(section, dict):
        return ""
    if rest in ("", "class_path"):
        is_name = "." in (option.value or "") or (option.value or "").isidentifier()
        return _name_other(option, section, "class_path") if is_name and not _is_section(option) else ""
    arguments = section if head == "trainer" else section.get("init_args")
    name, _, inner = rest.removeprefix("init_args.").partition(".")
    default = DEFAULT_CLASSES.get(head)
    if default and "class_path" in section and name not in read_options(default) and not _is_class_given(option, given):
        # The parser reads the option for the class that is known so far.
        return f"an option of {section['class_path']!s:.60}"
    if not isinstance(arguments, dict):
        return ""
    value = arguments.get(name)
    if inner and isinstance(value, dict) and "class_path" in value:
        inside = value.get("init_args")
        return _name_other(option, inside, inner.removeprefix("init_args.")) if isinstance(inside, dict) else ""
    if inner and isinstance(value, dict) and _is_same(option.value, value.get(inner)):
        return ""
    return _name_other(option, arguments, name)


def _name_other(option: Option, values: Mapping[str, Any], name: str) -> str:
    """Return the value of a name as text if it differs from the option's; "" for the same value and for none."""
    if name not in values:
        return ""
    value = values[name]
    entries = value if option.appends and isinstance(value, list) else [value]
    if any(_is_same(option.value, entry) for entry in entries):
        return ""
    shown = value["class_path"] if isinstance(value, dict) and "class_path" in value else value
    return f"it sets {name}: {shown!s:.60}"


def _is_same(text: str | None, value: Any) -> bool:
    """Return whether an option's text means the value; a class may be named with or without its module."""
    if isinstance(value, dict) and "class_path" in value:
        value = value["class_path"]
    if text is None or text == str(value) or value in (load_text(text), [load_text(text)]):
        return True
    if isinstance(value, str):
        return text == value.rpartition(".")[2]
    try:
        return not isinstance(value, bool) and float(text) == float(value)
    except (TypeError, ValueError):
        return False


def _is_class_given(option: Option, given: Sequence[Option]) -> bool:
    """Return whether another class than the default may be known where an option is read."""
    head = option.key.partition(".")[0]
    known = (head, f"{head}.class_path", *_CONFIG_OPTIONS)
    return any(other.key in known for other in given[: given.index(option)])


def _is_section(option: Option) -> bool:
    return option.key in _SECTIONS and Path(option.value or "").suffix in (".yaml", ".yml")
