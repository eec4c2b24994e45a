"""Clusters: ring times by hand, sizes of models, and the measured steps of several GPUs."""

import csv

import pytest

from benchmarks import cluster_model
from lightning_fastft.core.errors import OptionError
from lightning_fastft.estimate.clusters import LINK_SHARE, NETWORK_HOP_MS, NVLINK_HOP_MS, Rings, make_cluster
from lightning_fastft.estimate.costs import model_costs
from lightning_fastft.estimate.layouts import (
    RANK_WAIT,
    Layout,
    exchange,
    forecast,
    keeps_fp8,
    possible_layouts,
    rank_cost,
)
from lightning_fastft.estimate.machines import find_gpu
from lightning_fastft.estimate.meta_model import Swaps, build_on_meta
from lightning_fastft.estimate.model_size import measure_model
from lightning_fastft.planner.prediction import predict
from lightning_fastft.planner.step import uniform_plan

H100 = find_gpu("H100")
TOKENS = 512
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
DENSE_CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
}
# Of a dense layer: q, k and v; output; gate and up; down.
FP8_COLUMNS = 128 + 2 * 32 + 128 + 2 * 256 + 128
FP8_NUMBERS = 128 * (128 + 2 * 32 + 128 + 2 * 256 + 256)
EXPERT_NUMBERS = 8 * 3 * 64 * 128
LAYER_NUMBERS = EXPERT_NUMBERS + 128 * (128 + 2 * 32 + 128) + 8 * 128 + 2 * 128 + 2 * 16
ROOT_NUMBERS = 2 * 512 * 128 + 128
# Of a pack: angles of 16 columns, and the padding mask; of the model: two tables of frequencies.
SHARED_BYTES = TOKENS * (2 * 16 * 2 + 1) + 2 * 8 * 4


def cluster(num_gpus, num_nodes, **links):
    return make_cluster(H100, num_gpus=num_gpus, num_nodes=num_nodes, **links)


@pytest.fixture(scope="module")
def sized():
    """Return costs and sizes of the small model, with every weight trained and with adapters."""
    found = {}
    for rank in (None, 4):
        model = build_on_meta(CONFIG)
        cost = model_costs(model, num_tokens=TOKENS, mean_document_tokens=128, machine=H100, lora=rank)
        found[rank] = (cost, measure_model(model, cost))
    return found


def test_rings_move_their_share_over_the_slowest_link():
    rings = Rings(cluster(16, 2))
    inside = 7 / 8 * 1e9 / (LINK_SHARE * 450e9) * 1e3 + 7 * NVLINK_HOP_MS
    assert rings.neighbours_ms(1e9, 8) == pytest.approx(inside)
    # Eight adapters of 50 GB/s carry a ring over both nodes together.
    across = 15 / 16 * 1e9 / (LINK_SHARE * 400e9) * 1e3 + 15 * NETWORK_HOP_MS
    assert rings.neighbours_ms(1e9, 16, times=2) == pytest.approx(2 * across)
    # Between groups each rank has one of them.
    between = 1 / 2 * 1e9 / (LINK_SHARE * 50e9) * 1e3 + NETWORK_HOP_MS
    assert rings.groups_ms(1e9, 8) == pytest.approx(between)
    assert rings.link_ms == pytest.approx({"NVLink": inside, "InfiniBand": 2 * across + between})
    assert rings.neighbours_ms(1e9, 1) == rings.neighbours_ms(0, 8) == 0.0


def test_sizes_are_those_of_the_parameters(sized):
    _, full = sized[None]
    assert [part.num_trained for part in full.parts] == [LAYER_NUMBERS, LAYER_NUMBERS, ROOT_NUMBERS]
    assert (full.layers[0].num_expert_trained, full.num_experts, full.itemsize) == (EXPERT_NUMBERS, 8, 2)
    # Weight, gradient and two moments in bf16.
    assert full.state_itemsize == pytest.approx(8)
    _, lora = sized[4]
    assert lora.layers[0].expert_bytes == pytest.approx(2 * EXPERT_NUMBERS)
    assert lora.layers[0].num_trained == 4 * (2 * (128 + 128) + 2 * (128 + 32))
    assert (lora.trained_itemsize, lora.state_itemsize) == (4, pytest.approx(18))


