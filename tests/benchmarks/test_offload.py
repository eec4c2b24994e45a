import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import multi_gpu, multi_gpu_steps, multi_gpu_tables, offload, offload_front, offload_rig
from benchmarks.offload_rig import Rig, Run, disagreement, exposed_ms
from benchmarks.ruler import plans
from benchmarks.ruler.building import build
from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles, plan_packs, read_lengths
from lightning_fastft.activations.segments import Segment
from lightning_fastft.monitor.report import step_profile
from lightning_fastft.monitor.report.step_profile import Copy, Kernel, copy_use, read_events
from lightning_fastft.planner.step import Machine, SegmentCost, StepCost, ValueCost, uniform_plan

TINY = WORKLOADS["tiny"]
MIB = 2**20


# Intervals


def kernel(start, end, launched=-math.inf):
    return Kernel(start, end, launched)


def test_merge_and_overlap_measure_disjoint_intervals():
    merged = step_profile.merge([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0)])
    assert merged == [(0.0, 4.0), (5.0, 6.0)]
    assert step_profile.total(merged) == 5.0
    assert step_profile.overlap(merged, [(1.0, 2.0), (3.5, 5.5), (5.75, 9.0)]) == 1.0 + 0.5 + 0.5 + 0.25
    assert step_profile.overlap([], merged) == 0.0


def test_a_copy_under_kernels_is_not_exposed():
    use = copy_use([kernel(0, 1000), kernel(1001, 3000)], [Copy("h2d", 100, 2500, MIB)])
    assert use.covered_share == pytest.approx(2399 / 2400)
    assert use.exposed_ms == 0.0
    assert use.hidden_share == 1.0
    assert use.step_ms == 3.0


def test_a_kernel_that_waits_for_a_copy_shows_as_exposed_time():
    # The host launched the second kernel long before; the device stands still until the copy ends.
    use = copy_use([kernel(0, 1000), kernel(2000, 3000, launched=500)], [Copy("h2d", 900, 1990, MIB)])
    assert use.exposed_ms == pytest.approx((1990 - 1000 - step_profile.NEXT_KERNEL_US) / 1e3)
    assert use.covered_share == pytest.approx(100 / 1090)
    assert use.late_host_ms == 0.0


def test_a_late_host_is_not_held_against_the_copies():
    use = copy_use([kernel(0, 1000), kernel(2000, 3000, launched=1995)], [Copy("h2d", 900, 1990, MIB)])
    assert use.exposed_ms == 0.0
    assert use.late_host_ms == pytest.approx(0.995)
    # Handed over at last, it waits for the copy once more.
    use = copy_use([kernel(0, 1000), kernel(2000, 3000, launched=1500)], [Copy("h2d", 900, 2000, MIB)])
    assert use.exposed_ms == pytest.approx((500 - step_profile.LAUNCH_US) / 1e3)


def test_the_serial_control_shows_no_cover():
    # Copies on the compute stream: no kernel ever runs beside them.
    kernels = [kernel(start, start + 100, launched=0) for start in range(0, 1000, 200)]
    use = copy_use(kernels, [Copy("d2h", start + 100, start + 200, MIB) for start in range(0, 800, 200)])
    assert use.covered_share == 0.0
    assert use.exposed_ms > 0.35
    assert copy_use([], []).covered_share == 1.0


def test_events_of_a_trace_become_kernels_and_large_copies():
    def event(category, name, ts, dur, **arguments):
        return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": arguments}

    kernels, found = read_events(
        [
            event("cuda_runtime", "cudaLaunchKernel", 3.0, 1.0, correlation=7),
            event("cuda_driver", "cuLaunchKernelEx", 4.0, 1.0, correlation=8),
            event("kernel", "second", 30.0, 5.0, correlation=8),
            event("kernel", "first", 20.0, 5.0, correlation=7),
            event("gpu_memset", "Memset (Device)", 40.0, 1.0, correlation=9),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 50.0, 2.0, bytes=MIB),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 21.0, 9.0, bytes=4 * MIB, stream=13),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 22.0, 0.1, bytes=4096),
            {"ph": "M", "name": "thread_name", "args": {}},
        ]
    )
    assert kernels == [(20.0, 25.0, 3.0), (30.0, 35.0, 4.0), (40.0, 41.0, -math.inf), (50.0, 52.0, -math.inf)]
    assert found == [("d2h", 21.0, 30.0, 4 * MIB)]


