import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from benchmarks import (
    moe_layer,
    offload,
    packed_metadata,
    published,
    published_arms,
    published_padded,
    published_table,
    published_waits,
    results,
)
from benchmarks.published import find_files
from benchmarks.published_arms import all_combinations, first_step_difference, parse_combination
from benchmarks.published_padded import TRADITIONAL, Padding, group_documents, pad_documents, read_documents
from benchmarks.published_table import Rows, figures, judge_gain, read_rows, render
from benchmarks.ruler.cases import Case, CaseLog
from benchmarks.ruler.report import read_records
from benchmarks.ruler.workloads import WORKLOADS

REPOSITORY = Path(__file__).parents[2]
MIXTURE = "tiny-moe"


# The table


def row(benchmark, workload, system, metric, value, *, command="x", device="NVIDIA H200", date="2026-11-22"):
    return dict.fromkeys(results.COLUMNS, "") | locals() | {"value": f"{value:g}", "n": "10"}


def line_of(text, *parts):
    (found,) = [line for line in text.splitlines() if all(part in line for part in parts)]
    return found


def test_without_rows_every_figure_has_its_source_and_the_command_that_measures_it():
    text = render(Rows([]))
    for figure in figures():
        line = line_of(text, f"| {figure.claim} |")
        assert "| not measured |" in line
        assert f"| {figure.source} |" in line
        assert f"`{figure.command}`" in text


@pytest.mark.parametrize("command", sorted({figure.command for figure in figures()}))
def test_commands_of_the_table_can_be_given(command):
    head, module, *arguments = shlex.split(command.removeprefix("python "))
    assert head == "-m"
    parser = {
        "benchmarks.published": published,
        "benchmarks.offload": offload,
        "benchmarks.packed_metadata": packed_metadata,
    }[module]._parser()
    parser.parse_args(arguments)


def test_ours_stands_beside_the_published_figure_with_its_command_and_gpu():
    shared = {"command": "python -m benchmarks.offload buffers --cells x", "device": "NVIDIA B200"}
    cell = "qwen3-14b-qlora, packed, 16384 tokens"
    rows = [
        row("offload buffers", cell, "ours offload1", "step", 110.0, **shared),
        row("offload buffers", cell, "ours offload", "step", 100.0, **shared),
        row("offload buffers", cell, "ours offload1", "peak allocated", 20.0, **shared),
        row("offload buffers", cell, "ours offload", "peak allocated", 20.5, **shared),
    ]
    text = render(Rows(rows))
    line = line_of(text, "14B: +6.70 %")
    assert "+10.0 % steps/s, +0.54 GB" in line
    assert "NVIDIA B200, 2026-11-22" in line
    number = line.rpartition("[")[2].partition("]")[0]
    assert f"{number}. `{shared['command']}`" in text
    # A later run counts, one on a CPU and half of one do not.
    later = [
        row("offload buffers", cell, system, metric, value, command="later")
        for system, ms in (("ours offload1", 99.0), ("ours offload", 90.0))
        for metric, value in (("step", ms), ("peak allocated", 20.0))
    ]
    assert "+10.0 % steps/s, +0.00 GB" in line_of(render(Rows([*rows, *later])), "14B: +6.70 %")
    on_cpu = [{**entry, "device": "cpu", "value": "1"} for entry in rows]
    assert render(Rows([*rows, *on_cpu])) == text
    assert "not measured" in line_of(render(Rows(rows[:3])), "14B: +6.70 %")


def test_rows_of_two_gpus_are_never_compared():
    rows = [
        row("offload buffers", "qwen3-8b-qlora, packed", system, metric, 100.0, device=device)
        for system, device in (("ours offload1", "NVIDIA H200"), ("ours offload", "NVIDIA B200"))
        for metric in ("step", "peak allocated")
    ]
    assert "not measured" in line_of(render(Rows(rows)), "8B: +8.40 %")


