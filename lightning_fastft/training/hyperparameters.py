"""Hyperparameters of tuners and DataModules in the form that every logger takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.parsing import AttributeDict


def to_logged(saved: Mapping[str, Any]) -> AttributeDict:
    """Return hyperparameters with JSON text for each mapping whose keys are not identifiers, such as paths or patterns.

    Loggers make names of the keys of nested mappings, and MLflow refuses many characters in a name.

    Example:
        >>> dict(to_logged({"lora": {"r": 4, "rank_pattern": {"^.*q_proj$": 8}}}))
        {'lora': {'r': 4, 'rank_pattern': '{"^.*q_proj$": 8}'}}
    """
    return AttributeDict({name: _to_logged(value) for name, value in saved.items()})


def _to_logged(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if all(str(key).isidentifier() for key in value):
        return {key: _to_logged(entry) for key, entry in value.items()}
    return json.dumps(value, ensure_ascii=False, default=str)
