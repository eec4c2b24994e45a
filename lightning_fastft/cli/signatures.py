"""Read the options of a class from its source, without importing it: names, types, defaults and meanings."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_ENTRY = re.compile(r"^    \*{0,2}(\w+)(?: \([^)]*\))?: ?(.*)$")
_REFERENCE = re.compile(r"As in \w+\.?$")
# Sphinx roles, and code marks.
_MARKS = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`|``([^`]*)``")


class Option(NamedTuple):
    """An option of a class, read from its source.

    Args:
        type: The annotation; "" if there is none.
        default: The default as an expression; None if a value is required.
        meaning: Its description in the docstring, in one line.
    """

    type: str
    default: str | None
    meaning: str


@cache
def read_options(class_path: str) -> dict[str, Option]:
    """Return the options of a class by name, with those of its base class if it passes on ``**kwargs``.

    Modules that only import the class are followed.

    Returns:
        At most one option per name; none if no source has the class.

    Example:
        >>> list(read_options("lightning_fastft.FineTuner"))[:3]
        ['model', 'neftune_noise_alpha', 'tokenizer']
        >>> read_options("lightning_fastft.PackedDataModule")["max_tokens"].default
        '4096'
    """
    found, places, module = _find_class(class_path)
    if found is None:
        return {}
    base = found.bases[0] if found.bases else None
    base_path = places.get(base.id, f"{module}.{base.id}") if isinstance(base, ast.Name) else ""
    init = _find_init(found)
    if init is None:
        return read_options(base_path)
    meanings = {**_read_meanings(init), **_read_meanings(found)}
    inherited = read_options(base_path) if init.args.kwarg else {}
    own = {name: option._replace(meaning=meanings.get(name, "")) for name, option in _options_of(init).items()}
    for name, option in own.items():
        if name in inherited and (not option.meaning or _REFERENCE.match(option.meaning)):
            own[name] = option._replace(meaning=inherited[name].meaning)
    return {**own, **{name: option for name, option in inherited.items() if name not in own}}


def passes_on_options(class_path: str) -> bool:
    """Return whether a class passes ``**kwargs`` to several bases: it has more options than ``read_options`` finds.

    Example:
        >>> passes_on_options("lightning_fastft.FastFTDDPStrategy"), passes_on_options("lightning_fastft.FineTuner")
        (True, False)
    """
    found, _, _ = _find_class(class_path)
    init = _find_init(found)
    return found is not None and init is not None and init.args.kwarg is not None and len(found.bases) > 1


@cache
def _find_class(class_path: str) -> tuple[ast.ClassDef | None, dict[str, str], str]:
    """Return a class, the path of each name that its module imports, and its module; None if no source has it."""
    module, _, name = class_path.rpartition(".")
    file = _find_file(module)
    if file is None:
        return None, {}, module
    tree = ast.parse(file.read_text(encoding="utf-8"))
    places = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 0
        for alias in node.names
    }
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if found is None and places.get(name, class_path) != class_path:
        return _find_class(places[name])
    return found, places, module


def _find_init(found: ast.ClassDef | None) -> ast.FunctionDef | None:
    body = [] if found is None else found.body
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)


def _options_of(init: ast.FunctionDef) -> dict[str, Option]:
    """Return the parameters of an ``__init__`` after self, without meanings."""
    positional = init.args.args[1:]
    missing = len(positional) - len(init.args.defaults)
    pairs = [
        *zip(positional, [*[None] * missing, *init.args.defaults]),
        *zip(init.args.kwonlyargs, init.args.kw_defaults),
    ]
    return {
        argument.arg: Option(
            ast.unparse(argument.annotation) if argument.annotation else "",
            ast.unparse(default) if default is not None else None,
            "",
        )
        for argument, default in pairs
    }


def _read_meanings(node: ast.ClassDef | ast.FunctionDef) -> dict[str, str]:
    """Return the description of each argument in a docstring, in one line each."""
    found: dict[str, list[str]] = {}
    lines, name = inspect.cleandoc(ast.get_docstring(node) or "").partition("\nArgs:\n")[2].splitlines(), ""
    for line in lines:
        entry = _ENTRY.match(line)
        if entry:
            name = entry[1]
            found[name] = [entry[2]]
        elif line and not line.startswith(" "):
            break
        elif name:
            found[name].append(line.strip())
    return {
        name: _MARKS.sub(lambda mark: mark[1] or mark[2], " ".join(filter(None, words)))
        for name, words in found.items()
    }


def _find_file(module: str) -> Path | None:
    """Return the source of a module; only finding it does not import its package."""
    root, *parts = module.split(".")
    if root in sys.modules:
        origin = getattr(sys.modules[root], "__file__", None)
    else:
        spec = find_spec(root) if root else None
        origin = spec.origin if spec else None
    if origin is None or not origin.endswith(".py"):
        return None
    if not parts:
        return Path(origin)
    path = Path(origin).parent.joinpath(*parts)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
