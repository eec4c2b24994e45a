"""Watchdog process of a rank: end the job if a rank is dead, stopped or hung.

It is a process, because a thread stops with its rank under SIGSTOP or while other code holds the GIL. It is run by its
path and imports only the standard library, so it starts fast and uses about ten MiB. A rank writes its state to shared
memory, without a system call per step. The watchdogs of all ranks exchange their states in files, one write per second,
because a torch.distributed store would be inside one of the ranks.
"""

from pathlib import Path

# The script that is run.
ENTRY = str(Path(__file__).with_name("__main__.py"))
