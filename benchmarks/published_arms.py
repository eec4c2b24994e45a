"""Run the three optimisations on and off, in the processes of ``benchmarks.published combinations``.

Recorder, gradient check and clock are the ruler's (benchmarks/ruler/cases.py). The name of a combination lists its
parts: "once" or "every" layer builds the packed metadata, "two" or "one" staging buffer, routing by "bincount"
(BincountRouter), the "loop" of transformers (its eager form), the "published" loop or transformers' own "grouped"
products ("dense" for a dense model), and the attention whose metadata is built.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer

from benchmarks.moe_layer import PUBLISHED, register_published
from benchmarks.offload_rig import LOSS_TOLERANCE
from benchmarks.packed_metadata import _make_hook, _rebuilders
from benchmarks.ruler import judge as judging
from benchmarks.ruler.arms import ours
from benchmarks.ruler.cases import Case, CaseLog, CaseRecorder, base_dtype, run_case
from benchmarks.ruler.copies import CopyProfile
from benchmarks.ruler.measure import StepClock, summarise_ms
from benchmarks.ruler.plans import Mode, _gradients, deterministic, parse_mode
from benchmarks.ruler.workloads import Workload, WorkloadFiles
from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.hf.families import decoder_layers, find_causal_models
from lightning_fastft.moe.install import find_experts
from lightning_fastft.moe.interface import NAME as OUR_EXPERTS
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner

# Limit of the timed steps of a slow case (a loop over 128 experts); its row has the number of steps.
CASE_SECONDS = 12.0
LEAST_STEPS = 5
# Host memory for offload, in GiB; inputs of all layers of the largest workload at 8,192 tokens take 2.3.
HOST_GIB = 8
# Builders of the attention's metadata: transformers' own, with host syncs, or the published baseline's loop over
# documents.
REBUILDS = {"varlen": "varlen/every-layer", "sdpa": "sdpa/every-layer-loop"}
BUILD_KINDS = {"varlen": "varlen", "sdpa": "dense_mask"}
BUFFERS = {"two": "offload", "one": "offload1"}
# Names of transformers' experts implementations.
ROUTINGS = {"loop": "eager", "published": PUBLISHED, "grouped": "grouped_mm"}
FIRST_STEP = "published_first_step.json"


class Combination(NamedTuple):
    """One setting of the three switches, on one attention."""

    metadata: str
    buffers: str
    routing: str
    attention: str

    @property
    def mode(self) -> str:
        """Name in cases and rows."""
        return "+".join(self)

    @property
    def is_all_on(self) -> bool:
        """Whether all optimisations are on."""
        return (self.metadata, self.buffers) == ("once", "two") and self.routing in ("bincount", "dense")


def parse_combination(mode: str) -> Combination:
    """Return the combination of a mode; a "#" precedes the number of its round.

    Raises:
        ValueError: There is no such combination.

    Example:
        >>> parse_combination("every+one+loop+sdpa#2").routing
        'loop'
    """
    parts = mode.partition("#")[0].split("+")
    allowed = (("once", "every"), tuple(BUFFERS), ("bincount", "dense", *ROUTINGS), tuple(REBUILDS))
    if len(parts) != len(allowed) or any(part not in names for part, names in zip(parts, allowed)):
        raise ValueError(f"A combination is METADATA+BUFFERS+ROUTING+ATTENTION of {allowed}; got {mode!r}.")
    return Combination(*parts)


def all_combinations(workload: Workload, *, attention: str) -> list[Combination]:
    """Return eight combinations of a mixture model and two other routings with all else on, or four of a dense model;
    all off and all on first.

    Example:
        >>> from benchmarks.ruler.workloads import WORKLOADS
        >>> [one.mode for one in all_combinations(WORKLOADS["tiny"], attention="sdpa")][:2]
        ['every+one+dense+sdpa', 'once+two+dense+sdpa']
    """
    if not workload.num_experts:
        combinations = [
            Combination(*parts, "dense", attention) for parts in itertools.product(("every", "once"), ("one", "two"))
        ]
        return [combinations[0], combinations[-1], *combinations[1:-1]]
    # The most informative combinations come first and slow loops last, in case time runs out.
    switches = (
        ("every", "one", "loop"),
        ("once", "two", "bincount"),
        ("every", "two", "bincount"),
        ("once", "one", "bincount"),
    )
    more = (("once", "two", "grouped"), ("once", "two", "loop"), ("once", "two", "published"))
    rest = (("every", "one", "bincount"), ("every", "two", "loop"), ("once", "one", "loop"))
    return [Combination(*parts, attention) for parts in (*switches, *more, *rest)]


class PublishedFiles(WorkloadFiles):
    """A built workload with reference gradients of this benchmark, separate from the ruler's."""

    def reference(self, share: float) -> Path:
        """Return the file for the gradients of the first case."""
        return self.folder / f"published_gradients_{share:g}.safetensors"

    def bits(self, combination: Combination) -> Path:
        """Return the file for gradients by deterministic kernels, for combinations that must have the same."""
        return self.folder / f"published_bits_{combination.routing}_{combination.attention}.safetensors"

    def forget(self) -> None:
        """Remove the reference gradients of earlier runs."""
        for path in self.folder.glob("published_*"):
            path.unlink()