@pytest.mark.gpu
@pytest.mark.alone
def test_a_profiled_step_on_a_gpu_shows_its_copy_and_its_wait():
    # The copy takes milliseconds, so that a product starts beside it on a busy host too.
    host = torch.empty(512 * MIB, dtype=torch.uint8).pin_memory()
    device = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    square = torch.randn(1024, 1024, device="cuda")
    side, event = torch.cuda.Stream(), torch.cuda.Event()

    def step():
        with torch.cuda.stream(side):
            device.copy_(host, non_blocking=True)
            event.record()
        square @ square
        torch.cuda.current_stream().wait_event(event)
        square @ square

    step()
    profile = step_profile.StepProfile(is_cuda=True)
    profile.start()
    step()
    trace = profile.stop()
    use = copy_use(trace.kernels, trace.copies)
    assert use.num_h2d == 1
    assert use.h2d_gib == pytest.approx(0.5)
    # The first product ran beside the copy and is shorter, so the second one waited.
    assert 0 < use.exposed_ms < use.h2d_ms


# Modes


@pytest.mark.parametrize(
    ("mode", "policy", "vram_gib", "host_gib", "buffers", "wants_liger", "wants_fused"),
    [
        ("keep", "keep", None, None, 2, False, False),
        ("recompute+liger", "recompute", None, None, 2, True, False),
        ("offload", "offload", None, plans.DEFAULT_HOST_GIB, 2, False, False),
        ("offload1:8+liger", "offload", None, 8.0, 1, True, False),
        ("auto", "auto", None, plans.DEFAULT_HOST_GIB, 2, False, False),
        ("auto=14.5:32+liger", "auto", 14.5, 32.0, 2, True, False),
        ("recompute:8+stream+tiles4", "recompute", None, 8.0, 2, False, False),
        ("keep+resident", "keep", None, None, 2, False, False),
        ("keep+fused", "keep", None, None, 2, False, True),
        ("recompute+graphs", "recompute", None, None, 2, False, True),
        ("auto+graphs=auto", "auto", None, plans.DEFAULT_HOST_GIB, 2, False, True),
        ("keep+fused+fp8", "keep", None, None, 2, False, True),
    ],
)
def test_modes_name_policies_and_budgets(mode, policy, vram_gib, host_gib, buffers, wants_liger, wants_fused):
    checkpointing, liger, fused, graphs, fp8 = plans.parse_mode(mode)
    assert graphs == ("auto" if mode.endswith("+graphs=auto") else mode.endswith("+graphs"))
    assert fp8 == mode.endswith("+fp8")
    asked = [(callback.cuda_graphs, callback.base_compute) for callback in plans.parse_mode(mode).callbacks()]
    assert asked == ([(graphs, "fp8" if fp8 else "model_dtype")] if fused else [])
    options = checkpointing.options
    assert (checkpointing.policy, options.buffers, liger, fused) == (policy, buffers, wants_liger, wants_fused)
    assert options.vram_budget_bytes == (None if vram_gib is None else int(vram_gib * 2**30))
    assert options.host_budget_bytes == (None if host_gib is None else int(host_gib * 2**30))
    assert options.weights == next((name for name in ("stream", "resident") if name in mode), "auto")
    assert checkpointing.mlp_tiles == (4 if "tiles4" in mode else 1)
    assert checkpointing.options.may_tile == (checkpointing.policy == "auto" and "tiles" not in mode)


@pytest.mark.parametrize("mode", ["offloads", "keep+fast", "keep+tiles", "recompute+stream+resident", "stream", ""])
def test_an_unknown_mode_is_refused(mode):
    with pytest.raises(ValueError, match="A mode is"):
        plans.parse_mode(mode)


def test_auto_warms_up_until_its_plan_was_checked():
    assert plans.least_warmup("auto=3") > plans.CHECKED_STEP > plans.FIRST_PLANNED_STEP
    assert plans.least_warmup("keep") == 1


# Workloads


def test_longer_packs_share_weights_and_have_packs_of_their_own(tmp_path):
    long = WORKLOADS["tiny-long"]
    build(long, root=tmp_path, device="cpu", dtype=torch.float32)
    files, base = WorkloadFiles(tmp_path, long), WorkloadFiles(tmp_path, TINY)
    assert base.is_built()
    assert files.is_built()
    assert files.model == base.model
    assert files.reference(1.0) != base.reference(1.0)
    assert {pack.input_id_T.size for pack in files.read_packs()} == {512}
    assert not (files.folder / "model").exists()


