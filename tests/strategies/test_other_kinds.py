"""FastFTFSDPStrategy refuses checkpoints of other optimizers and schedulers, in both forms, on all ranks."""

import pytest
import torch

from tests.strategies.other_kinds_worker import CASES, FORMS
from tests.support.two_ranks import run_two_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    run_two_ranks("tests.strategies.other_kinds_worker", folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("same")])
def test_state_of_another_kind_is_refused(found, case, form):
    for rank in found:
        assert CASES[case][2] in rank[case, form]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("same")])
def test_state_of_the_same_kind_is_resumed(found, case, form):
    assert all(rank[case, form] == "2" for rank in found)
