"""Costs from shapes alone: against what was measured on an H200, and for every family that packed attention serves."""

import functools

import pytest
import torch
from peft import LoraConfig

from benchmarks.ruler.workloads import WORKLOADS, lora_config
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.vram_budget import HeadSizes, predict_cost
from lightning_fastft.core.errors import OptionError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.estimate.costs import meter_step, model_costs, plan_on
from lightning_fastft.estimate.machines import find_gpu
from lightning_fastft.estimate.meta_model import Swaps, build_on_meta, install_as_in_a_run
from lightning_fastft.hf.families import decoder_layers
from lightning_fastft.hf.mixers import MIXERS
from lightning_fastft.mixers.kernels import KINDS
from lightning_fastft.planner.plan import make_plan
from lightning_fastft.planner.prediction import predict
from lightning_fastft.planner.step import EndBytes, uniform_plan
from lightning_fastft.training.optimizer import FusedAdamW
from tests.support.children import thinned
from tests.support.tiny_models import HYBRIDS, build_tiny

GIB = 2**30
H200 = find_gpu("H200")
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
QWEN3_14B = {
    **QWEN3,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}
QWEN3_06B = {
    **QWEN3,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN35_9B = {"model_type": "qwen3_5_text", **WORKLOADS["qwen3.5-9b-lora"].model_config}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
# Two layers and their norms, embedding and head, which are not tied, and the last norm.
NUM_WEIGHTS = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256 + 2 * 128) + 2 * 512 * 128 + 128
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
PLANNED_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text"),
    *("gpt_oss", "qwen3_moe", "mixtral", "olmoe", "granite", "smollm3"),
)
# Of the documents of benchmarks/lengths, on average over tokens.
DOCUMENT_TOKENS = 910


def small_costs(model_type="llama", *, num_tokens=2048, document_tokens=512, **options):
    config = {"model_type": model_type, **SMALL, **options.pop("config", {})}
    return model_costs(config, num_tokens=num_tokens, mean_document_tokens=document_tokens, machine=H200, **options)


UNFUSED = Swaps(is_fused=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options", "step_ms", "peak_gib"),
    [
        (QWEN3_14B, {"quantization": "nf4"}, 854, 51.2),
        # 209 ms of that row times 190 / 234, by which the launches of one H100 have become faster, and times 51.8 / 62.6,
        # by which the host's work has become less since (python -m benchmarks.host_step --modes keep+fused).
        (QWEN3_06B, {}, 140, 9.9),
        (QWEN3_06B, {"swaps": Swaps(is_graphed=True)}, 70, 10.9),
        (QWEN3_14B, {"quantization": "nf4", "swaps": UNFUSED}, 1234, 87.3),
        (QWEN35_9B, {"lora": lora_config(WORKLOADS["qwen3.5-9b-lora"])}, 541, 49.1),
    ],
    ids=["14b", "0.6b", "0.6b-graphs", "14b-unfused", "qwen3.5-9b"],
)
def test_a_step_that_keeps_everything_costs_what_was_measured(config, options, step_ms, peak_gib):
    """Rows "ours keep" of benchmarks/results.csv."""
    options = {"lora": LoraConfig(r=16), **options}
    cost = model_costs(config, num_tokens=8192, mean_document_tokens=DOCUMENT_TOKENS, machine=H200, **options)
    keep = predict(cost, uniform_plan(len(cost.segments), "keep"), machine=H200.machine)
    assert keep.step_ms == pytest.approx(step_ms, rel=0.1)
    assert keep.peak_bytes / GIB == pytest.approx(peak_gib, rel=0.05)


@pytest.mark.parametrize(("model_type", "head_columns"), [("llama", 0), ("qwen3", 8 * 32)])
def test_a_kept_fused_layer_saves_these_tensors_and_no_other(model_type, head_columns):
    rank, num_tokens, width, hidden = 8, 2048, 128, 256
    config = {"head_dim": 32, "hidden_size": width, "intermediate_size": hidden}
    saved = small_costs(model_type, num_tokens=num_tokens, lora=LoraConfig(r=rank), config=config).segments[0]
    # Low-rank rows of seven layers, heads, attention's output, its input to the feed-forward block, gate and up; the
    # raw projection if its heads are normed.
    columns = 7 * rank + 8 * 32 + 4 * 32 + width + 2 * hidden + head_columns
    softmax_bytes = 4 * 4 * num_tokens
    # The random state of attention.
    assert saved.saved_bytes == pytest.approx(2 * num_tokens * columns + softmax_bytes, abs=512)


