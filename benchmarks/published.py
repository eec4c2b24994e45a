r"""Compare every published figure of the three optimisations with ours, and run the missing measurements.

    python -m benchmarks.published table --out runs/published.md
    python -m benchmarks.published combinations --workload qwen3-30b-a3b-12l-lora --out runs/published \
        --device cuda --steps 20
    python -m benchmarks.published traditional --out runs/published
    python -m benchmarks.published waits --out runs/published

- ``combinations``: metadata once or in every layer, two staging buffers or one, routing by one count or by the loop
  over experts: eight combinations of a mixture model (and two more experts functions of transformers),
  four of a dense one. All have the same packs, weights, adapters, optimizer and Trainer, and offload activations. First
  loss, gradients and their norm must be those of the first combination, with equal bits if kernels are deterministic;
  otherwise there is no row. Two rounds, the second in the opposite order: a gain counts if it is larger than the
  difference between two rounds of the same combination.
- ``traditional``: batches of documents padded to the longest, transformers + PEFT without Liger, against ours on the
  same documents, on a 7B Llama.
- ``waits``: the number of host syncs in a layer of experts and in one build of packed metadata, with the times of the
  layer on CUDA. On a CPU: operations that would sync if their tensors were on a GPU.

Every arm (the combinations of one workload, the padded loop, ours) runs in its own process with a time limit; the cases
after one that ends its process run in a new process. Records are written at once, and a further call in the same folder
continues where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# As in train_step: set before anything is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from benchmarks import moe_layer, published_table, published_waits
from benchmarks.published_arms import PublishedFiles, all_combinations, parse_combination, run_combinations
from benchmarks.published_padded import TRADITIONAL, run_packed, run_padded
from benchmarks.results import RESULTS_PATH, append_rows
from benchmarks.ruler.building import build
from benchmarks.ruler.cases import Case, CaseLog, base_dtype
from benchmarks.ruler.driver import LEAST_SECONDS, run_arms
from benchmarks.ruler.measure import summarise_ms
from benchmarks.ruler.report import read_records, render_table, result_rows
from benchmarks.ruler.workloads import WORKLOADS

# Reasons of cases that are tried again.
UNFINISHED = ("not started", "stopped after", "its process")
PADDED_MODES = ("padded+recompute", "padded+keep")
# 18.6 GiB are the 20 GB of the published figure.
OUR_MODES = ("recompute+fused", "recompute+fused@full", "auto=18.6:8+fused@full", "keep+fused@full")
NUM_WARMUP = 3
_KEY = ("workload", "system", "mode")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # On SIGTERM the driver ends its processes first: SystemExit runs every finally block.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    commands = {
        "table": _table,
        "build": _build,
        "combinations": _combinations,
        "traditional": _traditional,
        "waits": published_waits.measure,
        "arm": _arm,
    }
    return commands[options.command](options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", help="every published figure, its source, and ours")
    table.add_argument("--out", type=Path, help="Markdown file; without it the table is printed")
    table.add_argument("--results", type=Path, nargs="+", default=[RESULTS_PATH], help="measured rows")
    device = argparse.ArgumentParser(add_help=False)
    device.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device.add_argument("--root", type=Path, default=Path("/dev/shm/fastft"), help="folder of built models, in memory")
    shared = argparse.ArgumentParser(add_help=False, parents=[device])
    shared.add_argument("--out", type=Path, required=True, help="folder for raw.jsonl, log.txt, rows.csv and table.txt")
    shared.add_argument("--budget-s", type=float, default=3600.0)
    shared.add_argument("--arm-s", type=float, default=600.0, help="limit of one process")
    timed = argparse.ArgumentParser(add_help=False, parents=[shared])
    timed.add_argument("--steps", type=int, default=20, help="timed steps of a case, over all rounds")
    one = commands.add_parser("combinations", parents=[timed], help="the three optimisations on and off")
    one.add_argument("--workload", required=True, choices=tuple(WORKLOADS))
    one.add_argument(
        "--attention",
        default=None,
        choices=("varlen", "sdpa"),
        help="attention whose metadata is built; default: varlen on CUDA, sdpa on a CPU",
    )
    one.add_argument("--rounds", type=int, default=2, choices=(1, 2))
    two = commands.add_parser("traditional", parents=[timed], help="a padded loop, and ours")
    two.add_argument("--workload", default=None, help="llama-7b-lora on CUDA, tiny-llama on a CPU")
    two.add_argument("--padded-modes", nargs="+", default=list(PADDED_MODES))
    two.add_argument("--modes", nargs="+", default=list(OUR_MODES))
    three = commands.add_parser("waits", parents=[shared], help="host syncs of a layer of experts and of a mask")
    three.add_argument("--shapes", nargs="+", default=None, choices=tuple(moe_layer.SHAPES))
    three.add_argument("--tokens", type=int, default=None)
    three.add_argument("--runs", type=int, default=20, help="timed passes of a layer on CUDA")
    make = commands.add_parser("build", parents=[device], help="write models, adapters and token files")
    make.add_argument("--workload", nargs="+", required=True)
    arm = commands.add_parser("arm", parents=[device], help="one process of combinations or traditional")
    arm.add_argument("--cases", required=True)
    arm.add_argument("--raw", type=Path, required=True)
    return parser


def _table(options: argparse.Namespace) -> int:
    text = published_table.render(published_table.read_rows(options.results))
    if options.out is None:
        print(text)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0


def _build(options: argparse.Namespace) -> int:
    for name in options.workload:
        print(f"build: {name}: {json.dumps(build_files(name, root=options.root, device=options.device))}", flush=True)
    return 0


def build_files(name: str, *, root: Path, device: str) -> dict[str, float]:
    """Write the folder of a workload of the ruler or of this benchmark, once."""
    return build(find_files(root, name).workload, root=root, device=device, dtype=base_dtype(is_cuda=device == "cuda"))


def find_files(root: Path, name: str) -> PublishedFiles:
    """Return the folder of a workload of the ruler or of this benchmark."""
    return PublishedFiles(root, TRADITIONAL[name][0] if name in TRADITIONAL else WORKLOADS[name])


def _arm(options: argparse.Namespace) -> int:
    run_arm(
        [Case(**case) for case in json.loads(options.cases)], root=options.root, raw=options.raw, device=options.device
    )
    return 0


def run_arm(cases: Sequence[Case], *, root: Path, raw: Path, device: str) -> None:
    """Run the cases of one process."""
    files, log = find_files(root, cases[0].workload), CaseLog(raw)
    if cases[0].workload not in TRADITIONAL:
        run_combinations(cases, files=files, log=log, device=device)
    else:
        {"plain": run_padded, "ours": run_packed}[cases[0].system](cases, files=files, log=log, device=device)


# Cases in processes


def _combinations(options: argparse.Namespace) -> int:
    attention = options.attention or ("varlen" if options.device == "cuda" else "sdpa")
    modes = [one.mode for one in all_combinations(WORKLOADS[options.workload], attention=attention)]
    num_steps = -(-options.steps // options.rounds)
    template = Case(
        options.workload, "ours", "", optimizer="adamw_fused", num_warmup=NUM_WARMUP, num_steps=num_steps, diagnose=True
    )
    rounds = [modes, *([[f"{mode}#2" for mode in reversed(modes)]] if options.rounds == 2 else [])]
    # One process for both rounds, so that a model is loaded once and rounds differ only in their order.
    cases = [replace(template, mode=mode) for part in rounds for mode in part]
    _measure([cases], options, describe=describe_combinations, rows=combination_rows)
    return 0


def _traditional(options: argparse.Namespace) -> int:
    name = options.workload or ("llama-7b-lora" if options.device == "cuda" else "tiny-llama")
    options.workload = name
    template = Case(
        name, "ours", "", optimizer="adamw_fused", num_warmup=NUM_WARMUP, num_steps=options.steps, diagnose=True
    )
    arms = [
        [replace(template, system="plain", mode=mode) for mode in options.padded_modes],
        [replace(template, mode=mode) for mode in options.modes],
    ]
    _measure(arms, options, describe=describe_traditional, rows=traditional_rows)
    return 0


def _measure(
    arms: Sequence[Sequence[Case]],
    options: argparse.Namespace,
    *,
    describe: Callable[..., str],
    rows: Callable[..., Any],
) -> None:
    """Build the workload, run every case without a record, and write rows and table, also after an error."""
    deadline = time.monotonic() + options.budget_s
    options.out.mkdir(parents=True, exist_ok=True)
    raw, workload = options.out / "raw.jsonl", arms[0][0].workload
    if not find_files(options.root, workload).is_built():
        # In a separate process, so that none of its device memory stays.
        base = ["--root", str(options.root), "--device", options.device, "--workload", workload]
        subprocess.run(
            [sys.executable, "-m", "benchmarks.published", "build", *base], check=True, timeout=options.budget_s
        )
    before = read_records(raw)
    if not any(record.get("workload") == workload for record in before):
        # Do not compare with gradients of another call.
        find_files(options.root, workload).forget()
    try:
        for cases in arms:
            _run_until_done(cases, options, raw=raw, deadline=deadline)
    finally:
        keys = {(case.workload, case.mode.partition("#")[0]) for part in arms for case in part}
        own = [
            record
            for record in latest_records(read_records(raw))
            if (record["workload"], record["mode"].partition("#")[0]) in keys
        ]
        command = "python -m benchmarks.published " + " ".join(sys.argv[1:])
        new = [record for record in own if record not in before]
        # A combination with another round gets a new row of both rounds.
        touched = {(record["workload"], record["mode"].partition("#")[0]) for record in new}
        merged = [record for record in own if (record["workload"], record["mode"].partition("#")[0]) in touched]
        append_rows(rows(merged, command=command), path=options.out / "rows.csv")
        table = describe(own)
        with (options.out / "table.txt").open("a", encoding="utf-8") as file:
            file.write(table + "\n")
        print(table, flush=True)


def _run_until_done(cases: Sequence[Case], options: argparse.Namespace, *, raw: Path, deadline: float) -> None:
    """Run the cases in one process; the cases after one that ends its process run in another."""
    left = [case for case in cases if needs_a_run(case, read_records(raw))]
    while left:
        is_last = deadline - time.monotonic() < LEAST_SECONDS
        run_arms(
            [left],
            root=options.root,
            raw=raw,
            log=options.out / "log.txt",
            device=options.device,
            budget_seconds=deadline - time.monotonic(),
            arm_seconds=options.arm_s,
            module="benchmarks.published",
        )
        # The process ended in the first of these.
        left = [] if is_last else [case for case in left if needs_a_run(case, read_records(raw))][1:]


def needs_a_run(case: Case, records: Sequence[dict[str, Any]]) -> bool:
    """Return whether a case was never measured, refused or failed by itself."""
    own_records = [record for record in records if all(record.get(name) == getattr(case, name) for name in _KEY)]
    return not any(not record["reason"].startswith(UNFINISHED) for record in own_records)


def latest_records(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last record of each case."""
    return list({tuple(record[name] for name in _KEY): record for record in records if "mode" in record}.values())


