"""The command line: ``fastft fit | validate | test | data | doctor | demo``."""

from lightning_fastft.cli.command import main

__all__ = ["main"]