def test_layouts_are_those_that_divide_the_cluster(sized):
    _, model = sized[None]
    names = [layout.name for layout in possible_layouts(cluster(16, 2), model)]
    assert names[:5] == ["DDP", "FSDP2", "FSDP2, kept gathered", "hybrid sharding", "expert parallel 8"]
    assert names[-1] == "FSDP2, context parallel 8"
    assert [layout.name for layout in possible_layouts(cluster(6, 2), model)] == [*names[:3], "hybrid sharding"]


def test_each_strategy_exchanges_what_its_ring_needs(sized):
    _, model = sized[None]
    two = cluster(16, 2)
    options = {"num_tokens": TOKENS, "recomputed": [True, False]}
    rings = Rings(two)
    ddp = exchange(Layout("ddp"), two, model, **options)
    assert ddp.forward_ms == ddp.exposed_ms == 0.0
    parts = (LAYER_NUMBERS, LAYER_NUMBERS, ROOT_NUMBERS)
    assert ddp.backward_ms == pytest.approx(sum(rings.neighbours_ms(2 * part, 16, times=2) for part in parts))
    assert exchange(Layout("ddp"), two, model, is_last=False, **options).backward_ms == 0.0
    # Weights are gathered twice, the tensors outside of the layers once, and gradients are reduced in fp32.
    sharded = exchange(Layout("fsdp2"), two, model, **options)
    assert sharded.forward_ms == pytest.approx(sum(rings.neighbours_ms(2 * part, 16) for part in parts))
    assert sharded.backward_ms == pytest.approx(
        sum(rings.neighbours_ms(4 * part, 16) for part in parts)
        + sum(rings.neighbours_ms(2 * part, 16) for part in parts[:2])
    )
    hybrid = exchange(Layout("hybrid"), two, model, **options)
    assert hybrid.forward_ms == pytest.approx(sum(rings.neighbours_ms(2 * part, 8) for part in parts))
    assert hybrid.backward_ms == pytest.approx(
        sum(rings.neighbours_ms(4 * part, 8) + rings.groups_ms(4 * part / 8, 8, times=2) for part in parts)
        + sum(rings.neighbours_ms(2 * part, 8) for part in parts[:2])
    )
    # Inputs and outputs of all tokens of the group, in three passes of the recomputed layer and two of the kept one.
    experts = exchange(Layout("expert", size=8), two, model, **options)
    assert experts.exposed_ms == pytest.approx(rings.neighbours_ms(8 * TOKENS * 128 * 2, 8, times=10))
    dense = (LAYER_NUMBERS - EXPERT_NUMBERS, LAYER_NUMBERS - EXPERT_NUMBERS, ROOT_NUMBERS)
    assert experts.forward_ms == pytest.approx(sum(rings.neighbours_ms(2 * part, 8) for part in dense))
    # Queries, keys, values and outputs: 8 + 2 + 2 + 8 heads of 16 columns.
    context = exchange(Layout("ddp", context=4), two, model, **options)
    assert context.exposed_ms == pytest.approx(rings.all_to_all_ms(TOKENS * 20 * 16 * 2, 4, times=5))
    slow = make_cluster(H100, num_gpus=16, num_nodes=2, network="0.1")
    bounds = [exchange(Layout(*kind), slow, model, **options).bound for kind in (("fsdp2",), ("ddp", 1, 4))]
    assert bounds == ["the network", "the network"]
    one = cluster(8, 1)
    assert exchange(Layout("ddp", context=4), one, model, **options).bound == "NVLink"


