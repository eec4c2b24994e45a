"""The command line: ``fastft --help`` lists the commands, and each has a module of its name."""

from lightning_fastft.cli.command import main

__all__ = ["main"]
