"""shard_model: the pieces of every rank are those of the model that one device builds, and no rank ever holds the
whole.
"""

import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_fastft.core.errors import DataError, UnsupportedModelError
from lightning_fastft.hf.families import check_servable, decoder_layers
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.hf.lora import add_adapters, parse_lora
from lightning_fastft.hf.sharding import units
from lightning_fastft.hf.sharding.fillers import open_model, reads_base
from lightning_fastft.hf.sharding.stand_ins import gathered_bytes
from lightning_fastft.hf.sharding.state import is_sharded, reshard_trained, sharded_roots, unsharded_trained_names
from lightning_fastft.hf.sharding.units import places_whole, shard_model
from tests.support.sizes import sizes
from tests.support.tiny_models import HYBRIDS, TINY, build_tiny

pytestmark = pytest.mark.covering

NUM_RANKS = 2
CPU = torch.device("cpu")
SEED = 7
CONFIG = sizes(
    model_type="qwen3", vocab=61, width=32, inner=48, layers=3, heads=4, key_heads=2, head_width=8, positions=128
)
LORAS = {
    "no adapters": None,
    "lora": {"r": 4},
    "lora on the head": {"r": 4, "target_modules": ["q_proj", "lm_head"]},
    "trained copies": {"r": 4, "modules_to_save": ["lm_head", "embed_tokens"]},
    "weight-decomposed": {"r": 4, "use_dora": True},
    "from singular values": {"r": 4, "init_lora_weights": "pissa"},
}