def test_frozen_layers_that_stay_gathered_cost_memory_and_no_exchange(sized):
    cost, model = sized[4]
    two, options = cluster(16, 2), {"num_tokens": TOKENS}
    sharded, resident = Layout("fsdp2"), Layout("fsdp2", is_resident=True)
    assert resident in possible_layouts(two, model)
    times = [exchange(layout, two, model, recomputed=[False] * 2, **options) for layout in (sharded, resident)]
    frozen_ms = sum(Rings(two).neighbours_ms(layer.frozen_bytes, 16) for layer in model.layers)
    assert times[0].forward_ms - times[1].forward_ms == pytest.approx(frozen_ms)
    held = [rank_cost(cost, layout, two, model, **options).base_bytes for layout in (sharded, resident)]
    # Both layers, in place of the three that a forward has gathered.
    assert held[0] - held[1] == pytest.approx(model.layers[0].frozen_bytes, abs=1)


def test_replicated_adapters_are_reduced_once_and_never_gathered(sized):
    cost, model = sized[4]
    two, options = cluster(16, 2), {"num_tokens": TOKENS}
    rings, num_trained = Rings(two), sum(part.num_trained for part in model.parts)
    for layout in (Layout("fsdp2"), Layout("hybrid")):
        shards = {"fsdp2": 16, "hybrid": 8}[layout.kind]
        found = exchange(layout, two, model, recomputed=[False] * 2, **options)
        layers_ms = sum(rings.neighbours_ms(layer.frozen_bytes, shards) for layer in model.layers)
        assert found.backward_ms == pytest.approx(layers_ms)
        assert found.forward_ms == pytest.approx(layers_ms + rings.neighbours_ms(model.root.frozen_bytes, shards))
        # An all-reduce at the end of the backward, in which no compute runs.
        assert found.exposed_ms == pytest.approx(rings.neighbours_ms(4 * num_trained, 16, times=2))
        assert exchange(layout, two, model, recomputed=[False] * 2, is_last=False, **options).exposed_ms == 0.0
        # Every rank updates all of them.
        assert rank_cost(cost, layout, two, model, **options).other_ms == cost.other_ms


def test_trained_layers_that_stay_gathered_are_exchanged_in_the_forward_only(sized):
    cost, model = sized[None]
    two, options = cluster(16, 2), {"num_tokens": TOKENS}
    sharded, resident = Layout("fsdp2"), Layout("fsdp2", is_resident=True)
    times = [exchange(layout, two, model, recomputed=[False] * 2, **options) for layout in (sharded, resident)]
    assert times[0].forward_ms == times[1].forward_ms
    gathers_ms = sum(Rings(two).neighbours_ms(model.gathered_bytes(layer), 16) for layer in model.layers)
    assert times[0].backward_ms - times[1].backward_ms == pytest.approx(gathers_ms)
    held = [rank_cost(cost, layout, two, model, **options).base_bytes for layout in (sharded, resident)]
    # Both layers and the gradients of one, in place of three that a forward or two that a backward has gathered.
    assert held[1] >= sum(map(model.gathered_bytes, model.layers)) > held[1] - held[0] >= 0


