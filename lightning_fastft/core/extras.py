"""The optional packages: one table of extras, which errors, ``fastft doctor`` and the docs read."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple


class Extra(NamedTuple):
    """An extra of the package.

    Args:
        modules: What it lets Python import.
        enables: What works with it.
    """

    modules: tuple[str, ...]
    enables: str


# The requirements are in pyproject.toml; a test compares the names.
EXTRAS = {
    "qlora": Extra(("bitsandbytes",), "QLoRA: a frozen base in NF4, and 8-bit optimizer states of bitsandbytes"),
    "hopper": Extra(("cudnn",), "cuDNN attention, the fastest for documents of 4,096 tokens and more"),
    "hybrid": Extra(("fla",), "packed documents of hybrids (Qwen3.5, Kimi Linear, Mamba-2) on a GPU"),
    "vision": Extra(("PIL", "torchvision"), "images of vision-language models"),
    "wandb": Extra(("wandb",), "Lightning's WandbLogger"),
    "gguf": Extra(("gguf", "sentencepiece"), "fastft export --gguf and --ollama, with a clone of llama.cpp"),
    "eval": Extra(("lm_eval",), "fastft eval --tasks"),
    "litdata": Extra(("litdata",), "training data from folders of LitData"),
}


def pip_line(*extras: str) -> str:
    """Return the command that installs extras.

    Example:
        >>> pip_line("qlora", "hopper")
        "pip install 'lightning-fastft[qlora,hopper]'"
    """
    assert set(extras) <= {*EXTRAS, "all"}, extras
    return f"pip install 'lightning-fastft[{','.join(extras)}]'"


def missing_modules(extra: str) -> list[str]:
    """Return the modules of an extra that are not installed, without importing any."""
    return [name for name in EXTRAS[extra].modules if find_spec(name) is None]


def version_of(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def find_extra(module: str) -> str:
    """Return the extra that has a module; "" for none."""
    return next((name for name, extra in EXTRAS.items() if module.partition(".")[0] in extra.modules), "")