def test_values_of_fused_layers_are_the_products_and_the_attention():
    values = small_costs(lora=LoraConfig(r=4)).segments[0].values
    # The last projection is left out: no backward reads its output.
    names = ["self_attn.qkv", "attention", "self_attn.o_proj", "mlp.gate_up"]
    assert [value.name for value in values] == names
    # The magnitude of DoRA reads it.
    values = small_costs(lora=LoraConfig(r=4, use_dora=True)).segments[0].values
    assert [value.name for value in values] == [*names, "mlp.down"]


@pytest.mark.slow
def test_values_of_other_layers_are_the_linear_layers_and_the_attention_in_the_order_they_run():
    segment = small_costs(lora=LoraConfig(r=4), swaps=UNFUSED).segments[0]
    # The last projection is left out: no backward reads its output.
    assert [value.name.removesuffix(".base_layer") for value in segment.values] == [
        *(f"self_attn.{name}_proj" for name in "qkv"),
        "attention",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    ]
    assert segment.input_bytes == 2048 * 128 * 2
    assert [value.num_bytes for value in segment.values[:3]] == [2048 * 128 * 2, 2048 * 64 * 2, 2048 * 64 * 2]
    assert sum(value.num_bytes for value in segment.values) < segment.saved_bytes
    assert (
        0
        < sum(value.rebuild_ms for value in segment.values)
        <= segment.recompute_ms
        < segment.forward_ms
        < segment.backward_ms
    )


@pytest.mark.slow
def test_a_norm_behind_the_last_projection_makes_it_a_value():
    assert (
        small_costs("gemma2", lora=LoraConfig(r=4), config={"head_dim": 32}).segments[0].values[-1].name == "mlp.down"
    )


@pytest.mark.slow
def test_what_is_frozen_can_be_streamed_and_what_is_trained_holds_its_optimizer():
    full, lora, nf4 = (
        small_costs(),
        small_costs(lora=LoraConfig(r=4)),
        small_costs(lora=LoraConfig(r=4), quantization="nf4"),
    )
    linear = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256
    assert full.segments[0].weight_bytes == 0
    assert lora.segments[0].weight_bytes == 2 * (linear + 2 * 128)
    assert nf4.segments[0].weight_bytes == 0.5 * linear + 4 * 128
    sizes = [128 * 128] * 2 + [64 * 128] * 2 + [128 * 256] * 3
    # Bytes of the weights, a byte for 64 of them, 4 bytes for 256 of these, and two tables and an offset in fp32.
    packed = sum(size // 2 + size // 64 + 4 * -(-size // (64 * 256)) + 4 * (16 + 256 + 1) for size in sizes)
    assert (lora.base_bytes - lora.shared_bytes) - (nf4.base_bytes - nf4.shared_bytes) == 2 * (2 * linear - packed)
    # The two largest weights of one product, dequantised next to 8 ranks of adapters, in memory for all layers.
    assert nf4.shared_bytes - lora.shared_bytes == 2 * 512 * (128 + 8)


@pytest.mark.slow
def test_longer_documents_cost_more_and_a_window_bounds_them():
    options = {"num_tokens": 32768, "lora": LoraConfig(r=4), "swaps": Swaps(is_graphed=True)}
    short, long = (small_costs(document_tokens=length, **options).segments[0].values[1] for length in (512, 32768))
    assert (short.name, long.name) == ("attention", "attention")
    assert long.rebuild_ms > 5 * short.rebuild_ms
    windowed = (
        small_costs("mistral", document_tokens=32768, config={"sliding_window": 1024}, **options).segments[0].values[1]
    )
    assert windowed.rebuild_ms < long.rebuild_ms / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "has_adapters"),
    # Every family with or without adapters, in turns; `make test-faults` has the others.
    thinned(PLANNED_FAMILIES, (False, True), keep=lambda family, has_adapters: family % 2 == has_adapters),
)
def test_every_family_has_costs_that_can_be_planned(model_type, has_adapters):
    config = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, **(EXPERTS if "moe" in model_type else {})}
    cost = small_costs(model_type, lora=LoraConfig(r=4) if has_adapters else None, config=config)
    recompute = predict(cost, uniform_plan(2, "recompute"), machine=H200.machine)
    keep = predict(cost, uniform_plan(2, "keep"), machine=H200.machine)
    plan = make_plan(
        cost,
        vram_budget_bytes=(recompute.peak_bytes + keep.peak_bytes) // 2,
        host_budget_bytes=GIB,
        machine=H200.machine,
    )
    assert keep.step_ms <= plan.prediction.step_ms <= recompute.step_ms