def test_frozen_weights_in_fp8_are_gathered_and_held_in_one_byte():
    found = {}
    for is_fp8 in (False, True):
        model = build_on_meta(DENSE_CONFIG)
        options = {"num_tokens": TOKENS, "mean_document_tokens": 128, "machine": H100, "lora": 4}
        cost = model_costs(model, swaps=Swaps(is_fp8=is_fp8), **options)
        found[is_fp8] = (cost, measure_model(model, cost, is_fp8=is_fp8))
    (plain_cost, plain), (fp8_cost, fp8) = found[False], found[True]
    # One device also has the weights in e4m3, their transposes and scales; what it trains takes the same memory.
    assert fp8_cost.base_bytes - plain_cost.base_bytes == 2 * (2 * FP8_NUMBERS + 6 * FP8_COLUMNS)
    assert fp8.state_itemsize == plain.state_itemsize == pytest.approx(18)
    one, two = cluster(1, 1), cluster(16, 2)
    assert rank_cost(fp8_cost, Layout("ddp"), one, fp8, num_tokens=TOKENS).base_bytes == fp8_cost.base_bytes
    options = {"num_tokens": TOKENS, "recomputed": [False] * 2}
    times = [exchange(Layout("fsdp2"), two, size, **options) for size in (plain, fp8)]
    # In bf16 a layer has a byte more per weight.
    saved_ms = 2 * (Rings(two).neighbours_ms(1e9 + FP8_NUMBERS, 16) - Rings(two).neighbours_ms(1e9, 16))
    assert times[0].forward_ms - times[1].forward_ms == pytest.approx(saved_ms)
    held = {
        layout: rank_cost(plain_cost, layout, two, plain, num_tokens=TOKENS).base_bytes
        - rank_cost(fp8_cost, layout, two, fp8, num_tokens=TOKENS).base_bytes
        for layout in (Layout("fsdp2"), Layout("fsdp2", is_resident=True))
    }
    # Shards and three gathered layers, or both; each rank has all scales and the concatenated weights of gate and up.
    saved = 2 * FP8_NUMBERS / 16 - 2 * 6 * FP8_COLUMNS - 2 * 256 * 128
    assert list(held.values()) == pytest.approx([saved + 3 * FP8_NUMBERS, saved + 2 * FP8_NUMBERS], abs=2)


@pytest.mark.parametrize("options", [{"lora": None}, {"lora": 4, "quantization": "nf4"}], ids=["trained", "nf4"])
def test_weights_that_fsdp2_does_not_gather_in_e4m3_are_not_counted_so(options):
    model = build_on_meta(DENSE_CONFIG)
    cost = model_costs(
        model, num_tokens=TOKENS, mean_document_tokens=128, machine=H100, swaps=Swaps(is_fp8=True), **options
    )
    size, two = measure_model(model, cost, is_fp8=True), cluster(2, 1)
    assert not size.gathers_fp8
    assert [keeps_fp8(Layout(kind), two, size) for kind in ("ddp", "fsdp2")] == [True, False]


def test_memory_of_a_gpu_falls_with_its_share(sized):
    cost, model = sized[None]
    two = cluster(16, 2)
    held = {
        layout.name: rank_cost(cost, layout, two, model, num_tokens=TOKENS).base_bytes
        for layout in possible_layouts(two, model)
    }
    numbers = 2 * LAYER_NUMBERS + ROOT_NUMBERS
    assert held["DDP"] == 8 * numbers + 2 * numbers + SHARED_BYTES
    gathered = 2 * ROOT_NUMBERS + 2 * 2 * LAYER_NUMBERS + 2 * ROOT_NUMBERS + 6 * LAYER_NUMBERS
    assert held["FSDP2"] == int(8 * numbers / 16 + gathered) + SHARED_BYTES
    assert held["hybrid sharding"] == int(8 * numbers / 8 + gathered) + SHARED_BYTES
    # Owned experts are shards that are not gathered.
    tokens = 2 * 8 * TOKENS * 128 * 2
    dense = LAYER_NUMBERS - EXPERT_NUMBERS
    gathered = 2 * ROOT_NUMBERS + 2 * 2 * dense + 2 * ROOT_NUMBERS + 6 * dense
    assert held["expert parallel 8"] == int(8 * numbers / 8 + gathered + tokens) + SHARED_BYTES


def test_adapters_are_counted_whole_on_every_gpu_unless_they_are_sharded(sized):
    cost, model = sized[4]
    two = cluster(16, 2)
    whole, cut = (
        rank_cost(cost, Layout("fsdp2"), two, each, num_tokens=TOKENS).base_bytes
        for each in (model, model._replace(replicates_adapters=False))
    )
    num_trained = sum(part.num_trained for part in model.parts)
    # The reduction copies fp32 gradients; sharded adapters are gathered with three layers in the forward.
    copied, gathered = 4 * num_trained, 3 * 4 * model.layers[0].num_trained
    assert whole - cut == pytest.approx(num_trained * model.state_itemsize * 15 / 16 + copied - gathered, abs=1)


