"""Adapters that stock PEFT would lose when it reads them are refused before they are written."""

import pytest
import torch
from peft import PeftModel

from benchmarks.model_types import build_model
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.tiny_models import TINY, build_tiny


def test_adapters_that_would_be_lost_are_refused_and_nothing_is_written(tmp_path):
    tuner = FineTuner(build_model("laguna"), lora={"r": 2, "target_modules": "all-linear"})
    tuner.configure_model()
    with pytest.raises(UnsupportedModelError, match="shared_experts"):
        tuner.save_pretrained(tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()


@pytest.mark.parametrize("name", TINY)
def test_adapters_that_are_accepted_load_in_stock_peft(name, tmp_path):
    tuner = FineTuner(build_tiny(name), lora={"r": 2})
    tuner.configure_model()
    for parameter_name, parameter in tuner.model.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data.normal_()
    tuner.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(build_tiny(name), tmp_path)
    found, held = dict(again.named_parameters()), dict(tuner.model.named_parameters())
    assert all(torch.equal(found[key], value) for key, value in held.items() if ".lora_" in key)
