"""Compare packed-sequence metadata built once per batch with metadata built in every layer.

    python -m benchmarks.train_step build --workload qwen3-14b-qlora --root /dev/shm/fastft
    python -m benchmarks.packed_metadata --workload qwen3-14b-qlora --root /dev/shm/fastft --out runs/metadata

First it measures the time m of one build: of the dense mask (a loop over documents as in the published baseline,
transformers' own, ours), of FlexAttention's block mask and of varlen offsets. Then it measures forward, backward and
step of the workload (packed at 8,192 tokens, layers recomputed in the backward, labels on all tokens), with this
metadata built in every layer, also in the recompute, or cached once. All arms have the same model, kernels, packs and
adapters; before an arm is timed its gradients are compared with those of varlen attention cached once. At the end the
published formula (L-1)*m is compared with the measurement. 3 warm-up steps, 30 timed (10 if a step exceeds 3 s);
median, p10, p90.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from benchmarks.results import append_rows
from benchmarks.ruler import judge as judging
from benchmarks.ruler.cases import (
    LEARNING_RATE,
    LONG_STEP_MS,
    MAX_GRADIENT_NORM,
    NUM_LONG_STEPS,
    base_dtype,
    case_failures,
    drop_frames,
    versions,
)
from benchmarks.ruler.measure import summarise_ms
from benchmarks.ruler.workloads import WORKLOADS, Pack, WorkloadFiles, lora_config, plan_packs, read_lengths
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.kernels.attention.sdpa import QUERY_ROWS
from lightning_fastft.packing.collate import Document, PackedBatch, collate
from lightning_fastft.packing.context import BatchContext, VarlenArguments
from lightning_fastft.packing.masks import build_block_mask, build_dense_mask, list_block_ranges
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.training.fine_tuner import FineTuner

# Backend of the attention, and how its metadata is built; "once" is the cache of the batch context.
ARMS = (
    "varlen/once",
    "varlen/every-layer",
    "sdpa/once",
    "sdpa/every-layer-loop",
    "sdpa/every-layer-transformers",
    "sdpa/every-layer",
    "flex/once",
    "flex/every-layer",
    "flex/every-layer-transformers",
)
# Published for Unsloth: gain of forward, backward and step, in per cent; 14B on an unnamed card, the small models on
# Blackwell.
PUBLISHED = {
    "qwen3-14b-qlora": {"forward": 43.3, "backward": 5.8, "step": 14.3},
    "llama-3.2-1b-lora": {"step": 11.5},
    "qwen3-0.6b-lora": {"step": 14.8},
}
PUBLISHED_BUILD_MS = 13.7
NUM_WARMUP = 3
NUM_BUILDS = 20
SWEPT_TOKENS = (2048, 8192, 16_384, 32_768)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    raw = options.out / f"metadata_{options.workload}.jsonl"
    device = options.device
    deadline = time.monotonic() + options.budget_s
    shared = {"workload": options.workload, "versions": versions()}

    builds = measure_builds(
        options.build_tokens, device=device, block_mask_tokens=WORKLOADS[options.workload].max_tokens
    )
    _write(raw, {**shared, "builds": builds})
    print("\n".join(_build_line(row) for row in builds), flush=True)
    records: list[dict[str, Any]] = []
    files = WorkloadFiles(options.root, WORKLOADS[options.workload])
    if options.arms:
        rig = Rig(files, device=device)
        for arm in options.arms:
            if time.monotonic() > deadline - options.least_s:
                record = {"arm": arm, "reason": "not started: budget used up"}
            else:
                record = rig.measure(arm, num_steps=options.steps)
            records.append(record)
            _write(raw, {**shared, **record})
            print(f"arm: {arm}: {record.get('reason') or _short(record)}", flush=True)
    command = "python -m benchmarks.packed_metadata " + " ".join(sys.argv[1:])
    append_rows(result_rows(options.workload, builds, records, command=command), path=options.out / "rows.csv")
    table = render_table(options.workload, builds, records, max_tokens=files.workload.max_tokens)
    with (options.out / "table.txt").open("a", encoding="utf-8") as file:
        file.write(table + "\n")
    print(table, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--build-tokens",
        type=int,
        nargs="*",
        default=list(SWEPT_TOKENS),
        help="pack lengths at which one build is timed",
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--budget-s", type=float, default=3600.0)
    parser.add_argument("--least-s", type=float, default=40.0, help="least remaining time to start an arm")
    return parser


def loop_mask(position_id_1T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Build the additive mask document by document, as the published baseline did in every layer: copy lengths to the
    host, then write a block per document.
    """
    position_T = position_id_1T.reshape(-1)
    starts = (position_T == 0).nonzero().flatten().tolist()
    num_tokens = position_T.numel()
    mask_TT = torch.full((num_tokens, num_tokens), torch.finfo(dtype).min, dtype=dtype, device=position_T.device)
    for start, end in zip(starts, [*starts[1:], num_tokens]):
        length = end - start
        hidden = torch.ones(length, length, device=position_T.device).triu(diagonal=1).bool()
        block = torch.zeros(length, length, dtype=dtype, device=position_T.device).masked_fill(
            hidden, torch.finfo(dtype).min
        )
        mask_TT[start:end, start:end] = block
    return mask_TT[None, None]


