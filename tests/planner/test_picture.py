"""A plan as text: verbatim for a small step, and within its width for a large one."""

from lightning_fastft.planner.picture import NUM_COLUMNS, WIDTH, render_plan
from lightning_fastft.planner.plan import make_plan
from lightning_fastft.planner.prediction import predict
from lightning_fastft.planner.step import Machine, Plan, SegmentPlan, ValueCost, uniform_plan
from tests.planner.planning import GB, H200, MB, plain_step, qwen3_14b

MACHINE = Machine("any", 10e9, 10e9)
PICTURE = """\
layers                      treatment of their activations
0-1                         input host; self_attn.q_proj on the host; mlp.up_proj on the device;
                            rest recomputed
2                           input device; rest recomputed
3                           kept: nothing is recomputed
predicted peak    2.04 GiB
predicted step    148.0 ms, 20.0 of it recomputed
waits for copies  0.0 ms
host memory       0.17 GiB pinned, staging slots of 86 MiB
note: the host budget is small.

device memory over the step, full height 2.04 GiB
(f forward, h head, b backward, one layer after the other)
     peak |    #
          |   ###
          |   ######
          |#########
          |#########
          |#########
          |#########
          |#########
          +ffffhbbbb

streams over time, one character is 1.76 ms; d2h copies to the host, h2d back
(compute: f h b as above, o optimizer and others, . waiting; copies: . none, - some, = half, # all)
  compute |fffffffffffffffffffffffhhhbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbo
      d2h |#####-####=.........................................................................
      h2d |..........................=####-......................=####=........................"""


def lane(text, name):
    return next(line.partition("|")[2] for line in text.splitlines() if line.strip().startswith(f"{name} |"))


def test_the_picture_of_a_small_step():
    values = (ValueCost("self_attn.q_proj", 40 * MB, 2.0), ValueCost("mlp.up_proj", 60 * MB, 3.0))
    around = {"base_bytes": GB, "head_peak_bytes": 300 * MB, "head_ms": 6.0, "other_ms": 2.0}
    cost = plain_step(4, input_bytes=50 * MB, saved_bytes=400 * MB, values=values, **around)
    on_host = SegmentPlan(False, "host", (("self_attn.q_proj", "host"), ("mlp.up_proj", "device")))
    segments = (on_host, on_host, SegmentPlan(False, "device", ()), SegmentPlan(True, "device", ()))
    plan = Plan(segments, predict(cost, segments, machine=MACHINE), ("the host budget is small.",))
    assert render_plan(cost, plan) == PICTURE


def test_the_step_of_an_optimizer_with_transient_memory_is_drawn():
    cost = plain_step(4, base_bytes=GB)._replace(update_peak_bytes=GB)
    segments = uniform_plan(4, "keep")
    text = render_plan(cost, Plan(segments, predict(cost, segments, machine=MACHINE), ()))
    assert "one layer after the other; o optimizer)" in text
    assert "          +ffffhbbbbo\n" in text
    assert "     peak |         #\n" in text


def test_the_picture_of_64_layers_keeps_its_width():
    cost = qwen3_14b(num_layers=64)
    text = render_plan(cost, make_plan(cost, vram_budget_bytes=50 * GB, host_budget_bytes=100 * GB, machine=H200))
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert len(lane(text, "compute")) == len(lane(text, "d2h")) == NUM_COLUMNS


def test_compute_that_waits_for_copies_is_seen():
    cost = plain_step(6, input_bytes=400 * MB)
    segments = uniform_plan(6, "offload")
    prediction = predict(cost, segments, machine=MACHINE)
    text = render_plan(cost, Plan(segments, prediction, ()))
    assert f"waits for copies  {prediction.exposed_ms:.1f} ms" in text
    assert abs(lane(text, "compute").count(".") - NUM_COLUMNS * prediction.exposed_ms / prediction.step_ms) < 3


def test_streamed_weights_and_scattered_segments_are_said():
    cost = plain_step(20, weight_bytes=MB)
    segments = tuple(SegmentPlan(number % 2 == 0, "device", (), is_streamed=True) for number in range(20))
    text = render_plan(cost, Plan(segments, predict(cost, segments, machine=MACHINE), ()))
    assert "0, 2, 4, ... (10 in all)    kept: nothing is recomputed; weights streamed" in text
