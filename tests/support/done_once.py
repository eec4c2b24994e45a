"""What libraries do again at every call, and what no process of the tests needs twice or at all.

Imported before Lightning, in the processes of pytest and in those that ranks are forked from.
"""

import contextlib
import functools
import importlib.metadata
from unittest import mock

import jinja2
import torch

# Each Trainer looks for callbacks in the metadata of all packages: five sixths of the time of making one.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)

# Each report of a run compiles the template of its page: 0.2 s. What it becomes depends on the options and filters too.
_compile_template, _templates = jinja2.Environment.compile, {}


def _compile_template_once(environment, source, *args, **options):
    taken = (vars(environment)[name] for name in ("autoescape", "trim_blocks", "lstrip_blocks", "undefined"))
    functions = (frozenset(found.items()) for found in (environment.filters, environment.tests))
    key = type(environment), source, args, *options.items(), *taken, *functions, *environment.extensions
    if key not in _templates:
        _templates[key] = _compile_template(environment, source, *args, **options)
    return _templates[key]


jinja2.Environment.compile = _compile_template_once

if not torch.cuda.is_available():
    # bitsandbytes prepares functions of LLM.int8(), which nothing here calls, for a compiler that takes 1 to 2 s to import.
    # A build of torch without a compiler raises too.
    with mock.patch("torch.compile", side_effect=RuntimeError), contextlib.suppress(ImportError):
        import bitsandbytes  # noqa: F401

    # torch.manual_seed seeds devices that are not there later, and for that keeps the stack of its caller three times:
    # 1.3 ms, ten thousand times.
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = lambda seed: None

    # Each logged value goes to its device, which copies all that Lightning knows of it; here it is there already.
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

    _ResultMetric.to = lambda metric, *args, **kwargs: metric
