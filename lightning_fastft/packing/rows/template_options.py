"""Read the options of a chat template: TRL's chat_template_kwargs, a column of rows and an option for all rows."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from lightning_fastft.core.errors import OptionError
from lightning_fastft.packing.rows.rejects import MALFORMED, WRONG_TYPE, RowRejectedError

# The column of a row, and the option. The other names are arguments of apply_chat_template that are set for all rows.
OPTIONS = "chat_template_kwargs"
_SET_FOR_ALL = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)


def read_template_options(value: object) -> dict[str, Any]:
    """Return options by name, without those that are null.

    Args:
        value: An object, its JSON text, or None.

    Raises:
        RowRejectedError: The value is not an object of JSON values, or sets an argument that is set for all rows.

    Example:
        >>> read_template_options({"enable_thinking": False, "reasoning_effort": None})
        {'enable_thinking': False}
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowRejectedError(MALFORMED, f"{OPTIONS} is a string that is not valid JSON: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowRejectedError(WRONG_TYPE, f"{OPTIONS} must be an object, got {type(value).__name__}")
    options = {name: entry for name, entry in value.items() if entry is not None}
    for name in options:
        if not isinstance(name, str):
            raise RowRejectedError(WRONG_TYPE, f"{OPTIONS} has the name {name!r}; names must be strings")
        if name in _SET_FOR_ALL:
            raise RowRejectedError(WRONG_TYPE, f"{OPTIONS} sets {name!r}, which is set for all rows; remove it")
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        raise RowRejectedError(WRONG_TYPE, f"{OPTIONS} must hold JSON values: {error}") from None
    return options


def check_template_options(value: object) -> dict[str, Any]:
    """Return the options that are given for all rows, read as those of a row.

    Raises:
        OptionError: The value is not an object of JSON values, or sets an argument of apply_chat_template.
    """
    try:
        return read_template_options(value)
    except RowRejectedError as error:
        raise OptionError(f"{error.detail}.") from error


def check_template_reads(value: object, *, template: str | None) -> dict[str, Any]:
    """Return the options that are given for all rows, and refuse those that have no effect on a chat template.

    Raises:
        OptionError: As for ``check_template_options``; the template does not have the name of an option, or there is
            no template.
    """
    options = check_template_options(value)
    words = set(re.findall(r"[^\W\d]\w*", template or ""))
    for name in options:
        if template is None:
            raise OptionError(f"{OPTIONS} sets {name!r}, and the tokenizer has no chat template. Give chat_template.")
        if name not in words:
            near = difflib.get_close_matches(name, words, n=1)
            advice = f"Did you mean {near[0]!r}?" if near else "Remove it, or give another chat_template."
            raise OptionError(f"{OPTIONS} sets {name!r}, which the chat template does not read. {advice}")
    return options