@pytest.mark.parametrize(
    "name", [each.name for each in WORKLOADS.values() if each.weights_of and not each.document_lengths]
)
def test_the_stored_list_fills_every_longer_pack(name):
    workload, base = WORKLOADS[name], WORKLOADS[WORKLOADS[name].weights_of]
    assert base.model_config == workload.model_config
    # Mixtures in NF4 are quantised from the weights in bf16 as they are read.
    assert workload.quantization in (base.quantization, "nf4")
    lengths = [max(2, length // workload.length_divisor) for length in read_lengths()["lengths"]]
    assert len(plan_packs(lengths, max_tokens=workload.max_tokens, num_packs=workload.num_packs)) == workload.num_packs


# The rig


@pytest.fixture(scope="module")
def rig():
    return Rig(TINY, is_cuda=False)


@pytest.fixture(scope="module")
def runs(rig):
    found = {mode: rig.measure(Run(mode, 256, num_steps=3)) for mode in ("recompute", "offload", "offload1")}
    run = Run("auto=1000", 256, num_steps=3, plan=offload_rig.FULL_HOST_PLAN, delay_ms=40.0)
    found["full"] = rig.measure(run)
    return found


@pytest.mark.fault
def test_every_run_starts_from_the_same_adapters_and_agrees_to_the_bit(runs):
    assert {mode: run["reason"] for mode, run in runs.items()} == dict.fromkeys(runs, "")
    for run in runs.values():
        num_common = min(len(run["losses"]), 4)
        assert run["losses"][:num_common] == runs["recompute"]["losses"][:num_common]
        assert run["gradient_norm"] == runs["recompute"]["gradient_norm"]
        assert disagreement(run, runs["recompute"]) == ""
    assert runs["recompute"]["losses"][0] != runs["recompute"]["losses"][-1]
    assert [len(run["ms"]) for run in runs.values()] == [3] * 4


@pytest.mark.fault
def test_runs_used_what_their_names_say(runs):
    assert "engine" not in runs["recompute"]["description"]
    for mode, buffers in (("offload", 2), ("offload1", 1)):
        use = runs[mode]["description"]["engine"]
        assert runs[mode]["description"]["num_host_inputs"] == 1
        assert use["staging_bytes"] == buffers * use["pinned_bytes"]
    full = runs["full"]
    assert full["num_warmup"] == plans.LEAST_AUTO_WARMUP
    assert full["description"]["num_host_values"] > 3
    assert full["plan_check"]["is_bitwise"]
    # Two layers, each late at least in its forward.
    assert full["summary"]["median"] >= 80.0


def test_a_plan_is_checked_against_recompute_with_the_same_inputs_on_the_host():
    segments = [Segment(index) for index in range(3)]
    stack = SimpleNamespace(segments=segments, engine=None)
    planned = [plan._replace(values=(("attention", "host"),)) for plan in uniform_plan(3, "offload")]
    for segment, plan in zip(segments, planned):
        segment.follow(plan, None)
    with plans.recomputed(stack):
        assert [segment.plan for segment in segments] == list(uniform_plan(3, "offload"))
    assert [segment.plan for segment in segments] == planned


@pytest.mark.fault
def test_a_failing_run_is_a_record_with_its_reason(rig):
    record = rig.measure(Run("auto=0.0000001", 256, num_steps=2))
    assert record["reason"].startswith("OptionError: No plan fits")
    assert rig.measure(Run("recompute", 256, num_steps=2))["reason"] == ""


@pytest.mark.fault
def test_a_budget_cuts_the_steps_and_the_record_says_so(rig):
    record = rig.measure(Run("recompute", 256, num_steps=50), deadline=0.0)
    assert record["summary"]["n"] == len(record["ms"]) == 3


def test_profiled_steps_keep_what_their_copies_did(monkeypatch, rig):
    use = copy_use([kernel(0, 1000), kernel(2000, 3000, launched=500)], [Copy("h2d", 900, 1990, MIB)])
    monkeypatch.setattr(offload_rig.CopyProfile, "stop", lambda self: use)
    record = rig.measure(Run("recompute", 256, num_steps=3, num_profiles=2))
    assert record["reason"] == ""
    assert record["copies"] == [use._asdict()] * 2
    assert exposed_ms(record) == use.exposed_ms


def _run(**changes):
    return {"title": "own", "losses": [2.0, 1.0], "gradient_norm": 3.0, **changes}


def test_disagreement_sees_losses_and_gradients():
    reference = _run(title="recompute")
    assert disagreement(_run(losses=[2.0, 1.0005, 9.0]), reference) == ""
    assert "losses differ" in disagreement(_run(losses=[2.0, 1.01]), reference)
    assert "another norm" in disagreement(_run(gradient_norm=3.01), reference)


def test_check_plan_refuses_wrong_gradients_unseen_by_the_watch_over_the_budget(monkeypatch):
    seen = []

    def gradients(tuner, batch):
        seen.append(stack.watch)
        return {"0.q.A": torch.ones(4) * (1.0 if len(seen) % 2 else -1.0)}

    monkeypatch.setattr(plans, "_gradients", gradients)
    stack = SimpleNamespace(segments=[], engine=None, watch="the watch")
    with pytest.raises(ValueError, match="not those of recompute"):
        plans.check_plan(None, None, SimpleNamespace(stacks=[stack]), is_cuda=False)
    assert seen == [None, None]
    assert stack.watch == "the watch"
    assert not torch.are_deterministic_algorithms_enabled()


# Plans


def _cost(*, num_segments=12, value_bytes=400 * MIB, forward_ms=10.0):
    segment = SegmentCost(100 * MIB, 900 * MIB, forward_ms, 15.0, 9.0, (ValueCost("q", value_bytes, 2.0),), 0, 0, 0)
    return StepCost((segment,) * num_segments, 0, 0, 5.0, 1.0)


def test_full_host_segments_are_spaced_so_that_copies_hide(monkeypatch):
    # 500 MiB at 20 GB/s are 26 ms, with the margin 33: every fourth segment of 10 ms.
    cost = _cost()
    assert offload_rig.host_spacing(cost, copy_bytes_per_s=20e9) == 4
    assert offload_rig.host_spacing(cost, copy_bytes_per_s=1e15) == 1
    monkeypatch.setattr(offload_rig, "measure_machine", lambda device: Machine("m", 20e9, 30e9))
    plan = offload_rig.full_host_plan(SimpleNamespace(cost=cost, segments=[None] * 12))
    hosted = [index for index, entry in enumerate(plan) if entry.input_place == "host"]
    assert hosted == [0, 4]
    assert all(plan[index].values == (("q", "host"),) for index in hosted)
    assert plan[-4:] == list(uniform_plan(4, "recompute"))


def test_cells_and_guesses():
    assert offload.parse_cells(["tiny@256,512", "qwen3-8b-qlora@16384"]) == [
        ("tiny", 256),
        ("tiny", 512),
        ("qwen3-8b-qlora", 16384),
    ]
    with pytest.raises(ValueError, match="A cell is"):
        offload.parse_cells(["qwen3-9b@16384"])
    # The measured step that the guess is scaled by.
    assert offload.guess_step_s("qwen3-14b-qlora", 8192) == pytest.approx(1.485, rel=0.1)


# Tables


def _buffers_record(mode, ms, gib, **changes):
    use = {
        "exposed_ms": 1.5,
        "h2d_ms": 80.0,
        "num_h2d": 40,
        "covered_share": 0.97,
        "hidden_share": 0.98,
        "step_ms": ms,
        "copy_ms": 160.0,
        "late_host_ms": 0.0,
    }
    return {
        "workload": "qwen3-8b-qlora",
        "num_tokens": 16384,
        "mode": mode,
        "title": mode,
        "reason": "",
        "seconds": 1.0,
        "num_layers": 41,
        "is_serial": False,
        "delay_ms": 0.0,
        "summary": {"median": ms, "p10": ms, "p90": ms, "n": 10},
        "tokens_per_s": 1.0,
        "peak_gib": {"allocated": gib, "reserved": gib},
        "backward_ms": {"median": 410.0},
        "versions": {},
        "command_name": "buffers",
        "copies": [use],
        **changes,
    }


def test_buffers_table_sets_gain_formula_and_published_side_by_side():
    records = [
        _buffers_record("recompute", 1000.0, 30.0, copies=[]),
        _buffers_record("offload1", 1080.0, 20.0),
        _buffers_record("offload", 1000.0, 20.5),
    ]
    table = offload.buffers_table(records)
    assert "two buffers against offload1: +8.00 % steps/s, +0.50 GiB (published +8.4 %, +0.37 GB)" in table
    assert "two buffers against recompute: +0.00 % steps/s, -9.50 GiB" in table
    assert "c = 2.00 ms a copy, g = 10.00 ms a layer: (L-1)*min(c, g) = 80.0 ms, measured 80.0 ms" in table
    rows = offload.result_rows(records[2], command="x")
    assert {row["metric"] for row in rows} >= {"step", "tokens", "peak allocated", "exposed copies"}
    assert offload.result_rows({**records[2], "reason": "OOM"}, command="x") == []


@pytest.mark.parametrize(
    ("changes", "use", "verdict"),
    [
        ({}, {}, "pass"),
        ({}, {"covered_share": 0.90}, "FAIL"),
        ({}, {"exposed_ms": 11.0}, "FAIL"),
        # A late host leaves less to copy under; what compute waited for counts.
        ({"delay_ms": 2.0}, {"covered_share": 0.30, "late_host_ms": 60.0}, "pass"),
        ({"delay_ms": 2.0}, {"covered_share": 0.30}, "FAIL"),
        ({"delay_ms": 2.0}, {"hidden_share": 0.90, "late_host_ms": 60.0}, "FAIL"),
        ({"is_serial": True}, {"covered_share": 0.01, "exposed_ms": 90.0}, "pass"),
        ({"is_serial": True}, {"covered_share": 0.97}, "FAIL"),
    ],
)
def test_overlap_bars(changes, use, verdict):
    record = _buffers_record("offload", 1000.0, 20.0, **changes)
    record["copies"] = [{**record["copies"][0], **use}]
    assert offload.overlap_table([record]).endswith(verdict)


def test_exposed_time_is_the_median_of_the_profiled_steps():
    assert exposed_ms({"copies": [{"exposed_ms": value} for value in (9.0, 1.0, 2.0)]}) == 2.0
    assert math.isnan(exposed_ms({}))


def _front_record(mode, ms, gib, *, predicted=None, **changes):
    record = {
        "workload": "w",
        "system": "ours",
        "mode": mode,
        "title": f"ours {mode}",
        "reason": "",
        "label_share": 1.0,
        "optimizer": "adamw_8bit",
        "summary": {"median": ms, "p10": ms, "p90": ms, "n": 10},
        "peak_gib": {"allocated": gib, "reserved": gib},
        "tokens_per_s": 1.0,
        "labelled_tokens_per_s": 1.0,
        "versions": {},
        "verdict": {"worst_cosine": ["a", 1.0]},
        **changes,
    }
    if predicted is not None:
        record["plan"] = {
            "predicted": {"step_ms": predicted[0], "peak_gib": predicted[1], "exposed_ms": 0.5},
            "engine": {"pinned_bytes": 2**31},
        }
    return record


FRONT = [
    _front_record("recompute", 1000.0, 20.0),
    _front_record("keep", 600.0, 60.0),
    _front_record(
        "auto=20:32", 940.0, 20.0, predicted=(950.0, 20.5), plan_check={"is_bitwise": True, "worst_cosine": ["a", 1.0]}
    ),
    _front_record("auto=40:32", 780.0, 40.0, predicted=(800.0, 41.0)),
    _front_record("unsloth", 900.0, 18.0, system="unsloth"),
]


def test_front_rows_have_what_was_predicted_and_refused_cases_have_none():
    rows = offload_front.front_rows([*FRONT, _front_record("auto=1", 1.0, 1.0, reason="OOM")], command="x")
    assert {row["benchmark"] for row in rows} == {offload_front.BENCHMARK}
    figures = {(row["system"], row["metric"]): row["value"] for row in rows}
    assert figures["ours auto=40:32, adamw_8bit", "predicted peak"] == 41.0
    assert figures["ours auto=40:32, adamw_8bit", "pinned host memory"] == 2.0
    assert len({system for system, _ in figures}) == len(FRONT)


def test_budgets_lie_between_the_ends(tmp_path, monkeypatch):
    options = SimpleNamespace(
        out=tmp_path,
        root=tmp_path,
        liger=["tiny"],
        fused=[],
        optimizer="adamw_8bit",
        warmup=6,
        steps=3,
        num_budgets=9,
        device="cpu",
        host_gib=8.0,
    )
    front = offload_front.Front("tiny", options)
    assert front._budgets() == []
    raw = tmp_path / "raw.jsonl"
    for record in (*FRONT[:2], _front_record("offload:8", 1010.0, 10.0)):
        with raw.open("a") as file:
            file.write(json.dumps({**record, "workload": "tiny"}) + "\n")
    budgets = front._budgets()
    assert budgets[:3] == [20.0, 40.0, pytest.approx(62.0)]
    assert min(budgets) == pytest.approx(10.0 * offload_front.LEAST_SLACK)
    assert len(set(budgets)) == 9
    asked = []
    monkeypatch.setattr(front, "_arms", lambda arms, deadline: asked.extend(arms))
    front._modes(["recompute", "offload:8", "auto=3:8", "auto=3:8"], deadline=1e9)
    assert asked == ["ours:auto=3:8"]


# Whole calls


@pytest.mark.fault
def test_buffers_call_flushes_rows_and_goes_on_where_it_ended(tmp_path, capsys):
    arguments = ["buffers", "--out", str(tmp_path), "--device", "cpu", "--steps", "2", "--cells", "tiny@256"]
    assert offload.main([*arguments, "--modes", "recompute"]) == 0
    assert offload.main(arguments) == 0
    records = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    assert [record["title"] for record in records] == ["recompute", "offload1", "offload"]
    assert (tmp_path / "rows.csv").read_text().count(",step,") == 3
    assert "two buffers against offload1" in (tmp_path / "table.txt").read_text()


@pytest.mark.fault
def test_small_cards_try_modes_until_one_trains(tmp_path, capsys):
    arguments = [
        "small-cards",
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--steps",
        "2",
        "--tokens",
        "256",
        "--cards",
        "tiny=4",
    ]
    assert offload.main([*arguments, "--modes", "auto=0.0000001", "offload", "keep"]) == 0
    table = (tmp_path / "table.txt").read_text()
    assert "auto=0.0000001: FAILED: OptionError" in table
    assert "offload: " in table
    assert "keep" not in table


# Several devices


def _rank_record(title, *, strategy="one", accumulate=1, tokens_per_s=100.0, losses=(5.0, 4.9), num_ranks=1, reason=""):
    return {
        "title": title,
        "strategy": strategy,
        "accumulate": accumulate,
        "num_ranks": num_ranks,
        "tokens_per_s": tokens_per_s,
        "losses": list(losses),
        "reason": reason,
        "summary": {"median": 1.0, "p10": 1.0, "p90": 1.0, "n": 3},
        "peak_gib": [1.0] * num_ranks,
        "reserved_gib": [1.0] * num_ranks,
        "peak_gib_build": [1.0] * num_ranks,
        "build_s": 2.0,
        "workload": "w",
        "num_tokens": 8,
        "num_warmup": 8,
        "optim_bits": 32,
        "num_sharing": num_ranks if strategy == multi_gpu_steps.CONTEXT else 1,
        "is_one_document": False,
        "mode": "offload",
        "versions": {},
    }


@pytest.mark.parametrize(
    ("changes", "num_failed"),
    [
        ({}, 0),
        ({"tokens_per_s": 180.0}, 1),
        ({"losses": (5.0, 4.88)}, 1),
        ({"tokens_per_s": 170.0, "losses": (5.1, 4.9)}, 2),
    ],
)
def test_several_devices_are_held_to_speed_and_losses(changes, num_failed):
    ddp = _rank_record("ddp x2", strategy="ddp", num_ranks=2, **{"tokens_per_s": 197.0, **changes})
    table = multi_gpu_tables.multi_table(
        [_rank_record("one GPU"), _rank_record("one GPU, accumulation 2", accumulate=2), ddp]
    )
    assert table.count("FAIL") == num_failed
    assert table.count("pass") == 2 - num_failed


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "times", "verdict"),
    [
        ("ddp", 2, 1.95, "FAIL"),
        ("ddp", 4, 3.89, "pass"),
        ("ddp", 4, 3.87, "FAIL"),
        ("ddp", 8, 7.76, "pass"),
        ("ddp", 8, 7.75, "FAIL"),
        ("fsdp", 4, 3.71, "pass"),
        ("fsdp", 4, 3.69, "FAIL"),
        ("fsdp", 8, 7.4, "pass"),
        ("fsdp", 8, 7.39, "FAIL"),
    ],
)
def test_more_ranks_are_held_to_more_times_one_device(strategy, num_ranks, times, verdict):
    record = _rank_record("several", strategy=strategy, num_ranks=num_ranks, tokens_per_s=100.0 * times)
    table = multi_gpu_tables.multi_table([_rank_record("one GPU"), record])
    (bar,) = [line for line in table.splitlines() if "times one GPU" in line]
    assert bar.endswith(verdict)