class BriefRecorder(CaseRecorder):
    """The ruler's recorder with a limit of CASE_SECONDS; the loss of the first step must also be the reference's."""

    def backward_done(self, model: torch.nn.Module, *, loss: torch.Tensor | None = None) -> None:
        """Judge gradients as the ruler does, and also the first loss and the norm of all first gradients."""
        is_first = self.step == 0
        super().backward_done(model, loss=loss)
        if not is_first:
            return
        norms = [
            parameter.grad.double().norm()
            for parameter in judging.trainable_adapters(model).values()
            if parameter.grad is not None
        ]
        measured = {"loss": self.record["first_loss"], "gradient_norm": float(torch.stack(norms).norm())}
        self.record["gradient_norm"] = measured["gradient_norm"]
        path = self._files.folder / FIRST_STEP
        if self._is_reference:
            path.write_text(json.dumps(measured))
        elif path.exists():
            self.refuse(first_step_difference(measured, json.loads(path.read_text())))

    def refuse(self, reason: str) -> None:
        """Give the case no row, for this reason; it is still timed for the raw log. No-op for an empty reason."""
        if reason and self.verdict is not None and self.verdict.passed:
            self.verdict = replace(self.verdict, passed=False, reason=reason)
            self.record["verdict"] = self.verdict.to_dict()

    def _begin_timing(self) -> None:
        super()._begin_timing()
        step_ms = (self.record["warmup_ms"] or [0.0])[-1]
        if step_ms:
            self._num_timed = min(self._num_timed, max(LEAST_STEPS, int(CASE_SECONDS * 1e3 / step_ms)))


def first_step_difference(measured: dict[str, float], reference: dict[str, float]) -> str:
    """Return how loss or gradient norm of the first step differ from the reference; empty if they agree."""
    loss = abs(measured["loss"] / reference["loss"] - 1)
    if not loss <= LOSS_TOLERANCE:
        return f"the loss of its first step is {loss:.2e} from the reference's, {LOSS_TOLERANCE:g} is allowed"
    norm = abs(measured["gradient_norm"] / reference["gradient_norm"] - 1)
    if not norm <= judging.MAX_NORM_ERROR:
        return (
            f"the norm of its first gradients is {norm:.2%} from the reference's, {judging.MAX_NORM_ERROR:.0%} is "
            "allowed"
        )
    return ""


# The three optimisations


