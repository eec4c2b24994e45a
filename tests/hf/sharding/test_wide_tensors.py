"""Trained tensors that a model keeps in a wider dtype are one unit of FSDP2."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf.families import decoder_layers
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.hf.sharding.fillers import open_model
from lightning_fastft.hf.sharding.stand_ins import gathered_bytes
from lightning_fastft.hf.sharding.units import shard_model
from tests.hf.sharding.test_units import CPU, NUM_RANKS, build_pieces, build_whole, check_pieces, rank_of_two
from tests.support.tiny_models import build_tiny

pytestmark = pytest.mark.covering

# Names of the trained tensors that a model in bf16 keeps in fp32; of most since transformers 5.24, which has lara_mini.
WIDE = {"ernie4_5_moe": {"weight"}}
if "lara_mini" in CONFIG_MAPPING:
    WIDE |= {
        "deepseek_v3": {"weight"},
        "olmo_hybrid": {"A_log"},
        "kimi_linear": {"dt_bias", "weight"},
        "bailing_hybrid": {"A_log", "dt_bias", "weight"},
    }


def test_a_trained_head_that_a_model_keeps_wide_is_refused():
    with rank_of_two(0) as mesh:
        model = build_tiny("llama").to(torch.bfloat16)
        model.lm_head.float()
        with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight in float32"):
            shard_model(model, mesh, compute_dtype=torch.bfloat16, master_dtype=torch.float32)


def test_a_weight_that_a_model_keeps_wide_is_read_from_files_as_it_is(tmp_path):
    whole = build_tiny("llama")
    whole.save_pretrained(tmp_path)
    with rank_of_two(0) as mesh:
        model, filler = open_model(ModelSource(str(tmp_path)), device=CPU, dtype=torch.bfloat16)
        model.model.norm.float()
        shard_model(model, mesh, filler=filler, compute_dtype=torch.bfloat16, master_dtype=torch.bfloat16)
        assert torch.equal(model.model.norm.weight.to_local(), whole.model.norm.weight.chunk(NUM_RANKS)[0])


@pytest.mark.parametrize("source_kind", ["random", "files"])
@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("family", WIDE)
def test_trained_tensors_that_a_model_keeps_wide_are_one_unit(family, master_dtype, source_kind, tmp_path):
    source = ModelSource(build_tiny(family).config, init="random")
    if source_kind == "files":
        build_whole(source, dtype=torch.bfloat16).save_pretrained(tmp_path)
        source = ModelSource(str(tmp_path))
    whole = build_whole(source, dtype=torch.bfloat16)
    wide = {name for name, each in whole.named_parameters() if each.requires_grad and each.dtype is torch.float32}
    assert WIDE[family] <= {name.rpartition(".")[2] for name in wide}
    with rank_of_two(1) as mesh:
        # A user's own module computes in the dtypes of its weights.
        options = {} if master_dtype is None else {"compute_dtype": torch.bfloat16, "master_dtype": master_dtype}
        model, _ = build_pieces(source, mesh, dtype=torch.bfloat16, **options)
        check_pieces(model, whole, rank=1, dtype=master_dtype)
        assert gathered_bytes(model.model) == 4 * sum(model.get_parameter(name).numel() for name in wide)
        # Other units compute in bf16 and have none of them.
        narrow = [each for name, each in model.named_parameters() if isinstance(each, DTensor) and name not in wide]
        held = sum(gathered_bytes(unit) for unit in (model, *decoder_layers(model)))
        assert held == sum(each.numel() * (2 if each.requires_grad else each.dtype.itemsize) for each in narrow)
        assert type(model.model).__qualname__ == type(whole.model).__qualname__
        # torch checks the dtypes of all units.
        model(input_ids=torch.ones(1, 3, dtype=torch.int64))


def test_a_sharded_model_records_the_outputs_of_its_routers():
    source = ModelSource(build_tiny("ernie4_5_moe").config, init="random")
    with rank_of_two(0) as mesh:
        options = {"compute_dtype": torch.bfloat16, "master_dtype": torch.float32}
        model, _ = build_pieces(source, mesh, dtype=torch.bfloat16, **options)
        output = model(input_ids=torch.ones(1, 3, dtype=torch.int64), output_router_logits=True)
        assert len(output.router_logits) == len(decoder_layers(model))
