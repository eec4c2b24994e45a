"""Parse the commands that do not take the options of a config: short errors, options by their full names only."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from lightning_fastft.cli.other_names import advise_value, find_option, hint_argument, is_unnamed
from lightning_fastft.cli.usage import HELP
from lightning_fastft.core.checks import check_share
from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.rows.formats import EXTRA_COLUMNS, TOO_LONG
from lightning_fastft.packing.rows.template_options import check_template_options

COLUMNS_OPTION = "--data.columns."
# Options of PackedDataModule that its errors advise, as argparse takes them.
_DATA_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "too_long": {"choices": TOO_LONG},
    "max_reject_share": {"type": float},
    "extra_columns": {"choices": EXTRA_COLUMNS},
    "chat_template": {},
    "chat_template_kwargs": {},
    "cache_dir": {},
}
_ADVISED = re.compile(rf"(?:--data\.)?\b(max_tokens|{'|'.join(_DATA_OPTIONS)})\b(?:='?([\w.]*\w)'?)?")
_MISSING = re.compile(r"the following arguments are required: (.+)")
# Lower, "force" would be "for".
_NEAR = 0.76
_CHOICE = re.compile(r"argument (.+): invalid choice: (.+) \(choose from (.+)\)")


class Arguments(argparse.ArgumentParser):
    """Parse the words of one command; its help is in ``usage.py``.

    Args:
        command: Name of the command.

    Example:
        >>> arguments = Arguments("chat")
        >>> arguments.add_argument("--system") and None
        >>> arguments.read(["--sistem", "x"])
        Traceback (most recent call last):
            ...
        lightning_fastft.core.errors.OptionError: fastft chat has no option --sistem. Did you mean --system? All options: fastft chat --help.
    """  # noqa: E501

    def __init__(self, command: str) -> None:
        super().__init__(prog=f"fastft {command}", add_help=False, allow_abbrev=False)
        # The first line of the help.
        self._usage = HELP[command].partition("\n")[0]

    def read(self, words: Sequence[str]) -> Any:
        """Return the values of the options.

        Raises:
            OptionError: An option is unknown or lacks its value, or a required argument is missing.
        """
        # The parser names a missing argument first, often the one whose name is wrong.
        before = words[: words.index("--")] if "--" in words else words
        names = [word.partition("=")[0] for word in before if re.match("--?[A-Za-z]", word)]
        if wrong := [name for name in names if name not in self._option_string_actions]:
            self._refuse(wrong[0])
        found, unknown = self.parse_known_args(words)
        if unknown:
            self._refuse(unknown[0])
        return found

    def error(self, message: str) -> NoReturn:
        """Raise the reason as an OptionError."""
        if choice := _CHOICE.fullmatch(message):
            given = str(ast.literal_eval(choice[2]))
            near = difflib.get_close_matches(given.lower(), re.findall(r"[\w.]+", choice[3]), n=1)
            advice = advise_value(choice[1].lstrip("-"), given) or (f"Did you mean {near[0]}? " if near else "")
            message = f"{choice[1]} must be one of {choice[3]}, got {choice[2]}. {advice}"
        elif missing := _MISSING.fullmatch(message):
            message = f"needs {missing[1]}. Usage: {self._usage}. "
        else:
            message = re.sub(r"argument (\S+): expected one argument", r"\1 needs a value", message) + ". "
        colon = " " if message.startswith("needs") else ": "
        raise OptionError(f"{self.prog}{colon}{message}All options: {self.prog} --help.")

    def _refuse(self, word: str) -> NoReturn:
        """Raise an OptionError for an option or an argument that the command does not have."""
        name, is_option = word.partition("=")[0], word.startswith("-")
        kind, advice = (
            ("option", self._advise(name.lstrip("-"))) if is_option else ("argument", f"Usage: {self._usage}. ")
        )
        raise OptionError(f"{self.prog} has no {kind} {name}. {advice}All options: {self.prog} --help.")

    def _advise(self, name: str) -> str:
        """Return what was probably meant, as a sentence with a space behind it; "" if nothing is near."""
        known = [option.lstrip("-") for option in self._option_string_actions]
        unnamed = [action.dest for action in self._actions if not action.option_strings]
        if other := hint_argument(name, known=known):
            return f"{other} "
        if is_unnamed(name, unnamed):
            return f"Write its value without a name: {self._usage}. "
        dashed = name.replace("_", "-").lower()
        near = [option for option in known if option.startswith(dashed) or dashed.startswith(f"{option}-")]
        near = near or difflib.get_close_matches(dashed, known, n=1, cutoff=_NEAR)
        if near or name.startswith("columns."):
            return f"Did you mean --{near[0] if near else f'data.{name}'}? "
        option = find_option(name) if self.prog.endswith(" init") else ""
        if not option or option.endswith("."):
            return f"{option} ".lstrip()
        return f"Change it in the config that init writes, or give it to fastft fit: --{option}. "


def take_columns(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the columns that ``--data.columns.OURS YOURS`` names, as ``fastft fit`` spells it, and the other words.

    Raises:
        OptionError: A column has no name.

    Example:
        >>> take_columns(["--data", "a.csv", "--data.columns.prompt", "question"])
        ({'prompt': 'question'}, ['--data', 'a.csv'])
    """
    columns, rest, remaining = {}, [], iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if not name.startswith(COLUMNS_OPTION):
            rest.append(word)
            continue
        value = value if equals else next(remaining, "")
        if not value or name == COLUMNS_OPTION:
            raise OptionError(f"{name} needs a name, for example {COLUMNS_OPTION}prompt question.")
        columns[name.removeprefix(COLUMNS_OPTION)] = value
    return columns, rest


def read_path(text: str) -> Path:
    """Return a path; ``~`` is the home folder also where no shell has expanded it, as in ``--out=~/a``."""
    return Path(text).expanduser()


def add_data_options(arguments: Arguments, *, without: Sequence[str] = ()) -> None:
    """Add the options of PackedDataModule that its errors advise; they are None where they are not given."""
    for name, form in _DATA_OPTIONS.items():
        if name not in without:
            arguments.add_argument(_dashed(name), **form)


def read_data_options(given: argparse.Namespace, *, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns and the added options that were given, as PackedDataModule takes them.

    Raises:
        OptionError: A value is not allowed.
    """
    found = {name: getattr(given, name, None) for name in _DATA_OPTIONS}
    options: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    if "max_reject_share" in options:
        check_share(_dashed("max_reject_share"), options["max_reject_share"])
    if "chat_template_kwargs" in options:
        options["chat_template_kwargs"] = read_variables(options["chat_template_kwargs"])
    if options.get("cache_dir") == "null":
        options["cache_dir"] = None
    return {"columns": dict(columns), **options} if columns else options


def read_variables(text: str | None) -> dict[str, Any]:
    """Return the variables of ``--chat-template-kwargs``; none where it is not given.

    Raises:
        OptionError: They are not a JSON object.
    """
    with data_options_named():
        return check_template_options(text)


@contextmanager
def data_options_named() -> Iterator[None]:
    """Spell options in errors of the data in a block as ``add_data_options`` does.

    Example:
        >>> with data_options_named():
        ...     raise DataError("Raise max_tokens to 90, or use too_long='truncate'.")
        Traceback (most recent call last):
            ...
        lightning_fastft.core.errors.DataError: Raise --max-tokens to 90, or use --too-long truncate.
    """
    try:
        yield
    except (DataError, OptionError) as error:
        message = _ADVISED.sub(lambda found: _dashed(found[1]) + (f" {found[2]}" if found[2] else ""), str(error))
        raise type(error)(message) from error


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