class CombinationCallback(ours.MeasuringCallback):
    """Set the two switches that are not callbacks, compare bits before the first step, and check the effect of each
    switch.

    Args:
        combination: The switches.
        recorder: Recorder of the case.
        files: Files of the workload.
        adapter: The ruler's adapter values.
        mode: Mode of the activations.
        is_cuda: Whether steps run on a GPU.
    """

    def __init__(
        self,
        combination: Combination,
        recorder: BriefRecorder,
        *,
        files: PublishedFiles,
        adapter: Any,
        mode: Mode,
        is_cuda: bool,
    ) -> None:
        super().__init__(recorder, adapter=adapter, mode=mode, is_cuda=is_cuda)
        self._combination, self._files, self._brief = combination, files, recorder
        self._backward = StepClock(is_cuda=is_cuda)
        # Copies are profiled for the formula of two buffers: with all else on, in the first round.
        is_profiled = combination._replace(buffers="two").is_all_on and "#" not in recorder.case.mode
        self._profile = CopyProfile(is_cuda=is_cuda and is_profiled)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Set the experts function and the builder of metadata, after all other changes."""
        super().on_train_start(trainer, pl_module)
        model: Any = find_causal_models(pl_module.model)[0][1]
        if self._combination.routing in ROUTINGS:
            register_published()
            self.patcher.add_undo(
                functools.partial(model.set_experts_implementation, model.config._experts_implementation)
            )
            model.set_experts_implementation(ROUTINGS[self._combination.routing])
        if self._combination.metadata == "every":
            rebuild = _rebuilders(base_dtype(is_cuda=self._is_cuda))[REBUILDS[self._combination.attention]]
            layers: list[Any] = decoder_layers(model)
            for layer in layers:
                self.patcher.add_undo(
                    layer.self_attn.register_forward_pre_hook(_make_hook(rebuild), with_kwargs=True).remove
                )

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: PackedBatch, batch_idx: int) -> None:
        """Compare gradients bit by bit, before the first step of the first round."""
        if self._brief.step == 0 and "#" not in self._brief.case.mode:
            # The strategy sets it at the start of a step.
            batch.context.attention_backend = self._combination.attention
            self._brief.record["bits"] = compare_bits(pl_module, batch, self._files.bits(self._combination))
            if self._is_cuda:
                torch.cuda.empty_cache()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        """Mark the start of the backward."""
        super().on_before_backward(trainer, pl_module, loss)
        self._mark()

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        """Mark the end of the backward."""
        self._mark()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: PackedBatch, batch_idx: int
    ) -> None:
        """Refuse a case without the effect of its name; record the end of a step."""
        if self._brief.step == 0:
            bits = self._brief.record.get("bits", {})
            self._brief.refuse(bits.get("reason", ""))
            self._brief.refuse(self._misnomer(pl_module, batch))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._is_over and "backward" not in self._brief.record and "ms" in self._brief.record:
            # Marks come in pairs, before and after a backward.
            self._brief.record["backward"] = summarise_ms(self._backward.read_ms()[::2])
            self._brief.record["num_layers"] = len(decoder_layers(find_causal_models(pl_module.model)[0][1]))

    def _mark(self) -> None:
        if not self._is_over and self._brief.step >= self._brief.case.num_warmup:
            self._backward.mark()

    def _misnomer(self, pl_module: Any, batch: PackedBatch) -> str:
        """Return the switch that had not the effect of the combination; empty if all had."""
        wanted, context = self._combination, batch.context
        kind = BUILD_KINDS[wanted.attention]
        num_builds, expected = context.num_builds.get(kind, 0), 1 if wanted.metadata == "once" else context.num_reads
        if num_builds != expected or set(context.reads) != {wanted.attention}:
            return (
                f"{kind} was built {num_builds} times in {context.num_reads} attention calls by "
                f"{dict(context.reads)}, expected {expected}"
            )
        engine = self._checkpointing.stacks[-1].engine
        num_slots = 0 if engine is None else len(engine.slots)
        if num_slots != (2 if wanted.buffers == "two" else 1):
            return f"{num_slots} staging buffers"
        experts: list[tuple[str, Any]] = find_experts(pl_module.model)
        names = {module.config._experts_implementation for _, module in experts}
        if names != {"bincount": {OUR_EXPERTS}, "dense": set()}.get(wanted.routing, {ROUTINGS.get(wanted.routing)}):
            return f"the experts ran by {sorted(map(str, names))}"
        return ""


def compare_bits(tuner: FineTuner, batch: PackedBatch, path: Path) -> dict[str, Any]:
    """Compare the gradients of one batch by deterministic kernels with those of the first combination, and with a
    repetition.

    If the same kernels run and repeat their bits, bits are promised: then a difference is a fault.

    Args:
        tuner: The tuner before a step.
        batch: A batch on the device.
        path: Gradients of the first combination with this routing and attention; written if missing.

    Returns:
        "is_promised", "num_equal" of "num_tensors", and "reason" if a promise is broken.
    """
    try:
        with deterministic():
            gradients, again = _gradients(tuner, batch), _gradients(tuner, batch)
    except RuntimeError as error:
        # A kernel of another library has no deterministic form.
        if "deterministic" not in str(error):
            raise
        return {"is_promised": False, "why": str(error)[:200]}
    # Masks of these passes must not be used in the next step.
    batch.context._built.clear()
    batch.context.num_builds.clear()
    batch.context.reads.clear()
    is_repeatable = all(torch.equal(gradients[name], again[name]) for name in gradients)
    if not path.exists():
        if is_repeatable:
            judging.save_gradients(gradients, path)
        return {"is_promised": is_repeatable, "num_equal": len(gradients), "num_tensors": len(gradients)}
    first = judging.load_gradients(path)
    num_equal = sum(name in gradients and torch.equal(gradients[name], first[name]) for name in first)
    result: dict[str, Any] = {"is_promised": is_repeatable, "num_equal": num_equal, "num_tensors": len(first)}
    if is_repeatable and num_equal != len(first):
        result["reason"] = (
            f"{len(first) - num_equal} of {len(first)} gradients are not those of the first combination to the bit"
        )
    return result


def run_combinations(cases: Sequence[Case], *, files: PublishedFiles, log: CaseLog, device: str) -> None:
    """Run combinations on one loaded model; the first that passes writes the reference."""
    is_cuda, packs, adapter = device == "cuda", files.read_packs(), files.read_adapter()
    held: dict[str, FineTuner] = {}

    def body(recorder: CaseRecorder) -> None:
        if not held:
            held["tuner"] = ours.make_tuner(files, optimizer="adamw_fused", is_cuda=is_cuda)
        assert isinstance(recorder, BriefRecorder)
        _train_combination(held["tuner"], recorder, files=files, adapter=adapter, is_cuda=is_cuda)
        held["tuner"].zero_grad(set_to_none=True)

    for case in cases:
        is_reference = not files.reference(case.label_share).exists()
        recorder = BriefRecorder(case, files=files, packs=packs, is_cuda=is_cuda, is_reference=is_reference)
        if "error" in run_case(recorder, body, log=log):
            # Do not reuse the state that a failed fit left.
            held.clear()
            gc.collect()


def _train_combination(
    tuner: FineTuner, recorder: BriefRecorder, *, files: PublishedFiles, adapter: Any, is_cuda: bool
) -> None:
    combination = parse_combination(recorder.case.mode)
    mode = parse_mode(f"{BUFFERS[combination.buffers]}:{HOST_GIB}")
    measure = CombinationCallback(combination, recorder, files=files, adapter=adapter, mode=mode, is_cuda=is_cuda)
    strategy = FastFTStrategy(activations=mode.checkpointing, attention=combination.attention)
    callbacks = [BincountRouter()] if combination.routing == "bincount" else []
    fit(tuner, recorder, measure, strategy=strategy, callbacks=callbacks, is_cuda=is_cuda)


def fit(
    tuner: FineTuner,
    recorder: CaseRecorder,
    measure: ours.MeasuringCallback,
    *,
    strategy: FastFTStrategy,
    callbacks: Sequence[Any],
    is_cuda: bool,
) -> None:
    """Train with the public parts until the recorder ends."""
    num_steps = recorder.num_total + measure.num_extra_steps
    trainer: Any = ours.make_trainer(strategy, measure, max_steps=num_steps, is_cuda=is_cuda)
    trainer.callbacks.extend(callbacks)
    packs: Any = [recorder.pack_at(step) for step in range(num_steps)]
    collate: Any = ours.collate_pack
    loader: Any = torch.utils.data.DataLoader(packs, batch_size=None, collate_fn=collate, pin_memory=is_cuda)
    try:
        trainer.fit(tuner, train_dataloaders=loader)
    finally:
        measure.patcher.undo()
    recorder.record["statuses"] = measure.status_table
    recorder.record["fused"] = [status._asdict() for callback in callbacks for status in callback.status()]
