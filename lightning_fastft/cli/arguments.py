"""Parse the commands that do not take the options of a config: short errors, options by their full names only."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning_fastft.cli.usage import HELP
from lightning_fastft.core.errors import OptionError

COLUMNS_OPTION = "--data.columns."
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
        found, unknown = self.parse_known_args(words)
        if unknown:
            name = unknown[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            advice = f" Did you mean {near[0]}?" if near else ""
            raise OptionError(f"{self.prog} has no {kind} {name}.{advice} All options: {self.prog} --help.")
        return found

    def error(self, message: str) -> NoReturn:
        """Raise the reason as an OptionError."""
        choice = _CHOICE.fullmatch(message)
        if choice:
            message = f"{choice[1]} must be one of {choice[3]}, got {choice[2]}"
        raise OptionError(f"{self.prog}: {message}. Usage: {self._usage}. All options: {self.prog} --help.")


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