HYBRID_NAMES = [name for name, (model_type, _) in HYBRIDS.items() if MIXERS[model_type].kind in KINDS]


@pytest.mark.parametrize("name", HYBRID_NAMES)
def test_every_hybrid_with_kernels_has_costs_that_can_be_planned(name):
    cost = model_costs(build_tiny(name).config, num_tokens=256, mean_document_tokens=64, machine=H200, lora=4)
    recompute, keep = (
        predict(cost, uniform_plan(len(cost.segments), kind), machine=H200.machine) for kind in ("recompute", "keep")
    )
    plan = make_plan(cost, vram_budget_bytes=recompute.peak_bytes, host_budget_bytes=GIB, machine=H200.machine)
    assert recompute.peak_bytes < keep.peak_bytes
    assert keep.step_ms <= plan.prediction.step_ms <= recompute.step_ms


def test_a_hybrid_without_kernels_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"JambaMambaMixer \(Mamba\) has no GPU kernel yet.*one_by_one"):
        model_costs(build_tiny("jamba").config, num_tokens=64, mean_document_tokens=64, machine=H200)


@pytest.mark.slow
def test_layers_that_differ_in_their_window_alone_differ_in_their_attention_alone():
    config = {"head_dim": 32, "num_hidden_layers": 8, "sliding_window": 512}
    first, second = (
        small_costs("gemma3_text", num_tokens=2**13, document_tokens=2**13, config=config, swaps=Swaps(is_graphed=True))
        for _ in range(2)
    )
    assert first == second
    narrow, wide = dict.fromkeys(first.segments)
    assert narrow.forward_ms <= wide.forward_ms
    assert narrow.values[1].rebuild_ms < wide.values[1].rebuild_ms
    assert (narrow.saved_bytes, narrow.backward_peak_bytes) == (wide.saved_bytes, wide.backward_peak_bytes)


def test_gradients_are_resident_and_no_transient():
    full = small_costs(num_tokens=16, document_tokens=16)
    weights = sum((2 * 128 * 128 + 2 * 64 * 128, 3 * 128 * 256))
    assert full.segments[0].backward_peak_bytes < 2 * weights / 2


@pytest.mark.parametrize("mlp_tiles", [1, 8])
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("config", [QWEN3_14B, QWEN3_06B], ids=["14b", "0.6b"])
def test_the_first_steps_of_a_budget_are_predicted_from_above(config, is_fused, mlp_tiles):
    model = build_on_meta({**config, "num_hidden_layers": 1}, dtype=torch.bfloat16)
    swaps = Swaps(is_fused=is_fused, mlp_tiles=mlp_tiles)
    options = {"num_tokens": 8192, "mean_document_tokens": DOCUMENT_TOKENS, "lora": LoraConfig(r=16), "swaps": swaps}
    cost = meter_step(model, **options).costs_on(H200)
    patcher = ModelPatcher()
    install_as_in_a_run(model, patcher, OffloadCheckpointing("recompute", mlp_tiles=mlp_tiles), swaps=swaps)
    bound = predict_cost(
        decoder_layers(model),
        torch.empty(1, 1, config["hidden_size"], dtype=torch.bfloat16),
        longest_bytes=2 * 8192 * config["hidden_size"],
        base_bytes=0,
        head=HeadSizes(config["vocab_size"]),
        weight_bytes=[0],
        ends=EndBytes(),
        mlp_tiles=mlp_tiles,
    )
    patcher.undo()
    (segment,), (most,) = cost.segments, bound.segments
    taken, allowed = (item.saved_bytes + item.backward_peak_bytes for item in (segment, most))
    assert 0.5 * allowed < taken <= allowed
    assert cost.head_peak_bytes <= bound.head_peak_bytes


