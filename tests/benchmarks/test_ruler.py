import json
import math
import sys
import time

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from benchmarks import packed_metadata, results
from benchmarks.ruler import cases as cases_module
from benchmarks.ruler import judge, liger_layers, report
from benchmarks.ruler.arms import sft
from benchmarks.ruler.building import build
from benchmarks.ruler.cases import Case, CaseLog, CaseRecorder, run_case
from benchmarks.ruler.driver import check_references, parse_arm, run_arms
from benchmarks.ruler.measure import HostWaits, StepClock, percentile, summarise_ms
from benchmarks.ruler.workloads import (
    WORKLOADS,
    Pack,
    WorkloadFiles,
    generate_lengths,
    make_packs,
    plan_packs,
    read_lengths,
)
from lightning_fastft.training.optimizer import FusedAdamW

TINY = WORKLOADS["tiny"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ruler")
    build(TINY, root=folder, device="cpu", dtype=torch.float32)
    return folder


@pytest.fixture
def files(root):
    return WorkloadFiles(root, TINY)


@pytest.fixture
def records(files, tmp_path):
    """Run cases in this process and return their records."""

    def run(arm, *texts):
        log = tmp_path / "raw.jsonl"
        template = Case("tiny", "", "", num_warmup=2, num_steps=3)
        arm.run(
            [case for text in texts for case in parse_arm(text, template=template)],
            files=files,
            log=CaseLog(log),
            device="cpu",
        )
        return report.read_records(log)

    return run


# Workloads


def test_stored_lengths_are_what_the_generator_makes():
    stored = read_lengths()
    assert (
        generate_lengths(
            stored["num_documents"],
            seed=stored["seed"],
            mean=stored["mean"],
            sigma=stored["sigma"],
            low=stored["low"],
            high=stored["high"],
        )
        == stored["lengths"]
    )
    assert abs(np.mean(stored["lengths"]) - 512) < 15


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_packs_are_full_and_the_same_every_time(name):
    packs, again = make_packs(WORKLOADS[name]), make_packs(WORKLOADS[name])
    assert len(packs) == WORKLOADS[name].num_packs
    for pack, copy in zip(packs, again):
        assert sum(pack.lengths) == pack.input_id_T.size == WORKLOADS[name].max_tokens
        assert min(pack.lengths) >= 2
        assert np.array_equal(pack.input_id_T, copy.input_id_T)
        assert pack.input_id_T.max() < WORKLOADS[name].model_config["vocab_size"]
        assert pack.lengths == copy.lengths


def test_a_workload_may_name_the_documents_of_its_packs():
    assert all(pack.lengths == [16_384, 8192, 8192] for pack in make_packs(WORKLOADS["llama-3.1-8b-lora-32k"]))
    assert all(pack.lengths == [32_768] for pack in make_packs(WORKLOADS["llama-3.1-8b-lora-32k-one-document"]))
    assert all(pack.lengths == [131_072] for pack in make_packs(WORKLOADS["llama-3.1-8b-lora-128k-one-document"]))


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_no_pack_is_longer_than_its_model_allows(workload):
    """Unsloth rescales RoPE for a pack that is longer, and trains another model."""
    config = AutoConfig.for_model(workload.model_type, **workload.model_config)
    assert workload.max_tokens <= config.get_text_config().max_position_embeddings


def test_plan_packs_refuses_a_list_that_is_too_short():
    with pytest.raises(ValueError, match="fill 1 packs"):
        plan_packs([40, 60], max_tokens=64, num_packs=2)


def test_labels_are_the_last_share_of_each_document_and_never_its_first_token():
    pack = Pack(input_id_T=np.arange(100, 118), lengths=[10, 2, 5, 1])
    every = pack.label_T(1.0)
    assert [int(number) for number in np.flatnonzero(every == -100)] == [0, 10, 12, 17]
    third = pack.label_T(0.3)
    assert [int(number) for number in np.flatnonzero(third != -100)] == [7, 8, 9, 11, 15, 16]
    assert np.array_equal(third[third != -100], pack.input_id_T[third != -100])
    assert pack.position_T().tolist() == [*range(10), 0, 1, *range(5), 0]


def test_30_percent_of_a_real_pack_are_labelled():
    pack = make_packs(WORKLOADS["qwen3-14b-qlora"])[0]
    assert abs((pack.label_T(0.3) != -100).mean() - 0.3) < 0.005


def test_build_writes_what_every_system_reads_and_only_once(files, root):
    assert build(TINY, root=root, device="cpu", dtype=torch.float32) == {"seconds": 0.0}
    packs = files.read_packs()
    assert [pack.lengths for pack in packs] == [pack.lengths for pack in make_packs(TINY)]
    adapter = files.read_adapter()
    assert len(adapter) == 2 * 7 * TINY.model_config["num_hidden_layers"]
    for tensor in adapter.values():
        assert torch.equal(tensor, tensor.to(torch.bfloat16).float())
        assert float(tensor.abs().max()) > 0


# The judge


@pytest.fixture
def gradients():
    return {f"{layer}.mlp.up_proj.{side}": torch.randn(8, 16) for layer in range(3) for side in "AB"}


def test_judge_accepts_rounding_and_names_the_worst_tensor(gradients):
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in gradients.items()}
    verdict = judge.judge(rounded, gradients)
    assert verdict.passed
    assert verdict.worst_cosine[0] in gradients
    assert 0.9999 < verdict.worst_cosine[1] < 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensor: tensor * 1.03,
        lambda tensor: -tensor,
        lambda tensor: tensor + 0.1 * torch.randn_like(tensor),
        lambda tensor: torch.zeros_like(tensor),
        lambda tensor: tensor * math.nan,
    ],
    ids=["norm", "sign", "noise", "zero", "nan"],
)
def test_judge_refuses_one_wrong_tensor(gradients, spoil):
    wrong = dict(gradients)
    wrong["1.mlp.up_proj.B"] = spoil(wrong["1.mlp.up_proj.B"])
    verdict = judge.judge(wrong, gradients)
    assert not verdict.passed
    assert verdict.reason.startswith("1 of 6 gradients")
    assert "1.mlp.up_proj.B" in verdict.reason


