r"""Time whole training steps of mixture models: transformers' experts, the published form, BincountRouter, Unsloth.

    python -m benchmarks.train_step build --workload qwen3-30b-a3b-12l-lora --root /dev/shm/fastft
    python -m benchmarks.moe run --workload qwen3-30b-a3b-12l-lora --root /dev/shm/fastft --out runs/moe \
        --arms plain:reference ours:recompute,keep unsloth:unsloth unsloth:off
        plain:recompute+grouped_mm,recompute+eager,recompute+published
    python -m benchmarks.moe table runs/moe/raw.jsonl

Gradient check, clock, files and arms are those of ``benchmarks.train_step``, on mixture models, with LoRA on q, k, v, o
and on both stacks of expert weights. Modes:

- ``plain``: recompute or keep, with +eager, +grouped_mm or +published (the experts function of transformers; without
  one its own default); +flex for FlexAttention where the family has sinks (its default, eager attention, builds every
  score of the pack); +padded as in the ruler, for hybrids.
- ``ours``: as in the ruler, always with BincountRouter, and with FusedKernels in modes with +fused.
- ``unsloth``: unsloth (its default) and off; +paddedN for models that it never packs: length-grouped batches of N
  documents, right-padded. The checked step has the documents of the first pack. Then all documents of the token file
  follow, sorted by length and cut into batches, which are mixed so that short and long ones alternate from the start;
  only real tokens are counted, and the rate is that of all timed steps together.

A further run in the same folder continues where the last one ended: cases with a verdict are not repeated.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# As in train_step: set before anything is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
if __name__ == "__main__" and '"system": "unsloth"' in " ".join(sys.argv):
    # Unsloth patches torch and transformers on import, so it must be imported first.
    import unsloth  # noqa: F401

import torch

from benchmarks.ruler.arms.padded import parse_unsloth_mode, run_padded_cases
from benchmarks.ruler.cases import Case, CaseLog, CaseRecorder, base_dtype, quantization_config, run_case
from benchmarks.ruler.driver import check_references, parse_arm, run_arms
from benchmarks.ruler.fla_gradient import install_fla_gradient
from benchmarks.ruler.judge import load_adapter
from benchmarks.ruler.pairs import UNFINISHED
from benchmarks.ruler.plans import SHIPPED, describe_plan, least_warmup, parse_mode
from benchmarks.ruler.report import read_records, render_table, result_rows
from benchmarks.ruler.workloads import EXPERT_PARAMETERS, WORKLOADS, Pack, WorkloadFiles, lora_config

# Keys that identify a case.
_KEY = ("workload", "system", "mode", "label_share", "optimizer")


# The plain arm


def parse_plain_mode(mode: str) -> tuple[bool, str | None, bool]:
    """Return whether everything is kept, the experts implementation (None for transformers' default), and whether
    FlexAttention is requested.

    Raises:
        ValueError: There is no such mode.

    Example:
        >>> parse_plain_mode("recompute+eager+padded")
        (False, 'eager', False)
    """
    from benchmarks.moe_layer import PUBLISHED

    names = {"eager": "eager", "grouped_mm": "grouped_mm", "published": PUBLISHED}
    name, *added = mode.split("+")
    experts = [names[part] for part in added if part in names]
    if (
        name not in ("recompute", "keep")
        or len(experts) > 1
        or len(experts) + sum(part in ("flex", "padded") for part in added) != len(added)
    ):
        raise ValueError(
            "A mode of plain is recompute or keep, with one of +eager, +grouped_mm, +published, and +flex or +padded; "
            f"got {mode!r}."
        )
    return name == "keep", experts[0] if experts else None, "flex" in added


def run_plain(cases: list[Case], *, files: WorkloadFiles, log: CaseLog, device: str) -> None:
    """Run the cases on one loaded model; the first writes the reference gradients if there are none."""
    from benchmarks.moe_layer import register_published
    from benchmarks.ruler.arms import plain

    register_published()
    if files.workload.is_hybrid:
        install_fla_gradient()
    modes = [parse_plain_mode(case.mode) for case in cases]
    is_cuda, packs, adapter = device == "cuda", files.read_packs(), files.read_adapter()
    model = _load_plain(files, device=device)
    base = model.get_base_model()
    if files.workload.model_type == "gpt_oss":
        base.model.register_forward_pre_hook(isolate_documents, with_kwargs=True)
    own = (base.config._experts_implementation, base.config._attn_implementation)
    for case, (is_kept, experts, is_flex) in zip(cases, modes):
        base.set_experts_implementation(experts or own[0])
        base.set_attn_implementation("flex_attention" if is_flex else own[1])
        is_reference = case.num_steps == 0 or not files.reference(case.label_share).exists()
        recorder = _recorder(case, files=files, packs=packs, is_cuda=is_cuda, is_reference=is_reference)

        def body(recorder: CaseRecorder, *, is_kept: bool = is_kept) -> None:
            load_adapter(model, adapter)
            plain.set_checkpointing(model, enabled=not is_kept)
            loop = plain.train_padded if "padded" in recorder.case.mode.split("+") else plain.train
            loop(model, recorder, device=device)

        run_case(recorder, body, log=log)
        model.zero_grad(set_to_none=True)


def _load_plain(files: WorkloadFiles, *, device: str) -> Any:
    """Load as the plain arm does, with experts in NF4 if the workload has them so.

    Models with sinks use transformers' own attention for them, because no installed flash kernel supports sinks.
    """
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from lightning_fastft.hf.expert_nf4_reading import quantise_experts_too

    is_cuda, options = device == "cuda", {}
    quantization = quantization_config(files.workload, is_cuda=is_cuda)
    if quantization is not None:
        # bitsandbytes does not quantise experts, but every system must train on the same weights.
        options["quantization_config"] = quantise_experts_too(quantization)
    attention = "eager" if files.workload.model_type == "gpt_oss" else "flash_attention_2" if is_cuda else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        files.model,
        dtype=base_dtype(is_cuda=is_cuda),
        attn_implementation=attention,
        device_map={"": 0 if is_cuda else "cpu"},
        **options,
    )
    model.config.use_cache = False
    return get_peft_model(model, lora_config(files.workload)).train()


def isolate_documents(
    model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass gpt-oss the masks that separate packed documents; a forward pre-hook.

    The family builds its masks without positions, so that documents in one row see each other unless a flash kernel
    separates them. It accepts given masks, which transformers' own functions build here from the positions of the
    batch.
    """
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    if keywords.get("attention_mask") is None and keywords.get("position_ids") is not None:
        states = model.embed_tokens.weight.new_empty((*keywords["position_ids"].shape, 1))
        # By position: transformers 5.24 names the cache, which is None here, otherwise.
        given = (model.config, states, None, None, keywords["position_ids"])
        masks = {
            "full_attention": create_causal_mask(*given),
            "sliding_attention": create_sliding_window_causal_mask(*given),
        }
        keywords = {**keywords, "attention_mask": masks}
    return arguments, keywords


# Ours


def run_ours(cases: list[Case], *, files: WorkloadFiles, log: CaseLog, device: str) -> None:
    """Run the cases through FineTuner, FastFTStrategy and Trainer with BincountRouter; cases with the same
    optimizer share one FineTuner.
    """
    from benchmarks.ruler.arms import ours

    is_cuda, packs, adapter = device == "cuda", files.read_packs(), files.read_adapter()
    held: dict[str, Any] = {}

    def body(recorder: CaseRecorder) -> None:
        name = recorder.case.optimizer
        if name not in held:
            held.clear()
            # A tuner and its Trainer refer to each other: without this, two models would be on the device.
            gc.collect()
            held[name] = ours.make_tuner(files, optimizer=name, is_cuda=is_cuda)
        _train_ours(held[name], recorder, adapter=adapter, is_cuda=is_cuda)
        held[name].zero_grad(set_to_none=True)

    for case in cases:
        case = replace(case, num_warmup=max(case.num_warmup, least_warmup(case.mode)))
        recorder = _recorder(case, files=files, packs=packs, is_cuda=is_cuda)
        if "error" in run_case(recorder, body, log=log):
            # Do not reuse the state that a failed fit left.
            held.clear()


def _train_ours(tuner: Any, recorder: CaseRecorder, *, adapter: dict[str, torch.Tensor], is_cuda: bool) -> None:
    from benchmarks.ruler.arms import ours
    from lightning_fastft.callbacks.bincount_router import BincountRouter
    from lightning_fastft.strategies.single_device import FastFTStrategy

    if recorder.case.mode == SHIPPED:
        ours.train_shipped(tuner, recorder, start=adapter, is_cuda=is_cuda)
        return
    mode = parse_mode(recorder.case.mode)
    measure = ours.MeasuringCallback(recorder, adapter=adapter, mode=mode, is_cuda=is_cuda)
    strategy, router = FastFTStrategy(activations=mode.checkpointing), BincountRouter()
    num_steps = recorder.num_total + measure.num_extra_steps
    trainer = ours.make_trainer(strategy, measure, max_steps=num_steps, is_cuda=is_cuda)
    fused = mode.callbacks(is_cuda=is_cuda)
    trainer.callbacks.extend([router, *fused])
    loader = torch.utils.data.DataLoader(
        [recorder.pack_at(step) for step in range(num_steps)],
        batch_size=None,
        collate_fn=functools.partial(ours.collate_pack, share=recorder.case.label_share),
        pin_memory=is_cuda,
    )
    try:
        trainer.fit(tuner, train_dataloaders=loader)
    finally:
        measure.patcher.undo()
    recorder.record["statuses"] = measure.status_table
    recorder.record["router"] = [status._asdict() for status in router.status()]
    recorder.record["fused"] = [status._asdict() for callback in fused for status in callback.status()]
    recorder.record.setdefault("plan", describe_plan(mode.checkpointing))


# Unsloth


def run_unsloth(cases: list[Case], *, files: WorkloadFiles, log: CaseLog, device: str) -> None:
    """Run cases of one mode on one trainer, with adapters on the experts as its documentation requests them."""
    from benchmarks.ruler.arms import sft
    from benchmarks.ruler.arms.unsloth import MODES, FastLanguageModel, add_adapters

    # After Unsloth, which replaces them.
    from trl import SFTConfig, SFTTrainer  # isort: skip

    name, batch_size = parse_unsloth_mode(cases[0].mode)
    workload, is_cuda = files.workload, device == "cuda"
    if workload.is_hybrid:
        install_fla_gradient()
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(files.model),
        max_seq_length=workload.max_tokens,
        load_in_4bit=False,
        dtype=base_dtype(is_cuda=is_cuda),
        local_files_only=True,
    )
    model = add_adapters(
        model, workload, target_modules=[*workload.target_modules, *EXPERT_PARAMETERS.values()], mode=MODES[name]
    )
    dropped = drop_shared_adapters(model)
    if dropped:
        print("unsloth trains no adapters of the ruler's, taken off:", dropped[:3], len(dropped), flush=True)
    print("unsloth trains, in layer 0:", json.dumps(trained_in_layer(model, 0)), flush=True)
    arguments = {**sft.training_arguments(cases[0], files=files, is_cuda=is_cuda), "packing": not batch_size}
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=sft.seed_documents(),
        args=SFTConfig(**arguments, dataset_text_field="text", dataset_num_proc=1),
    )
    if batch_size:
        run_padded_cases(
            cases,
            trainer=trainer,
            files=files,
            log=log,
            is_cuda=is_cuda,
            batch_size=batch_size,
            recorder=_recorder,
        )
    else:
        sft.run_cases(cases, trainer=trainer, files=files, log=log, is_cuda=is_cuda)


