"""Our arm, through the public path: FineTuner, FastFTStrategy and Lightning's Trainer; a callback measures.

Modes: "keep", "recompute", "offload" (two staging buffers), "offload1" (one), "auto", "auto=14.5" (device memory in
GiB; ":32" after it is host memory), each with "+fused" (FusedKernels), "+graphs" (the same with CUDA graphs),
"+graphs=auto" (graphs if launch-bound), "shipped" (the shipped config of the workload through the CLI, with all its
callbacks and PackedDataModule), "+fp8" (FusedKernels with products in fp8, checked with wider limits:
benchmarks/ruler/judge.py), "+stream" (frozen weights on the host), "+tiles8" (feed-forward blocks in 8 tiles),
"+ragged" (all packs but the first lack their last document, as PackedDataModule's without pad_to_max) and "+liger"
(Liger's norms and SwiGLU, swapped in per instance); benchmarks/ruler/plans.py. If a workload trains all weights,
FineTuner gets no lora, and AdamW keeps its moments in bf16 unless it has 8-bit moments. Gradients of recorded layers
are compared with those of eager layers. Under "auto" the checked step is one that is measured for the plan, so
gradients are compared again after the plan is made: with those of recompute on the same weights.
"""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.ruler.cases import MAX_GRADIENT_NORM, Case, CaseLog, CaseRecorder, learning_rate_of, run_case
from benchmarks.ruler.copies import CopyProfile
from benchmarks.ruler.judge import load_start
from benchmarks.ruler.liger_layers import install_liger_layers
from benchmarks.ruler.plans import (
    CHECKED_STEP,
    GRAPHS_CHECKED_STEP,
    SHIPPED,
    Mode,
    check_graphs,
    check_plan,
    describe_plan,
    has_host_tensors,
    least_warmup,
    parse_mode,
)
from benchmarks.ruler.workloads import SHIPPED_CONFIGS, Pack, WorkloadFiles, lora_config, make_ragged
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import render_status_table
from lightning_fastft.fused.fp8_base import STATUS_NAME as FP8_STATUS
from lightning_fastft.optim import FusedAdamW, MuonAdamW
from lightning_fastft.packing.collate import Document, PackedBatch, collate
from lightning_fastft.packing.packs import Packs
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.data.planned import TrainingPlan
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.fine_tuner import FineTuner


def run(
    cases: list[Case], *, files: WorkloadFiles, log: CaseLog, device: str, recorder: type[CaseRecorder] = CaseRecorder
) -> None:
    """Run the cases one after the other on one FineTuner; each has its own Trainer.

    Args:
        cases: Cases of one workload.
        files: The folder of the workload.
        log: Takes the records.
        device: "cuda" or "cpu".
        recorder: Class that records a case.
    """
    is_cuda, packs, start = device == "cuda", files.read_packs(), files.read_trained()
    # The only reference to the model between cases, so that an unused model leaves the device.
    held: dict[str, FineTuner] = {}

    def body(one: CaseRecorder) -> None:
        name = one.case.optimizer
        if not held:
            # A tuner and its Trainer refer to each other: without this, two models would be on the device.
            gc.collect()
            held["tuner"] = make_tuner(files, optimizer=name, is_cuda=is_cuda)
        held["tuner"].optimizer_factory = optimizer_factory(name, is_cuda=is_cuda)
        _train(held["tuner"], one, start=start, is_cuda=is_cuda)
        held["tuner"].zero_grad(set_to_none=True)

    for case in cases:
        case = replace(case, num_warmup=max(case.num_warmup, least_warmup(case.mode)))
        given = make_ragged(packs) if "ragged" in case.mode.split("+") else packs
        if "error" in run_case(recorder(case, files=files, packs=given, is_cuda=is_cuda), body, log=log):
            # Do not reuse the state that a failed fit left.
            held.clear()


def make_tuner(files: WorkloadFiles, *, optimizer: str, is_cuda: bool) -> FineTuner:
    """Return a FineTuner as a user creates it."""
    tuner = FineTuner(
        str(files.model),
        quantization=files.workload.quantization,
        lora=lora_config(files.workload),
        dtype="bfloat16" if is_cuda else "float32",
        optimizer=optimizer_factory(optimizer, is_cuda=is_cuda),
        learning_rate=learning_rate_of(files.workload),
        scheduler="constant",
        warmup_share=0.0,
    )
    # Lightning moves the module to the host when a fit ends; the next case needs it on the device.
    tuner.cpu = lambda: tuner  # type: ignore[method-assign]
    return tuner


def make_batch(documents: list[tuple[Any, Any]]) -> PackedBatch:
    """Collate one pack, as the data module does."""
    return collate([Document(ids, labels) for ids, labels in documents])