def test_every_figure_is_answered_by_the_rows_that_benchmarks_write():
    rows = [
        row("packed_metadata", "8192 tokens, 19 documents", f"dense, {kind}", "one build", ms)
        for kind, ms in (("loop over documents", 2.0), ("transformers", 1.0), ("ours", 0.5))
    ]
    for name in ("llama-3.2-1b-lora", "qwen3-0.6b-lora", "qwen3-14b-qlora"):
        for arm, ms in (
            ("sdpa/every-layer-loop", 120.0),
            ("sdpa/once", 100.0),
            ("varlen/every-layer", 101.0),
            ("varlen/once", 100.0),
        ):
            rows += [
                row("packed_metadata", f"{name}, recompute", arm, part, ms) for part in ("forward", "backward", "step")
            ]
    for name in offload.PUBLISHED:
        for system, ms in (("ours offload1", 110.0), ("ours offload", 100.0)):
            cell = f"{name}, packed, 16384 tokens"
            rows += [
                row("offload buffers", cell, system, metric, ms)
                for metric in ("step", "peak allocated", "exposed copies")
            ]
    for arm, ms in (("eager", 12.0), ("published", 10.0), ("ours", 4.0)):
        rows += [
            row("moe_layer", "gpt-oss-20b, 8192 tokens, balanced, frozen experts", arm, part, ms)
            for part in ("forward", "backward")
        ]
        rows += [
            row("published waits", "a layer of gpt-oss-20b, 8192 tokens", arm, f"host waits, {part}", ms)
            for part in ("forward", "backward")
        ]
    kinds = ("dense, loop over documents", "varlen, transformers", "dense, ours", "varlen, ours")
    rows += [
        row("published waits", "8192 tokens", kind, "host waits, one build", number)
        for number, kind in enumerate(kinds)
    ]
    for name in (published_table.DENSE, published_table.MIXTURE):
        for combination in all_combinations(WORKLOADS[name], attention="varlen"):
            ms = (
                100.0
                + 10.0 * (combination.metadata == "every")
                + 20.0 * (combination.buffers == "one")
                + 50.0 * (combination.routing == "loop")
            )
            rows += [
                row("published combinations", f"{name}, packed, offload", combination.mode, metric, value)
                for metric, value in (
                    ("step", ms),
                    ("difference of two rounds", 1.0),
                    ("copy of a layer's input", 0.5),
                    ("backward of a layer", 2.0),
                )
            ]
    for system, rate, gib in (("plain padded+recompute", 1000.0, 30.0), ("ours recompute+fused@full", 2500.0, 15.0)):
        cell, system = "llama-7b-lora, documents of at most 2048 tokens, 8 a batch", f"{system}, adamw_fused"
        rows += [
            row("published traditional", cell, system, "tokens", rate),
            row("published traditional", cell, system, "peak allocated", gib),
        ]
    text = render(Rows(rows))
    assert "not measured" not in text
    dense, mixture = (
        int(WORKLOADS[name].model_config["num_hidden_layers"])
        for name in (published_table.DENSE, published_table.MIXTURE)
    )
    assert "step +20.0 % (20.0 ms a step)" in line_of(text, "qwen3-14b: forward +43.3 %")
    assert "(L-1)*m = 15 * 2.00 = 30.0 ms" in line_of(text, "+11.5 %")
    assert f"(L-1)*min(c, g) = {(dense - 1) * 0.5:.1f} ms, 20.0 measured" in line_of(text, "207 to 279 ms")
    assert f"(L-1)*min(c, g) = {(mixture - 1) * 0.5:.1f} ms, 20.0 measured" in text
    assert "the published loop: forward +20.0 %" in line_of(text, "forward +23 %")
    assert "+50.0 % steps/s; the published loop: +50.0 %" in line_of(text, "10 to 15 %")
    assert "+80.0 % steps/s (180.0 -> 100.0 ms)" in line_of(text, "about 25 %", "qwen3-30b")
    assert "+30.0 % steps/s (130.0 -> 100.0 ms)" in line_of(text, "about 25 %", "qwen3-0.6b")
    assert "2.50x the real tokens/s, 32.2 -> 16.1 GB" in line_of(text, "2x the speed")
    assert "-50% memory" in line_of(text, "80 % less memory")


