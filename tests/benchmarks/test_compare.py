"""The comparison: which processes run in which order, what is pooled, when rows are written, and what is said
about systems that are not here.
"""

import csv
import json
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks import compare, results, train_step
from benchmarks.ruler import clocks, logs, picture, systems
from benchmarks.ruler.cases import CaseLog
from benchmarks.ruler.model_configs import num_weights
from benchmarks.ruler.pairs import CONTROL, comparison_rows, comparison_table, control_of, find_unfinished, pool, ratios
from benchmarks.ruler.report import read_records
from benchmarks.ruler.rows import ROWS, is_default
from benchmarks.ruler.systems import SYSTEMS, Setting, System
from benchmarks.ruler.workloads import WORKLOADS
from tests.support.comparison import OURS, PLAIN, UNSLOTH, pairs_of, record_of, records_of_a_run


@pytest.fixture
def measured():
    return records_of_a_run()


# Pooling


def test_both_halves_are_one_sample():
    (row,) = pool(
        [record_of(OURS, half=1, ms=100.0, n=3, is_fresh=False), record_of(OURS, half=2, ms=110.0, n=3)],
        clocks=[(9.0, 345.0), (12.0, 1900.0), (13.0, 1980.0), (22.0, 1980.0), (16.0, 345.0)],
    )
    assert row["ms"] == [100.0] * 3 + [110.0] * 3
    assert row["summary"] == {"median": 105.0, "mean": 105.0, "p10": 100.0, "p90": 110.0, "n": 6}
    assert (row["host_waits_step"], row["device_memory_gib"]) == (20, 62.0)
    # 9 s for the 9 steps of the second process, whose first steps compile as those of a user do, and 191 at the mean.
    assert row["whole_run_s"] == pytest.approx(9.0 + 191 * 0.110)
    assert (row["medians"], row["num_samples"], row["calls"]) == ([100.0, 110.0], [3, 3], [1, 1])
    assert row["tokens_per_s"] == pytest.approx(8192 / 0.105)
    assert row["labelled_tokens_per_s"] == pytest.approx(8000 / 0.105)
    assert row["peak_gib"] == {"allocated": 42.0, "reserved": 52.0}
    assert (row["pinned_host_gib"], row["host_waits"], row["verdict"]["worst_cosine"][1]) == (1.0, 2, 0.998)
    # Samples before, between and after the timed steps do not count.
    assert row["clock_mhz"] == 1980.0


def test_batches_with_varying_numbers_of_tokens_have_the_rate_of_all_steps_together():
    records = [{**record_of(OURS, half=1, n=4), "ms": [100.0, 100.0, 100.0, 500.0]}]
    rates = [pool([{**records[0], "is_even": is_even}], num_passes=1)[0]["tokens_per_s"] for is_even in (True, False)]
    assert rates == [pytest.approx(8192 / 0.1), pytest.approx(8192 / 0.2)]


@pytest.mark.parametrize(
    ("halves", "reason"),
    [
        ([record_of(OURS, half=1)], "process 2: it was not run"),
        ([record_of(OURS, half=1, reason="OutOfMemoryError: 150 GiB")], "process 1: OutOfMemoryError: 150 GiB"),
        (
            [record_of(OURS, half=1), record_of(OURS, half=2, reason="not training: x")],
            "process 2: not training: x",
        ),
        (
            [record_of(OURS, half=1), record_of(OURS, half=2, versions={"torch": "2.12.0", "device": "NVIDIA H200"})],
            "its processes ran under different versions of torch",
        ),
    ],
    ids=["missing", "failed", "refused", "versions"],
)
def test_half_a_row_is_none(halves, reason):
    (row,) = pool(halves)
    assert row["reason"] == reason
    assert "summary" not in row
    assert comparison_rows([*pool([*pairs_of(OURS, 1.0, 1.0, repeat=CONTROL)]), row], command="x") == []


def test_the_last_try_of_a_half_counts():
    records = [record_of(OURS, half=1, reason="not started: 3 s of the budget left"), *pairs_of(OURS, 100.0, 100.0)]
    assert [row["reason"] for row in pool(records)] == [""]


# The control


@pytest.mark.parametrize(
    ("ms", "is_passed"), [(100.0, True), (98.1, True), (101.9, True), (102.1, False), (97.9, False)]
)
def test_rows_are_written_only_within_two_percent(ms, is_passed, measured):
    measured[2:4] = pairs_of(OURS, ms, ms, repeat=CONTROL)
    rows = pool(measured)
    assert control_of(rows).passed == is_passed
    assert bool(comparison_rows(rows, command="x")) == is_passed
    assert ("CONTROL FAILED" in comparison_table(rows, {}, settings=[], device="cuda")) == (not is_passed)


def test_without_a_control_no_row_is_written(measured):
    rows = pool(measured[:2] + measured[4:])
    assert comparison_rows(rows, command="x") == []
    assert "CONTROL MISSING" in comparison_table(rows, {}, settings=[], device="cuda")


# Rows and table


