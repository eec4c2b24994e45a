"""Checkpoints whose tensors must be converted fill a sharded model unit by unit, as others do."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_fastft.core.errors import DataError
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.hf.sharding.fillers import open_model
from lightning_fastft.hf.sharding.reads import find_reads
from tests.hf.sharding.test_units import CPU, build_pieces, build_whole, check_pieces, rank_of_two
from tests.support.packed_files import write_fp8, write_mxfp4
from tests.support.tiny_models import COMPOSITES, HYBRIDS, TINY, build_tiny

pytestmark = pytest.mark.covering

# Families whose files hold an expert or a product in tensors of its own, and the model holds one for all.
CONVERTED = {
    "qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "lfm2_moe", "qwen3_next", "qwen3_5_moe_text", "lara_mini",
    "mellum", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "nemotron_h_hybrid", "jamba", "qwen3_vl_moe",
}  # fmt: skip


def save(folder, family, **changes):
    """Write the files that the hub would have, without tensors of zeros alone."""
    model = build_tiny(family, **changes)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and not tensor.any():
            tensor.data.normal_()
    model.save_pretrained(folder)
    return ModelSource(str(folder))


def stored_names(folder):
    return load_file(folder / "model.safetensors").keys()


def check(source, *, has_conversions=True, **options):
    """Compare the pieces of a rank with the model of one device."""
    with rank_of_two(1) as mesh:
        model, filler = build_pieces(source, mesh, dtype=torch.bfloat16, **options)
        assert filler is not None
        found = any(read._converter is not None for read in filler.reads.values())
        assert found == has_conversions, "CONVERTED of this file names the families whose files are converted"
        assert not filler._made
        check_pieces(model, build_whole(source, dtype=torch.bfloat16, lora=options.get("lora")), rank=1)


@pytest.mark.parametrize("family", [*TINY, *HYBRIDS, *COMPOSITES])
def test_every_family_is_filled_from_its_files(tmp_path, family):
    source = save(tmp_path / "files", family)
    check(source, has_conversions=family in CONVERTED)
    # As after from_pretrained, the model is saved under the names of the files.
    model = build_tiny(family)
    assert find_reads(model, source) is not None
    model.save_pretrained(tmp_path / "again")
    assert stored_names(tmp_path / "again") == stored_names(tmp_path / "files")


def test_experts_are_merged_in_the_order_of_their_numbers(tmp_path):
    # By name, 10 is before 2.
    check(save(tmp_path, "qwen3_moe", num_experts=12))


def test_a_prefix_of_the_files_is_kept_when_the_model_is_saved(tmp_path):
    # The text part of a model with an image tower.
    source = save(tmp_path / "files", "qwen3_5_text")
    names = {}

    def add_prefix(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            names[f"model.language_model.{name.removeprefix('model.')}"] = tensors.pop(name)
        tensors.update(names)

    change(tmp_path / "files", add_prefix)
    check(source, has_conversions=False)
    model = build_tiny("qwen3_5_text")
    assert find_reads(model, source) is not None
    model.save_pretrained(tmp_path / "again")
    assert stored_names(tmp_path / "again") == stored_names(tmp_path / "files")


def test_lora_on_experts_is_above_merged_files(tmp_path):
    lora = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    check(save(tmp_path, "qwen3_moe"), lora=lora)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_in_fp8_are_dequantised_unit_by_unit(tmp_path, family):
    write_fp8(tmp_path, family)
    source = ModelSource(str(tmp_path / "fp8"))
    check(source)
    model = build_whole(source, dtype=torch.bfloat16)
    assert find_reads(model, source) is not None
    model.save_pretrained(tmp_path / "again")
    assert stored_names(tmp_path / "again") == stored_names(tmp_path / "dense")


@pytest.mark.parametrize("has_lora", [False, True])
def test_experts_in_mxfp4_are_dequantised_unit_by_unit(tmp_path, has_lora):
    write_mxfp4(tmp_path)
    # PEFT's wrapper hides the stack.
    lora = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    check(ModelSource(str(tmp_path)), **({"lora": lora} if has_lora else {}))


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_sharded_model_does_not_say_that_it_is_quantised(tmp_path, init):
    write_fp8(tmp_path, "qwen3")
    model, _ = open_model(ModelSource(str(tmp_path / "fp8"), init=init), device=CPU, dtype=torch.bfloat16)
    assert "quantization_config" not in model.config.to_dict()


def test_masters_hold_what_dequantised_files_have(tmp_path):
    write_fp8(tmp_path, "qwen3_moe")
    source = ModelSource(str(tmp_path / "fp8"))
    with rank_of_two(0) as mesh:
        options = {"compute_dtype": torch.bfloat16, "master_dtype": torch.float32}
        model, _ = build_pieces(source, mesh, dtype=torch.bfloat16, **options)
        check_pieces(model, build_whole(source, dtype=torch.float32), rank=0)


def test_masters_of_merged_experts_hold_what_the_files_have(tmp_path):
    source = save(tmp_path, "qwen3_moe")
    with rank_of_two(0) as mesh:
        options = {"compute_dtype": torch.bfloat16, "master_dtype": torch.float32}
        model, _ = build_pieces(source, mesh, dtype=torch.bfloat16, **options)
        check_pieces(model, build_whole(source, dtype=torch.float32), rank=0)


def change(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_layers_for_other_predictions_are_skipped_as_transformers_does(tmp_path):
    source = save(tmp_path, "qwen3_next")
    change(tmp_path, lambda tensors: tensors.update({"mtp.norm.weight": torch.ones(4)}))
    check(source)


@pytest.mark.parametrize(
    ("name", "message"),
    [("gate_proj", "cannot convert"), ("down_proj", r"layers\.1\.mlp\.experts\.down_proj.*another shape")],
)
def test_a_missing_expert_is_refused(tmp_path, name, message):
    source = save(tmp_path, "qwen3_moe")
    change(tmp_path, lambda tensors: tensors.pop(f"model.layers.1.mlp.experts.2.{name}.weight"))
    with pytest.raises(DataError, match=message):
        open_model(source, device=CPU, dtype=torch.float32)


def test_an_expert_that_is_not_finite_is_refused_by_name(tmp_path):
    source = save(tmp_path, "qwen3_moe")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    change(tmp_path, lambda tensors: tensors[name].fill_(torch.nan))
    with rank_of_two(0) as mesh, pytest.raises(DataError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        build_pieces(source, mesh, dtype=torch.float32)


def test_foreign_tensors_are_left_to_the_reader_of_whole_models(tmp_path):
    source = save(tmp_path, "qwen3_moe")
    change(tmp_path, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.ones(4)}))
    assert find_reads(build_tiny("qwen3_moe"), source) is None
    with pytest.raises(DataError, match="in the files but not in the model"):
        open_model(source, device=CPU, dtype=torch.float32)


def test_a_dtype_that_is_not_known_is_left_to_the_reader_of_whole_models(tmp_path, monkeypatch):
    source = save(tmp_path, "qwen3_moe")
    monkeypatch.setattr("lightning_fastft.hf.sharding.reads._DTYPES", {})
    assert open_model(source, device=CPU, dtype=torch.float32)[1] is None