@contextmanager
def rank_of_two(rank):
    """A mesh of two ranks in which nothing is ever sent: enough to build the pieces of one."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
    try:
        yield init_device_mesh("cpu", (NUM_RANKS,))
    finally:
        torch.distributed.destroy_process_group()


def build_whole(source, *, dtype, lora=None):
    model = build_model(source, device=CPU, dtype=dtype, seed=SEED)
    return model if lora is None else add_adapters(model, lora=parse_lora(lora), adapter_dtype=torch.float32, seed=SEED)


def build_pieces(source, mesh, *, dtype, lora=None, **options):
    config = None if lora is None else parse_lora(lora)
    model, filler = open_model(
        source, device=CPU, dtype=dtype, seed=SEED, is_read_early=config is not None and reads_base(config)
    )
    if config is not None:
        if filler is None:
            model = add_adapters(model, lora=config, adapter_dtype=torch.float32, seed=SEED)
        else:
            with filler.placeholders(model):
                model = add_adapters(model, lora=config, adapter_dtype=torch.float32, seed=SEED)
    status = shard_model(model, mesh, filler=filler, **options)
    assert status.state == "active"
    return model, filler


def check_pieces(model, whole, *, rank, dtype=None):
    """Every parameter is the piece of the whole one, every buffer is equal."""
    expected = dict(whole.named_parameters(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        truth = expected[name].detach()
        if not isinstance(parameter, DTensor) and "e_score_correction_bias" in name:
            # Frozen and wider than its unit, which has no part of it.
            assert torch.equal(parameter, truth)
            continue
        assert isinstance(parameter, DTensor), name
        assert parameter.shape == truth.shape, name
        assert parameter.requires_grad == expected[name].requires_grad, name
        pieces = truth.chunk(NUM_RANKS)
        piece = pieces[rank] if rank < len(pieces) else truth[:0]
        if dtype is not None and parameter.requires_grad:
            piece = piece.to(torch.promote_types(dtype, piece.dtype))
        assert parameter.dtype is piece.dtype, name
        assert torch.equal(parameter.to_local().detach(), piece), name
    buffers = dict(whole.named_buffers())
    assert {name for name, _ in model.named_buffers()} == set(buffers)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("lora", LORAS)
def test_random_pieces_equal_the_model_of_one_device(rank, is_tied, lora):
    source = ModelSource({**CONFIG, "tie_word_embeddings": is_tied}, init="random")
    with rank_of_two(rank) as mesh:
        model, _ = build_pieces(source, mesh, dtype=torch.bfloat16, lora=LORAS[lora], compute_dtype=torch.bfloat16)
        check_pieces(model, build_whole(source, dtype=torch.bfloat16, lora=LORAS[lora]), rank=rank)


@pytest.mark.parametrize("family", TINY)
def test_every_family_is_built_in_pieces(family):
    config = build_tiny(family).config
    source = ModelSource(config, init="random")
    with rank_of_two(1) as mesh:
        model, filler = build_pieces(source, mesh, dtype=torch.float32)
        assert filler is not None
        check_pieces(model, build_whole(source, dtype=torch.float32), rank=1)
        assert all(isinstance(layer, FSDPModule) for layer in decoder_layers(model))


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_hybrid_is_packed_in_pieces(family):
    """FSDP2 replaces the classes of decoder layers, whose source says how they attend."""
    with rank_of_two(0) as mesh:
        model, _ = build_pieces(ModelSource(build_tiny(family).config, init="random"), mesh, dtype=torch.float32)
        check_servable(model)


@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_trained_copies_of_an_embedding_with_a_buffer_begin_as_the_embedding(init, tmp_path):
    """The buffer of a scaled embedding is computed by an initialisation of its module."""
    tiny, lora = build_tiny("gemma2"), LORAS["trained copies"]
    tiny.save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path) if init == "pretrained" else tiny.config, init=init)
    with rank_of_two(0) as mesh:
        model, filler = build_pieces(source, mesh, dtype=torch.float32, lora=lora)
        assert filler is not None
        check_pieces(model, build_whole(source, dtype=torch.float32, lora=lora), rank=0)


@pytest.mark.parametrize("lora", [{"r": 4}, {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["mamba"]}])
def test_buffers_that_a_model_computes_for_its_layers_are_filled(tmp_path, lora):
    tiny = build_tiny("falcon_h1", ssm_multipliers=[0.5, 2.0, 3.0, 4.0, 5.0])
    tiny.save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path))
    with rank_of_two(0) as mesh:
        model, filler = build_pieces(source, mesh, dtype=torch.float32, lora=lora)
        assert filler is not None
        check_pieces(model, build_whole(source, dtype=torch.float32, lora=lora), rank=0)


def test_routers_that_their_block_draws_are_those_of_one_device():
    source = ModelSource(build_tiny("qwen3_next").config.to_dict(), init="random")
    with rank_of_two(0) as mesh:
        model, _ = build_pieces(source, mesh, dtype=torch.float32)
        check_pieces(model, build_whole(source, dtype=torch.float32), rank=0)


def test_weights_that_nothing_draws_are_refused():
    """The trained copy of a router is made before the block draws the original."""
    source = ModelSource(build_tiny("qwen3_next").config.to_dict(), init="random")
    lora = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["gate"]}
    with rank_of_two(0) as mesh, pytest.raises(UnsupportedModelError, match="modules_to_save"):
        build_pieces(source, mesh, dtype=torch.float32, lora=lora)


def test_global_generators_are_left_as_they_were():
    before = torch.get_rng_state()
    with rank_of_two(0) as mesh:
        build_pieces(ModelSource(CONFIG, init="random"), mesh, dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A dense checkpoint in several files, with its own names."""
    folder = tmp_path_factory.mktemp("dense")
    build_model(
        ModelSource({**CONFIG, "tie_word_embeddings": False}, init="random"), device=CPU, dtype=torch.float32, seed=3
    ).save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.mark.parametrize("lora", LORAS)
def test_read_pieces_equal_the_model_of_one_device(saved, lora):
    source = ModelSource(str(saved))
    with rank_of_two(1) as mesh:
        model, filler = build_pieces(source, mesh, dtype=torch.bfloat16, lora=LORAS[lora], compute_dtype=torch.bfloat16)
        assert (filler is None) == (lora in ("weight-decomposed", "from singular values"))
        check_pieces(model, build_whole(source, dtype=torch.bfloat16, lora=LORAS[lora]), rank=1)


