"""The table of extras is that of pyproject.toml, and every refusal takes its command from it."""

import re
from pathlib import Path

import pytest

import lightning_fastft
from lightning_fastft.core import extras
from lightning_fastft.core.extras import EXTRAS, find_extra, missing_modules, pip_line

PACKAGE = Path(lightning_fastft.__file__).parent
PROJECT = (PACKAGE.parent / "pyproject.toml").read_text()
# Distributions by the modules that the table names.
DISTRIBUTIONS = {
    "qlora": {"bitsandbytes"},
    "hopper": {"nvidia-cudnn-frontend"},
    "hybrid": {"fla-core"},
    "vision": {"pillow", "torchvision"},
    "wandb": {"wandb"},
    "gguf": {"gguf", "sentencepiece"},
    "eval": {"lm-eval"},
    "litdata": {"litdata"},
}


def requirements(project):
    """Return the distributions of each extra; tomllib is not in Python 3.10."""
    part = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    found = dict(re.findall(r"^(\w+) = \[(.*)\]$", part, flags=re.MULTILINE))
    return {
        name: {re.split(r"[><=;~\[]", text)[0] for text in re.findall(r'"([^"]+)"', line)}
        for name, line in found.items()
    }


def test_every_extra_of_the_table_is_in_the_project():
    found = requirements(PROJECT)
    assert {name: found[name] for name in found if name not in ("all", "test", "dev")} == DISTRIBUTIONS
    assert set(DISTRIBUTIONS) == set(EXTRAS)
    assert f'all = ["lightning_fastft[{",".join(EXTRAS)}]"]' in PROJECT


def test_every_named_command_installs_an_extra_of_the_table():
    """Docs and messages write no other name of the package, and no extra that is not there."""
    root = PACKAGE.parent
    texts = {path: path.read_text() for path in [*PACKAGE.rglob("*.py"), *root.glob("*.md"), *root.glob("docs/*.md")]}
    named = [
        (path, name)
        for path, text in texts.items()
        if path.name != "CHANGELOG.md"
        for names in re.findall(r"lightning[-_]fastft\[([^\]{]+)\]", text)
        for name in names.split(",")
    ]
    assert len(named) > 3
    assert [(path, name) for path, name in named if name not in {*EXTRAS, "all"}] == []
    written = re.findall(r"pip install 'lightning", "\n".join(texts[path] for path in PACKAGE.rglob("*.py")))
    assert len(written) == 2, "a message writes its own command; use pip_line"


def test_missing_modules_are_found_without_an_import(monkeypatch):
    monkeypatch.setitem(extras.EXTRAS, "vision", extras.Extra(("PIL", "no_such_module"), ""))
    assert missing_modules("vision") == ["no_such_module"]
    assert find_extra("bitsandbytes.functional") == "qlora"
    assert find_extra("torch") == ""
    with pytest.raises(AssertionError):
        pip_line("no_such_extra")


def test_table_of_the_guide_is_that_of_the_package():
    pages = "\n".join(path.read_text() for path in (PACKAGE.parent / "docs").rglob("*.md"))
    assert [name for name, extra in EXTRAS.items() if f"| `{name}` | {extra.enables} |" not in pages] == []