# Rows and gains of combinations


def merge_rounds(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return one record for each combination with the steps of all its rounds, by mode; a combination refused in
    one round has its reason.
    """
    merged: dict[str, dict[str, Any]] = {}
    for mode in dict.fromkeys(record["mode"].partition("#")[0] for record in records):
        rounds = [record for record in records if record["mode"].partition("#")[0] == mode]
        # A second round without time does not invalidate the first.
        judged = [record for record in rounds if not record["reason"].startswith(UNFINISHED)]
        refused = next((record for record in judged if record["reason"]), None)
        if refused is not None or not judged:
            merged[mode] = {**(refused or rounds[0]), "mode": mode}
            continue
        first = judged[0]
        step_ms = [value for record in judged for value in record["ms"]]
        medians = [record["summary"]["median"] for record in judged]
        summary = summarise_ms(step_ms)
        faster = first["summary"]["median"] / summary["median"]
        merged[mode] = {
            **first,
            "mode": mode,
            "title": f"{first['system']} {mode}",
            "ms": step_ms,
            "summary": summary,
            "tokens_per_s": first["tokens_per_s"] * faster,
            "labelled_tokens_per_s": first["labelled_tokens_per_s"] * faster,
            "peak_gib": {name: max(record["peak_gib"][name] for record in judged) for name in first["peak_gib"]},
            "spread": (max(medians) / min(medians) - 1) * 100 if len(medians) > 1 else None,
        }
    return merged


def combination_rows(records: Sequence[dict[str, Any]], *, command: str) -> list[dict[str, Any]]:
    """Return rows for results.csv: the ruler's over both rounds, and copies, backward and the spread of rounds."""
    rows: list[dict[str, Any]] = []
    for mode, record in merge_rounds(records).items():
        own = result_rows([record], command=command)
        rows += [
            {
                **row,
                "benchmark": "published combinations",
                "workload": f"{record['workload']}, packed, offload",
                "system": mode,
            }
            for row in own
        ]
        if not own:
            continue
        shared = {
            **{name: rows[-1][name] for name in ("benchmark", "workload", "system", "version", "command", "device")},
            "n": 1,
        }
        copy_ms, backward = copy_of_layer_ms(record), record.get("backward")
        if backward is not None:
            layer_ms = backward["median"] / record["num_layers"]
            rows.append(
                {**shared, "metric": "backward of a layer", "value": layer_ms, "unit": "ms", "n": backward["n"]}
            )
        if copy_ms is not None:
            rows.append({**shared, "metric": "copy of a layer's input", "value": copy_ms, "unit": "ms"})
            rows.append({**shared, "metric": "exposed copies", "value": record["copies"]["exposed_ms"], "unit": "ms"})
        if record["spread"] is not None:
            rows.append(
                {**shared, "metric": "difference of two rounds", "value": record["spread"], "unit": "%", "n": 2}
            )
    return rows


def copy_of_layer_ms(record: dict[str, Any]) -> float | None:
    """Return c of the published formula, the time of one copy back from the host; None if none was profiled."""
    use = record.get("copies") or {}
    return use["h2d_ms"] / use["num_h2d"] if use.get("num_h2d") else None


def gains(merged: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the gain of each optimisation with the others on, and of all against none.

    Args:
        merged: Result of merge_rounds for one workload and one attention.

    Returns:
        "name", "gain" in per cent of steps/s, "spread" (the largest difference of two rounds of one combination; None
        for one round), and "waits" a step, off and on.
    """
    timed = {parse_combination(mode): record for mode, record in merged.items() if not record["reason"]}
    best = next((one for one in timed if one.is_all_on), None)
    if best is None:
        return []
    loop = "loop" if best.routing == "bincount" else best.routing
    pairs = [
        ("metadata once", best._replace(metadata="every"), best),
        ("two staging buffers", best._replace(buffers="one"), best),
        ("bincount routing", best._replace(routing="loop"), best),
        ("published routing", best._replace(routing="loop"), best._replace(routing="published")),
        ("transformers' grouped products", best._replace(routing="loop"), best._replace(routing="grouped")),
        (
            "all three together" if loop == "loop" else "both together",
            best._replace(metadata="every", buffers="one", routing=loop),
            best,
        ),
    ]
    results = []
    for name, off, on in pairs:
        if off in timed and on in timed and off != on:
            spreads = [timed[one]["spread"] for one in (off, on)]
            results.append(
                {
                    "name": name,
                    "gain": (timed[off]["summary"]["median"] / timed[on]["summary"]["median"] - 1) * 100,
                    "spread": None if None in spreads else max(spreads),
                    # The zero waits of a CPU are no statement about a GPU.
                    "waits": tuple(
                        timed[one].get("host_waits") if "device" in timed[one]["versions"] else None
                        for one in (off, on)
                    ),
                }
            )
    return results


def state_gain(gain: dict[str, Any]) -> str:
    """Return a gain in one sentence, with the difference of two rounds of one combination.

    Example:
        >>> state_gain({"name": "once", "gain": 0.2, "spread": None, "waits": (0, 0)})
        'once: +0.2 % steps/s: one round, its spread is not known; host waits a step 0 -> 0: none to remove'
    """
    off, on = gain["waits"]
    waits = f"; host waits a step {off} -> {on}" + (": none to remove" if off == 0 else "") if off is not None else ""
    spread = gain["spread"]
    verdict = (
        "one round, its spread is not known" if spread is None else published_table.judge_gain(gain["gain"], spread)
    )
    return f"{gain['name']}: {gain['gain']:+.1f} % steps/s: {verdict}{waits}"


def describe_combinations(records: Sequence[dict[str, Any]]) -> str:
    """Return one line for each combination, then the gain of every optimisation."""
    merged = merge_rounds(records)
    workload = records[0]["workload"] if records else ""
    lines = [
        f"{workload}, offload: ms [p10, p90] n, tokens/s, peak GiB, host waits a step, bits equal to the first with "
        "the same routing"
    ]
    for mode, record in merged.items():
        lines.append(f"  {mode:<30} " + (f"no row: {record['reason'][:300]}" if record["reason"] else _figures(record)))
    results = gains(merged)
    lines += [f"  {state_gain(gain)}" for gain in results]
    lines += [f"  {line}" for line in _formula(merged)]
    if not results:
        lines.append("  no gain: the combination with all on, or the one to compare it with, was not measured")
    return "\n".join(lines)


def _figures(record: dict[str, Any]) -> str:
    summary, bits = record["summary"], record.get("bits", {})
    text = f"{bits['num_equal']}/{bits['num_tensors']}" if "num_tensors" in bits else "not promised"
    return (
        f"{summary['median']:.1f} [{summary['p10']:.1f}, {summary['p90']:.1f}] n={summary['n']}, "
        f"{record['tokens_per_s']:.0f}, "
        f"{record['peak_gib']['allocated']:.2f}, {record.get('host_waits', '-')}, {text}"
    )


def _formula(merged: dict[str, dict[str, Any]]) -> list[str]:
    """Return (L-1)*min(c, g) of one staging buffer with all else on, and the time that two buffers save."""
    timed = {parse_combination(mode): record for mode, record in merged.items() if not record["reason"]}
    best = next((one for one in timed if one.is_all_on), None)
    single = None if best is None else timed.get(best._replace(buffers="one"))
    copy_ms = None if single is None else copy_of_layer_ms(single)
    if best is None or single is None or copy_ms is None or "backward" not in timed[best]:
        return []
    layers, backward_ms = timed[best]["num_layers"], timed[best]["backward"]["median"] / timed[best]["num_layers"]
    saved = single["summary"]["median"] - timed[best]["summary"]["median"]
    return [
        f"c = {copy_ms:.3f} ms a copy, g = {backward_ms:.2f} ms a layer: (L-1)*min(c, g) = "
        f"{(layers - 1) * min(copy_ms, backward_ms):.1f} ms, "
        f"measured {saved:.1f} ms"
    ]


# Rows and gains of the padded loop


def traditional_rows(records: Sequence[dict[str, Any]], *, command: str) -> list[dict[str, Any]]:
    """Return the ruler's rows under this benchmark's name, with the batches in the workload."""
    rows = []
    for record in records:
        padding = TRADITIONAL[record["workload"]][1]
        workload = f"{record['workload']}, documents of at most {padding.longest} tokens, {padding.batch_size} a batch"
        rows += [
            {**row, "benchmark": "published traditional", "workload": workload}
            for row in result_rows([record], command=command)
        ]
        if not record["reason"] and "real_share" in record:
            rows.append({**rows[-1], "metric": "real tokens", "value": record["real_share"] * 100, "unit": "%"})
    return rows


def describe_traditional(records: Sequence[dict[str, Any]]) -> str:
    """Return the ruler's table, and every mode of ours against the padded loop with recompute."""
    lines = [render_table(records)]
    timed = [record for record in records if not record["reason"]]
    base = next((record for record in timed if record["mode"] == PADDED_MODES[0]), None)
    for record in timed:
        if base is not None and record["system"] == "ours":
            before, after = base["peak_gib"]["allocated"], record["peak_gib"]["allocated"]
            # Memory is not measured on a CPU.
            memory = f", {before:.1f} -> {after:.1f} GiB ({after / before - 1:+.0%})" if before else ""
            lines.append(
                f"  {record['title']}: {record['tokens_per_s'] / base['tokens_per_s']:.2f}x the real tokens/s of the "
                f"padded loop{memory}"
            )
    lines += [
        f"  {record['title']}: {record['real_share']:.0%} of its tokens are real"
        for record in timed
        if "real_share" in record
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