def test_rows_have_the_columns_of_results_and_every_figure(measured, tmp_path):
    rows = comparison_rows(
        pool(measured, clocks=[(12.0, 1965.0)]), command="python -m benchmarks.compare --workload qwen3-14b-qlora"
    )
    results.append_rows(rows, path=tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        written = [row for row in csv.DictReader(file) if row["system"] == "ours keep+fused, adamw_8bit"]
    figures = {row["metric"]: (row["value"], row["unit"], row["n"]) for row in written}
    assert figures == {
        "step": ("100", "ms", "30"),
        "step, process 1": ("100", "ms", "15"),
        "step, process 2": ("100", "ms", "15"),
        "tokens": ("81920", "tokens/s", "30"),
        "labelled tokens": ("80000", "tokens/s", "30"),
        "peak allocated": ("42", "GiB", "30"),
        "peak reserved": ("52", "GiB", "30"),
        "pinned host": ("1", "GiB", "30"),
        "host waits": ("2", "per step", "30"),
        "host waits, whole step": ("20", "per step", "30"),
        "device memory": ("62", "GiB", "30"),
        "step, mean": ("100", "ms", "30"),
        "whole run of 200 steps": ("26.9", "s", "30"),
        "SM clock": ("1965", "MHz", "30"),
        "trained values": ("1000", "1", "30"),
        "lowest gradient cosine": ("0.998", "1", "30"),
    }
    assert {(row["benchmark"], row["workload"], row["device"]) for row in written} == {
        ("compare", "qwen3-14b-qlora, packed, labels 100%", "NVIDIA H200")
    }
    assert "torch 2.11.0" in written[0]["version"]
    assert "--workload qwen3-14b-qlora" in written[0]["command"]
    assert [row["value"] for row in rows if row["metric"] == "A/A difference"] == [pytest.approx(1.0)]


def test_ratios_compare_best_with_best_and_default_with_default():
    records = [
        *pairs_of(OURS, 100.0, 100.0),
        *pairs_of(("ours", "auto+graphs=auto"), 120.0, 120.0),
        *pairs_of(OURS, 98.5, 98.5, repeat=CONTROL),
        *pairs_of(UNSLOTH, 150.0, 150.0),
        *pairs_of(("unsloth", "unsloth"), 180.0, 180.0),
        *pairs_of(("trl", "keep+liger"), 140.0, 140.0),
        record_of(("plain", "keep"), half=1, reason="out of memory"),
    ]
    assert ratios(pool(records), settings=[OURS, UNSLOTH, ("trl", "keep+liger"), ("plain", "keep")], device="cuda") == [
        "best against best: ours keep+fused 1.50x unsloth off in tokens/s; 42.0 against 42.0 GiB",
        "best against best: ours keep+fused 1.40x trl keep+liger in tokens/s; 42.0 against 42.0 GiB",
        "default against default: ours auto+graphs=auto 1.50x unsloth unsloth in tokens/s; 42.0 against 42.0 GiB",
    ]


def test_ratios_of_a_row_compare_equal_moments_first():
    def pair(setting, ms, optimizer):
        return pairs_of(setting, ms, ms, optimizer=optimizer)

    records = [
        *pair(OURS, 80.0, "adamw_fused"), *pair(OURS, 100.0, "adamw_fused_8bit"),
        *pairs_of(OURS, 99.0, 99.0, optimizer="adamw_fused_8bit", repeat=CONTROL),
        *pair(UNSLOTH, 150.0, "adamw_8bit"), *pair(UNSLOTH, 160.0, "adamw_fused"),
        # A peer with varying times is reported, and does not block the result.
        *pairs_of(UNSLOTH, 180.0, 180.0, optimizer="adamw_8bit", repeat=CONTROL),
    ]  # fmt: skip
    rows, settings = pool(records), [(*OURS, "8-bit"), (*OURS, "32-bit"), (*UNSLOTH, "8-bit"), (*UNSLOTH, "32-bit")]
    found = [line.split(" in ")[0] for line in ratios(rows, settings=settings, device="cuda")]
    assert found == [
        "8-bit moments: ours keep+fused 1.50x unsloth off",
        "32-bit moments: ours keep+fused 2.00x unsloth off",
        "best against best: ours keep+fused 1.88x unsloth off",
    ]
    assert "unsloth off repeated differs by 20.00%" in comparison_table(rows, {}, settings=settings, device="cuda")
    differences = [row["value"] for row in comparison_rows(rows, command="x") if row["metric"] == "A/A difference"]
    assert differences == [pytest.approx(100 / 99), pytest.approx(20.0)]
    # One of the two widths is not measured yet.
    assert find_unfinished(rows, [*settings, ("unsloth", "unsloth", "32-bit")]) != []
    assert find_unfinished(rows[:2] + rows[3:], settings) == []
    assert find_unfinished(rows[1:], settings) == [{"system": "ours", "mode": "keep+fused", "repeat": ""}]


def test_a_base_in_fp8_is_compared_with_another_one_only():
    own, other = ("ours", "keep+fused+fp8"), ("unsloth", "off+fp8")
    records = [
        *pairs_of(OURS, 100.0, 100.0), *pairs_of(OURS, 100.0, 100.0, repeat=CONTROL), *pairs_of(own, 60.0, 60.0),
        *pairs_of(UNSLOTH, 150.0, 150.0), *pairs_of(other, 120.0, 120.0),
    ]  # fmt: skip
    found = [
        line.split(" in ")[0] for line in ratios(pool(records), settings=[OURS, own, UNSLOTH, other], device="cuda")
    ]
    assert found == [
        "best against best: ours keep+fused 1.50x unsloth off",
        "fp8 against fp8: ours keep+fused+fp8 2.00x unsloth off+fp8",
    ]


GRAPHS = ("ours", "keep+graphs")


@pytest.mark.parametrize(
    "left",
    [
        [],
        [record_of(GRAPHS, half=1)],
        [record_of(GRAPHS, half=1), record_of(GRAPHS, half=2, reason="not started: 0 s of the budget left")],
        [record_of(GRAPHS, half=1, reason="stopped after 400 s")],
    ],
    ids=["no record", "no second half", "not started", "stopped"],
)
def test_nothing_is_said_of_the_best_while_a_setting_is_to_be_measured(left):
    records = [
        *pairs_of(OURS, 100.0, 100.0),
        *pairs_of(OURS, 100.0, 100.0, repeat=CONTROL),
        *pairs_of(("ours", "auto+graphs=auto"), 120.0, 120.0),
        *left,
        *pairs_of(UNSLOTH, 150.0, 150.0),
        *pairs_of(("unsloth", "unsloth"), 180.0, 180.0),
    ]
    rows, settings = pool(records), [OURS, ("ours", "auto+graphs=auto"), GRAPHS, UNSLOTH, ("unsloth", "unsloth")]
    assert [(setting["system"], setting["mode"]) for setting in find_unfinished(rows, settings)] == [GRAPHS]
    assert ratios(rows, settings=settings, device="cuda") == [
        "best against best, unsloth: settings of ours are still to be measured",
        "default against default: ours auto+graphs=auto 1.50x unsloth unsloth in tokens/s; 42.0 against 42.0 GiB",
    ]


def test_what_failed_is_finished():
    failed = record_of(GRAPHS, half=1, reason="RuntimeError: the graph was not started: stopped after its first node")
    assert find_unfinished(pool([failed]), [GRAPHS]) == []


def test_without_a_control_that_passed_nothing_is_said_of_who_is_faster(measured):
    assert len(ratios(pool(measured), settings=[], device="cuda")) == 2
    for control in (pairs_of(OURS, 110.0, 110.0, repeat=CONTROL), []):
        assert "tokens/s;" not in comparison_table(
            pool([*measured[:2], *control, *measured[4:]]), {}, settings=[], device="cuda"
        )


def test_a_table_of_a_cpu_has_no_ratio_and_no_memory(measured):
    lines = comparison_table(pool(measured), {}, settings=[], device="cpu").splitlines()
    assert lines[-1] == "  on a CPU nothing is compared and no row is written"
    header = lines[0].split("  ")
    assert {"GiB", "resv", "used", "pinned"} <= {name.strip() for name in header}
    for line in lines[1:5]:
        # GiB, reserved, used, pinned: no 42.0, 52.0, 62.0 and 1.0.
        assert line.split()[-8:-4] == ["-"] * 4


def test_table_names_what_was_refused_and_what_was_not_run(measured):
    measured.append(record_of(("plain", "keep"), half=1, reason="OutOfMemoryError: 150 GiB"))
    table = comparison_table(
        pool(measured), {"torchtune": "ModuleNotFoundError: x; pip install torchtune"}, settings=[], device="cuda"
    )
    assert "no row: plain keep: process 1: OutOfMemoryError: 150 GiB" in table
    assert "not run: torchtune: ModuleNotFoundError: x; pip install torchtune" in table
    assert [line.split()[:2] for line in table.splitlines()[1:5]] == [
        ["ours", "keep+fused"],
        ["ours", "keep+fused"],
        ["unsloth", "off"],
        ["plain", "recompute"],
    ]
    assert "plain recompute *" in table
    # Both medians stand in the row.
    assert {"151.0", "150.0", "152.0"} <= set(
        next(line for line in table.splitlines() if "unsloth off" in line).split()
    )


@pytest.mark.parametrize("is_failed", [False, True])
def test_chart_is_a_picture(is_failed, measured, tmp_path):
    if is_failed:
        measured[2:4] = pairs_of(OURS, 110.0, 110.0, repeat=CONTROL)
    picture.draw_comparison(
        pool(measured), {"axolotl": "not here"}, device="cuda", title="qwen3-14b-qlora", path=tmp_path / "chart.png"
    )
    content = (tmp_path / "chart.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_a_chart_of_a_cpu_says_that_nothing_is_compared(measured, monkeypatch, tmp_path):
    titles = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda figure, text, **_: titles.append(text))
    for device in ("cpu", "cuda"):
        picture.draw_comparison(pool(measured), {}, device=device, title="tiny", path=tmp_path / "chart.png")
    assert titles == ["tiny\non a CPU nothing is compared: the bars show that everything ran", "tiny"]


# Systems


def test_a_system_that_is_not_installed_is_named_with_its_error_and_its_pip_line():
    system = System(
        arm="trl", modules=("no_such_peer.training",), pip="pip install no-such-peer", settings=(Setting("recompute"),)
    )
    assert (
        systems.find_gap(system, device="cuda")
        == "ModuleNotFoundError: No module named 'no_such_peer'; pip install no-such-peer"
    )


def test_a_system_without_an_arm_is_named_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "sound_peer.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert systems.find_gap(System(arm="trl", modules=("sound_peer",), pip=""), device="cpu") == ""
    gap = systems.find_gap(System(arm="", modules=("sound_peer",), pip="", why_no_arm="it is young"), device="cuda")
    assert gap == "it has no arm: it is young"
    assert "sound_peer" not in sys.modules


def test_systems_without_a_mode_on_a_cpu_are_not_run_there():
    found, gaps = compare.find_settings(SYSTEMS, device="cpu")
    assert {arm for arm, _ in found} == {"plain", "ours"}
    assert all("needs a GPU" in gaps[name] for name in ("unsloth", "trl", "trl+liger"))


def test_unknown_option_is_answered_in_a_line(capsys):
    with pytest.raises(SystemExit):
        compare.read_options(["--workload", "tiny", "--num-steps", "3"])
    said = capsys.readouterr().err
    assert "Did you mean --steps?" in said
    assert len(said.splitlines()) == 1


def test_a_row_names_the_systems_that_pip_does_not_install_here():
    gaps = compare.find_settings(SYSTEMS, device="cpu", row="tiny")[1]
    assert {name for name in gaps if not SYSTEMS[name].arm} == {*systems.CONFLICTS}
    assert gaps["axolotl"].startswith("it has no arm: 0.21.0: torch<")


def test_settings_are_found_in_order_and_those_without_their_module_are_named(monkeypatch):
    monkeypatch.setattr(systems, "find_gap", lambda system, device: "")
    monkeypatch.setattr(
        compare, "find_gap", lambda system, device: "it is broken" if system is SYSTEMS["unsloth"] else ""
    )
    monkeypatch.setattr(compare, "missing_module", lambda setting: setting.needs)
    found, gaps = compare.find_settings(["unsloth", "trl+liger", "ours", "plain"], device="cuda")
    assert found == [
        ("plain", "recompute"), ("plain", "keep"),
        ("ours", "keep+graphs"), ("ours", "recompute+graphs=auto"), ("ours", "auto+graphs=auto"),
        ("trl", "recompute+liger"), ("trl", "keep+liger"),
    ]  # fmt: skip
    assert gaps == {
        "plain keep+liger": "ModuleNotFoundError: No module named 'liger_kernel'",
        "unsloth": "it is broken",
    }


def test_every_system_has_one_default_and_modes_that_its_arm_knows():
    from benchmarks.ruler.arms import plain, trl
    from benchmarks.ruler.plans import parse_mode

    for name, system in SYSTEMS.items():
        assert bool(system.packages) == bool(system.arm), f"{name}: its rows name the versions of its packages"
        for settings, has_any in ((system.settings, system.arm), (system.cpu_settings, not system.why_no_cpu)):
            assert sum(setting.is_default for setting in settings) == (1 if system.arm and has_any else 0), name
    for setting in (*SYSTEMS["ours"].settings, *SYSTEMS["ours"].cpu_settings):
        parse_mode(setting.mode)
    assert {setting.mode for setting in SYSTEMS["plain"].settings} <= set(plain.MODES)
    assert {setting.mode for name in ("trl", "trl+liger") for setting in SYSTEMS[name].settings} <= set(trl.MODES)


@pytest.mark.parametrize("name", list(ROWS))
def test_every_row_has_modes_that_its_arms_know(name):
    from benchmarks import moe
    from benchmarks.ruler.arms import plain, trl
    from benchmarks.ruler.plans import parse_mode

    row = ROWS[name]
    # The first case leaves the reference gradients.
    assert next(iter(row.settings)) == "plain"
    assert set(row.settings) >= ({"plain", "ours"} if name == "tiny" else {"plain", "ours", "unsloth"})
    for mode in row.settings["ours"]:
        parse_mode(mode)
    if WORKLOADS[row.workload].num_experts:
        assert all(moe.parse_plain_mode(mode) for mode in row.settings["plain"])
        assert all(moe.parse_unsloth_mode(mode) for mode in row.settings["unsloth"])
    else:
        assert all(moe.parse_unsloth_mode(mode.removesuffix("+fp8")) for mode in row.settings.get("unsloth", ()))
        assert {mode.partition("+padded")[0] for mode in row.settings["plain"]} <= set(plain.MODES)
        assert {*row.settings.get("trl", ()), *row.settings.get("trl+liger", ())} <= set(trl.MODES)
    in_fp8 = {system for system, modes in row.settings.items() if any("fp8" in mode.split("+") for mode in modes)}
    assert in_fp8 in (set(), {"ours", "unsloth"}), "fp8 of ours is compared with fp8 of Unsloth"
    first = {"workload": row.workload, "system": "ours", "mode": row.settings["ours"][0]}
    assert is_default(first, device="cuda")
    assert not is_default({**first, "mode": "recompute+fused"}, device="cuda")


def test_a_row_has_its_workload_both_optimizers_and_enough_steps():
    options = compare.read_options(["--row", "llama-3.1-8b-32k"])
    assert (options.workload, options.device) == ("llama-3.1-8b-lora-32k", "cuda")
    assert (options.optimizers, options.steps, options.passes) == (("adamw_8bit", "adamw_fused"), 200, 2)
    options = compare.read_options(["--workload", "tiny", "--optimizer", "adamw_fused"])
    assert (options.optimizers, options.steps, options.warmup) == (("adamw_fused",), 30, 6)
    for wrong in (["--workload", "tiny"], ["--arms", "ours", "unslot"]):
        with pytest.raises(SystemExit):
            compare.read_options(["--row", "tiny", *wrong])


def test_settings_of_a_row_are_its_own(monkeypatch):
    monkeypatch.setattr(compare, "find_gap", lambda system, device: "")
    monkeypatch.setattr(compare, "missing_module", lambda setting: setting.needs)
    found, gaps = compare.find_settings(SYSTEMS, device="cuda", row="qwen3-30b-a3b")
    assert found == [
        ("plain", "recompute+grouped_mm"),
        ("ours", "shipped"), ("ours", "keep+graphs"), ("ours", "recompute+graphs"),
        ("unsloth", "unsloth"), ("unsloth", "off"),
    ]  # fmt: skip
    assert gaps == {}
    found, gaps = compare.find_settings(SYSTEMS, device="cuda", row="qwen3-8b-full")
    assert ("trl", "keep") in found
    assert set(gaps) == {"plain keep+liger", "trl+liger recompute+liger", "trl+liger keep+liger"}


def test_a_setting_that_the_row_does_not_have_is_named_before_anything_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "find_gap", lambda system, device: "absent" if system.arm == "unsloth" else "")
    monkeypatch.setattr(compare.ComparisonRun, "build", lambda self: pytest.fail("built"))
    words = ["--row", "tiny", "--out", str(tmp_path), "--no-chart", "--arms", "plain", "ours:keep+fused+fp8"]
    with pytest.raises(SystemExit, match=r"tiny has no setting ours:keep\+fused\+fp8; there are .*ours:keep"):
        compare.main(words)
    settings, gaps = compare.find_settings(SYSTEMS, device="cuda", row="qwen3-8b-full")
    compare.check_arms(["ours:keep+fused", "unsloth:off", "ours"], settings, gaps, name="qwen3-8b-full")


