"""Offload on a GPU: bit-equal under delayed copies, no host wait, no leak, and copies that really run beside
compute.
"""

import gc
import random

import pytest
import torch

from lightning_fastft.activations.engine import OffloadEngine
from lightning_fastft.activations.streams import CudaCopyStreams
from lightning_fastft.planner.step import SegmentPlan
from tests.planner.plan_trials import PlannedModel, assert_equal, kept_gradients, random_plan
from tests.support.engine_use import describe_use
from tests.support.host_waits import waits_are_errors
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny

pytestmark = pytest.mark.gpu

LENGTHS = (300, 1, 512, 211)
# About 1 ms at the clocks of today's GPUs.
CYCLES_PER_MS = 2_000_000


class DelayedLanes(CudaCopyStreams):
    """Copies that start late, at random, by up to 3 ms."""

    least_ms, most_ms = 0.0, 3.0

    def __init__(self, device, *, seed):
        super().__init__(device)
        self._rng = random.Random(seed)

    def _copy(self, target, source, *, stream, after):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(self._rng.uniform(self.least_ms, self.most_ms) * CYCLES_PER_MS))
        return super()._copy(target, source, stream=stream, after=after)


@pytest.fixture
def deterministic(monkeypatch):
    # Asked for by torch; the products here run on one stream, where cuBLAS is deterministic whatever its workspace.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # With warn_only the flash kernels of torch stay non-deterministic.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_model(name, *, dtype=torch.bfloat16):
    options = {} if name in ("gpt_oss", "gemma2") else {"num_hidden_layers": 4}
    model = build_tiny(name, **options).to("cuda", dtype).train()
    return model, [make_batch(LENGTHS, seed=seed).to("cuda") for seed in range(3)]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_random_plans_are_bit_equal_under_delayed_copies(name, deterministic):
    model, batches = make_model(name)
    expected = {count: kept_gradients(model, batches, count) for count in (1, 3)}
    for count in (1, 3):
        assert_equal(
            kept_gradients(model, batches, count, policy="torch"), expected[count], what=f"{name}: torch's checkpoint"
        )
    planned = PlannedModel(model, batches, make_copy_streams=lambda device: DelayedLanes(device, seed=5))
    # Attention is a value here: the flash kernels are ours to skip.
    assert "attention" in planned.value_names[0]
    for seed in range(50):
        planned.follow(random_plan(planned.value_names, seed=seed))
        for count in (1, 3):
            assert_equal(planned.gradients(count), expected[count], what=f"{name}, plan {seed}, accumulation {count}")
        use = planned.use()
        assert use is None or (
            use["num_kept"],
            use["num_unplanned"],
            use["num_replaced"],
            use["pinned_used_bytes"],
        ) == (0, 0, 0, 0)


@pytest.mark.parametrize("fault", ["out", "in"])
def test_a_missing_wait_is_seen(fault, deterministic):
    class Careless(DelayedLanes):
        def wait_compute(self, mark):
            """Wait for nothing."""

        def copy_out(self, host, device, *, after):
            return super().copy_out(host, device, after=after)

    class EarlyFetch(DelayedLanes):
        def copy_in(self, device, host, *, after):
            return super().copy_in(device, host, after=[])

    model, batches = make_model("llama")
    expected = kept_gradients(model, batches, 3)
    planned = PlannedModel(
        model, batches, make_copy_streams=lambda device: (Careless if fault == "out" else EarlyFetch)(device, seed=5)
    )
    planned.follow(all_on_host(planned.value_names))
    found = planned.gradients(3)
    assert any(not torch.equal(found[name], gradient) for name, gradient in expected.items())


def all_on_host(value_names):
    return [
        SegmentPlan(is_kept=False, input_place="host", values=tuple((name, "host") for name in names))
        for names in value_names
    ]


def test_a_step_under_offload_waits_for_nothing():
    model, batches = make_model("qwen3")
    planned = PlannedModel(model, batches)
    planned.follow(all_on_host(planned.value_names))
    planned.gradients(1)
    with waits_are_errors():
        for batch in batches:
            model(**batch).loss.backward()


def allocated_bytes():
    """Memory of this process, without what earlier tests left in reference cycles."""
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()


def test_nothing_leaks_over_200_steps_nor_after_the_end():
    gc.collect()
    model, batches = make_model("llama")
    planned = PlannedModel(model, batches)
    before = allocated_bytes()
    planned.follow(all_on_host(planned.value_names))
    found = {}
    for step in range(200):
        planned.gradients(1)
        if step in (2, 199):
            found[step] = (planned.use(), allocated_bytes())
    assert found[2] == found[199]
    engine = planned.stack.engine
    planned.patcher.undo()
    assert describe_use(engine)["pinned_bytes"] == describe_use(engine)["staging_bytes"] == 0
    model.zero_grad(set_to_none=True)
    assert allocated_bytes() <= before


def test_an_exception_in_the_backward_leaves_a_clean_next_step(deterministic):
    model, batches = make_model("llama")
    expected = kept_gradients(model, batches, 1)
    planned = PlannedModel(model, batches)
    planned.follow(all_on_host(planned.value_names))

    def fail(_):
        raise RuntimeError("planted")

    handle = model.model.layers[1].mlp.register_full_backward_pre_hook(lambda *_: fail(_))
    with pytest.raises(RuntimeError, match="planted"):
        planned.gradients(1)
    handle.remove()
    assert_equal(planned.gradients(1), expected, what="after an exception")
    assert planned.use()["pinned_used_bytes"] == 0


@pytest.mark.alone
def test_pinned_copies_reach_the_speed_of_the_bus():
    engine = OffloadEngine(CudaCopyStreams(torch.device("cuda")), host_bytes=2**30, slot_bytes=2**29)
    tensor = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    allocations = []
    for repeat in range(4):
        if repeat == 1:
            begin.record(engine.streams.out_stream)
        allocations.append(engine.store(engine.open_group(), tensor))
    end.record(engine.streams.out_stream)
    end.synchronize()
    rate = 3 * 2**28 / (begin.elapsed_time(end) / 1e3)
    allocations.clear()
    engine.close()
    assert rate > 20e9, f"{rate / 1e9:.1f} GB/s: is the slab pinned?"
