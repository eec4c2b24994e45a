import ast
from importlib import import_module
from pathlib import Path

import pytest

import lightning_fastft


def test_public_list_equals_its_stored_copy():
    stored = (Path(__file__).parent / "public.txt").read_text().split()
    assert sorted(lightning_fastft.__all__) == stored, (
        "a change of the public list changes tests/meta/public.txt and CHANGELOG.md too"
    )


@pytest.mark.parametrize("name", lightning_fastft.__all__)
def test_public_name_exists_and_says_what_it_is(name):
    value = getattr(lightning_fastft, name)
    assert value.__name__ == name
    assert value.__doc__


def test_type_checkers_see_the_public_list():
    source = ast.parse(Path(lightning_fastft.__file__).read_text())
    block = next(node for node in source.body if isinstance(node, ast.If))
    imports = [(node.module, alias.name, alias.asname) for node in block.body for alias in node.names]
    assert sorted(name for _, name, _ in imports) == sorted(lightning_fastft.__all__), (
        "a public name is imported under TYPE_CHECKING in lightning_fastft/__init__.py too"
    )
    for module, name, alias in imports:
        assert alias == name, f"write `import {name} as {name}`: only then type checkers export it"
        assert getattr(import_module(module), name) is getattr(lightning_fastft, name)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="FineTuner"):
        lightning_fastft.no_such_name  # noqa: B018