def test_the_stored_results_answer_what_they_hold(tmp_path):
    out = tmp_path / "folder" / "published.md"
    assert published.main(["table", "--out", str(out)]) == 0
    text = out.read_text()
    stored = {(entry["benchmark"], entry["command"]) for entry in read_rows([results.RESULTS_PATH])._rows}
    used = [line.partition("`")[2].rstrip("`") for line in text.splitlines() if line[:1].isdigit()]
    assert len([command for command in used if command in {command for _, command in stored}]) >= 3
    assert "not measured" not in line_of(text, "m = 13.7 ms")
    assert "not measured" not in line_of(text, "8B: +8.40 %")


# Combinations: names, rows, gains


def test_a_mixture_has_eight_combinations_and_a_dense_model_four():
    mixture = all_combinations(WORKLOADS[MIXTURE], attention="sdpa")
    factorial = {one[:3] for one in mixture if one.routing in ("loop", "bincount")}
    assert len(factorial) == 8
    assert {one.routing for one in mixture} == {"loop", "bincount", "published", "grouped"}
    assert len(set(mixture)) == len(mixture) == 10
    dense = all_combinations(WORKLOADS["tiny"], attention="varlen")
    assert len(set(dense)) == len(dense) == 4
    for found in (mixture, dense):
        assert [one.is_all_on for one in found].index(True) == 1
        assert sum(one.is_all_on for one in found) == 1
        assert found[0][:2] == ("every", "one")
        assert [parse_combination(f"{one.mode}#2") for one in found] == found
    for mode in ("once+two", "once+two+bincount+flex", "never+two+bincount+sdpa", "once+two+bincount+sdpa+x"):
        with pytest.raises(ValueError, match="A combination is"):
            parse_combination(mode)


def record(mode, ms, *, waits=0, gib=10.0, **changes):
    return {
        "workload": "qwen3-0.6b-lora",
        "system": "ours",
        "mode": mode,
        "title": f"ours {mode}",
        "label_share": 1.0,
        "optimizer": "adamw_fused",
        "reason": "",
        "ms": [ms] * 3,
        "summary": {"median": ms, "p10": ms, "p90": ms, "n": 3},
        "tokens_per_s": 1e6 / ms,
        "labelled_tokens_per_s": 9e5 / ms,
        "peak_gib": {"allocated": gib, "reserved": gib},
        "host_waits": waits,
        "num_layers": 10,
        "backward": {"median": 50.0, "n": 3},
        "copies": {"h2d_ms": 20.0, "num_h2d": 10, "exposed_ms": 1.0},
        "versions": {"device": "NVIDIA H200"},
        "verdict": {"passed": True, "worst_cosine": ["a", 1.0]},
        "bits": {"num_equal": 4, "num_tensors": 4},
        **changes,
    }


OFF, ON = "every+one+dense+varlen", "once+two+dense+varlen"


def test_rounds_are_one_row_and_their_difference_is_the_spread():
    records = [record(ON, 100.0, gib=9.0), record(f"{ON}#2", 102.0, gib=9.5)]
    merged = published.merge_rounds(records)[ON]
    assert merged["summary"] == {"median": 101.0, "mean": 101.0, "p10": 100.0, "p90": 102.0, "n": 6}
    assert merged["spread"] == pytest.approx(2.0)
    assert merged["tokens_per_s"] == pytest.approx(1e6 / 101.0)
    assert merged["peak_gib"]["allocated"] == 9.5
    rows = {entry["metric"]: entry for entry in published.combination_rows(records, command="x")}
    assert {entry["system"] for entry in rows.values()} == {ON}
    assert rows["step"]["value"] == 101.0
    assert rows["backward of a layer"]["value"] == 5.0
    assert rows["copy of a layer's input"]["value"] == 2.0
    assert rows["difference of two rounds"]["value"] == pytest.approx(2.0)
    assert set(rows["step"]) <= set(results.COLUMNS)


