"""The ``fastft`` command: dispatch to subcommands, and turn errors into exit codes."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from lightning_fastft.cli.answers import explain_missing_files
from lightning_fastft.cli.mistakes import check_words
from lightning_fastft.cli.noise import without_noise
from lightning_fastft.cli.usage import HELP, USAGE
from lightning_fastft.cli.words import TRAINER_COMMANDS, config_names
from lightning_fastft.core.errors import FastFTError, OptionError, printable

# Commands that take the options of a config.
_CONFIGURED = (*TRAINER_COMMANDS, "data", "doctor", "plan", "demo")


def main(args: Sequence[str] | None = None) -> int:
    """Run the ``fastft`` command and return its exit status.

    Args:
        args: Words of the command line without the name of the program; None for those of this process.
    """
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE.format(configs=", ".join(config_names())))
        return 0
    if words[0] in HELP and {"-h", "--help"} & set(words):
        sys.stdout.write(HELP[words[0]])
        return 0
    try:
        if words[0] in _CONFIGURED:
            check_words(words[0], words[1:])
        with without_noise():
            return _run(words[0], words[1:])
    except FastFTError as error:
        sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        return 1
    # transformers raises either for a missing or damaged model folder.
    except (OSError, ValueError) as error:
        answer = explain_missing_files(error)
        if not answer:
            raise
        sys.stderr.write(printable(answer, keeps_lines=True))
        return 1


def _run(command: str, words: list[str]) -> int:
    # Imported on use, because each command has imports that the others do not need.
    if command in TRAINER_COMMANDS:
        from lightning_fastft.cli.lightning_cli import FastFTCLI

        FastFTCLI([command, *words])
        return 0
    if command in HELP:
        # Each has a module of its name.
        run: Callable[[Sequence[str]], int] = getattr(
            import_module(f"lightning_fastft.cli.{command}"), f"run_{command}"
        )
        return run(words)
    near = difflib.get_close_matches(command, (*TRAINER_COMMANDS, *HELP), n=1)
    advice = f" Did you mean {near[0]}?" if near else ""
    raise OptionError(f"Unknown command {command!r}.{advice} Allowed are {', '.join((*TRAINER_COMMANDS, *HELP))}.")