def test_ranks_that_share_packs_are_compared_with_one_device():
    shared = _rank_record("context x2", strategy=multi_gpu_steps.CONTEXT, num_ranks=2, tokens_per_s=195.0)
    table = multi_gpu_tables.multi_table([_rank_record("one GPU"), shared])
    assert "context x2: 1.950 times" in table
    assert table.count("pass") == 2


@pytest.mark.parametrize(("losses", "verdict"), [((5.0, 4.9), "pass"), ((5.0, 4.88), "FAIL")])
def test_owned_experts_are_compared_with_gathered_ones(losses, verdict):
    owned = _rank_record("experts x2", strategy=multi_gpu.EXPERTS, num_ranks=2, tokens_per_s=150.0, losses=losses)
    table = multi_gpu_tables.expert_table([_rank_record("fsdp x2", strategy="fsdp", num_ranks=2), owned])
    assert "1.500 times" in table
    assert verdict in table


def test_losses_that_do_not_fall_prove_nothing():
    records = [
        _rank_record("acc", accumulate=2, losses=(5.0, 5.0)),
        _rank_record("ddp x2", strategy="ddp", num_ranks=2, losses=(5.0, 5.0)),
    ]
    assert "FAIL" in multi_gpu_tables.multi_table(records)
    assert "FAIL" in multi_gpu_tables.full_table([_rank_record("full", losses=(5.0, math.nan))])
    assert "pass" in multi_gpu_tables.full_table([_rank_record("full")])


