"""Decide what a config may import: a short list of packages, and what the user names on the command line, never what a file names.

The check is jsonargparse's own: a path outside the list is refused before anything of it is imported, and what a path resolves to is checked again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jsonargparse import set_parsing_settings

from lightning_fastft.errors import OptionError

ALLOW_IMPORT_OPTION = "--allow-import"

_SCHEDULERS = (
    "get_scheduler",
    "get_constant_schedule",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_cosine_with_hard_restarts_schedule_with_warmup",
    "get_cosine_with_min_lr_schedule_with_warmup",
    "get_inverse_sqrt_schedule",
    "get_linear_schedule_with_warmup",
    "get_polynomial_decay_schedule_with_warmup",
    "get_wsd_schedule",
)
ALLOWED_PATHS = (
    "lightning",
    "lightning_fastft",
    "torch",
    "torchmetrics",
    "peft",
    "lightning.pytorch.cli.ReduceLROnPlateau",
    *(f"transformers{module}.{name}" for module in ("", ".optimization") for name in _SCHEDULERS),
)
# Parts of allowed packages that load code or files, start processes or replace this policy; the longer entry wins over the shorter one.
DENIED_PATHS = (
    "*",
    "lightning.app",
    "lightning.fabric.cli",
    "lightning.pytorch.cli",
    "lightning_fastft.cli",
    "lightning_fastft.cli_imports",
    "torch.classes",
    "torch.compiler",
    "torch.distributed.elastic",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "torch.distributed.rpc",
    "torch.distributed.run",
    "torch.export",
    "torch.fx",
    "torch.hub",
    "torch.jit",
    "torch.load",
    "torch.save",
    "torch.multiprocessing",
    "torch.ops",
    "torch.package",
    "torch.serialization",
    "torch.testing",
    "torch.utils.backend_registration",
    "torch.utils.benchmark",
    "torch.utils.bottleneck",
    "torch.utils.collect_env",
    "torch.utils.cpp_extension",
    "torch.utils.model_zoo",
    "torch.utils.tensorboard",
)


def take_allowed_imports(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without ``--allow-import``, and the packages that it named.

    Args:
        args: The words of the command line; ``--allow-import name`` and ``--allow-import=name`` may come anywhere and more than once.

    Raises:
        OptionError: The option has no value, or the value is no dotted import path.

    Example:
        >>> take_allowed_imports(["fit", "--allow-import", "my_package"])
        (['fit'], ['my_package'])
    """
    rest, allowed = [], []
    words = iter(args)
    for word in words:
        if word == ALLOW_IMPORT_OPTION:
            allowed.append(next(words, ""))
        elif word.startswith(f"{ALLOW_IMPORT_OPTION}="):
            allowed.append(word.partition("=")[2])
        else:
            rest.append(word)
    for path in allowed:
        if not all(part.isidentifier() for part in path.split(".")):
            raise OptionError(f"{ALLOW_IMPORT_OPTION} takes a dotted import path such as my_package or my_package.models, got {path!r}.")
    return rest, allowed


@contextmanager
def import_policy(allowed: Sequence[str] = ()) -> Iterator[None]:
    """Restrict what values of a config may import while the block runs; paths named in allowed are taken back afterwards.

    Args:
        allowed: Import paths that the user named on the command line, on top of ``ALLOWED_PATHS``.

    Raises:
        OptionError: A path is one that can never be allowed.
    """
    new = [path for path in allowed if path not in ALLOWED_PATHS]
    try:
        set_parsing_settings(
            import_path_denylist=[path for path in DENIED_PATHS if path not in new],
            import_path_allowlist=[*ALLOWED_PATHS, *new],
            # A value of type Any stays data, and a config is a local file.
            instantiate_subclass_spec_in_any=False,
            config_read_mode_fsspec_enabled=False,
            config_read_mode_urls_enabled=False,
        )
    except ValueError as error:
        raise OptionError(f"{ALLOW_IMPORT_OPTION} {' '.join(new)}: {error}") from error
    try:
        yield
    finally:
        if new:
            set_parsing_settings(import_path_denylist=new)
