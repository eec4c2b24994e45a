"""Tuner: the base of all tuners of this package, with the optimizer and the steps on packed batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.completions import Completions
from lightning_fastft.packing.needs import DataNeeds
from lightning_fastft.training.hyperparameters import to_logged
from lightning_fastft.training.model.averaged import AveragedCausalLM
from lightning_fastft.training.model.construction import check_early_callbacks, find_base
from lightning_fastft.training.model.forward import read_logits, run_objective, sum_per_document
from lightning_fastft.training.model.options import (
    ModelOptions,
    check_interval,
    check_optimizer_options,
    collect_optimizer_hyperparameters,
    collect_restored_hyperparameters,
)
from lightning_fastft.training.optimization.choice import (
    call_factory,
    check_schedule_length,
    choose_optimizer,
    find_fast_parameters,
    find_undecayed_parameters,
    make_schedule,
)
from lightning_fastft.training.optimization.schedule_free import check_schedule
from lightning_fastft.training.optimization.schedules import RunSchedule, apply_found_rate, apply_schedule
from lightning_fastft.training.optimizer import FusedAdamW

if TYPE_CHECKING:
    from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
    from lightning.pytorch.utilities.parsing import AttributeDict
    from peft import LoraConfig
    from torch.optim import Optimizer
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from lightning_fastft.patches.lazy_logits import LazyLogits

ReadT = TypeVar("ReadT")

# Key of checkpoints.
_SCHEDULE = "fastft_schedule"


class Tuner(AveragedCausalLM):
    """Load, quantise, adapt, shard, optimise, resume and save a causal language model; subclasses add the steps.

    The model is built in ``configure_model``, on the device of its rank.

    The Trainer's precision stays "32-true", where Lightning changes no dtype: ``dtype`` is the dtype of the base and of
    the arithmetic, ``adapter_dtype`` that of the trained adapter Parameters. dtype="float32" is fp32 to the last bit:
    TF32 must be off. fp16 (GPUs before Ampere) needs LoRA and ``Trainer(precision="16-mixed")``, whose loss scaler
    syncs with the device once per step. Code from a model repository is never run, and weights are read from
    safetensors only.

    Args:
        model: Hub id, local folder, path of a ``config.json``, a dictionary with ``model_type``, a transformers
            configuration, or a model that is loaded already (transformers or PEFT; used as it is).
        tokenizer: Hub id or folder of the tokenizer, or a tokenizer or processor; None for the model's own.
        quantization: "nf4" holds the frozen base in 4 bits, experts included (QLoRA; needs lora and the extra
            ``qlora``); None for no quantisation. Files in fp8 or MXFP4 are dequantised in either case.
        lora: PEFT's LoraConfig or its fields, for example ``{"r": 16, "lora_alpha": 16}``. Unless it names targets,
            projections of attention and of recurrent mixers and dense and shared feed-forward layers are adapted, in
            every family; routers never, routed experts only by ``target_parameters``. None trains every parameter.
        init: "pretrained" reads the weights, "random" initialises them from the configuration.
        dtype: "bfloat16", "float16", "float32", or "auto": bf16 if the device computes in it, else fp32.
        adapter_dtype: "float32" or "bfloat16".
        master_dtype: Dtype in which full fine-tuning holds its weights and AdamW's moments. "auto": fp32 where the
            model is sharded (16 bytes per weight over all devices, fp32 masters of bf16 arithmetic), dtype elsewhere.
            "float32" and "bfloat16" set it; "bfloat16" takes 8 bytes. "float32" on whole bf16 weights: ``FusedAdamW``
            adds masters (16 bytes per weight with its gradient), without which changes below the last
            digit of a weight are lost.
        optimizer: Called with the parameters; None for AdamW: ``FusedAdamW``, which clips, steps and writes the
            adapters' compute copies in one pass, if every trained parameter is held in fp32 and there is no loss
            scaler; else torch.optim.AdamW, fused if possible. ``MuonAdamW`` is Muon for matrices. Schedule-free
            optimizers need scheduler="constant".
        learning_rate: Peak learning rate, at least 0; None for the optimizer's own, or 2e-4 if optimizer is None.
        weight_decay: Decay of matrices, none on vectors, norms and biases; None for the optimizer's own, or 0 if
            optimizer is None.
        loraplus_lr_ratio: LoRA+: learning rate of B of each adapter (and of trained vectors) over learning_rate, at
            least 1; None for one rate. The name is PEFT's.
        scheduler: "cosine", "linear" or "constant" after the warm-up, per optimizer step; or called with the optimizer,
            then without our warm-up.
        scheduler_interval: "step" or "epoch": how often a scheduler that is called with the optimizer moves.
        warmup_share: Share of all optimizer steps over which the learning rate rises from 0, in [0, 1].
        warmup_steps: The same in optimizer steps; replaces warmup_share.
        min_learning_rate_share: Share of the peak at which "cosine" and "linear" end, in [0, 1].
        revision: Branch, tag or commit on the hub, for the model and its tokenizer.
        accept_other_base: Whether adapters of a checkpoint or folder are loaded onto another base than the one that
            they were trained on.
        adapter: Folder of PEFT LoRA adapters to continue training, with their configuration, in place of lora.
        frozen_adapters: Folders of more PEFT LoRA adapters: active in every forward, never trained or saved.

    Raises:
        OptionError: A value is not allowed, or two options do not fit.
    """

    def __init__(
        self,
        model: str | dict[str, Any] | PretrainedConfig | PreTrainedModel,
        *,
        tokenizer: str | PreTrainedTokenizerBase | Any = None,
        quantization: Literal["nf4"] | None = None,
        lora: dict[str, Any] | LoraConfig | None = None,
        init: Literal["pretrained", "random"] = "pretrained",
        dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
        adapter_dtype: Literal["float32", "bfloat16"] = "float32",
        master_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        optimizer: OptimizerCallable | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        loraplus_lr_ratio: float | None = None,
        scheduler: Literal["cosine", "linear", "constant"] | LRSchedulerCallable = "cosine",
        scheduler_interval: Literal["step", "epoch"] = "step",
        warmup_share: float = 0.03,
        warmup_steps: int | None = None,
        min_learning_rate_share: float = 0.0,
        revision: str | None = None,
        accept_other_base: bool = False,
        adapter: str | None = None,
        frozen_adapters: list[str] | None = None,
    ) -> None:
        built_from = ModelOptions(
            tokenizer=tokenizer, quantization=quantization, lora=lora, init=init, dtype=dtype,
            adapter_dtype=adapter_dtype, master_dtype=master_dtype, revision=revision,
            accept_other_base=accept_other_base, adapter=adapter, frozen_adapters=frozen_adapters,
        )  # fmt: skip
        super().__init__(model, built_from)
        self.optimizer_factory = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.loraplus_lr_ratio = loraplus_lr_ratio
        self.scheduler = scheduler
        self.scheduler_interval = scheduler_interval
        self.warmup_share = warmup_share
        self.warmup_steps = warmup_steps
        self.min_learning_rate_share = min_learning_rate_share
        check_optimizer_options(self)
        self.save_hyperparameters(collect_optimizer_hyperparameters(self))
        # Options that the checkpoint of a resumed run replaced; the record of the run has these.
        self._restored: dict[str, Any] = {}
        self._checked_models: set[int] = set()
        # By how many steps the schedule is ahead of the run, whose steps before a resume may have had another size.
        self._steps_ahead = 0.0

    def setup(self, stage: str) -> None:
        """Start at the beginning of the schedule; a checkpoint is restored later."""
        super().setup(stage)
        self._steps_ahead = 0.0
        if stage == "fit" and self._restored:
            self.hparams.update(collect_optimizer_hyperparameters(self))
            self._restored = {}
        # Another run may install another head.
        self._checked_models.clear()

    @property
    def hparams_initial(self) -> AttributeDict:
        """The hyperparameters as they were saved, in the form that loggers take."""
        return to_logged({**super().hparams_initial, **self._restored})

    def configure_model(self) -> None:
        """Build the model once; the end of the run leaves the average of a schedule-free optimizer, and releases what
        optimizers hold in addition to their state.
        """
        self._find_patcher().add_undo(self._release_optimizers)
        super().configure_model()

    # Whether the loss is exact on a part of a pack (context parallelism): a sum over labelled tokens.
    trains_on_parts = False

    @property
    def data_needs(self) -> DataNeeds:
        """What the loss asks of the data."""
        return DataNeeds()

    @property
    def stop_ids(self) -> tuple[int, ...] | None:
        """Ids of the tokens at which generation stops; None if the model does not generate."""
        from lightning_fastft.hf.loading.source import read_stop_ids

        if self.source is not None:
            return self.source.stop_ids
        return read_stop_ids(getattr(getattr(self.model, "generation_config", None), "eos_token_id", None))

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch, and log it."""
        return self._step(batch, prefix="train")

    def validation_step(self, batch: PackedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the metrics of a batch as means over all validation batches; of named loaders also for each."""
        self._begin_evaluation("val", batch_idx=batch_idx, dataloader_idx=dataloader_idx)
        self._evaluate(batch, prefix="val")

    def test_step(self, batch: PackedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the metrics of a batch as means over all test batches; of named loaders also for each."""
        self._begin_evaluation("test", batch_idx=batch_idx, dataloader_idx=dataloader_idx)
        self._evaluate(batch, prefix="test")

    def _evaluate(self, batch: PackedBatch, *, prefix: str) -> None:
        """Add a batch to the metrics of a validation or test; by default those of a training step."""
        self._step(batch, prefix=prefix)

    def _step(self, batch: PackedBatch, *, prefix: str) -> torch.Tensor:
        """Return the loss of a batch, and log it under a prefix; a subclass has it or its own steps."""
        raise NotImplementedError

    def predict_step(self, batch: PackedBatch, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        """Return the log-probability of the labelled tokens of each document, shape (S,), in the order of the pack.

        ``batch.numbers`` are the numbers of the documents in their data set. The pad tail is not one of them.
        """
        return sum_per_document(self._read_log_probs(batch), batch.context)

    def has_signal(self, batch: PackedBatch) -> bool:
        """Return whether a batch can train anything, from what the host knows; read by ``GradientHealth``."""
        return batch.context.whole.num_labelled > 0

    @property
    def logged_names(self) -> frozenset[str] | None:
        """Names that callbacks can monitor in training; None for a class without ``_logged``, which may log more."""
        logged = vars(type(self)).get("_logged")
        if logged is None:
            return None
        return self._with_loader_names(
            frozenset(f"{prefix}_{name}" for prefix in ("train", "val") for name in logged(self))
        )

    def _minimise(self, batch: PackedBatch, objective: Callable[[LazyLogits], torch.Tensor]) -> torch.Tensor:
        """Return the 0-dim loss that an objective computes from the logits of the trained model."""
        return run_objective(self._check_lazy(batch, None), batch, objective)

    def _read(self, batch: PackedBatch, read: Callable[[LazyLogits], ReadT], *, model: Any = None) -> ReadT:
        """Return what a function reads from the lazy logits of a model, None for the trained one, without a graph."""
        return read_logits(self._check_lazy(batch, model), batch, read)

    def _read_log_probs(self, batch: PackedBatch, *, temperature: float = 1.0, model: Any = None) -> torch.Tensor:
        """Return the log-probability of each labelled row's target, shape (R,), without a graph.

        Some are read between two steps, outside of Lightning's context, and compared with those of a step.
        """
        with nullcontext() if self._trainer is None else self.trainer.precision_plugin.forward_context():
            return self._read(batch, lambda logits: logits.log_probs(temperature=temperature).log_prob_R, model=model)

    def _check_lazy(self, batch: PackedBatch, model: Any) -> Any:
        """Return the model; check once that its head is lazy.

        Raises:
            DataError: The batch is not packed.
            UnsupportedModelError: The head is not lazy.
        """
        if not isinstance(batch, PackedBatch):
            raise DataError(f"{type(self).__name__} trains on packed batches of PackedDataModule or collate.")
        model = self.model if model is None else model
        if id(model) not in self._checked_models:
            from lightning_fastft.patches.head import check_objective

            check_objective(find_base(model))
            self._checked_models.add(id(model))
        return model

    def _find_completions(self, batch: PackedBatch) -> Completions:
        """Return the completions of a batch.

        Raises:
            DataError: It has none.
        """
        completions = batch.context.completions if isinstance(batch, PackedBatch) else None
        if completions is None:
            formats = " or ".join(sorted(self.data_needs.formats))
            raise DataError(
                f"{type(self).__name__} got a batch without completions: give PackedDataModule rows of format "
                f"{formats}."
            )
        return completions

    # Optimisation.

    def configure_optimizers(self) -> Any:
        """Return the optimizer over every trainable parameter, and its schedule."""
        optimizer = self._make_optimizer()
        check_schedule(optimizer, self.scheduler)
        if isinstance(self.scheduler, str):
            check_interval(self)
            # Lightning gives a run that trains nothing the length of an endless one.
            num_steps = self.trainer.estimated_stepping_batches if self.trainer.limit_train_batches else 0
            check_schedule_length(self.trainer, self.scheduler, num_steps=num_steps)
            is_counted = num_steps == self.trainer.max_steps
            share_of_peak = make_schedule(
                self.scheduler,
                num_steps=num_steps,
                warmup_share=self.warmup_share,
                warmup_steps=self.warmup_steps,
                end_share=self.min_learning_rate_share,
            )
            # No lambda: a Trainer is pickled with its schedules.
            schedule = RunSchedule(
                optimizer, share_of_peak if is_counted else functools.partial(self._share_at_place, share_of_peak)
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        scheduler = self.scheduler(optimizer)
        options: dict[str, Any] = {"scheduler": scheduler, "interval": self.scheduler_interval}
        if isinstance(scheduler, ReduceLROnPlateau):
            options.update(interval="epoch", monitor=getattr(scheduler, "monitor", "val_loss"))
        return {"optimizer": optimizer, "lr_scheduler": options}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the size of a step, by which a resumed run finds its place in the schedule."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[_SCHEDULE] = {"step_size": self._step_size(), "steps_ahead": self._steps_ahead}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Find the place in the schedule: 8 steps of 3 micro-batches count as 4 steps of 6.

        It is exact to a step, because the last step of an epoch may have fewer micro-batches.
        """
        super().on_load_checkpoint(checkpoint)
        if self._trainer is not None and self.trainer.ckpt_path is not None:
            self._restored = collect_restored_hyperparameters(checkpoint)
        saved = checkpoint.get(_SCHEDULE)
        if saved is None or self._trainer is None:
            return
        self._steps_ahead = saved["steps_ahead"]
        if saved["step_size"] != self._step_size():
            num_done = checkpoint["global_step"]
            scale = saved["step_size"] / self._step_size()
            self._steps_ahead = (num_done + saved["steps_ahead"]) * scale - num_done

    def _share_at_place(self, share_of_peak: Callable[[float], float], step: int) -> float:
        """Return the share of the peak learning rate at the place of a step in the schedule. Strategies that shard
        restore that place after the schedule is made.
        """
        # A new schedule asks for its first step before its own state is restored.
        return share_of_peak(max(0.0, step + self._steps_ahead))

    def _step_size(self) -> int:
        """Return the micro-batches of an optimizer step, on all ranks."""
        ranks = self.trainer.distributed_sampler_kwargs or {}
        return self.trainer.accumulate_grad_batches * int(ranks.get("num_replicas", 1))

    def configure_callbacks(self) -> list[Callback]:
        """Return no callbacks; refuse those of the Trainer that would need the model too early.

        Raises:
            OptionError: Such a callback is there.
        """
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        check_early_callbacks(callbacks, tuner=self)
        return []

    def on_train_start(self) -> None:
        """Give the rate that Lightning's LearningRateFinder found to the schedule, and a resumed run its own rate.

        ExactResume has compared the options of both runs by now; the record has those that are used.
        """
        super().on_train_start()
        self.hparams.update(self._restored)
        has_finder = any(isinstance(callback, LearningRateFinder) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        for config in self.trainer.lr_scheduler_configs if has_finder else ():
            apply_found_rate(config.scheduler.optimizer, config.scheduler, found=self.learning_rate)
        for config in self.trainer.lr_scheduler_configs if self.trainer.ckpt_path is not None else ():
            apply_schedule(config.scheduler)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Run the optimizer step, then refresh the compute copies of the adapters that it has not written."""
        super().optimizer_step(*args, **kwargs)
        if self.low_precision_adapters is not None:
            self.low_precision_adapters.refresh(is_after_step=True)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer | LightningOptimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by norm inside the optimizer's pass where it can; gradients then stay as they are. All else is
        Lightning's.
        """
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if not isinstance(inner, FusedAdamW) or gradient_clip_algorithm not in (None, "norm"):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)  # type: ignore[arg-type]
        elif gradient_clip_val is not None and gradient_clip_val > 0:
            inner.clip_next(gradient_clip_val)

    def _make_optimizer(self) -> Optimizer:
        optimizer = self._choose_optimizer()
        if isinstance(optimizer, FusedAdamW) and self.low_precision_adapters is not None:
            optimizer.attach_copies(
                self.low_precision_adapters.pairs, on_written=self.low_precision_adapters.mark_written
            )
        return optimizer

    def _choose_optimizer(self) -> Optimizer:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        model_name = type(self.model).__name__
        if not parameters:
            raise OptionError(
                f"{model_name} has no trainable parameter: give lora, or set requires_grad on what is to be trained."
            )
        has_bf16 = any(parameter.dtype is torch.bfloat16 for parameter in parameters)
        options: dict[str, Any] = {
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "undecayed": find_undecayed_parameters(self),
            "wants_masters": has_bf16 and self._sharding is None and self.master_dtype_name == "float32",
        }
        if self.loraplus_lr_ratio is not None:
            options["fast"] = find_fast_parameters(self.named_parameters())
            options["fast_ratio"] = self.loraplus_lr_ratio
        if self.optimizer_factory is not None:
            from lightning_fastft.hf.embeddings import find_token_parameters

            options["of_tokens"] = find_token_parameters(self)
            return call_factory(self.optimizer_factory, parameters, model_name=model_name, **options)
        return choose_optimizer(parameters, trainer=self.trainer, **options)

    def _release_optimizers(self) -> None:
        self._end_steps()
        # Lightning moves the state to the host; tables would keep the device memory alive.
        for optimizer in () if self._trainer is None else self.trainer.optimizers:
            if isinstance(optimizer, FusedAdamW):
                optimizer.release()
