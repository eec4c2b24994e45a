"""Check values against the annotation of their option, if both are simple."""

from __future__ import annotations

import ast
from typing import Any

# Words that the parser may take for a truth value or for None.
_SPECIAL = frozenset({"", "~", "true", "false", "yes", "no", "on", "off", "y", "n", "none", "null"})
_NAMES = {"int": int, "float": float, "bool": bool}


def find_wrong_type(annotation: str, value: Any, *, text: str | None = None) -> str:
    """Return the parser's error for a value that certainly has another type; "" for all others.

    Whole numbers, numbers, truth values and literals, with or without None, are checked. The text is that of a command
    line; None in a file.

    Example:
        >>> find_wrong_type("int", "abc")
        "Expected a <class 'int'>. Got value: abc"
        >>> find_wrong_type("float | None", 0.5)
        ''
    """
    parts = _parts_of(ast.parse(annotation, mode="eval").body) if annotation else []
    kinds = [part for part in parts if part is not None]
    if len(kinds) != 1:
        return ""
    expected, is_wrong = _judge(kinds[0], value)
    if not is_wrong:
        return ""
    shown = value if text is None else text
    if None in parts:
        return f"{expected}\n- Expected a <class 'NoneType'>\nGiven value: {shown}"
    return f"{expected}. Got value: {shown}"


def _judge(kind: Any, value: Any) -> tuple[str, bool]:
    """Return the expected type in words, and whether a value certainly has another."""
    is_word = isinstance(value, str) and value.lower() not in _SPECIAL
    if isinstance(kind, ast.Subscript):
        choices = ast.literal_eval(kind.slice)
        choices = choices if isinstance(choices, tuple) else (choices,)
        names = ", ".join(repr(choice) for choice in choices)
        is_known = not all(isinstance(choice, str) for choice in choices) or value in choices
        return f"Expected a typing.Literal[{names}]", is_word and not is_known
    expected = f"Expected a <class '{kind.__name__}'>"
    if kind is int and isinstance(value, float):
        return expected, not value.is_integer()
    return expected, is_word and not _is_number(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parts_of(node: ast.expr) -> list[Any]:
    """Return the members of a union: types, literals as they are parsed, and None. Others are twice "other"."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_parts_of(node.left), *_parts_of(node.right)]
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        if node.value.id == "Optional":
            return [*_parts_of(node.slice), None]
        if node.value.id == "Literal":
            return [node]
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return [_NAMES[node.id]]
    if isinstance(node, ast.Constant) and node.value is None:
        return [None]
    return ["other", "other"]