def test_masters_hold_what_the_files_have_not_what_bf16_leaves_of_it(saved):
    source = ModelSource(str(saved))
    with rank_of_two(0) as mesh:
        options = {"compute_dtype": torch.bfloat16, "master_dtype": torch.float32}
        model, _ = build_pieces(source, mesh, dtype=torch.bfloat16, **options)
        check_pieces(model, build_whole(source, dtype=torch.float32), rank=0)


def test_random_masters_begin_at_the_weights_of_one_device():
    source = ModelSource(CONFIG, init="random")
    with rank_of_two(0) as mesh:
        model, _ = build_pieces(
            source, mesh, dtype=torch.bfloat16, compute_dtype=torch.bfloat16, master_dtype=torch.float32
        )
        check_pieces(model, build_whole(source, dtype=torch.bfloat16), rank=0, dtype=torch.float32)


@pytest.mark.parametrize("is_random", [True, False])
def test_no_rank_holds_more_than_its_pieces_one_layer_and_what_is_outside_the_layers(saved, is_random):
    source = ModelSource({**CONFIG, "num_hidden_layers": 12}, init="random") if is_random else ModelSource(str(saved))
    held, filled = [], []
    cut = units.fully_shard

    with rank_of_two(0) as mesh:
        model, filler = open_model(source, device=CPU, dtype=torch.float32, seed=SEED)
        assert all(parameter.is_meta for parameter in model.parameters())
        fill = filler.fill

        def fill_and_remember(module, *, keys, **options):
            fill(module, keys=keys, **options)
            filled.extend(weakref.ref(module._parameters[key]) for key in keys)

        def measure_and_cut(unit, **options):
            wholes = [reference() for reference in filled]
            pieces = [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]
            held.append(
                sum(tensor.numel() * tensor.element_size() for tensor in (*wholes, *pieces) if tensor is not None)
            )
            return cut(unit, **options)

        with (
            mock.patch.object(filler, "fill", fill_and_remember),
            mock.patch.object(units, "fully_shard", measure_and_cut),
        ):
            shard_model(model, mesh, filler=filler)
        layers = decoder_layers(model)
        whole_layer = sum(parameter.numel() * 4 for parameter in layers[0].parameters())
        outside = sum(parameter.numel() * 4 for name, parameter in model.named_parameters() if "layers." not in name)
        pieces = sum(parameter.to_local().numel() * 4 for parameter in model.parameters())
        assert len(held) == len(layers) + 1
        assert max(held) <= pieces + whole_layer + outside
        assert pieces <= (len(layers) * whole_layer + outside) / NUM_RANKS + 4096


def test_weights_that_are_not_finite_are_refused_by_name(saved, tmp_path):
    for path in saved.iterdir():
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            for name in tensors:
                if name.endswith("layers.1.mlp.up_proj.weight"):
                    tensors[name][0, 0] = float("nan")
            save_file(tensors, tmp_path / path.name, metadata={"format": "pt"})
        else:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with rank_of_two(0) as mesh, pytest.raises(DataError, match=r"layers\.1\.mlp\.up_proj"):
        build_pieces(ModelSource(str(tmp_path)), mesh, dtype=torch.float32)


