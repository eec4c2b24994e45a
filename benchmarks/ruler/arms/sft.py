"""Code that the TRL and Unsloth arms share: their SFTTrainer trains on the ruler's packs, and a callback measures.

The trainer is built as in its documentation (packing on); its prepared data set is then replaced by one with the same
columns and the ruler's packs. Model, collator, loss, optimizer and step are those of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.ruler.cases import MAX_GRADIENT_NORM, Case, CaseLog, CaseRecorder, learning_rate_of, run_case
from benchmarks.ruler.judge import load_start
from benchmarks.ruler.workloads import Pack, WorkloadFiles

OPTIMIZERS = {"adamw_8bit": "adamw_8bit", "adamw_fused": "adamw_torch_fused"}


def training_arguments(case: Case, *, files: WorkloadFiles, is_cuda: bool) -> dict[str, Any]:
    """Return the SFTConfig arguments that are the same for both trainers."""
    return {
        "output_dir": str(files.folder / "trainer_output"),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_steps": case.num_warmup + case.num_steps,
        "lr_scheduler_type": "constant",
        "learning_rate": learning_rate_of(files.workload),
        "max_grad_norm": MAX_GRADIENT_NORM,
        "optim": OPTIMIZERS[case.optimizer] if is_cuda else "adamw_torch",
        "train_sampling_strategy": "sequential",
        "logging_steps": 100_000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "max_length": files.workload.max_tokens,
        "packing": True,
        "bf16": is_cuda,
        # Batches are collated ahead of the step, as ours are.
        **({"dataloader_num_workers": 1, "dataloader_prefetch_factor": 8} if is_cuda else {}),
        "seed": 3407,
        **({} if is_cuda else {"use_cpu": True}),
    }


def seed_documents(num_documents: int = 64) -> Any:
    """Return a small text data set for a trainer to prepare; the packs replace it before training."""
    from datasets import Dataset

    return Dataset.from_dict(
        {"text": [" ".join(f"w{4 + (row * 7 + word) % 100}" for word in range(40)) for row in range(num_documents)]}
    )


def run_cases(
    cases: list[Case],
    *,
    trainer: Any,
    files: WorkloadFiles,
    log: CaseLog,
    is_cuda: bool,
    recorder: type[CaseRecorder] = CaseRecorder,
) -> None:
    """Train every case with one trainer; cases differ in their label share and their optimizer only."""
    packs = files.read_packs()
    start = files.read_trained()
    driver = install_driver(trainer)
    for case in cases:
        one = recorder(case, files=files, packs=packs, is_cuda=is_cuda)

        def body(recorder: CaseRecorder) -> None:
            rows, share = [recorder.pack_at(step) for step in range(recorder.num_total)], recorder.case.label_share
            driver.expected = expected_batch(rows[0], share=share)
            load_start(trainer.model, start)
            train(trainer, data_set(rows, share=share), driver=driver, recorder=recorder, is_cuda=is_cuda)

        run_case(one, body, log=log)
        trainer.model.zero_grad(set_to_none=True)


def train(trainer: Any, data_set: Any, *, driver: Any, recorder: CaseRecorder, is_cuda: bool) -> None:
    """Train on prepared rows with the optimizer of the recorder's case; a callback reports to the recorder."""
    from transformers.training_args import OptimizerNames

    driver.recorder = recorder
    trainer.train_dataset = data_set
    trainer._signature_columns = data_set.column_names
    # The next call of train creates the optimizer of the case.
    trainer.optimizer = trainer.lr_scheduler = None
    if is_cuda:
        trainer.args.optim = OptimizerNames(OPTIMIZERS[recorder.case.optimizer])
    try:
        trainer.train()
    finally:
        driver.recorder = None


def describe_model(model: torch.nn.Module) -> str:
    """Describe the trained and frozen tensors of a model and its recomputed modules, in one line.

    Example:
        >>> describe_model(torch.nn.Linear(2, 3))
        'trains 9 values in 2 tensors of torch.float32; frozen: 0 tensors []; checkpointing in 0 modules'
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    dtypes = ", ".join(sorted({str(parameter.dtype) for parameter in trained}))
    num_recomputed = sum(bool(getattr(module, "gradient_checkpointing", False)) for module in model.modules())
    text = f"trains {sum(parameter.numel() for parameter in trained)} values in {len(trained)} tensors of {dtypes}"
    return f"{text}; frozen: {len(frozen)} tensors {frozen[:3]}; checkpointing in {num_recomputed} modules"


def data_set(packs: list[Pack], *, share: float) -> Any:
    """Return the packs as a data set that a trainer has prepared."""
    from datasets import Dataset

    return Dataset.from_dict(
        {
            "input_ids": [pack.input_id_T.tolist() for pack in packs],
            "labels": [pack.label_T(share).tolist() for pack in packs],
            "seq_lengths": [pack.lengths for pack in packs],
        }
    )


def expected_batch(pack: Pack, *, share: float) -> dict[str, np.ndarray]:
    """Return the expected content of a collated pack."""
    return {"input_ids": pack.input_id_T, "labels": pack.label_T(share), "position_ids": pack.position_T()}


def install_driver(trainer: Any) -> Any:
    """Add the measuring callback and wrap training_step, once per trainer."""
    from transformers import TrainerCallback

    class Driver(TrainerCallback):
        """Report to the recorder, and stop the trainer when the recorder ends."""

        recorder: CaseRecorder | None = None
        expected: dict[str, np.ndarray] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if self.recorder is not None and self.recorder.step_done():
                control.should_training_stop = True
            return control

    driver = Driver()
    trainer.add_callback(driver)
    own_step: Callable[..., torch.Tensor] = trainer.training_step

    def training_step(model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> torch.Tensor:
        recorder = driver.recorder
        assert recorder is not None
        if recorder.step == 0:
            recorder.record["batch"] = check_batch(inputs, driver.expected)
            # Here the trainer has already enabled or disabled its checkpointing.
            own = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            recorder.record["trained"] = f"{describe_model(model)}; {type(own).__module__}.{type(own).__name__}"
            print(f"{recorder.case.title}: {recorder.record['trained']}", flush=True)
        recorder.batch_arrived(inputs)
        loss = own_step(model, inputs, *arguments, **keywords)
        recorder.backward_done(model, loss=loss.detach())
        return loss

    trainer.training_step = training_step
    return driver


def check_batch(inputs: dict[str, Any], expected: dict[str, np.ndarray]) -> dict[str, str]:
    """Return a description of the first batch.

    Raises:
        ValueError: The trainer's collator did not produce the ruler's first pack.
    """
    description = {
        key: str(tuple(value.shape)) if hasattr(value, "shape") else repr(value) for key, value in inputs.items()
    }
    for key, value_T in expected.items():
        if key not in inputs:
            # Unsloth may pass lengths instead of positions; ids and labels must be there.
            if key == "position_ids":
                continue
            raise ValueError(f"The trainer's batch has no {key}; it has {description}.")
        given = inputs[key].detach().cpu().numpy().reshape(-1)
        if given.shape != value_T.shape or not np.array_equal(given, value_T):
            num_different = int((given != value_T).sum()) if given.shape == value_T.shape else -1
            raise ValueError(
                f"The trainer's {key} differ from the ruler's first pack in {num_different} places; batch: "
                f"{description}."
            )
    return description
