"""The names under which transformers finds our attention and our experts."""

from __future__ import annotations

from lightning_fastft.moe.interface import register_experts
from lightning_fastft.patches import attention


def register() -> None:
    """Make ``attn_implementation="fastft"`` and ``experts_implementation="fastft"`` known to transformers; calling it
    again changes nothing.

    For models that are loaded or switched by hand; our strategies and callbacks do it themselves.

    Example:
        >>> from transformers import AttentionInterface
        >>> register()
        >>> "fastft" in AttentionInterface()
        True
    """
    attention.register()
    register_experts()
