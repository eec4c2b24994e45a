"""Import bitsandbytes without torch's compiler."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec

import torch

_VARIABLE = "TORCHDYNAMO_DISABLE"


def import_bitsandbytes() -> None:
    """Import bitsandbytes if it is installed, without torch's compiler if there is a GPU.

    Call this before PEFT is imported, which imports bitsandbytes. bitsandbytes calls ``torch.compile`` on two
    operations for devices that have no kernels for them, and this imports Inductor. CUDA has the kernels; on a CPU
    beside a GPU the two operations run uncompiled.

    Cost:
        Saves a fifth of the time of all imports of a command (3 of 16.5 s on two cores).

    Source:
        own
    """
    if "bitsandbytes" in sys.modules or find_spec("bitsandbytes") is None:
        return
    given = os.environ.get(_VARIABLE)
    if given is None and torch.cuda.is_available():
        os.environ[_VARIABLE] = "1"
    try:
        import_module("bitsandbytes")
    finally:
        if given is None:
            os.environ.pop(_VARIABLE, None)