def test_missing_weights_are_refused_by_name(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = next(path for path in sorted(tmp_path.glob("*.safetensors")))
    tensors = load_file(first)
    del tensors[sorted(tensors)[0]]
    save_file(tensors, first, metadata={"format": "pt"})
    with pytest.raises(DataError, match="missing from the files"):
        open_model(ModelSource(str(tmp_path)), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_pieces_are_the_bytes_of_one_device(dtype):
    source = ModelSource(CONFIG, init="random")
    options = {"device": CPU, "dtype": dtype, "quantization": "nf4", "seed": SEED}
    with rank_of_two(1) as mesh:
        model, filler = open_model(source, **options)
        assert filler is None
        shard_model(model, mesh, compute_dtype=dtype)
        whole = build_model(source, **options).model.layers[1].mlp.up_proj.weight
        found = model.model.layers[1].mlp.up_proj.weight
        assert found.dtype is dtype
        assert torch.equal(
            found.to_local().detach().flatten().view(torch.uint8), whole.detach().flatten().chunk(NUM_RANKS)[1]
        )


def test_frozen_tensors_that_a_model_keeps_wide_stay_whole():
    with rank_of_two(0) as mesh:
        model = build_tiny("llama").to(torch.bfloat16).requires_grad_(False)
        model.model.layers[0].input_layernorm.float()
        status = shard_model(model, mesh, compute_dtype=torch.bfloat16)
        assert status.reason.endswith("computed in bfloat16, reduced in float32")
        norm = model.model.layers[0].input_layernorm.weight
        assert not isinstance(norm, DTensor)
        assert norm.dtype is torch.float32


def test_trained_rows_of_a_tied_embedding_are_refused():
    lora = parse_lora({"r": 2, "target_modules": ["o_proj"], "trainable_token_indices": [3, 5]})
    for is_tied in (False, True):
        with rank_of_two(0) as mesh:
            model = build_tiny("llama", tie_word_embeddings=is_tied)
            adapted = add_adapters(model, lora=lora, adapter_dtype=torch.float32)
            if not is_tied:
                assert shard_model(adapted, mesh).state == "active"
                continue
            with pytest.raises(UnsupportedModelError, match="trainable_token_indices"):
                shard_model(adapted, mesh)


def test_module_without_a_language_model_is_refused():
    with rank_of_two(0) as mesh, pytest.raises(UnsupportedModelError, match="Linear holds no transformers model"):
        shard_model(torch.nn.Linear(2, 2), mesh)


def test_tensor_that_nothing_fills_is_refused():
    with rank_of_two(0) as mesh:
        model, _ = open_model(ModelSource(CONFIG, init="random"), device=CPU, dtype=torch.float32)
        with pytest.raises(UnsupportedModelError, match="nothing fills"):
            shard_model(model, mesh)


def test_units_are_resharded_after_a_step_where_they_train_and_an_outer_module_may_have_no_unit():
    with rank_of_two(0) as mesh:
        trained, frozen = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(False)
        whole = torch.nn.Sequential(trained, frozen)
        for module in (trained, frozen, whole):
            fully_shard(module, mesh=mesh)
        assert (gathered_bytes(trained), gathered_bytes(whole)) == (4 * 20, 0)
        for module in (trained, frozen):
            module.unshard()
        reshard_trained(whole)
        assert isinstance(trained.weight, DTensor)
        assert not isinstance(frozen.weight, DTensor)


def test_pieces_are_told_from_wholes():
    with rank_of_two(0) as mesh:
        inner = build_tiny("llama")
        outer = torch.nn.ModuleDict({"model": inner, "value": torch.nn.Linear(2, 2)})
        assert not is_sharded(outer)
        assert not sharded_roots(outer)
        shard_model(outer, mesh)
        assert is_sharded(outer)
        assert sharded_roots(outer) == [inner]
        assert unsharded_trained_names(outer) == ["value.weight", "value.bias"]


@pytest.mark.parametrize(
    ("adapters", "has_experts", "is_whole"),
    [("auto", False, True), ("auto", True, False), ("replicate", True, True), ("shard", False, False)],
)
def test_adapters_are_whole_unless_experts_have_some(adapters, has_experts, is_whole):
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if has_experts else None
    lora = parse_lora({"r": 4, "target_modules": ["q_proj"], "target_parameters": stacks})
    model = add_adapters(build_tiny("qwen3_moe"), lora=lora, adapter_dtype=torch.float32, seed=SEED)
    assert places_whole(model, adapters) is is_whole
