"""ModelPatcher: every change is taken back, in reverse order, and state is shared, never copied."""

import sys

import pytest
from torch import nn

from lightning_fastft.core.errors import SwapError
from lightning_fastft.core.patcher import ModelPatcher, share_state


class LoudLinear(nn.Linear):
    pass


def test_undo_restores_modules_and_attributes_in_reverse_order():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3)))
    old, weight = model[1][0], model[1][0].weight
    patcher = ModelPatcher()
    patcher.replace_module(model, "1.0", share_state(old, LoudLinear))
    patcher.replace_module(model, "1.0", nn.Identity())
    patcher.set_attribute(model, "fresh", 1)
    patcher.set_attribute(model, "fresh", 2)
    calls = []
    patcher.add_undo(lambda: calls.append("undone"))
    assert len(patcher) == 5
    patcher.undo()
    patcher.undo()
    assert model[1][0] is old
    assert model[1][0].weight is weight
    assert not hasattr(model, "fresh")
    assert calls == ["undone"]


def test_shared_state_keeps_parameters_and_keys():
    old = nn.Linear(2, 2)
    new = share_state(old, LoudLinear)
    assert type(new) is LoudLinear
    assert new.weight is old.weight
    new.weight = nn.Parameter(old.weight.detach() + 1)
    assert old.weight is new.weight
    assert list(new.state_dict()) == list(old.state_dict())


def test_unknown_names_and_foreign_classes_are_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(SwapError, match="no submodule '7'"):
        ModelPatcher().replace_module(model, "7", nn.Identity())
    with pytest.raises(SwapError, match="must extend Linear"):
        share_state(model[0], nn.Conv1d)


def test_undo_of_many_changes_needs_no_deep_stack():
    owner, patcher = nn.Module(), ModelPatcher()
    for number in range(2 * sys.getrecursionlimit()):
        patcher.set_attribute(owner, "number", number)
    patcher.undo()
    assert "number" not in vars(owner)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_stops_no_other_undo(error):
    undone, patcher = [], ModelPatcher()

    def fail(text):
        undone.append(text)
        raise error(text)

    patcher.add_undo(lambda: undone.append("first change"))
    patcher.add_undo(lambda: fail("second change"))
    patcher.add_undo(lambda: fail("third change"))
    with pytest.raises(error, match="second change") as caught:
        patcher.undo()
    assert "third change" in str(caught.value.__context__)
    assert undone == ["third change", "second change", "first change"]
