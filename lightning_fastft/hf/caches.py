"""Names of the keyword in which decoder layers and mixers get a cache of keys, values or states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# "cache" since transformers 5.24; before, "past_key_values", and "cache_params" for recurrent mixers.
CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")


def has_cache(keywords: Mapping[str, Any]) -> bool:
    """Return whether the keywords of a call hold a cache.

    Example:
        >>> has_cache({"cache": None, "use_cache": True}), has_cache({"past_key_values": object()})
        (False, True)
    """
    return any(keywords.get(name) is not None for name in CACHE_KEYWORDS)
