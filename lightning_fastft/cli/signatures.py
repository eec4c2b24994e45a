"""Read the parameters of a class from its source, without importing it."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path


def read_parameters(class_path: str) -> list[str]:
    """Return the parameters of a class, with those of its base class where it passes on ``**kwargs``.

    Args:
        class_path: Import path of the class; modules that only import it are followed.

    Returns:
        The names, at most one of each; none where no source has the class.

    Example:
        >>> read_parameters("lightning_fastft.FineTuner")[:3]
        ['model', 'neftune_noise_alpha', 'tokenizer']
    """
    module, _, name = class_path.rpartition(".")
    file = _find_file(module)
    if file is None:
        return []
    tree = ast.parse(file.read_text(encoding="utf-8"))
    places = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 0
        for alias in node.names
    }
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if found is None:
        return read_parameters(places[name]) if places.get(name, class_path) != class_path else []
    base = found.bases[0] if found.bases else None
    base_path = places.get(base.id, f"{module}.{base.id}") if isinstance(base, ast.Name) else ""
    init = next((node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
    if init is None:
        return read_parameters(base_path)
    names = [argument.arg for argument in (*init.args.args[1:], *init.args.kwonlyargs)]
    return list(dict.fromkeys(names + read_parameters(base_path))) if init.args.kwarg else names


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
