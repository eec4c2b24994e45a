import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "lightning_fastft"
# (first match wins) place -> its floor and its step inside the floor; imports go to a lower floor, or inside one to the
# same or an earlier step.
PLACES = (
    ("__init__.py", (9, 0)),
    ("__main__.py", (11, 0)),
    ("optim.py", (9, 0)),
    ("core/", (0, 0)),
    ("packing/", (1, 0)),
    ("kernels/*/op.py", (1, 2)),
    ("kernels/", (1, 1)),
    ("planner/", (1, 0)),
    *((f"checkpoint/{name}.py", (1, 0)) for name in ("archives", "atomic", "digests", "signing", "files")),
    ("activations/", (2, 0)),
    ("hf/", (3, 0)),
    ("mixers/", (4, 0)),
    ("patches/", (4, 1)),
    ("moe/", (4, 2)),
    ("fused/", (5, 0)),
    ("graphs/", (6, 0)),
    ("estimate/", (6, 0)),
    ("checkpoint/", (7, 0)),
    ("strategies/", (7, 1)),
    ("training/", (7, 1)),
    ("demo/", (7, 1)),
    ("monitor/", (8, 0)),
    ("callbacks/", (8, 0)),
    ("fabric/", (9, 0)),
    ("cli/", (10, 0)),
    ("configs/", (10, 0)),
)
# Third-party packages and the only places that may import them, at any depth of a file.
# The estimate builds models on the meta device.
_HUGGING_FACE = ("hf/", "mixers/", "patches/", "moe/", "fused/", "estimate/")
ONLY_IN = {
    "lightning": (7, 11),
    "transformers": _HUGGING_FACE,
    "peft": _HUGGING_FACE,
    "bitsandbytes": _HUGGING_FACE,
    "fla": ("mixers/",),
    "litgpt": ("hf/",),
    "triton": ("kernels/*/triton.py",),
    "jsonargparse": ("cli/",),
}
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def is_at(path: Path, place: str) -> bool:
    text = path.as_posix()
    return path.match(place) if "*" in place else text.startswith(place)


def floor_of(path: Path) -> tuple[int, int]:
    found = next((floor for place, floor in PLACES if is_at(path, place)), None)
    assert found is not None, f"{path} has no floor: add it to PLACES, and to DESIGN's list of places"
    return found


@functools.cache
def imports_of(source: str) -> set[tuple[str, bool]]:
    """Return (dotted name, whether it is for types only) of every import in a file, at any depth."""
    nodes = list(ast.walk(ast.parse(source)))
    for_types = {
        id(node)
        for block in nodes
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {(alias.name, id(node) in for_types) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # "from package import module" names a module as well as "from package.module import name" does.
            found |= {(f"{node.module}.{alias.name}", id(node) in for_types) for alias in node.names} | {
                (str(node.module), id(node) in for_types)
            }
    return found


def own_file(name: str) -> Path | None:
    """Return the file of a module of ours; None for foreign modules and for names inside modules."""
    package, _, rest = name.partition(".")
    base = ROOT / rest.replace(".", "/") if rest else ROOT
    if package != ROOT.name:
        return None
    if base.with_suffix(".py").is_file():
        return base.with_suffix(".py").relative_to(ROOT)
    return (base / "__init__.py").relative_to(ROOT) if rest and (base / "__init__.py").is_file() else None


def faults_of(path: Path, source: str) -> list[str]:
    """Return the imports of a file that break the order of the house."""
    floor, faults = floor_of(path), []
    for name, is_for_types in imports_of(source):
        target = own_file(name)
        if target is not None and floor_of(target) > floor and not is_for_types:
            faults.append(f"{path} (floor {floor}) imports {target} (floor {floor_of(target)})")
        allowed = ONLY_IN.get(name.partition(".")[0])
        if allowed is None or is_for_types:
            continue
        is_allowed = (
            floor[0] >= allowed[0] if isinstance(allowed[0], int) else any(is_at(path, place) for place in allowed)
        )
        if not is_allowed:
            faults.append(f"{path} imports {name}")
    return faults


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path):
    assert faults_of(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        (
            "packing/context.py",
            "from lightning_fastft.training.fine_tuner import FineTuner",
            "imports training/fine_tuner.py",
        ),
        ("packing/context.py", "def f():\n    import lightning.pytorch as pl", "imports lightning.pytorch"),
        ("training/fine_tuner.py", "def f():\n    from transformers import AutoModel", "imports transformers"),
        ("kernels/attention/op.py", "import triton.language as tl", "imports triton.language"),
        ("activations/checkpointing.py", "from lightning_fastft.patches import head", "imports patches/head.py"),
        (
            "strategies/mixin.py",
            "from lightning_fastft.callbacks.gradient_health import GradientHealth",
            "imports callbacks/gradient_health.py",
        ),
        (
            "core/errors.py",
            "from lightning_fastft.core.checks import check_int\nfrom lightning_fastft.packing import context",
            "imports packing/context.py",
        ),
    ],
)
def test_planted_import_is_found(path, source, fault):
    faults = faults_of(Path(path), source)
    assert faults
    assert all(fault in found or "from lightning_fastft" in found or ROOT.name not in found for found in faults)
    assert any(fault in found for found in faults)


def test_an_import_for_types_may_point_up():
    assert (
        faults_of(
            Path("packing/context.py"),
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from transformers import AutoModel\n",
        )
        == []
    )


def test_no_circle_among_modules():
    edges = {
        path: {own_file(name) for name, is_for_types in imports_of((ROOT / path).read_text()) if not is_for_types}
        - {None, path}
        for path in FILES
    }
    # The package's own __init__ is everybody's parent, and loads its names late.
    edges[Path("__init__.py")] = set()
    done: set[Path] = set()

    def visit(path: Path, trail: tuple[Path, ...]) -> None:
        assert path not in trail, " -> ".join(map(str, (*trail, path)))
        if path in done:
            return
        for target in edges[path]:
            visit(target, (*trail, path))
        done.add(path)

    for path in FILES:
        visit(path, ())