def test_wrong_sizes_are_refused():
    with pytest.raises(OptionError, match="mean_document_tokens"):
        small_costs(num_tokens=100, document_tokens=0.5)
    with pytest.raises(OptionError, match="quantization"):
        small_costs(quantization="int8")


def test_the_random_state_stays_as_it_was():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    small_costs(lora=LoraConfig(r=4))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.slow
def test_masters_of_whole_weights_take_eight_more_bytes_each():
    # 8 bytes per weight: weight, gradient and moments in bf16; 16 with fp32 masters and moments.
    assert small_costs(has_masters=True).base_bytes - small_costs().base_bytes == 8 * NUM_WEIGHTS
    # Adapters have masters in any case, and the base is frozen.
    lora = LoraConfig(r=4)
    assert small_costs(lora=lora, has_masters=True).base_bytes == small_costs(lora=lora).base_bytes


def test_frozen_weights_in_fp8_are_held_beside_those_in_bf16():
    config = {**EXPERTS, "head_dim": 32}
    plain, fp8 = (
        small_costs("qwen3_moe", lora=4, config=config, swaps=Swaps(is_fp8=is_fp8)) for is_fp8 in (False, True)
    )
    experts, attention = 8 * (128 * 128 + 64 * 128), 2 * 128 * 128 + 2 * 64 * 128
    # Each weight and its transpose; an fp32 scale for each expert of two stacks, six bytes for each output column.
    layer = 2 * experts + 2 * 8 * 4 + 2 * attention + 6 * (2 * 128 + 2 * 64)
    assert (fp8.base_bytes - fp8.shared_bytes) - (plain.base_bytes - plain.shared_bytes) == 2 * layer


def test_a_step_is_metered_once_for_all_gpus():
    config = {"model_type": "llama", **SMALL}
    step = meter_step(config, num_tokens=2048, mean_document_tokens=512, swaps=Swaps(is_graphed=True))
    fast, slow = (step.costs_on(find_gpu(name)) for name in ("H200", "RTX 4060"))
    assert fast == small_costs(swaps=Swaps(is_graphed=True)) == step.costs_on(H200)
    assert slow.segments[0].forward_ms > 5 * fast.segments[0].forward_ms
    assert slow.base_bytes == fast.base_bytes


def test_a_budget_is_planned_as_a_run_plans_it():
    cost = small_costs(lora=4)
    least, most = (
        predict(cost, uniform_plan(2, kind), machine=H200.machine).peak_bytes for kind in ("recompute", "keep")
    )
    plan = functools.partial(plan_on, H200, cost, host_budget_bytes=0)
    # 95 % of a budget, or all of it if nothing fits 95 %.
    assert plan(vram_budget_bytes=most).prediction.peak_bytes <= 0.95 * most
    assert plan(vram_budget_bytes=int(1.06 * most)).prediction.peak_bytes == most
    assert plan(vram_budget_bytes=least).prediction.peak_bytes <= least
    assert plan(vram_budget_bytes=None).prediction.peak_bytes == most


@pytest.mark.slow
def test_loftq_costs_what_other_initialisations_cost():
    lora = LoraConfig(r=4)
    # Set later, because PEFT asks for scipy in the call above.
    lora.init_lora_weights, lora.loftq_config = "loftq", {"loftq_bits": 4, "loftq_iter": 1}
    assert small_costs(lora=lora, quantization="nf4") == small_costs(lora=4, quantization="nf4")


def test_an_optimizer_counts_its_own_state():
    plain = small_costs().base_bytes
    wide = small_costs(optimizer=FusedAdamW).base_bytes
    narrow, on_host = (
        small_costs(optimizer=lambda params, share=share: FusedAdamW(params, optim_bits=8, offload=share)).base_bytes
        for share in (0.0, 1.0)
    )
    # fp32 moments take 8 bytes per weight where bf16 ones take 4.
    assert wide - plain == 4 * NUM_WEIGHTS
    assert on_host < narrow < plain