def optimizer_factory(name: str, *, is_cuda: bool) -> Any:
    """Return the optimizer factory for FineTuner; None for its default."""
    if name == "adamw_fused_8bit":
        return functools.partial(FusedAdamW, optim_bits=8)
    if name == "muon_adamw":
        return functools.partial(MuonAdamW, master_weights=True)
    if name == "adamw_fused" or not is_cuda:
        return None
    from bitsandbytes.optim import AdamW8bit

    return functools.partial(AdamW8bit)


def _train(tuner: FineTuner, recorder: CaseRecorder, *, start: Mapping[str, torch.Tensor], is_cuda: bool) -> None:
    case = recorder.case
    if case.mode == SHIPPED:
        train_shipped(tuner, recorder, start=start, is_cuda=is_cuda)
        return
    mode = parse_mode(case.mode)
    measure = MeasuringCallback(recorder, adapter=start, mode=mode, is_cuda=is_cuda)
    strategy = FastFTStrategy(activations=mode.checkpointing)
    trainer = make_trainer(strategy, measure, max_steps=recorder.num_total + measure.num_extra_steps, is_cuda=is_cuda)
    fused = mode.callbacks(is_cuda=is_cuda)
    trainer.callbacks.extend(fused)
    rows = [recorder.pack_at(step) for step in range(recorder.num_total + measure.num_extra_steps)]
    loader = torch.utils.data.DataLoader(
        rows, batch_size=None, collate_fn=functools.partial(collate_pack, share=case.label_share), pin_memory=is_cuda
    )
    try:
        trainer.fit(tuner, train_dataloaders=loader)
    finally:
        measure.patcher.undo()
    _note_statuses(recorder, measure, trainer)
    if mode.wants_fp8 and not any(
        status["name"] == FP8_STATUS and status["state"] == "active" for status in recorder.record["fused"]
    ):
        raise ValueError(f"fp8 was asked for, and nothing computed in it: {recorder.record['fused']}")


def _note_statuses(recorder: CaseRecorder, measure: MeasuringCallback, trainer: Trainer) -> None:
    recorder.record["statuses"] = measure.status_table
    recorder.record["fused"] = [
        status._asdict()
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, FusedKernels)
        for status in callback.status()
    ]


def train_shipped(
    tuner: FineTuner, recorder: CaseRecorder, *, start: Mapping[str, torch.Tensor], is_cuda: bool
) -> None:
    """Train as ``fastft fit --config NAME`` does: with Trainer, strategy and callbacks of the shipped config, and its
    PackedDataModule on the ruler's tokenised rows and packs.

    The tuner is that of the ruler, so that adapters are those of every other system; a step trains one pack, as theirs.
    """
    name = SHIPPED_CONFIGS[recorder.case.workload]
    num_steps = recorder.num_total + MeasuringCallback.num_extra_steps
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config", name, "--trainer.max_steps", str(num_steps), "--trainer.max_epochs", "-1"]
        words += ["--trainer.accumulate_grad_batches", "1"]
        words += ["--trainer.default_root_dir", folder, "--data.paths", "unused.jsonl"]
        words += [] if is_cuda else ["--trainer.accelerator", "cpu"]
        cli = FastFTCLI(words, run=False)
        trainer, shipped = cli.trainer, cli.datamodule
        mode = parse_mode(SHIPPED)._replace(checkpointing=trainer.strategy.checkpointing)
        measure = MeasuringCallback(recorder, adapter=start, mode=mode, is_cuda=is_cuda)
        trainer.callbacks.append(measure)
        packs = [recorder.pack_at(step) for step in range(num_steps)]
        data = RulerData(packs, max_tokens=packs[0].input_id_T.size, pad_to_max=shipped.pad_to_max)
        try:
            trainer.fit(tuner, datamodule=data)
        finally:
            measure.patcher.undo()
        _note_statuses(recorder, measure, trainer)
        recorder.record["shipped"] = {"config": name, "callbacks": [type(one).__name__ for one in trainer.callbacks]}


class RulerData(PackedDataModule):
    """The package's data module on the ruler's documents; its packs are the ruler's, in their order.

    Args:
        packs: Packs in the order of the steps.
        max_tokens: Tokens of a pack.
        pad_to_max: Value of the shipped config.
    """

    def __init__(self, packs: Sequence[Pack], *, max_tokens: int, pad_to_max: bool) -> None:
        rows = [{"input_ids": ids.tolist()} for pack in packs for ids, _ in pack.documents(1.0)]
        super().__init__(
            rows, max_tokens=max_tokens, pad_to_max=pad_to_max, format="input_ids", add_eos=False, cache_dir=None,
            show_progress=False,
        )  # fmt: skip
        starts = np.cumsum([0, *(len(pack.lengths) for pack in packs)])
        self._ruler_packs = Packs(document_N=np.arange(starts[-1]), start_P1=starts, max_tokens=max_tokens)

    def _plan_training(self) -> TrainingPlan:
        self._packs["train"] = self._ruler_packs
        planned = super()._plan_training()
        planned.plan.shuffle = False
        return planned