def test_a_round_that_was_refused_takes_the_row_and_one_without_time_does_not():
    cut = published.merge_rounds([record(ON, 100.0), record(f"{ON}#2", 1.0, reason="stopped after 30 s")])[ON]
    assert (cut["reason"], cut["spread"], cut["summary"]["n"]) == ("", None, 3)
    refused = [record(ON, 100.0), record(f"{ON}#2", 100.0, reason="its loss differs")]
    assert published.merge_rounds(refused)[ON]["reason"] == "its loss differs"
    assert published.combination_rows(refused, command="x") == []


def test_gains_are_said_plainly():
    steps = (
        (OFF, 130.0, 28),
        ("every+two+dense+varlen", 100.4, 28),
        ("once+one+dense+varlen", 120.0, 0),
        (ON, 100.0, 0),
    )
    records = [record(mode, ms, waits=waits) for mode, ms, waits in steps]
    records += [record(f"{mode}#2", ms * 1.01, waits=waits) for mode, ms, waits in steps]
    text = published.describe_combinations(records)
    assert (
        "metadata once: +0.4 % steps/s: near 0: two rounds of one combination differ by up to 1.0 %; host waits a step "
        "28 -> 0" in text
    )
    assert "two staging buffers: +20.0 % steps/s: more than two rounds" in text
    assert "host waits a step 0 -> 0: none to remove" in text
    assert "both together: +30.0 % steps/s" in text
    assert "c = 2.000 ms a copy, g = 5.00 ms a layer: (L-1)*min(c, g) = 18.0 ms, measured 20.1 ms" in text
    assert "no gain: " in published.describe_combinations(records[:1])
    assert judge_gain(-0.4, 0.1).startswith("near 0")
    assert judge_gain(3.0, 8.0).startswith("not decided")
    assert judge_gain(3.0, 1.0).startswith("more than")


# Combinations: runs on a CPU


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    for name in (MIXTURE, "tiny-llama"):
        published.build_files(name, root=folder, device="cpu")
    assert find_files(folder, "tiny-llama").is_built()
    return folder


def cases_of(*modes, system="ours", workload=MIXTURE, num_steps=1):
    template = Case(workload, system, "", optimizer="adamw_fused", num_warmup=2, num_steps=num_steps, diagnose=True)
    return [replace(template, mode=mode) for mode in modes]


def run(root, tmp_path, *modes, system="ours", workload=MIXTURE, num_steps=1):
    raw = tmp_path / "raw.jsonl"
    num_before = len(read_records(raw))
    published.run_arm(
        cases_of(*modes, system=system, workload=workload, num_steps=num_steps), root=root, raw=raw, device="cpu"
    )
    return read_records(raw)[num_before:]


@pytest.fixture
def fresh(root):
    find_files(root, MIXTURE).forget()
    find_files(root, "tiny-llama").forget()
    return root


@pytest.mark.fault
def test_all_combinations_train_the_same_step(fresh, tmp_path):
    modes = [one.mode for one in all_combinations(WORKLOADS[MIXTURE], attention="sdpa")]
    records = run(fresh, tmp_path, *modes, f"{modes[1]}#2")
    assert {entry["mode"]: entry["reason"] for entry in records} == dict.fromkeys([*modes, f"{modes[1]}#2"], "")
    for entry in records[:-1]:
        assert entry["bits"]["is_promised"]
        assert entry["bits"]["num_equal"] == entry["bits"]["num_tensors"] > 20
        assert len(entry["ms"]) == 1
        assert entry["first_loss"] == pytest.approx(records[0]["first_loss"], rel=1e-5)
    assert "bits" not in records[-1]
    # Other sums, so routings are not equal to the bit; the same routing is, by construction of the reference files.
    paths = {path.name for path in find_files(fresh, MIXTURE).folder.glob("published_bits_*")}
    assert paths == {
        f"published_bits_{routing}_sdpa.safetensors" for routing in ("loop", "bincount", "published", "grouped")
    }
    text = published.describe_combinations(records)
    assert "all three together" in text
    # Nothing waits for a CPU, which is no finding.
    assert "host waits a step" not in text.splitlines()[-1]