def transformers_mask(position_id_1T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Build the dense mask with transformers' own functions, from positions; additive, as in our backend."""
    from transformers.masking_utils import (
        and_masks,
        causal_mask_function,
        find_packed_sequence_indices,
        packed_sequence_mask_function,
        sdpa_mask,
    )

    document_1T = find_packed_sequence_indices(position_id_1T)
    function = (
        causal_mask_function
        if document_1T is None
        else and_masks(causal_mask_function, packed_sequence_mask_function(document_1T))
    )
    num_tokens = position_id_1T.shape[1]
    is_visible = sdpa_mask(
        batch_size=1,
        q_length=num_tokens,
        kv_length=num_tokens,
        mask_function=function,
        allow_is_causal_skip=False,
        device=position_id_1T.device,
    )
    lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=is_visible.device)
    return torch.where(is_visible, lowest.new_zeros(()), lowest)


def transformers_block_mask(position_id_1T: torch.Tensor) -> Any:
    """Build the block mask with torch's create_block_mask, compiled, as transformers does for packed batches."""
    from torch.nn.attention.flex_attention import create_block_mask

    document_T = (position_id_1T.reshape(-1) == 0).cumsum(0)

    def is_visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (document_T[query] == document_T[key])

    num_tokens = position_id_1T.shape[1]
    return create_block_mask(
        is_visible, 1, None, num_tokens, num_tokens, device=str(position_id_1T.device), _compile=position_id_1T.is_cuda
    )


def derived_offsets(position_id_1T: torch.Tensor) -> VarlenArguments:
    """Derive varlen offsets from positions as transformers does, with its host syncs."""
    from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

    (start_S1, _), (longest, _) = prepare_fa_kwargs_from_position_ids(position_id_1T)
    return VarlenArguments(start_S1, int(longest), start_S1, int(longest))


def _rebuilders(dtype: torch.dtype) -> dict[str, Callable[[BatchContext, torch.Tensor], None]]:
    """Return the function that drops and rebuilds the metadata before every attention layer of an arm."""

    def drop(context: BatchContext, _: torch.Tensor) -> None:
        context._built.clear()

    def with_builder(
        method: str, kind: str, build: Callable[[BatchContext, torch.Tensor], Any]
    ) -> Callable[[BatchContext, torch.Tensor], None]:
        def rebuild(context: BatchContext, position_id_1T: torch.Tensor) -> None:
            context._built.clear()
            setattr(context, method, lambda **_: context.once(kind, build, lambda: build(context, position_id_1T)))

        return rebuild

    def with_mask(
        build: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
    ) -> Callable[[BatchContext, torch.Tensor], None]:
        def build_blocks(
            context: BatchContext, position_id_1T: torch.Tensor
        ) -> list[tuple[slice, slice, torch.Tensor]]:
            mask_11TT = build(position_id_1T, dtype)
            # Attention reads the same blocks of queries in every arm, so that arms differ only in the build.
            ranges = list_block_ranges(
                context.num_tokens,
                starts=context.start_host_S1[:-1].tolist(),
                prefixes=context.prefixes,
                window=None,
                num_rows=QUERY_ROWS,
            )
            return [(queries, keys, mask_11TT[:, :, queries, keys]) for queries, keys in ranges]

        return with_builder("mask_blocks", "dense_mask", build_blocks)

    return {
        "varlen/every-layer": with_builder(
            "varlen", "varlen", lambda _, position_id_1T: derived_offsets(position_id_1T)
        ),
        "sdpa/every-layer": drop,
        "sdpa/every-layer-loop": with_mask(loop_mask),
        "sdpa/every-layer-transformers": with_mask(transformers_mask),
        "flex/every-layer": drop,
        "flex/every-layer-transformers": with_builder(
            "block_mask", "block_mask", lambda _, position_id_1T: transformers_block_mask(position_id_1T)
        ),
    }