def test_judge_refuses_missing_and_surplus_tensors(gradients):
    fewer = {name: gradients[name] for name in list(gradients)[1:]}
    assert "1 tensors without a gradient" in judge.judge(fewer, gradients).reason
    assert "1 that the plain arm does not train" in judge.judge(gradients, fewer).reason
    assert not judge.judge({}, {}).passed


def test_the_reference_itself_must_train(gradients):
    assert judge.first_reference(gradients).passed
    gradients["0.mlp.up_proj.A"] = torch.zeros(2)
    assert "0.mlp.up_proj.A" in judge.first_reference(gradients).reason


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.11.self_attn.q_proj.lora_A.default.weight",
        "model.base_model.model.model.layers.11.self_attn.q_proj.lora_A.default.weight",
        "base_model.model.model.layers.11.self_attn.q_proj.lora_A.weight",
    ],
)
def test_canonical_name_does_not_depend_on_the_wrapper(name):
    assert judge.canonical_name(name) == "11.self_attn.q_proj.A"
    assert judge.canonical_name("model.layers.1.mlp.up_proj.base_layer.weight") is None


def test_load_adapter_refuses_another_set_of_tensors(files):
    from benchmarks.ruler.arms import plain

    model, adapter = plain.load_model(files, device="cpu"), files.read_adapter()
    judge.load_adapter(model, adapter)
    held = judge.trainable_adapters(model)
    assert all(torch.equal(held[judge.canonical_name(name)], tensor) for name, tensor in adapter.items())
    adapter.popitem()
    with pytest.raises(ValueError, match="differ in"):
        judge.load_adapter(model, adapter)


# Measuring


def test_percentile_and_summary():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert summarise_ms([float(number) for number in range(101)]) == {
        "median": 50.0,
        "mean": 50.0,
        "p10": 10.0,
        "p90": 90.0,
        "n": 101,
    }


def test_clock_counts_the_steps_between_marks():
    clock = StepClock(is_cuda=False)
    for _ in range(4):
        clock.mark()
    values = clock.read_ms()
    assert len(values) == 3
    assert all(value >= 0 for value in values)


