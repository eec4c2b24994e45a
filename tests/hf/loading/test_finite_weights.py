"""Files of a checkpoint are judged before quantisation hides what is in them."""

import pytest
import torch
from torch import nn

from lightning_fastft.core.errors import DataError
from lightning_fastft.hf.loading.finite_weights import check_files_finite, check_finite
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from tests.support.sizes import sizes

CONFIG = sizes(model_type="llama", vocab=64, width=64, inner=64, layers=2, heads=2, key_heads=2)


@pytest.mark.covering
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_files_with_values_that_are_not_finite_are_refused_by_name(tmp_path, value, shard_size):
    model = build_model(ModelSource(CONFIG, init="random"), device=torch.device("cpu"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "good", max_shard_size=shard_size)
    check_files_finite(ModelSource(str(tmp_path / "good")), device=torch.device("cpu"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = value
    model.save_pretrained(tmp_path / "bad", max_shard_size=shard_size)
    with pytest.raises(DataError, match=r"infinity in model\.layers\.1\.mlp\.up_proj\.weight\."):
        check_files_finite(ModelSource(str(tmp_path / "bad")), device=torch.device("cpu"))


def test_check_finite_lists_a_few_names_and_counts_the_rest():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)])
    check_finite(model, name="good")
    nn.init.constant_(model[3].bias, float("nan"))
    with pytest.raises(DataError, match=r"in 3\.bias\."):
        check_finite(model, name="bad")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("inf"))
    with pytest.raises(DataError, match="and 4 more"):
        check_finite(model, name="bad")