def keep_metadata(monkeypatch):
    monkeypatch.setattr(published_arms, "_make_hook", lambda rebuild: lambda module, arguments, keywords: None)


def keep_two_buffers(monkeypatch):
    monkeypatch.setattr(published_arms, "BUFFERS", {"one": "offload", "two": "offload"})


class NoRouter(Callback):
    def status(self):
        return []


def leave_router_out(monkeypatch):
    monkeypatch.setattr(published_arms, "BincountRouter", NoRouter)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("spoil", "mode", "reason"),
    [
        (keep_metadata, "every+two+grouped+sdpa", "dense_mask was built 1 times in 4 attention calls"),
        (keep_two_buffers, "once+one+grouped+sdpa", "2 staging buffers"),
        (leave_router_out, "once+two+bincount+sdpa", "the experts ran by"),
    ],
)
def test_a_combination_that_does_not_do_what_it_says_gets_no_row(fresh, tmp_path, monkeypatch, spoil, mode, reason):
    spoil(monkeypatch)
    (entry,) = run(fresh, tmp_path, mode)
    assert reason in entry["reason"]
    assert published.combination_rows([entry], command="x") == []


def lose_an_expert(call):
    return lambda self, x, index, weight: call(self, x, index, weight.masked_fill(index == 3, 0.0))


def shift_bits(call):
    """Other by a few units in the last place, which no judge sees."""
    return lambda self, x, index, weight: call(self, x, index, weight) * 1.00001


@pytest.mark.fault
def test_wrong_gradients_and_other_bits_get_no_row(fresh, tmp_path, monkeypatch):
    mode = "once+two+published+sdpa"
    (right,) = run(fresh, tmp_path, mode)
    assert right["reason"] == ""
    own = moe_layer.published_experts_forward
    monkeypatch.setattr(moe_layer, "published_experts_forward", shift_bits(own))
    (other,) = run(fresh, tmp_path, mode)
    assert other["reason"].endswith("are not those of the first combination to the bit")
    assert other["bits"]["is_promised"]
    monkeypatch.setattr(moe_layer, "published_experts_forward", lose_an_expert(own))
    (wrong,) = run(fresh, tmp_path, mode)
    assert "gradients differ" in wrong["reason"]
    assert published.combination_rows([other, wrong], command="x") == []
    # In the raw log they are timed.
    assert "summary" in other


def refuse_when_deterministic(call):
    def forward(self, x, index, weight):
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("histc does not have a deterministic implementation")
        return call(self, x, index, weight)

    return forward