def make_trainer(strategy: Any, callback: Callback, *, max_steps: int, is_cuda: bool, **options: Any) -> Trainer:
    """Return a Trainer without logging, checkpoints and validation."""
    return Trainer(
        accelerator="gpu" if is_cuda else "cpu",
        strategy=strategy,
        max_steps=max_steps,
        gradient_clip_val=MAX_GRADIENT_NORM,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"devices": 1, **options},
    )


def collate_pack(pack: Pack, *, share: float = 1.0) -> PackedBatch:
    """Collate one pack of the token file."""
    return make_batch(pack.documents(share))


class MeasuringCallback(Callback):
    """Load the ruler's adapters or weights, report to the recorder, and stop the Trainer when the recorder ends.

    If tensors are offloaded, one more step is profiled after the last timed one.

    Args:
        recorder: Recorder of the case.
        adapter: The ruler's adapter values; all weights if there are no adapters.
        mode: Mode of the case.
        is_cuda: Whether steps run on a GPU.
    """

    num_extra_steps = 1

    def __init__(
        self, recorder: CaseRecorder, *, adapter: Mapping[str, torch.Tensor], mode: Mode, is_cuda: bool
    ) -> None:
        self.patcher = ModelPatcher()
        self.status_table = ""
        self._recorder = recorder
        self._adapter = adapter
        self._mode = mode
        self._checkpointing = mode.checkpointing
        self._is_cuda = is_cuda
        self._profile = CopyProfile(is_cuda=is_cuda)
        self._is_over = False
        self._loss: torch.Tensor | None = None

    def _note_plan(self) -> None:
        """Record the active optimisations, and add the host memory that the engine has registered by itself."""
        record, plan = self._recorder.record, describe_plan(self._checkpointing)
        record["plan"] = plan
        if "pinned_host_gib" in record:
            registered = plan.get("engine", {}).get("pinned_bytes", 0) + plan.get("streamed", {}).get(
                "num_host_bytes", 0
            )
            record["pinned_host_gib"] += registered / 2**30

    def on_train_start(self, trainer: Trainer, pl_module: FineTuner) -> None:
        """Load the adapters or weights and swap layers of the mode, after all other changes."""
        if self._mode.wants_liger:
            self._recorder.record["liger_layers"] = install_liger_layers(pl_module.model, self.patcher)
        load_start(pl_module.model, self._adapter)
        if pl_module.low_precision_adapters is not None:
            pl_module.low_precision_adapters.refresh()
        self.status_table = render_status_table(trainer.strategy.statuses())

    def on_train_batch_start(self, trainer: Trainer, pl_module: FineTuner, batch: Any, batch_idx: int) -> None:
        """Compare gradients as soon as there is a plan; record the arrival of a batch."""
        if self._is_over:
            return
        stacks = self._checkpointing.stacks
        if self._recorder.step == CHECKED_STEP and stacks and stacks[-1].plan is not None:
            with self._recorder.not_counted():
                self._recorder.record["plan_check"] = check_plan(
                    pl_module, batch, self._checkpointing, is_cuda=self._is_cuda
                )
        if self._recorder.step == GRAPHS_CHECKED_STEP and self._mode.wants_graphs:
            may_be_none = self._mode.wants_graphs == "auto"
            with self._recorder.not_counted():
                self._recorder.record["graphs_check"] = check_graphs(
                    pl_module, batch, is_cuda=self._is_cuda, may_be_none=may_be_none
                )
        self._recorder.batch_arrived(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: FineTuner, loss: torch.Tensor) -> None:
        """Store the loss of the judged step."""
        self._loss = loss.detach() if self._recorder.step == 0 else None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: FineTuner, optimizer: Any) -> None:
        """Pass the gradients to the recorder before they are clipped."""
        if not self._is_over:
            self._recorder.backward_done(pl_module.model, loss=self._loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: FineTuner, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the end of a step."""
        if self._is_over:
            use = self._profile.stop()
            self._recorder.record["copies"] = None if use is None else use._asdict()
            trainer.should_stop = True
        elif self._recorder.step_done():
            self._is_over = True
            self._note_plan()
            # Before teardown, which clears it.
            backends = dict(trainer.strategy.packed_steps.backends_used)
            self._recorder.record.update(backends=backends, attention=", ".join(sorted(backends)))
            if "ms" in self._recorder.record and has_host_tensors(self._checkpointing):
                self._profile.start()
            else:
                trainer.should_stop = True