def test_default_root_is_in_memory_only_where_the_weights_fit(monkeypatch, tmp_path):
    monkeypatch.setattr(compare, "_SHARED_MEMORY", tmp_path)
    free = tmp_path / "free"
    for num_bytes, root in ((4.1, tmp_path / "fastft"), (3.9, compare.Path("runs/weights"))):
        usage = type("Usage", (), {"free": num_bytes * num_weights(WORKLOADS["qwen3-14b-qlora"].model_config)})
        monkeypatch.setattr(compare.shutil, "disk_usage", lambda path, usage=usage: usage)
        assert compare.default_root("qwen3-14b-qlora") == root
    monkeypatch.setattr(compare, "_SHARED_MEMORY", free)
    assert compare.default_root("tiny") == compare.Path("runs/weights")


# Clocks


def test_clocks_are_read_while_the_log_is_open(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho \"$@\" >arguments\necho '2026/11/22 04:10:19.250, 1980'\necho '2026/11/22 04:10:19.750, "
        "[N/A]'\nsleep 60\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "clocks.csv"
    with clocks.ClockLog(path):
        for _ in range(200):
            if path.exists() and path.read_text().count("\n") == 2:
                break
            time.sleep(0.02)
    ((moment, clock),) = clocks.read_clocks(path)
    assert clock == 1980.0
    assert moment % 60 == pytest.approx(19.25)
    assert "-i 3" in (tmp_path / "arguments").read_text()


def test_a_card_has_a_name_of_its_own(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$4" = 7 ] && exit 6\n[ "$4" = 8 ] && exit 0\necho "GPU-$4"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    names = []
    for devices in ("3,1", "3", "1", "7", "8"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        names.append(clocks.find_card())
    # What is no card has no name.
    assert (names[0], *names[3:]) == (names[1], "", "")
    assert names[1] != names[2]
    assert len(names[1]) == 8


def test_without_nvidia_smi_there_are_no_clocks(monkeypatch, tmp_path):
    monkeypatch.setattr(clocks.shutil, "which", lambda name: None)
    with clocks.ClockLog(tmp_path / "clocks.csv"):
        pass
    assert clocks.read_clocks(tmp_path / "clocks.csv") == []
    assert clocks.median_clock_mhz([], [(0.0, 1.0)]) is None
    assert clocks.find_card() == ""


# The run


@pytest.fixture
def processes(monkeypatch):
    """Stand in for the processes of a run: list (title, half, whether judged), and leave the given records."""
    started, answers = [], {}

    def run_arms(arms, *, raw, budget_seconds, **_):
        (cases,) = arms
        started.append([(case.title, case.optimizer, case.half, case.is_judged) for case in cases])
        for case in cases:
            if case.num_steps == 0:
                CaseLog(raw).write({**vars(case), "title": case.title, "reason": "asked for its gradients only"})
                continue
            answer = answers.get((case.title, case.half), {})
            reason = "not started: no time" if budget_seconds <= 0 else answer.get("reason", "")
            found = record_of((case.system, case.mode), half=case.half, repeat=case.repeat, reason=reason)
            CaseLog(raw).write({**found, **vars(case), **answer})

    monkeypatch.setattr(compare, "run_arms", run_arms)
    return started, answers


@pytest.fixture
def run(processes, tmp_path):
    """Return a function that measures settings, as often as it is called with the same folder of results."""

    def measure(
        *settings, has_reference=True, budget_s="1000", device="cuda", passes="2", words=("--workload", "tiny")
    ):
        given = ["--root", str(tmp_path), "--device", device, "--budget-s", budget_s]
        options = compare.read_options([*given, "--passes", passes, "--no-chart", *words])
        files = compare.WorkloadFiles(tmp_path, WORKLOADS["tiny"])
        files.folder.mkdir(exist_ok=True)
        if has_reference:
            files.reference(1.0).touch()
        session = compare.ComparisonRun(options, files=files, out=tmp_path)
        session.measure(settings)
        return session

    return measure


def titles_of(started):
    """Return title and pass of every case, process by process."""
    return [[(title, half) for title, _, half, _ in process] for process in started]


AUTO = ("ours", "auto")


def test_processes_run_forwards_and_backwards_and_ours_once_more(run, processes):
    run(PLAIN, OURS, AUTO, UNSLOTH, ("unsloth", "unsloth"))
    plain, unsloth = ["plain recompute", "plain recompute A/A"], ["unsloth off", "unsloth off A/A"]
    order = [plain, ["ours keep+fused", "ours auto"], unsloth, ["unsloth unsloth"]]
    first, second = ([[(title, half) for title in titles] for titles in order] for half in (1, 2))
    assert titles_of(processes[0]) == [*first, *reversed(second), [("ours keep+fused A/A", 1)]]


def test_one_pass_measures_both_optimizers_in_one_process(run, processes):
    rows = run(PLAIN, OURS, passes="1").records()
    assert titles_of(processes[0]) == [
        [("plain recompute", 1), ("plain recompute A/A", 1)], [("ours keep+fused", 1)], [("ours keep+fused A/A", 1)],
    ]  # fmt: skip
    assert {record["num_steps"] for record in rows} == {30}
    assert [record["is_fresh"] for record in rows] == [True, False, True, True]


def test_only_the_first_case_of_plain_leaves_the_reference(run, processes):
    run(PLAIN, OURS, has_reference=False)
    judged = [[is_judged for *_, is_judged in process] for process in processes[0]]
    # Nothing here writes one, so plain leaves it again.
    assert judged == [[False, True], [False], [True], [True], [False, True], [True]]


@pytest.mark.parametrize(("device", "optimizer"), [("cuda", "adamw_fused_8bit"), ("cpu", "adamw_8bit")])
def test_ours_steps_with_its_own_averages_of_as_many_bits(run, device, optimizer):
    records = run(PLAIN, OURS, UNSLOTH, device=device).records()
    assert {(record["system"], record["optimizer"]) for record in records} == {
        ("plain", "adamw_8bit"), ("ours", optimizer), ("unsloth", "adamw_8bit")
    }  # fmt: skip


def test_what_was_refused_is_not_run_again_and_not_the_control(run, processes):
    processes[1]["ours keep+fused", 1] = {"reason": "OutOfMemoryError"}
    run(PLAIN, OURS, AUTO)
    assert titles_of(processes[0])[1:] == [
        [("ours keep+fused", 1), ("ours auto", 1)],
        [("ours auto", 2)],
        [("plain recompute", 2), ("plain recompute A/A", 2)],
        [("ours auto A/A", 1)],
    ]


def test_the_control_is_a_setting_that_was_measured_and_stays_the_same(run, processes):
    words = ["--row", "tiny"]
    run(PLAIN, ("ours", "keep"), passes="1", words=words)
    assert titles_of(processes[0])[-1] == [("ours keep A/A", 1)]
    run(PLAIN, ("ours", "shipped"), ("ours", "keep"), passes="1", words=words)
    assert titles_of(processes[0])[-1] == [("ours keep A/A", 2)]


def test_without_plain_the_reference_is_left_first_and_tried_once(run, processes):
    run(OURS, UNSLOTH, has_reference=False)
    assert titles_of(processes[0])[:2] == [[("plain recompute", 0)], [("ours keep+fused", 1)]]
    assert titles_of(processes[0]).count([("plain recompute", 0)]) == 1


def test_plain_with_liger_alone_is_compared_with_a_reference_that_is_left_before(run, processes):
    run(("plain", "keep+liger"), OURS, has_reference=False, passes="1")
    assert [[(title, is_judged) for title, *_, is_judged in process] for process in processes[0][:2]] == [
        [("plain recompute", False)], [("plain keep+liger", True), ("plain keep+liger A/A", True)],
    ]  # fmt: skip


def test_a_run_that_ended_for_want_of_time_goes_on(run, processes, capsys):
    session = run(PLAIN, OURS, budget_s="0")
    assert {record["reason"] for record in session.records()} == {"not started: no time"}
    assert compare._report(session, [PLAIN, OURS], {}, command="x") == 1
    assert "not finished: the same command with --out" in capsys.readouterr().out
    processes[0].clear()
    session = run(PLAIN, OURS)
    assert len(processes[0]) == 5
    processes[0].clear()
    assert compare._report(session, [PLAIN, OURS], {}, command="x") == 0
    assert "not finished" not in capsys.readouterr().out
    # Nothing is measured twice but the control, and rows are those of all records.
    run(PLAIN, OURS)
    assert titles_of(processes[0]) == [[("ours keep+fused A/A", 3)]]


def test_time_is_kept_for_the_control_of_a_call_that_is_cut_short(run, processes):
    session = run(PLAIN, OURS, budget_s="40")
    assert {(record["title"], record["reason"]) for record in session.records()} == {
        ("plain recompute", "not started: no time"),
        ("plain recompute A/A", "not started: no time"),
        ("ours keep+fused", "not started: no time"),
        ("ours keep+fused A/A", ""),
    }


def test_time_for_one_case_and_the_start_of_its_process_is_kept_after_ours(run, processes, monkeypatch):
    clock_s, budgets, stand_in = [0.0], {}, compare.run_arms

    def run_arms(arms, *, budget_seconds, **options):
        budgets[arms[0][0].title] = budget_seconds
        clock_s[0] += 120
        stand_in(arms, budget_seconds=budget_seconds, **options)

    monkeypatch.setattr(compare, "run_arms", run_arms)
    monkeypatch.setattr(compare, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    run(OURS, AUTO, ("unsloth", "off"), passes="1")
    # Of 120 s for two cases, half is that of one case; the start of a process may take 45 s more.
    assert budgets == {"ours keep+fused": 940, "unsloth off": 1000 - 120 - 105, "ours keep+fused A/A": 1000 - 240}


# More than one call


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        ({}, ""),
        ({"ms": [103.0] * 15}, "repeated over 2 calls differs by 3.00%"),
        ({"reason": "stopped after 3 s"}, "call 2 did not measure it"),
        ({"versions": {"torch": "2.11.0", "device": "NVIDIA H100"}}, "different versions of device"),
        ({"versions": {"torch": "2.12.0", "device": "NVIDIA H200"}}, "different versions of torch"),
    ],
    ids=["agree", "differ", "cut off", "device", "versions"],
)
def test_calls_are_joined_only_if_their_controls_agree(planted, expected, run, processes, tmp_path):
    run(PLAIN, OURS, passes="1")
    log = logs.write_log(tmp_path, name="tiny", command="x", gaps={}, num_passes=1)
    (tmp_path / "raw.jsonl").unlink()
    logs.join_logs([log], out=tmp_path)
    processes[0].clear()
    processes[1]["ours keep+fused A/A", 2] = planted
    session = run(PLAIN, OURS, UNSLOTH, passes="1")
    assert titles_of(processes[0]) == [[("unsloth off", 1), ("unsloth off A/A", 1)], [("ours keep+fused A/A", 2)]]
    rows = pool(session.records(), num_passes=1)
    control = control_of(rows)
    assert control.passed == (not expected)
    assert expected in control.describe()
    metrics = {row["metric"] for row in comparison_rows(rows, command="x") if row["system"].startswith("ours")}
    assert ("A/A difference, 2 calls" in metrics) == (not expected)


@pytest.mark.parametrize(("card", "num_left_out"), [("a", 2), ("b", 1), ("", 0), ("c", 3)])
def test_records_of_another_card_are_left_out(card, num_left_out, tmp_path):
    for place in ("a", "b", "b", None):
        record = record_of(OURS, half=1) | ({} if place is None else {"card": place})
        CaseLog(tmp_path / "raw.jsonl").write(record)
    log = logs.write_log(tmp_path, name="tiny", command="x", gaps={}, num_passes=1)
    (tmp_path / "raw.jsonl").unlink()
    # Older records do not say which card it was.
    num_joined = 4 - num_left_out
    assert logs.join_logs([log], out=tmp_path, card=card) == num_left_out
    assert len(read_records(tmp_path / "raw.jsonl")) == num_joined


def test_a_log_gives_the_rows_again(run, tmp_path):
    session = run(PLAIN, OURS, UNSLOTH)
    (tmp_path / "clocks.csv").write_text("1970/01/01 00:00:12.000, 1965\n")
    assert compare._report(session, [PLAIN, OURS, UNSLOTH], {"axolotl": "not here"}, command="x") == 0
    (log,) = logs.read_logs(tmp_path)
    results.append_rows(log.rows(), path=tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "rows.csv").read_text()
    assert log.about["gaps"] == {"axolotl": "not here"}
    assert log.path.name == f"tiny-h200-{log.about['date']}.jsonl.gz"
    assert log.path.stat().st_size < 3000


@pytest.mark.parametrize(("arms", "num_wanted"), [(["plain", "ours"], 2), (["ours:keep"], 1)])
def test_systems_that_arms_do_not_name_are_not_missed(arms, num_wanted, monkeypatch, processes, tmp_path):
    monkeypatch.setattr(compare, "find_gap", lambda system, device: "" if system.arm else "no arm")
    monkeypatch.setattr(compare, "missing_module", lambda setting: "")
    monkeypatch.setattr(compare.ComparisonRun, "build", lambda self: None)
    seen = []
    monkeypatch.setattr(compare, "_report", lambda run, settings, gaps, command: seen.append(settings))
    (tmp_path / "tiny").mkdir()
    words = ["--workload", "tiny", "--device", "cpu", "--no-chart", "--root", str(tmp_path), "--out", str(tmp_path)]
    compare.main([*words, "--arms", *arms])
    compare.main(["--row", "tiny", *words[2:], "--arms", *arms])
    # A row lacks what another call still has to measure.
    assert [len(settings) for settings in seen] == [num_wanted, 3]


def test_a_setting_without_a_record_is_not_finished(run, processes, capsys):
    compare._report(run(PLAIN, OURS), [PLAIN, OURS, UNSLOTH], {}, command="x")
    assert "not finished: the same command with --out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "reason", "said"),
    [
        (("ours keep+fused A/A", 1), "", "everything ran: 4 cases"),
        (("ours keep+fused", 2), "cosine 0.9", "not everything ran: ours keep+fused"),
        (("plain recompute", 2), "not started: 0 s", "not everything ran: plain recompute"),
    ],
    ids=["all", "refused", "no time"],
)
@pytest.mark.parametrize("control_ms", [100.0, 500.0])
def test_a_cpu_shows_that_everything_runs(control_ms, case, reason, said, run, processes, capsys):
    # Whether the control would pass says nothing there.
    processes[1]["ours keep+fused A/A", 1] = {"ms": [control_ms] * 15}
    processes[1].setdefault(case, {})["reason"] = reason
    session = run(PLAIN, OURS, device="cpu")
    status = compare._report(session, [PLAIN, OURS], {}, command="x")
    told = capsys.readouterr().out
    assert said in told
    assert status == (1 if reason else 0)
    assert "CONTROL" not in told
    assert not (session.out / "rows.csv").exists()


def test_chart_without_matplotlib_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install matplotlib, or add --no-chart"):
        compare.main(["--workload", "tiny", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def check_results(out, status, titles):
    """Check what a run on a CPU has left."""
    records = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    assert [(record["title"], record["half"]) for record in records] == titles
    assert {record["reason"] for record in records} == {""}
    # For our system, the backend that ran, not "fastft", its name in transformers.
    assert {record["attention"] for record in records} == {"sdpa"}
    assert len({record["num_trained"] for record in records}) == 1
    table = (out / "table.txt").read_text()
    assert "on a CPU nothing is compared" in table
    assert "against" not in table
    assert (out / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert status == 0
    assert not (out / "rows.csv").exists()
    return records


@pytest.mark.slow
def test_the_tiny_row_runs_on_a_cpu(monkeypatch, tmp_path):
    def in_this_process(arms, *, root, raw, device, **_):
        for cases in arms:
            words = ["arm", "--cases", json.dumps([vars(case) for case in cases]), "--root", str(root)]
            train_step.main([*words, "--raw", str(raw), "--device", device])

    monkeypatch.setattr(compare, "run_arms", in_this_process)
    monkeypatch.setattr(compare.subprocess, "run", lambda command, check: train_step.main(command[3:]))
    words = ["--row", "tiny", "--steps", "4", "--warmup", "2", "--passes", "1", "--arms", "plain", "ours"]
    status = compare.main([*words, "--root", str(tmp_path), "--out", str(tmp_path / "out")])
    # Both optimizers, and a control of each system.
    plain = ["plain recompute", "plain recompute", "plain recompute A/A"]
    titles = [*plain, "ours shipped", "ours keep", "ours shipped", "ours keep", "ours shipped A/A"]
    records = check_results(tmp_path / "out", status, [(title, 1) for title in titles])
    assert [record["optimizer"] for record in records][:3] == ["adamw_8bit", "adamw_fused", "adamw_8bit"]
    assert records[3]["shipped"]["config"] == "qlora_qwen3_8b"
    assert {"FusedKernels", "GradientHealth", "FiniteGuard", "TokenThroughput"} <= {*records[3]["shipped"]["callbacks"]}


@pytest.mark.fault
def test_plain_and_ours_are_compared_in_processes_of_their_own(tmp_path):
    words = ["--workload", "tiny", "--device", "cpu", "--arms", "plain", "ours", "--root", str(tmp_path)]
    plain = [("plain recompute", 1), ("plain recompute A/A", 1)]
    back = [("ours keep", 2), ("plain recompute", 2), ("plain recompute A/A", 2), ("ours keep A/A", 1)]
    check_results(
        tmp_path / "out", compare.main([*words, "--out", str(tmp_path / "out")]), [*plain, ("ours keep", 1), *back]
    )
