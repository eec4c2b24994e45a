"""What libraries do again at every call, and what no process of the tests needs twice or at all.

Imported before Lightning, in the processes of pytest and in those that ranks are forked from.
"""

import functools
import importlib.metadata

import torch

# Each Trainer looks for callbacks in the metadata of all packages: five sixths of the time of making one.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)

if not torch.cuda.is_available():
    # torch.manual_seed seeds devices that are not there later, and for that keeps the stack of its caller three times:
    # 1.3 ms, ten thousand times.
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = lambda seed: None
