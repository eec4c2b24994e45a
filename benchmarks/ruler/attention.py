"""Describe the attention of a system, for its record."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from benchmarks.ruler.flash_attn_stand_in import SUMMARY


def describe_attention(model: Any) -> str:
    """Return the attention that a transformers model is set to, and the packages that may compute it, if imported.

    Example:
        >>> describe_attention(type("Model", (), {"config": type("C", (), {"_attn_implementation": "sdpa"})}))
        'sdpa'
    """
    name = str(getattr(getattr(model, "config", None), "_attn_implementation", "unknown"))
    return f"{name} ({packages})" if name != "sdpa" and (packages := ", ".join(_packages())) else name


def _packages() -> list[str]:
    packages = []
    for module, package in (("flash_attn", "flash-attn"), ("xformers", "xformers")):
        if module in sys.modules:
            try:
                about = metadata.metadata(package)
            except metadata.PackageNotFoundError:
                continue
            packages.append(SUMMARY if about["Summary"] == SUMMARY else f"{package} {about['Version']}")
    return packages