@pytest.mark.fault
def test_a_kernel_without_a_deterministic_form_promises_no_bits_and_is_measured(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(
        moe_layer, "published_experts_forward", refuse_when_deterministic(moe_layer.published_experts_forward)
    )
    (entry,) = run(fresh, tmp_path, "once+two+published+sdpa")
    assert entry["reason"] == ""
    assert not entry["bits"]["is_promised"]
    assert "histc" in entry["bits"]["why"]
    assert "not promised" in published.describe_combinations([entry])


def test_first_steps_that_differ_are_told_apart():
    reference = {"loss": 2.0, "gradient_norm": 1.0}
    assert first_step_difference({"loss": 2.001, "gradient_norm": 1.01}, reference) == ""
    assert "loss of its first step" in first_step_difference({"loss": 2.01, "gradient_norm": 1.0}, reference)
    assert "norm of its first gradients" in first_step_difference({"loss": 2.0, "gradient_norm": 1.03}, reference)
    assert "loss of its first step" in first_step_difference({"loss": float("nan"), "gradient_norm": 1.0}, reference)


# Processes


class Processes:
    """Stands in for the driver: what each process leaves, and which case each ends in."""

    def __init__(self, raw, *, deadly=(), refused=()):
        self.raw, self.deadly, self.refused, self.calls = raw, deadly, refused, []

    def __call__(self, arms, **options):
        (cases,) = arms
        self.calls.append([case.mode for case in cases])
        assert len(self.calls) < 4, "a case is tried for ever"
        is_dead = False
        for case in cases:
            is_dead = is_dead or case.mode in self.deadly
            reason = "its process ended with code -9: " if is_dead else "refused" if case.mode in self.refused else ""
            CaseLog(self.raw).write(
                {"workload": case.workload, "system": case.system, "mode": case.mode, "reason": reason}
            )


def test_a_case_that_kills_its_process_does_not_stop_those_behind_it(tmp_path, monkeypatch):
    raw = tmp_path / "raw.jsonl"
    processes = Processes(raw, deadly=("b",), refused=("a",))
    monkeypatch.setattr(published, "run_arms", processes)
    cases = cases_of("a", "b", "c", "d")
    options = published._parser().parse_args(["combinations", "--workload", MIXTURE, "--out", str(tmp_path)])
    published._run_until_done(cases, options, raw=raw, deadline=float("inf"))
    assert processes.calls == [["a", "b", "c", "d"], ["c", "d"]]
    latest = {entry["mode"]: entry["reason"][:11] for entry in published.latest_records(read_records(raw))}
    assert latest == {"a": "refused", "b": "its process", "c": "", "d": ""}
    # The next call tries what its process took along once more, and nothing else; without time it is only noted.
    processes.calls.clear()
    published._run_until_done(cases, options, raw=raw, deadline=0.0)
    assert processes.calls == [["b"]]


@pytest.mark.fault
def test_a_command_writes_rows_and_table_also_when_it_is_told_to_stop(root, tmp_path, monkeypatch):
    raw = tmp_path / "raw.jsonl"

    def stop(arms, **options):
        (cases,) = arms
        CaseLog(raw).write(record(cases[0].mode, 10.0, workload=MIXTURE))
        raise SystemExit(143)

    monkeypatch.setattr(published, "run_arms", stop)
    with pytest.raises(SystemExit):
        published.main(
            ["combinations", "--workload", MIXTURE, "--out", str(tmp_path), "--root", str(root), "--device", "cpu"]
        )
    assert (tmp_path / "rows.csv").read_text().count("every+one+loop+sdpa") > 5
    assert "no gain: " in (tmp_path / "table.txt").read_text()


# The padded loop


def test_batches_and_packs_hold_the_same_documents_in_their_order():
    workload, padding = TRADITIONAL["llama-7b-lora"]
    documents = read_documents(workload, longest=padding.longest)
    assert max(map(len, documents)) == padding.longest
    batches = list(group_documents(documents, padding, is_filled=False))
    packs = list(group_documents(documents, padding, is_filled=True))
    assert {len(batch.lengths) for batch in batches} == {padding.batch_size}
    assert (batches[0].input_id_T == packs[0].input_id_T).all()
    assert all(padding.pack_tokens - padding.longest < sum(pack.lengths) <= padding.pack_tokens for pack in packs[1:])
    for groups in (batches, packs):
        joined = [token for group in groups for token in group.input_id_T.tolist()]
        assert joined == [token for document in documents for token in document.tolist()][: len(joined)]
    assert len(list(group_documents(documents[:9], Padding(4, 8, 8), is_filled=False))) == 2


def leave_padding_visible(call):
    """The labels of padding are its tokens: what a loop does that copies ids to labels."""

    def pad(pack, tokenizer):
        batch = call(pack, tokenizer)
        return {**batch, "labels": batch["input_ids"].clone()}

    return pad


def cut_a_token(call):
    def pad(pack, tokenizer):
        batch = call(pack, tokenizer)
        return {name: value[:, :-1] for name, value in batch.items()}

    return pad


@pytest.mark.fault
def test_the_padded_loop_and_ours_do_the_same_work(fresh, tmp_path):
    padded = run(fresh, tmp_path, "padded+recompute", "padded+keep", system="plain", workload="tiny-llama", num_steps=2)
    packed = run(fresh, tmp_path, "recompute+fused", "keep+fused@full", workload="tiny-llama", num_steps=2)
    records = [*padded, *packed]
    assert [entry["reason"] for entry in records] == [""] * 4
    workload, padding = TRADITIONAL["tiny-llama"]
    batches = list(group_documents(read_documents(workload, longest=padding.longest), padding, is_filled=False))
    assert [entry["num_tokens"] for entry in records[:3]] == [sum(sum(batch.lengths) for batch in batches[2:4])] * 3
    assert packed[1]["num_tokens"] > packed[0]["num_tokens"]
    assert 0.3 < padded[0]["real_share"] < 1.0
    rows = published.traditional_rows(records, command="x")
    assert {entry["system"] for entry in rows} == {
        "plain padded+recompute, adamw_fused", "plain padded+keep, adamw_fused", "ours recompute+fused, adamw_fused",
        "ours keep+fused@full, adamw_fused",
    }  # fmt: skip
    assert {entry["workload"] for entry in rows} == {"tiny-llama, documents of at most 128 tokens, 4 a batch"}
    text = published.describe_traditional(records)
    assert "x the real tokens/s of the padded loop" in text
    assert "of its tokens are real" in text


@pytest.mark.fault
@pytest.mark.parametrize("spoil", [leave_padding_visible, cut_a_token])
def test_a_padded_loop_that_trains_something_else_gets_no_row(fresh, tmp_path, monkeypatch, spoil):
    monkeypatch.setattr(published_padded, "pad_documents", spoil(pad_documents))
    (entry,) = run(fresh, tmp_path, "padded+keep", system="plain", workload="tiny-llama")
    assert "entered the model" in entry["reason"]
    assert published.traditional_rows([entry], command="x") == []


# Host waits


def test_waits_of_masks_and_layers_are_counted(tmp_path):
    found = published_waits.build_waits(256, device="cpu")
    assert found["dense, ours"] == found["varlen, ours"] == found["block mask, ours"] == 0
    assert found["dense, loop over documents"] == 2
    assert found["varlen, transformers"] > 0
    assert published.main(["waits", "--out", str(tmp_path), "--device", "cpu", "--shapes", "tiny-qwen3"]) == 0
    text = (tmp_path / "table.txt").read_text()
    assert "tiny-qwen3 published    2 / 0" in text
    assert "tiny-qwen3 ours         0 / 0" in text
    rows = [line for line in (tmp_path / "rows.csv").read_text().splitlines() if "a layer of tiny-qwen3" in line]
    assert len(rows) == 2 * len(published_waits.ARMS)
    (eager,) = [entry for entry in read_records(tmp_path / "raw.jsonl") if entry["arm"] == "eager"]
    assert eager["waits"][0] > moe_layer.SHAPES["tiny-qwen3"][1]["num_experts"]


def test_a_layer_with_other_results_has_no_waits_to_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(moe_layer, "published_experts_forward", lose_an_expert(moe_layer.published_experts_forward))
    published.main(["waits", "--out", str(tmp_path), "--device", "cpu", "--shapes", "tiny-qwen3"])
    assert "tiny-qwen3 published    no row" in (tmp_path / "table.txt").read_text()
    assert "a layer of tiny-qwen3, 64 tokens,published" not in (tmp_path / "rows.csv").read_text().replace('"', "")