def test_the_slower_one_of_compute_and_links_counts(sized):
    cost, model = sized[4]
    found = {}
    for network in ("infiniband", "0.01"):
        where = cluster(16, 2, network=network)
        own = rank_cost(cost, Layout("fsdp2"), where, model, num_tokens=TOKENS)
        segments = uniform_plan(2, "keep")
        prediction = predict(own, segments, machine=H100.machine)
        options = {"cost": own, "segments": segments, "prediction": prediction, "num_tokens": TOKENS}
        found[network] = forecast(Layout("fsdp2"), where, model, **options)
        traffic = exchange(Layout("fsdp2"), where, model, num_tokens=TOKENS, recomputed=[False, False])
        if network == "0.01":
            links = own.other_ms + traffic.forward_ms + traffic.backward_ms + traffic.exposed_ms
            assert found[network].step_ms == pytest.approx(links * RANK_WAIT)
            assert found[network].is_link_bound
            two_batches = forecast(Layout("fsdp2"), where, model, num_micro=2, **options)
            assert found[network].step_ms < two_batches.step_ms < 2 * found[network].step_ms
        else:
            assert prediction.step_ms * RANK_WAIT < found[network].step_ms < 2 * prediction.step_ms


def test_links_have_names_or_rates_and_wrong_ones_are_refused():
    assert cluster(8, 2, network="ethernet").network_bytes_per_s == 12.5e9
    assert cluster(8, 2, node_link="pcie").network == "Ethernet"
    assert cluster(8, 1, node_link="25").node_bytes_per_s == 25e9
    with pytest.raises(OptionError, match="does not divide"):
        cluster(10, 4)
    with pytest.raises(OptionError, match=r"--network.*'wifi'"):
        cluster(8, 2, network="wifi")
    with pytest.raises(OptionError, match="above 0"):
        cluster(8, 2, node_link="-5")
    with pytest.raises(OptionError, match="no nvlink"):
        make_cluster(find_gpu("4090"), num_gpus=2, num_nodes=1, node_link="nvlink")


def is_in_every_run(workload):
    """Whether rows of a workload are: every strategy and mode of one model, experts of few layers, and gathers in e4m3."""
    return workload.startswith(("qwen3-8b", "qwen3-30b-a3b-12l")) or "+fp8" in workload


@pytest.mark.parametrize(
    ("is_judged", "num_rows"),
    [(is_in_every_run, 27), pytest.param(lambda workload: True, 41, marks=pytest.mark.fault)],
    ids=["of each kind", "all"],
)
@pytest.mark.slow(seconds=12)
def test_measured_steps_of_several_gpus_are_predicted_within_ten_percent(tmp_path, is_judged, num_rows):
    with cluster_model.RESULTS_PATH.open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        kept = [row for row in table if row["benchmark"] == "train_step" or is_judged(row["workload"])]
    with (tmp_path / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, table.fieldnames)
        writer.writeheader()
        writer.writerows(kept)
    rows = cluster_model.compare_rows(tmp_path / "rows.csv")
    assert len(rows) >= num_rows
    # Two of them gave constants of the model.
    assert sum(row.is_used for row in rows) == 2
    for row in rows:
        assert row.unknown or not row.is_off, row
    # Expert parallelism: the memory of plans that are the same in both is predicted, and the time is not.
    experts = [row for row in rows if row.unknown]
    assert {row.system.split()[1] for row in experts} == {"experts"}
    assert all(abs(row.peak_error) <= cluster_model.MAX_ERROR for row in experts if "auto" not in row.workload)
