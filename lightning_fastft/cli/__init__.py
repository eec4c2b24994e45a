"""The command line: ``fastft --help`` lists the commands, and each has a module of its name.

Words enter; printed lines, files and an exit status leave. ``command`` finds the module of a word; fit, validate and
test go to Lightning's CLI in ``lightning_cli``. ``mistakes`` answers wrong options before torch is imported.
``recipe`` is behind init, ``trained`` behind chat, eval, export and push. Read ``command``, then ``lightning_cli``.
"""

from lightning_fastft.cli.command import main

__all__ = ["main"]
