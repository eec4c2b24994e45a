from pathlib import Path

import pytest

import lightning_fastft


def test_public_list_equals_its_stored_copy():
    stored = (Path(__file__).parent / "public.txt").read_text().split()
    assert sorted(lightning_fastft.__all__) == stored, (
        "a change of the public surface changes tests/meta/public.txt and CHANGELOG.md too"
    )


@pytest.mark.parametrize("name", lightning_fastft.__all__)
def test_public_name_exists_and_says_what_it_is(name):
    value = getattr(lightning_fastft, name)
    assert value.__name__ == name
    assert value.__doc__


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="FineTuner"):
        lightning_fastft.no_such_name  # noqa: B018