def drop_shared_adapters(model: torch.nn.Module) -> list[str]:
    """Remove adapters from shared experts, whose projections are named like the experts' stacks; return their names."""
    names = [
        name for name, module in model.named_modules() if ".shared_expert." in name and hasattr(module, "base_layer")
    ]
    for name in names:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, model.get_submodule(name).base_layer)
    return names


def trained_in_layer(model: torch.nn.Module, number: int) -> dict[str, list[int]]:
    """Return names and shapes of the trained tensors of one layer, by the names of the system."""
    start = f"layers.{number}."
    return {
        name: list(tensor.shape) for name, tensor in model.named_parameters() if tensor.requires_grad and start in name
    }


# One process, one run, the table

ARMS: dict[str, Callable[..., None]] = {"plain": run_plain, "ours": run_ours, "unsloth": run_unsloth}


def _recorder(
    case: Case, *, files: WorkloadFiles, packs: list[Pack], is_cuda: bool, is_reference: bool = False
) -> CaseRecorder:
    """Return the recorder of a case, whose record also has the spread of rows over experts."""
    recorder = CaseRecorder(case, files=files, packs=packs, is_cuda=is_cuda, is_reference=is_reference)
    recorder.record["routing"] = json.loads(files.routing.read_text(encoding="utf-8"))
    return recorder


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return {"run": _run, "arm": _arm, "table": _table}[options.command](options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run arms and print the table")
    run.add_argument(
        "--workload", required=True, choices=[name for name, workload in WORKLOADS.items() if workload.num_experts]
    )
    run.add_argument("--arms", nargs="+", required=True)
    run.add_argument("--out", type=Path, required=True, help="folder for raw.jsonl, log.txt, rows.csv and table.txt")
    run.add_argument("--steps", type=int, default=30)
    run.add_argument("--warmup", type=int, default=6)
    run.add_argument("--optimizer", default="adamw_8bit", choices=("adamw_8bit", "adamw_fused"))
    run.add_argument(
        "--diagnose", action="store_true", help="time refused cases for the raw log; they still get no row"
    )
    run.add_argument("--budget-s", type=float, default=3600.0)
    run.add_argument("--arm-s", type=float, default=400.0)
    arm = commands.add_parser("arm", help="one process of run")
    arm.add_argument("--cases", required=True)
    arm.add_argument("--raw", type=Path, required=True)
    table = commands.add_parser("table", help="print the table of raw logs")
    table.add_argument("raw", type=Path, nargs="+")
    for command in (run, arm):
        command.add_argument("--root", type=Path, required=True, help="folder of the built workloads, in memory")
        command.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return parser


def _run(options: argparse.Namespace) -> int:
    from benchmarks.results import append_rows

    template = Case(
        options.workload,
        "",
        "",
        optimizer=options.optimizer,
        num_warmup=options.warmup,
        num_steps=options.steps,
        diagnose=options.diagnose,
    )
    arms = [parse_arm(text, template=template) for text in options.arms]
    check_references(arms, root=options.root)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    raw = options.out / "raw.jsonl"
    records = read_records(raw)
    files = WorkloadFiles(options.root, WORKLOADS[options.workload])
    arms = [left for cases in arms if (left := [case for case in cases if not is_done(case, records, files=files)])]
    run_arms(
        arms,
        root=options.root,
        raw=raw,
        log=options.out / "log.txt",
        device=options.device,
        budget_seconds=options.budget_s,
        arm_seconds=options.arm_s,
        module="benchmarks.moe",
    )
    num_before, records = len(records), read_records(raw)
    command = "python -m benchmarks.moe " + " ".join(sys.argv[1:])
    append_rows(moe_rows(records, num_before=num_before, command=command), path=options.out / "rows.csv")
    table = describe(records)
    (options.out / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(table, flush=True)
    return 0


def _arm(options: argparse.Namespace) -> int:
    cases = [Case(**case) for case in json.loads(options.cases)]
    files = WorkloadFiles(options.root, WORKLOADS[cases[0].workload])
    ARMS[cases[0].system](cases, files=files, log=CaseLog(options.raw), device=options.device)
    return 0


def _table(options: argparse.Namespace) -> int:
    print(describe([record for path in options.raw for record in read_records(path)]))
    return 0


def is_done(case: Case, records: Sequence[dict[str, Any]], *, files: WorkloadFiles) -> bool:
    """Return whether a case need not be tried again: it was measured, refused or failed, and this machine can read the
    reference gradients.
    """
    if case.num_steps == 0:
        return files.reference(case.label_share).exists()
    return any(
        all(record[name] == getattr(case, name) for name in _KEY)
        and record.get("num_steps") != 0
        and not record["reason"].startswith(UNFINISHED)
        for record in records
    )


def moe_rows(records: Sequence[dict[str, Any]], *, command: str, num_before: int = 0) -> list[dict[str, Any]]:
    """Return the ruler's rows of the records after the first num_before, with this benchmark's name and the routing in
    the workload.
    """
    # An unchanged arm of the ruler does not record the routing, which depends on weights and tokens. Without an arm
    # that records it, the workload is named without it.
    routing = {
        record["workload"]: f", busiest tenth {record['routing']['busiest_tenth']:.0%}"
        for record in records
        if "routing" in record
    }
    return [
        {**row, "benchmark": "moe", "workload": row["workload"] + routing.get(record["workload"], "")}
        for record in records[num_before:]
        for row in result_rows([record], command=command)
    ]


def describe(records: Sequence[dict[str, Any]]) -> str:
    """Return the ruler's table of the last record of each case, and the spread of rows."""
    latest = {(*(record[name] for name in _KEY), record.get("num_steps") == 0): record for record in records}
    lines = [render_table(list(latest.values()))]
    for workload in dict.fromkeys(record["workload"] for record in latest.values()):
        own = [record for record in latest.values() if record["workload"] == workload]
        routing = next((record["routing"] for record in own if "routing" in record), None)
        if routing is not None:
            spread = f"layers {routing['lowest']:.1%} to {routing['highest']:.1%}"
            lines.append(
                f"{workload}: the busiest tenth of the experts gets {routing['busiest_tenth']:.1%} of the rows ({spread})"
            )
        lines += [
            f"{workload}: {record['title']}: {record['real_share']:.0%} of the padded tokens are real"
            for record in own
            if "real_share" in record and not record["reason"]
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