class Rig:
    """One loaded model on which every arm is measured.

    Args:
        files: The built workload.
        device: "cuda" or "cpu".
    """

    def __init__(self, files: WorkloadFiles, *, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._device = torch.device("cuda", 0) if self._is_cuda else torch.device("cpu")
        self._dtype = base_dtype(is_cuda=self._is_cuda)
        self._packs = files.read_packs()
        self._adapter = files.read_adapter()
        self._tuner = FineTuner(
            str(files.model),
            quantization=files.workload.quantization,
            lora=lora_config(files.workload),
            dtype="bfloat16" if self._is_cuda else "float32",
        )
        self._tuner.to(self._device)
        self._tuner.configure_model()
        self._model = self._tuner.model.train()
        installed = install_packed_training(
            self._model, ModelPatcher(), checkpointing=OffloadCheckpointing("recompute")
        )
        self.num_layers = len(installed.layers)
        self._attention_layers = [layer.self_attn for layer in installed.layers]
        self._reference: dict[str, torch.Tensor] | None = None

    def measure(self, arm: str, *, num_steps: int) -> dict[str, Any]:
        """Judge one arm, then time it; a failure gives a record too."""
        record: dict[str, Any] = {"arm": arm, "num_layers": self.num_layers}
        rebuild = _rebuilders(self._dtype).get(arm)
        handles = (
            []
            if rebuild is None
            else [
                layer.register_forward_pre_hook(_make_hook(rebuild), with_kwargs=True)
                for layer in self._attention_layers
            ]
        )
        try:
            self._time(arm, record, num_steps=num_steps)
        except case_failures() as error:
            record["reason"] = f"{type(error).__name__}: {str(error)[:500]}"
            drop_frames(error)
        finally:
            for handle in handles:
                handle.remove()
        self._model.zero_grad(set_to_none=True)
        gc.collect()
        if self._is_cuda:
            torch.cuda.empty_cache()
        return record

    def _time(self, arm: str, record: dict[str, Any], *, num_steps: int) -> None:
        judging.load_adapter(self._model, self._adapter)
        self._refresh_low_precision_adapters()
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
        backend = self._backend(arm)
        marks: list[tuple[Any, ...]] = []
        step, num_timed = 0, num_steps
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        while step < NUM_WARMUP + num_timed:
            batch = self._batch(step)
            begin = self._mark()
            batch = batch.to(self._device)
            batch.context.attention_backend = backend
            loss = self._model(**batch).loss
            middle = self._mark()
            loss.backward()
            end = self._mark()
            if step == 0:
                record["num_builds"], record["num_reads"] = dict(batch.context.num_builds), batch.context.num_reads
                self._judge(record, first_loss=float(loss.detach()))
                self._check_builds(arm, record)
                if record.get("reason"):
                    return
            torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
            optimizer.step()
            self._refresh_low_precision_adapters()
            optimizer.zero_grad(set_to_none=True)
            marks.append((begin, middle, end, self._mark()))
            step += 1
            if step == NUM_WARMUP and self._elapsed([marks[-1]], 0, 3)[0] > LONG_STEP_MS:
                num_timed = min(num_timed, NUM_LONG_STEPS)
        timed = marks[NUM_WARMUP:]
        for name, (first, last) in {"forward": (0, 1), "backward": (1, 2), "step": (0, 3)}.items():
            values = self._elapsed(timed, first, last)
            record[name] = summarise_ms(values)
            record[f"{name}_ms"] = values
        record["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if self._is_cuda else 0.0

    def _refresh_low_precision_adapters(self) -> None:
        if self._tuner.low_precision_adapters is not None:
            self._tuner.low_precision_adapters.refresh()

    def _judge(self, record: dict[str, Any], *, first_loss: float) -> None:
        record["first_loss"] = first_loss
        gradients = judging.read_gradients(self._model)
        if self._reference is None:
            self._reference = gradients
            record["verdict"] = judging.first_reference(gradients).to_dict()
        else:
            record["verdict"] = judging.judge(gradients, self._reference, device=str(self._device)).to_dict()
        if not record["verdict"]["passed"]:
            record["reason"] = record["verdict"]["reason"]

    def _check_builds(self, arm: str, record: dict[str, Any]) -> None:
        """Refuse an arm whose number of builds does not match its name: once, or at every read."""
        kind = {"varlen": "varlen", "sdpa": "dense_mask", "flex": "block_mask"}[self._backend(arm)]
        expected = 1 if arm.endswith("/once") else record["num_reads"]
        if self._is_cuda or arm.startswith("sdpa"):
            num_builds = record["num_builds"].get(kind, 0)
            if num_builds != expected and not record.get("reason"):
                record["reason"] = (
                    f"{kind} was built {num_builds} times for {record['num_reads']} attention calls, expected {expected}"
                )

    def _backend(self, arm: str) -> str:
        """Return the arm's backend; on a CPU the dense mask, because only this has a backward there."""
        backend = arm.partition("/")[0]
        return backend if self._is_cuda else "sdpa"

    def _batch(self, step: int) -> PackedBatch:
        pack = self._packs[step % len(self._packs)]
        batch = collate([Document(ids, labels) for ids, labels in pack.documents(1.0)])
        return batch.pin_memory() if self._is_cuda else batch

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed(self, marks: Sequence[tuple[Any, ...]], first: int, last: int) -> list[float]:
        if not self._is_cuda:
            return [(row[last] - row[first]) * 1e3 for row in marks]
        torch.cuda.synchronize()
        return [row[first].elapsed_time(row[last]) for row in marks]


def _make_hook(rebuild: Callable[[BatchContext, torch.Tensor], None]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        context = keywords["context"]
        rebuild(context, context.position_T[None])

    return hook


def measure_builds(token_counts: Sequence[int], *, device: str, block_mask_tokens: int) -> list[dict[str, Any]]:
    """Time one build of every kind of metadata, with host and device work, at these pack lengths.

    Args:
        token_counts: Tokens per pack; documents are those of the stored list.
        device: Device of the metadata.
        block_mask_tokens: The only length at which transformers' block mask is built, because each length compiles it
            again.
    """
    rows = []
    is_cuda = device == "cuda"
    dtype = base_dtype(is_cuda=is_cuda)
    for num_tokens in token_counts:
        (lengths,) = plan_packs(read_lengths()["lengths"], max_tokens=num_tokens, num_packs=1)
        pack = Pack(input_id_T=torch.ones(num_tokens, dtype=torch.int64).numpy(), lengths=lengths)
        context = collate([Document(ids, labels) for ids, labels in pack.documents(1.0)]).to(device).context
        for kind, build in _builders(context, dtype).items():
            if kind == "block mask, transformers" and num_tokens != block_mask_tokens:
                continue
            row: dict[str, Any] = {"kind": kind, "num_tokens": num_tokens, "num_documents": len(lengths)}
            try:
                row["ms"] = summarise_ms(_time_builds(build, is_cuda=is_cuda))
            except case_failures() as error:
                row["reason"] = f"{type(error).__name__}: {str(error)[:300]}"
            rows.append(row)
        if is_cuda:
            torch.cuda.empty_cache()
    return rows


def _builders(context: BatchContext, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    position_id_1T = context.position_T[None]
    return {
        "dense, loop over documents": lambda: loop_mask(position_id_1T, dtype),
        "dense, transformers": lambda: transformers_mask(position_id_1T, dtype),
        "dense, ours": lambda: build_dense_mask(context.position_T, None, window=None, dtype=dtype),
        "block mask, transformers": lambda: transformers_block_mask(position_id_1T),
        "block mask, ours": lambda: build_block_mask(
            context.position_T, None, document_T=context.document_T, window=None
        ),
        "varlen, transformers": lambda: derived_offsets(position_id_1T),
    }


def _time_builds(build: Callable[[], Any], *, is_cuda: bool) -> list[float]:
    values = []
    for number in range(NUM_WARMUP + NUM_BUILDS):
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        built = build()
        if is_cuda:
            torch.cuda.synchronize()
        if number >= NUM_WARMUP:
            values.append((time.perf_counter() - start) * 1e3)
        del built
    return values


def render_table(
    workload: str, builds: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]], *, max_tokens: int
) -> str:
    """Return builds, arms, and gains, with the formula and the published figures."""
    lines = [f"{workload}: one build, ms (published m = {PUBLISHED_BUILD_MS} for the dense mask)"]
    lines += ["  " + _build_line(row) for row in builds]
    lines.append(f"{workload}: ms of forward / backward / step, recompute, {max_tokens} tokens")
    for record in records:
        lines.append(f"  {record['arm']:<30} {record.get('reason') or _short(record)}")
    by_arm = {record["arm"]: record for record in records if "step" in record}
    for gain in gains(by_arm, builds, max_tokens=max_tokens):
        published = PUBLISHED.get(workload, {}) if gain["arm"] == "sdpa/every-layer-loop" else {}
        text = (
            "; published " + ", ".join(f"{part} +{value} %" for part, value in published.items()) if published else ""
        )
        lines.append(
            f"  once against {gain['arm']}: forward {gain['forward']:+.1f} %, backward {gain['backward']:+.1f} %, step "
            f"{gain['step']:+.1f} %{text}; "
            f"saved {gain['saved_ms']:.1f} ms a step, {gain['saved_forward_ms']:.1f} in the forward, formula (L-1)*m = "
            f"{gain['formula_ms']:.1f} ms"
        )
    return "\n".join(lines)


def gains(
    by_arm: dict[str, dict[str, Any]], builds: Sequence[dict[str, Any]], *, max_tokens: int
) -> list[dict[str, Any]]:
    """Return the gain of caching over every arm that rebuilds: in per cent of speed, in milliseconds, and by the
    published formula.

    Args:
        by_arm: Timed records by arm.
        builds: Times of one build.
        max_tokens: Tokens of the packs that the arms trained.
    """
    kinds = {
        "varlen/every-layer": "varlen, transformers",
        "sdpa/every-layer": "dense, ours",
        "sdpa/every-layer-loop": "dense, loop over documents",
        "sdpa/every-layer-transformers": "dense, transformers",
        "flex/every-layer": "block mask, ours",
        "flex/every-layer-transformers": "block mask, transformers",
    }
    build_ms = {row["kind"]: row["ms"]["median"] for row in builds if "ms" in row and row["num_tokens"] == max_tokens}
    gains = []
    for arm, kind in kinds.items():
        once = by_arm.get(arm.partition("/")[0] + "/once")
        again = by_arm.get(arm)
        if once is None or again is None:
            continue
        gain: dict[str, Any] = {
            part: (again[part]["median"] / once[part]["median"] - 1) * 100 for part in ("forward", "backward", "step")
        }
        gain.update(
            arm=arm,
            saved_ms=again["step"]["median"] - once["step"]["median"],
            saved_forward_ms=again["forward"]["median"] - once["forward"]["median"],
            formula_ms=(again["num_layers"] - 1) * build_ms.get(kind, float("nan")),
        )
        gains.append(gain)
    return gains


def result_rows(
    workload: str, builds: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]], *, command: str
) -> list[dict[str, Any]]:
    """Return rows for results.csv."""
    packages = versions()
    shared = {
        "benchmark": "packed_metadata",
        "version": "; ".join(
            f"{name} {packages[name]}" for name in ("lightning_fastft", "torch", "transformers") if name in packages
        ),
        "command": command,
        "device": packages.get("device", "cpu"),
        "unit": "ms",
    }
    rows = [
        {
            **shared,
            "workload": f"{row['num_tokens']} tokens, {row['num_documents']} documents",
            "system": row["kind"],
            "metric": "one build",
            **_spread(row["ms"]),
        }
        for row in builds
        if "ms" in row
    ]
    for record in records:
        if "step" in record:
            rows += [
                {
                    **shared,
                    "workload": f"{workload}, recompute",
                    "system": record["arm"],
                    "metric": part,
                    **_spread(record[part]),
                }
                for part in ("forward", "backward", "step")
            ]
    return rows


def _spread(summary: dict[str, Any]) -> dict[str, Any]:
    return {"value": summary["median"], "p10": summary["p10"], "p90": summary["p90"], "n": summary["n"]}


def _build_line(row: dict[str, Any]) -> str:
    text = (
        str(row["reason"])
        if "reason" in row
        else f"{row['ms']['median']:.3f} [{row['ms']['p10']:.3f}, {row['ms']['p90']:.3f}]"
    )
    return f"{row['kind']:<28} {row['num_tokens']:>6} tokens {row['num_documents']:>4} documents  {text}"


def _short(record: dict[str, Any]) -> str:
    parts = " / ".join(f"{record[part]['median']:.1f}" for part in ("forward", "backward", "step"))
    step = record["step"]
    return (
        f"{parts}  [{step['p10']:.1f}, {step['p90']:.1f}] n={step['n']}, {record['peak_gib']:.1f} GiB, built "
        f"{record['num_builds']}"
    )


def _write(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
