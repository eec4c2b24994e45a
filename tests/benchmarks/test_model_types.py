"""The recorded sweep over causal types: complete, without a fault, and what the package does now."""

from collections import Counter

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.model_types import BOUND, FAULTS, Outcome, examine, read_record, record
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf.families import check_servable

ROWS = {row["model_type"]: row for row in read_record()}
MOST_EXACT = 150
is_recorded = pytest.mark.skipif(
    {row["transformers"] for row in ROWS.values()} != {transformers.__version__},
    reason="the record is of another transformers",
)


def test_the_record_has_no_fault_and_is_of_one_release():
    totals = Counter(row["outcome"] for row in ROWS.values())
    assert totals["exact"] >= MOST_EXACT
    assert not any(totals[fault] for fault in FAULTS)
    assert all(float(row["error"]) <= BOUND for row in ROWS.values() if row["outcome"] == "exact")
    assert len({row["transformers"] for row in ROWS.values()}) == 1


@is_recorded
def test_the_record_is_of_every_causal_type():
    assert set(ROWS) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_a_record_replaces_rows_and_keeps_the_others(tmp_path):
    place = tmp_path / "types.csv"
    record([Outcome("b", "exact", "2 reads", 1e-7, "auto"), Outcome("a", "raw", "KeyError: x")], place)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mpt", n_layers=1))
    with pytest.raises(UnsupportedModelError) as caught:
        check_servable(model)
    refused = f"UnsupportedModelError: {caught.value}"
    record([Outcome("a", "exact", refused, 2e-8, "one_by_one")], place)
    assert [(row["model_type"], row["outcome"], row["reason"]) for row in read_record(place)] == [
        ("a", "exact", "its attention is not on transformers' attention interface"),
        ("b", "exact", ""),
    ]


@is_recorded
@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_every_type_ends_as_recorded(model_type):
    outcome = examine(model_type)
    assert (outcome.outcome, outcome.attention) == (ROWS[model_type]["outcome"], ROWS[model_type]["attention"]), outcome