def test_every_rank_gets_its_own_packs_and_the_window_divides_the_loss():
    packs = multi_gpu_steps.make_packs(TINY)[:8]
    shares = [multi_gpu_steps.Share(packs, rank=rank, num_ranks=2, accumulate=2, num_warmup=8) for rank in range(2)]
    seen = [share.batch(number)["input_ids"][0] for number in range(2) for share in shares]
    assert all(torch.equal(ids, torch.from_numpy(pack.input_id_T)) for ids, pack in zip(seen, packs))
    # Steps of the warm-up repeat their packs; the first timed step, of micro-batches 16 and 17, has the next four.
    assert torch.equal(shares[1].batch(2)["input_ids"], shares[1].batch(0)["input_ids"])
    assert torch.equal(shares[1].batch(17)["input_ids"][0], torch.from_numpy(packs[7].input_id_T))
    num_labelled = sum(int((pack.label_T(1.0) != -100).sum()) for pack in packs[:4])
    assert shares[0].batch(0)["num_items_in_batch"] == pytest.approx(num_labelled / 4)


def test_packs_of_a_step_cost_alike_whatever_the_number_of_steps():
    packs = multi_gpu_steps.make_packs(replace(TINY, num_packs=4 * 64))
    found = multi_gpu_steps.balance(packs, num_step_packs=4)
    costs = [[sum(length**2 for length in pack.lengths) for pack in order] for order in (packs, found)]
    assert sorted(costs[0]) == sorted(costs[1])
    plain, balanced = (np.reshape(cost, (-1, 4)).max(axis=1).mean() / np.mean(cost) for cost in costs)
    assert balanced < 1.05 < plain
    assert multi_gpu_steps.balance(packs[: 4 * 32], num_step_packs=4) == found[: 4 * 32]


# Over half a minute: with the long half of the other tests.
@pytest.mark.fault
def test_two_ranks_take_the_steps_of_one_with_accumulation(tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--workload", "tiny", "--tokens", "256", "--steps", "2"]
    assert multi_gpu.main(["multi", *arguments]) == 0
    records = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    assert [record["reason"] for record in records] == [""] * 4
    table = (tmp_path / "table.txt").read_text()
    assert len([line for line in table.splitlines() if "losses fell" in line and line.endswith("pass")]) == 2