@pytest.mark.gpu
def test_host_waits_counts_copies_to_the_host_and_full_waits():
    value = torch.ones(3, device="cuda")
    with HostWaits(is_cuda=True) as waits:
        value.add_(1)
    assert waits.count == 0
    with HostWaits(is_cuda=True) as waits:
        value.sum().item()
        torch.cuda.synchronize()
        value.nonzero()
    assert waits.count >= 3
    assert torch.cuda.get_sync_debug_mode() == 0


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"lora_A": torch.nn.Linear(2, 2, bias=False)})])
        self.layers[0]["q"] = torch.nn.ModuleDict({"lora_A": torch.nn.Linear(2, 2, bias=False)})
        del self.layers[0]["lora_A"]


def _drive(recorder, *, gradient=1.0):
    model = _Model()
    for step in range(100):
        pack = recorder.pack_at(step)
        ids, labels = (
            torch.from_numpy(pack.input_id_T)[None],
            torch.from_numpy(pack.label_T(recorder.case.label_share))[None],
        )
        recorder.batch_arrived({"input_ids": ids, "labels": labels})
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        recorder.backward_done(model, loss=torch.tensor(2.0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        if recorder.step_done():
            return
    raise AssertionError("the recorder never stopped")


def _recorder(files, **options):
    case = Case("tiny", "plain", "recompute", num_warmup=3, num_steps=5, **options.pop("case", {}))
    return CaseRecorder(case, files=files, packs=files.read_packs(), is_cuda=False, **options)


def test_recorder_times_what_was_asked_after_the_warm_up(files):
    recorder = _recorder(files, is_reference=True)
    _drive(recorder)
    record = recorder.record
    assert recorder.step == 8
    assert len(record["ms"]) == record["summary"]["n"] == 5
    assert record["first_loss"] == 2.0
    assert record["host_waits"] == 0
    assert record["tokens_per_s"] == pytest.approx(TINY.max_tokens / record["summary"]["median"] * 1e3)
    labelled = [int((recorder.pack_at(step).label_T(1.0) != -100).sum()) for step in range(3, 8)]
    assert record["labelled_tokens_per_s"] == pytest.approx(np.mean(labelled) / record["summary"]["median"] * 1e3)


def test_recorder_counts_the_host_syncs_of_the_optimizer_too(files, monkeypatch):
    class Waits:
        count, places = 7, ["optimizer.py:1"]

        def __init__(self, *, is_cuda): ...
        def __enter__(self): ...
        def __exit__(self, *exception): ...
        def count_so_far(self):
            return 2

    monkeypatch.setattr(cases_module, "HostWaits", Waits)
    recorder = _recorder(files, is_reference=True)
    _drive(recorder)
    assert (recorder.record["host_waits"], recorder.record["host_waits_step"]) == (2, 7)
    assert recorder.record["host_wait_places"] == ["optimizer.py:1"]


def test_the_whole_run_has_the_first_steps_and_not_the_judge(files, monkeypatch):
    def slow(seconds, own):
        def run(*arguments):
            time.sleep(seconds)
            return own(*arguments)

        return run

    recorder = _recorder(files, is_reference=True)
    monkeypatch.setattr(recorder, "_judge", slow(1.5, recorder._judge))
    monkeypatch.setattr(recorder, "pack_at", slow(0.02, recorder.pack_at))
    _drive(recorder)
    assert 0.14 <= recorder.record["whole_run_s"] < 1.5
    assert recorder.record["num_whole_steps"] == 8


def test_packs_are_new_in_every_step(files):
    recorder = _recorder(files)
    packs = [recorder.pack_at(step) for step in range(3 * TINY.num_packs)]
    assert len({pack.input_id_T.tobytes() for pack in packs}) == len(packs)
    for pack, again in zip(packs, packs[TINY.num_packs :]):
        assert sorted(pack.lengths) == sorted(again.lengths)
        assert np.array_equal(np.sort(pack.input_id_T), np.sort(again.input_id_T))


@pytest.mark.parametrize(("half", "num_steps"), [(0, 3), (1, 2)])
def test_recorder_takes_fewer_long_steps(half, num_steps, files, monkeypatch):
    monkeypatch.setattr(cases_module, "LONG_STEP_MS", -1.0)
    monkeypatch.setattr(cases_module, "NUM_LONG_STEPS", 3)
    recorder = _recorder(files, is_reference=True, case={"half": half})
    _drive(recorder)
    assert recorder.record["summary"]["n"] == num_steps
    # Fewer were looked at than were planned, and none is missing.
    assert recorder.record["not_training"] == ""


def test_recorder_stops_at_the_judged_step_when_refused(files):
    _drive(_recorder(files, is_reference=True))
    recorder = _recorder(files)
    _drive(recorder, gradient=-1.0)
    assert recorder.step == 1
    assert "summary" not in recorder.record
    assert "gradients differ" in cases_module.reason_without_row(recorder.record)


def test_a_refused_case_that_is_diagnosed_still_has_no_row(files):
    _drive(_recorder(files, is_reference=True))
    recorder = _recorder(files, case={"diagnose": True})
    _drive(recorder, gradient=-1.0)
    assert "summary" in recorder.record
    record = {**recorder.record, "reason": cases_module.reason_without_row(recorder.record), "versions": {}}
    assert report.result_rows([record], command="x") == []
    assert "no row: plain recompute" in report.render_table([record])
    assert "measured all the same" in report.render_table([record])


def test_without_a_reference_nothing_is_timed(files):
    recorder = _recorder(files, case={"label_share": 0.123})
    _drive(recorder)
    assert "left no gradients" in recorder.record["verdict"]["reason"]
    assert recorder.step == 1


def test_a_failing_case_leaves_a_record_and_no_open_counter(files, tmp_path):
    recorder = _recorder(files)

    def body(recorder):
        recorder.step = 2
        recorder.batch_arrived()
        raise RuntimeError("out of memory")

    record = run_case(recorder, body, log=CaseLog(tmp_path / "raw.jsonl"))
    assert record["reason"] == "RuntimeError: out of memory"
    assert report.read_records(tmp_path / "raw.jsonl")[0]["reason"] == record["reason"]
    assert recorder._waits is None


# Results and report


def test_results_keep_one_header_and_refuse_others(tmp_path):
    path = tmp_path / "results.csv"
    results.append_rows([{"benchmark": "b", "metric": "m", "value": 1.23456789, "unit": "ms"}], path=path)
    results.append_rows([{"benchmark": "b", "metric": "m", "value": 2, "n": 30}], path=path)
    lines = path.read_text().splitlines()
    assert lines[0] == "date,benchmark,workload,system,version,metric,value,p10,p90,n,unit,command,device"
    assert len(lines) == 3
    assert ",1.23457," in lines[1]
    with pytest.raises(ValueError, match="Unknown columns"):
        results.append_rows([{"speed": 1}], path=path)
    assert results.merge(path, path=tmp_path / "other.csv") == 2
    path.write_text("date,value\n")
    with pytest.raises(ValueError, match="expected date"):
        results.append_rows([{"value": 1}], path=path)


def test_parse_arm_reads_modes_shares_and_optimizers():
    template = Case("tiny", "", "", num_steps=7)
    keep, share = parse_arm("ours:keep+liger/adamw_fused,keep@0.3", template=template)
    assert (keep.mode, keep.optimizer, keep.label_share, keep.num_steps) == ("keep+liger", "adamw_fused", 1.0, 7)
    assert (share.mode, share.optimizer, share.label_share) == ("keep", "adamw_8bit", 0.3)
    (reference,) = parse_arm("plain:reference@0.3", template=template)
    assert (reference.num_steps, reference.num_warmup, reference.label_share) == (0, 1, 0.3)
    with pytest.raises(ValueError, match="An arm is"):
        parse_arm("nobody:keep", template=template)
    for text in ("ours:keep/sgd", "unsloth:off/adamw_fused_8bit"):
        with pytest.raises(ValueError, match="Optimizers of"):
            parse_arm(text, template=template)


def test_ours_trains_with_averages_in_8_bits_on_either_device(files, records):
    from benchmarks.ruler.arms import ours, plain

    records(plain, "plain:reference")
    (record,) = [row for row in records(ours, "ours:keep+fused/adamw_fused_8bit") if row["system"] == "ours"]
    assert not record["reason"]
    optimizer = ours.make_tuner(files, optimizer="adamw_fused_8bit", is_cuda=False).optimizer_factory(
        [torch.nn.Parameter(torch.zeros(4096))]
    )
    assert isinstance(optimizer, FusedAdamW)
    assert optimizer.optim_bits == 8


# Arms


def test_check_batch_refuses_other_tokens_and_labels():
    pack = make_packs(TINY)[0]
    expected = sft.expected_batch(pack, share=0.3)
    batch = {key: torch.from_numpy(value)[None] for key, value in expected.items()}
    assert sft.check_batch(batch, expected)["labels"] == "(1, 256)"
    without_positions = {key: value for key, value in batch.items() if key != "position_ids"}
    sft.check_batch({**without_positions, "packed_seq_lengths": torch.tensor(pack.lengths)}, expected)
    for key in ("input_ids", "labels", "position_ids"):
        with pytest.raises(ValueError, match=f"trainer's {key} differ"):
            sft.check_batch({**batch, key: batch[key].roll(1)}, expected)


@pytest.mark.fault
def test_plain_and_ours_have_the_same_gradients_and_get_rows(records):
    from benchmarks.ruler.arms import ours, plain

    records(plain, "plain:keep,recompute,reference@0.3")
    rows = records(ours, "ours:recompute,keep@0.3")
    assert [(row["reason"], row["system"]) for row in rows] == [
        ("", "plain"), ("", "plain"), (cases_module.REFERENCE_ONLY, "plain"), ("", "ours"), ("", "ours"),
    ]  # fmt: skip
    assert all(row["verdict"]["worst_cosine"][1] > 0.999999 for row in rows)
    assert abs(rows[0]["first_loss"] - rows[3]["first_loss"]) < 1e-4
    table = report.render_table(rows)
    assert table.count("ours") == 2
    assert "no row" not in table
    written = report.result_rows(rows, command="x")
    assert {row["metric"] for row in written} == {
        "step", "tokens", "labelled tokens", "peak allocated", "peak reserved", "host waits", "lowest gradient cosine",
        "step, mean", "host waits, whole step", "device memory", "whole run of 5 steps",
    }  # fmt: skip
    assert len(written) == 4 * 11


@pytest.mark.fault
def test_a_system_whose_documents_see_each_other_is_refused(records, monkeypatch):
    from benchmarks.ruler.arms import ours, plain

    records(plain, "plain:reference")
    own = ours.make_batch
    monkeypatch.setattr(
        ours, "make_batch", lambda documents: own([tuple(np.concatenate(part) for part in zip(*documents))])
    )
    (row,) = [row for row in records(ours, "ours:keep") if row["system"] == "ours"]
    assert "gradients differ from the plain arm's" in row["reason"]
    assert "summary" not in row


def test_arms_without_gradients_to_compare_with_are_refused_before_they_run(tmp_path):
    arms = {
        text: parse_arm(text, template=Case("tiny", "", ""))
        for text in ("plain:reference", "ours:keep@0.3", "ours:keep")
    }
    plain, few, whole = arms.values()
    check_references([plain, whole], root=tmp_path)
    for refused in ([whole], [whole, plain], [plain, few]):
        with pytest.raises(ValueError, match="plain:reference"):
            check_references(refused, root=tmp_path)
    left = WorkloadFiles(tmp_path, WORKLOADS["tiny"]).reference(0.3)
    left.parent.mkdir()
    left.touch()
    check_references([few], root=tmp_path)


@pytest.mark.fault
def test_one_arm_cannot_stop_another(files, root, tmp_path):
    template = Case("tiny", "", "", num_warmup=2, num_steps=2)
    # A mode that does not exist ends its process; the next arm runs.
    arms = [
        parse_arm("unsloth:no-such-mode", template=template),
        parse_arm("plain:keep", template=template),
        parse_arm("trl:keep", template=template),
    ]
    raw, log = tmp_path / "raw.jsonl", tmp_path / "log.txt"
    run_arms(arms[:2], root=root, raw=raw, log=log, device="cpu", budget_seconds=300, arm_seconds=200)
    run_arms(arms[2:], root=root, raw=raw, log=log, device="cpu", budget_seconds=5, arm_seconds=200)
    broken, plain, late = report.read_records(raw)
    assert broken["reason"].startswith("its process ended with code 1")
    assert plain["reason"] == ""
    assert late["reason"].startswith("not started")


@pytest.mark.fault
def test_an_arm_that_hangs_is_stopped(files, root, tmp_path, monkeypatch):
    sleeper = tmp_path / "sleeper"
    sleeper.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    raw = tmp_path / "raw.jsonl"
    run_arms(
        [parse_arm("plain:keep", template=Case("tiny", "", ""))],
        root=root,
        raw=raw,
        log=tmp_path / "log.txt",
        device="cpu",
        budget_seconds=99,
        arm_seconds=1,
    )
    assert report.read_records(raw)[0]["reason"] == "stopped after 1 s"


def _plain_norm(x, weight, eps):
    return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_liger_layers_swap_instances_and_give_them_back(name, monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightning_fastft.core.patcher import ModelPatcher

    monkeypatch.setattr(liger_layers, "rms_norm", _plain_norm)
    monkeypatch.setattr(liger_layers, "silu_mul", lambda gate, up: torch.nn.functional.silu(gate) * up)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3" if name == "tiny" else "llama", **TINY.model_config)
    )
    ids = torch.arange(12)[None]
    before, names = model(ids).logits, [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    patcher = ModelPatcher()
    found = liger_layers.install_liger_layers(model, patcher)
    assert found == {"norms": 9 if name == "tiny" else 5, "mlps": 2}
    assert torch.allclose(model(ids).logits, before, atol=1e-6)
    assert list(model.state_dict()) == keys
    assert type(model.model.norm).__name__.startswith("Liger")
    patcher.undo()
    assert [type(module) for module in model.modules()] == names
    with pytest.raises(ValueError, match="match"):
        liger_layers.install_liger_layers(torch.nn.Linear(2, 2), ModelPatcher())


# Packed metadata


def _context(lengths):
    from lightning_fastft.packing.collate import Document, collate

    return collate([Document(np.arange(length), np.arange(length)) for length in lengths]).context


@pytest.mark.parametrize("lengths", [[5], [3, 1, 7, 2], [130, 40, 86]])
def test_every_build_of_the_same_metadata_says_the_same(lengths):
    context = _context(lengths)
    position = context.position_T[None]
    ours = context.dense_mask(dtype=torch.float32)
    assert torch.equal(packed_metadata.loop_mask(position, torch.float32), ours)
    assert torch.equal(packed_metadata.transformers_mask(position, torch.float32), ours)
    derived = packed_metadata.derived_offsets(position)
    assert torch.equal(derived.start_S1, context.start_S1)
    assert torch.equal(derived.key_start_S1, context.varlen().key_start_S1)
    assert derived[1::2] == context.varlen()[1::2]
    foreign, block = packed_metadata.transformers_block_mask(position), context.block_mask()
    index = torch.arange(context.num_tokens)
    zero = torch.tensor(0)
    seen = [mask.mask_mod(zero, zero, index[:, None], index[None, :]) for mask in (foreign, block)]
    assert torch.equal(*seen)
    assert torch.equal(seen[0], context.dense_mask()[0, 0])


def test_gains_are_speed_and_the_published_formula():
    def record(forward, backward, step):
        return {
            part: {"median": value} for part, value in zip(("forward", "backward", "step"), (forward, backward, step))
        } | {"num_layers": 11}

    builds = [{"kind": "dense, loop over documents", "num_tokens": 8192, "ms": {"median": 2.0}}]
    (gain,) = packed_metadata.gains(
        {
            "sdpa/once": record(10.0, 20.0, 40.0),
            "sdpa/every-layer-loop": record(15.0, 21.0, 50.0),
            "flex/every-layer": record(1.0, 1.0, 1.0),
        },
        builds,
        max_tokens=8192,
    )
    assert (gain["forward"], gain["step"]) == (pytest.approx(50.0), pytest.approx(25.0))
    assert (gain["saved_ms"], gain["saved_forward_ms"], gain["formula_ms"]) == (10.0, 5.0, 20.0)


@pytest.mark.fault
def test_metadata_arms_build_as_often_as_their_name_says(root, tmp_path):
    arguments = [
        "--workload",
        "tiny",
        "--root",
        str(root),
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--steps",
        "2",
        "--build-tokens",
        "256",
    ]
    assert packed_metadata.main([*arguments, "--arms", "sdpa/once", "sdpa/every-layer-loop", "sdpa/every-layer"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metadata_tiny.jsonl").read_text().splitlines()]
    assert [line.get("reason") for line in lines[1:]] == [None, None, None]
    # Two layers, run once forward and once again in the backward.
    assert [line["num_builds"]["dense_mask"] for line in lines[1:]] == [1, 4, 4]
    assert "once against sdpa/every-layer-loop" in (tmp_path / "table.txt").read_text()
