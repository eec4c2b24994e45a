"""Tuner: what all LightningModules of this package share, from loading a model to saving what was trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightning_fastft.checkpoint.remote import downloaded, is_remote
from lightning_fastft.core.checks import (
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_share,
    check_string,
    check_tokenizer,
    is_processor,
    local_path,
    tokenizer_of,
)
from lightning_fastft.core.errors import ContextError, DataError, OptionError, ResumeError, SwapError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.completions import Completions
from lightning_fastft.packing.needs import DataNeeds
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.patching import patcher_of
from lightning_fastft.training.optimizer import FusedAdamW, is_steppable
from lightning_fastft.training.schedules import SCHEDULES, group_parameters, learning_rate_schedule

if TYPE_CHECKING:
    from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
    from peft import LoraConfig
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Self

    from lightning_fastft.hf.images import ImageEncoder
    from lightning_fastft.hf.lora_targets import DefaultTargets
    from lightning_fastft.hf.sharding.fillers import Filler
    from lightning_fastft.patches.head import LazyLogits

Transform = Callable[[Any], Any]
Stage = Literal["before_adapters", "after_adapters"]
ReadT = TypeVar("ReadT")

DEFAULT_LEARNING_RATE = 2e-4
# Ten times what any optimizer trains with, and more steps than a run has: beyond them a decimal point is at the wrong
# place.
LARGEST_RATE, LARGEST_STEP = 1e3, 10**9
STAGES = ("before_adapters", "after_adapters")


class Tuner(LightningModule):
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
            ``qlora``); None for no quantisation.
        lora: PEFT's LoraConfig or its fields, for example ``{"r": 16, "lora_alpha": 16}``. Unless it names targets,
            projections of attention and of recurrent mixers and dense and shared feed-forward layers are adapted, in
            every family; routers never, routed experts only by ``target_parameters``. None trains every parameter.
        init: "pretrained" reads the weights, "random" initialises them from the configuration.
        dtype: "bfloat16", "float16", "float32", or "auto": bf16 where the device computes in it, else fp32.
        adapter_dtype: "float32" or "bfloat16".
        master_dtype: Dtype in which full fine-tuning holds its weights and AdamW's moments. "auto": fp32 where the
            model is sharded (16 bytes per weight over all devices, fp32 masters of bf16 arithmetic), dtype elsewhere.
            "float32" and "bfloat16" say it; "bfloat16" takes 8 bytes. "float32" on whole bf16 weights: ``FusedAdamW``
            holds masters beside them (16 bytes per weight with its gradient), without which changes below the last
            digit of a weight are lost.
        optimizer: Called with the parameters; None for AdamW: ``FusedAdamW``, which clips, steps and writes the
            adapters' compute copies in one pass, where every trained parameter is held in fp32, whole on one device,
            without a loss scaler; else torch.optim.AdamW, fused where it can be.
        learning_rate: Peak learning rate, at least 0; None for the optimizer's own, and 2e-4 where optimizer is None.
        weight_decay: Decay of matrices, none on vectors (norms, biases); None for the optimizer's own, and 0 where
            optimizer is None.
        scheduler: "cosine", "linear" or "constant" after the warm-up, per optimizer step; or called with the optimizer,
            then without our warm-up.
        scheduler_interval: "step" or "epoch": how often a scheduler that is called with the optimizer moves.
        warmup_share: Share of all optimizer steps over which the learning rate rises from 0, in [0, 1].
        warmup_steps: The same in optimizer steps; replaces warmup_share.
        min_learning_rate_share: Share of the peak at which "cosine" and "linear" end, in [0, 1].
        revision: Branch, tag or commit on the hub, for the model and its tokenizer.
        accept_other_base: Whether adapters of a checkpoint are loaded onto a base whose weights differ from those that
            they were trained on.

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
        scheduler: Literal["cosine", "linear", "constant"] | LRSchedulerCallable = "cosine",
        scheduler_interval: Literal["step", "epoch"] = "step",
        warmup_share: float = 0.03,
        warmup_steps: int | None = None,
        min_learning_rate_share: float = 0.0,
        revision: str | None = None,
        accept_other_base: bool = False,
    ) -> None:
        super().__init__()
        from lightning_fastft.hf.dtypes import DTYPES
        from lightning_fastft.hf.loading.source import ModelSource
        from lightning_fastft.hf.lora import describe_lora, parse_lora, to_plain

        check_choice("quantization", quantization, (None, "nf4"))
        check_choice("dtype", dtype, ("auto", *DTYPES))
        check_choice("adapter_dtype", adapter_dtype, ("float32", "bfloat16"))
        check_choice("master_dtype", master_dtype, ("auto", "float32", "bfloat16"))
        check_choice("scheduler_interval", scheduler_interval, ("step", "epoch"))
        check_share("warmup_share", warmup_share)
        check_share("min_learning_rate_share", min_learning_rate_share)
        check_tokenizer(tokenizer)
        _check_kinds(revision=revision, optimizer=optimizer, scheduler=scheduler)
        _check_optional_numbers(learning_rate=learning_rate, weight_decay=weight_decay, warmup_steps=warmup_steps)
        is_instance = isinstance(model, nn.Module)
        if quantization is not None and lora is None:
            raise OptionError(
                f"quantization={quantization!r} freezes the base, so nothing would be trained: give lora, for example "
                f"lora={{'r': 16}}."
            )
        if is_instance and quantization is not None:
            raise OptionError(
                "A model that is loaded already is used as it is: load it quantised yourself, or give its name to "
                "FineTuner."
            )
        if lora is not None and hasattr(model, "peft_config"):
            raise OptionError("The model has PEFT adapters already: leave lora away, or give the base model.")
        if master_dtype != "auto" and (lora is not None or hasattr(model, "peft_config")):
            raise OptionError(
                f"master_dtype={master_dtype!r} is for full fine-tuning; the dtype in which adapters are held is "
                "adapter_dtype."
            )
        self.source = None if is_instance else ModelSource(model, init=init, revision=revision)
        self.lora = None if lora is None else parse_lora(lora)
        self.quantization = quantization
        self.dtype_name = dtype
        self.adapter_dtype = DTYPES[adapter_dtype]
        self.master_dtype_name = master_dtype
        self.optimizer_factory = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.scheduler = scheduler
        self.scheduler_interval = scheduler_interval
        self.warmup_share = warmup_share
        self.warmup_steps = warmup_steps
        self.min_learning_rate_share = min_learning_rate_share
        # Not a hyperparameter: a checkpoint must not carry the permission.
        self.accept_other_base = check_bool("accept_other_base", accept_other_base)

        self.model: Any = model if is_instance else None
        # A model beside the trained one that is never trained or saved: a reference, a teacher.
        self.frozen_model: Any = None
        self.low_precision_adapters: Any = None
        self.token_metrics = nn.ModuleDict()
        self._given_tokenizer = tokenizer
        # A processor of texts and images holds the tokenizer.
        self._tokenizer: Any = tokenizer_of(tokenizer)
        self._transforms: dict[str, tuple[Transform, Stage]] = {}
        self._is_built = False
        self._checked_models: set[int] = set()
        self._seed = 0
        self._base_digest = ""
        self._compute_dtype = torch.float32
        # Only for a model that is built without a Trainer.
        self._own_patcher = ModelPatcher()
        self._sharding: Status | None = None
        self._default_targets: DefaultTargets | None = None

        hparams = {
            "quantization": quantization,
            "init": init,
            "dtype": dtype,
            "adapter_dtype": adapter_dtype,
            "master_dtype": master_dtype,
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "warmup_share": warmup_share,
            "warmup_steps": warmup_steps,
            "revision": revision,
            "min_learning_rate_share": min_learning_rate_share,
            "scheduler_interval": scheduler_interval,
            "lora": None if self.lora is None else describe_lora(self.lora),
        }
        # Plain types only, so that torch.load(weights_only=True) reads the checkpoint; objects that are none are left
        # out.
        if self.source is not None:
            content = self.source.config.to_diff_dict() if hasattr(model, "to_diff_dict") else model
            hparams["model"] = to_plain(content)
        if isinstance(tokenizer, str):
            hparams["tokenizer"] = tokenizer
        if isinstance(scheduler, str):
            hparams["scheduler"] = scheduler
        self.save_hyperparameters(hparams)

    # For data modules and callbacks.

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, loaded on first use; None where the model is a bare configuration and none was given."""
        if isinstance(self._tokenizer, str):
            from lightning_fastft.hf.loading.source import ModelSource

            self._tokenizer = ModelSource(self._tokenizer).load_tokenizer()
        elif self._tokenizer is None and self.source is not None:
            self._tokenizer = self.source.load_tokenizer()
        return self._tokenizer

    @property
    def image_encoder(self) -> ImageEncoder | None:
        """The processor of images, loaded when images are met; None where the model comes without one."""
        from lightning_fastft.hf.images import ImageEncoder
        from lightning_fastft.hf.loading.source import ModelSource

        given = self._given_tokenizer
        if is_processor(given):
            return ImageEncoder(given)
        source = ModelSource(given) if isinstance(given, str) else self.source
        return ImageEncoder(source) if source is not None and source.has_processor else None

    @property
    def vocab_size(self) -> int:
        """Token ids the model can embed."""
        if self.model is not None:
            return int(self.model.get_input_embeddings().weight.shape[0])
        assert self.source is not None
        return self.source.vocab_size

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained and the base is frozen."""
        return self.lora is not None or hasattr(self.model, "peft_config")

    @property
    def is_sharded(self) -> bool:
        """Whether the model's weights are spread over ranks."""
        return self._sharding is not None

    def register_transform(self, name: str, transform: Transform, *, stage: Stage = "before_adapters") -> None:
        """Have the model changed while it is built; callbacks call this in ``setup``.

        Args:
            name: A name is applied once, however often it is registered.
            transform: Called with the model; returns another model, or None if it changed that one.
            stage: "before_adapters": the transformers model; "after_adapters": the PEFT model.

        Raises:
            SwapError: The model is built and this name was not registered before.
        """
        check_choice("stage", stage, STAGES)
        if name in self._transforms:
            return
        if self._is_built:
            raise SwapError(
                f"The model is built, so the transform {name!r} comes too late. Give its callback to the first "
                "Trainer, or make a new FineTuner."
            )
        self._transforms[name] = (transform, stage)

    def statuses(self) -> list[Status]:
        """Return the statuses of the model itself: sharding, quantisation and adapters."""
        if not self._is_built:
            return []
        found = [] if self._sharding is None else [self._sharding]
        found += [Status("NF4 base", "inactive", "not asked for")]
        if self.quantization is not None:
            from lightning_fastft.hf.expert_nf4 import describe_experts

            experts = describe_experts(self.model)
            found[-1:] = [
                Status("NF4 base", "active", "bitsandbytes, double quantisation"),
                *([experts] if experts.state == "active" else []),
            ]
        if hasattr(self.model, "peft_config"):
            from lightning_fastft.hf.lora_targets import describe_adapters

            lora = next(iter(self.model.peft_config.values()))
            found.append(Status("LoRA", "active", describe_adapters(self.model, lora, found=self._default_targets)))
        if self.low_precision_adapters is not None:
            found.append(self.low_precision_adapters.status)
        return found

    # Building.

    def configure_model(self) -> None:
        """Build the model once: load, transforms before adapters, adapters, transforms after them, training mode,
        shards where the strategy has them.

        Raises:
            OptionError: The Trainer's precision does not fit dtype and adapter_dtype, or the strategy does not fit the
                module.
            DataError: Weights are missing, left over or not finite.
        """
        from lightning_fastft.hf.lora import add_adapters

        device = self.device if self._trainer is None else self.trainer.strategy.root_device
        mesh, filler = self._find_mesh(), None
        if not self._is_built:
            dtype = self._resolve_dtype(device)
            # One seed for all ranks: adapters and random weights must be equal where nothing broadcasts them.
            self._seed = (
                torch.initial_seed()
                if self._trainer is None
                else int(self.trainer.strategy.broadcast(torch.initial_seed()))
            )
            model = self.model
            if model is None:
                model, filler = self._open_model(device=device, dtype=dtype, is_sharded=mesh is not None)
            self._base_digest = self._digest_base(model)
            model = self._transform(model, "before_adapters")
            self._compute_dtype = model.dtype
            if self.lora is not None:
                lora = self._name_targets(model)
                with nullcontext() if filler is None else filler.placeholders(model):
                    model = add_adapters(model, lora=lora, adapter_dtype=self.adapter_dtype, seed=self._seed)
                self._warn_of_whole_copies(model)
            self.model = self._transform(model, "after_adapters")
            self.strict_loading = not self.has_adapters
            self._is_built = True
        else:
            self._resolve_dtype(device)
        if mesh is not None and self._sharding is None:
            self._shard(mesh, filler=filler)
        patcher = self._own_patcher if self._trainer is None else patcher_of(self.trainer)
        patcher.add_undo(self._release_optimizers)
        self._install_low_precision_adapters(patcher)
        self.model.train()

    def _name_targets(self, model: PreTrainedModel) -> LoraConfig:
        """Return the LoRA configuration with its targets; checkpoints hold those of the default rule by name."""
        from lightning_fastft.hf.lora_targets import copy_with_targets

        assert self.lora is not None
        lora, self._default_targets = copy_with_targets(model, self.lora)
        if self._default_targets is not None:
            self.hparams["lora"] = {**self.hparams["lora"], "target_modules": sorted(lora.target_modules or ())}
        return lora

    def _find_mesh(self) -> DeviceMesh | None:
        """Return the data parallel mesh of a strategy that shards models, else None; refuse options that do not
        fit it.
        """
        strategy = None if self._trainer is None else self.trainer.strategy
        if not isinstance(strategy, ModelParallelStrategy):
            if self._sharding is not None:
                raise OptionError(
                    "The model is sharded over the ranks of an earlier Trainer: make a new FineTuner, or use "
                    "strategy='fastft_fsdp'."
                )
            if self.master_dtype_name not in ("auto", self.dtype_name) and not self._wants_masters():
                raise OptionError(
                    f"master_dtype={self.master_dtype_name!r} with dtype={self.dtype_name!r} needs a sharded model, "
                    "Trainer(strategy='fastft_fsdp'); or leave master_dtype at 'auto'."
                )
            return None
        mesh = strategy.device_mesh
        if mesh["tensor_parallel"].size() != 1:
            raise OptionError(
                f"FineTuner is data parallel only, and {type(strategy).__name__} was given "
                f"tensor_parallel_size={mesh['tensor_parallel'].size()}: "
                "use Trainer(strategy='fastft_fsdp')."
            )
        return strategy.sharding_mesh if isinstance(strategy, FastFTFSDPStrategy) else mesh["data_parallel"]

    def _wants_masters(self) -> bool:
        """Return whether the optimizer may hold fp32 masters of unsharded weights; loss scaling of fp16 cannot be part
        of its pass.
        """
        return self.master_dtype_name == "float32" and self.dtype_name in ("auto", "bfloat16")

    def _open_model(
        self, *, device: torch.device, dtype: torch.dtype, is_sharded: bool
    ) -> tuple[PreTrainedModel, Filler | None]:
        """Return the finished model, or one to be filled where it will be sharded."""
        from lightning_fastft.hf.loading.model import build_model

        assert self.source is not None
        if not is_sharded:
            return build_model(
                self.source, device=device, dtype=dtype, quantization=self.quantization, seed=self._seed
            ), None
        from lightning_fastft.hf.sharding.fillers import open_model, reads_base

        is_read_early = self.lora is not None and reads_base(self.lora)
        return open_model(
            self.source,
            device=device,
            dtype=dtype,
            quantization=self.quantization,
            seed=self._seed,
            is_read_early=is_read_early,
        )

    def _digest_base(self, model: Any) -> str:
        """Return what identifies the frozen base; empty where it is trained, and so part of every checkpoint, or
        not in memory yet.
        """
        if not self.has_adapters:
            return ""
        from lightning_fastft.hf.base_digest import digest_files, digest_tensors

        if self.source is not None and self.source.init == "pretrained":
            from lightning_fastft.hf.loading.source import weight_files

            paths = weight_files(self.source)
            return digest_files(paths) if paths else ""
        return digest_tensors(model, is_trained_too=not hasattr(model, "peft_config"))

    def _shard(self, mesh: DeviceMesh, *, filler: Filler | None) -> None:
        """Cut the model over the ranks; adapters keep their dtype, trained bases get masters."""
        from lightning_fastft.hf.dtypes import DTYPES
        from lightning_fastft.hf.sharding.units import shard_model

        master_dtype = None
        if not self.has_adapters:
            master_dtype = torch.float32 if self.master_dtype_name == "auto" else DTYPES[self.master_dtype_name]
            if master_dtype.itemsize < self._compute_dtype.itemsize:
                raise OptionError(
                    f"master_dtype={self.master_dtype_name!r} is narrower than the {self._compute_dtype} of the "
                    "arithmetic: set dtype too."
                )
        self._sharding = shard_model(
            self.model, mesh, filler=filler, compute_dtype=self._compute_dtype, master_dtype=master_dtype
        )

    def _warn_of_whole_copies(self, model: Any) -> None:
        """Say that PEFT's copies of whole modules (modules_to_save) compute in their own dtype, so they are no
        fp32 masters.
        """
        others = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.dtype != self.adapter_dtype
        ]
        if others:
            rank_zero_warn(
                f"{len(others)} trained tensors are copies of base modules and stay in {self._compute_dtype}, for "
                f"example {others[0]}."
            )

    def _transform(self, model: Any, stage: Stage) -> Any:
        for transform, wanted in self._transforms.values():
            if wanted == stage:
                changed = transform(model)
                model = model if changed is None else changed
        return model

    def _resolve_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of base and arithmetic; a Trainer precision that would change it is refused by name."""
        from lightning_fastft.hf.dtypes import check_precision, resolve_dtype

        precision = "32-true" if self._trainer is None else str(self.trainer.precision)
        is_fit = self._trainer is not None and self.trainer.state.fn == "fit"
        name: str = self.dtype_name
        if self.model is not None:
            standing = str(self._compute_dtype if self._is_built else self.model.dtype).removeprefix("torch.")
            if name not in ("auto", standing):
                raise OptionError(
                    f"dtype={name!r} was asked for and the model given has {standing}: cast it yourself, or leave "
                    "dtype away."
                )
            name = standing
        elif name == "auto" and precision in ("bf16-true", "16-mixed"):
            name = "bfloat16" if precision == "bf16-true" else "float16"
        check_precision(
            precision, dtype=name, adapter_dtype=self.adapter_dtype, has_adapters=self.has_adapters, is_fit=is_fit
        )
        matmul_precision = torch.get_float32_matmul_precision()
        if self.dtype_name == "float32" and matmul_precision != "highest":
            raise OptionError(
                "dtype='float32' is fp32 to the last bit, and torch.get_float32_matmul_precision() is "
                f"{matmul_precision!r}. Remove "
                "torch.set_float32_matmul_precision(...) or set it to 'highest'; for speed use dtype='bfloat16'."
            )
        return resolve_dtype(name, device=device)

    def _install_low_precision_adapters(self, patcher: ModelPatcher) -> None:
        """Give fp32 adapters on a base of lower precision a low-precision copy to compute with."""
        if not self.has_adapters or self.low_precision_adapters is not None:
            return
        from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters

        copies = install_low_precision_adapters(self.model, patcher, compute_dtype=self._compute_dtype)
        patcher.set_attribute(self, "low_precision_adapters", copies)

    def _refresh_low_precision_adapters(self) -> None:
        if self.low_precision_adapters is not None:
            self.low_precision_adapters.refresh()

    def on_fit_start(self) -> None:
        """Refresh the compute copies of the adapters after placement, broadcast and a restored checkpoint."""
        self._refresh_low_precision_adapters()

    def on_validation_start(self) -> None:
        """Refresh the compute copies of the adapters."""
        self._refresh_low_precision_adapters()

    def on_test_start(self) -> None:
        """Refresh the compute copies of the adapters."""
        self._refresh_low_precision_adapters()

    def on_predict_start(self) -> None:
        """Refresh the compute copies of the adapters."""
        self._refresh_low_precision_adapters()

    def teardown(self, stage: str) -> None:
        """Leave a plain transformers or PEFT model; the run's patcher has undone its changes."""
        self._own_patcher.undo()

    def _release_optimizers(self) -> None:
        # Lightning moves the state to the host; tables would keep the device memory alive.
        for optimizer in () if self._trainer is None else self.trainer.optimizers:
            if isinstance(optimizer, FusedAdamW):
                optimizer.release()

    # Steps.

    def forward(self, **inputs: Any) -> Any:
        """Call the model."""
        return self.model(**inputs)

    @property
    def data_needs(self) -> DataNeeds:
        """What the loss asks of the data."""
        return DataNeeds()

    def predict_step(self, batch: PackedBatch, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        """Return the log-probability of the labelled tokens of each document, shape (S,), in the order of the pack.

        ``batch.numbers`` are the numbers of the documents in their data set. The pad tail is no document.
        """
        log_prob_R, context = self._read_log_probs(batch), batch.context
        num_documents = int((context.start_host_S1[:-1] < context.num_real_tokens).sum())
        # Labelled rows ascend, so those of a document are neighbours.
        row_R = context.labelled_row_R[: context.num_labelled]
        offset_S1 = torch.searchsorted(row_R, context.start_S1[: num_documents + 1].long())
        return torch.segment_reduce(
            log_prob_R[: context.num_labelled], "sum", offsets=offset_S1, unsafe=True, initial=0.0
        )

    def has_signal(self, batch: PackedBatch) -> bool:
        """Return whether a batch can train anything, from what the host knows; read by ``GradientHealth``."""
        return batch.context.num_labelled > 0

    def _minimise(
        self, batch: PackedBatch, objective: Callable[[LazyLogits], torch.Tensor], *, model: Any = None
    ) -> torch.Tensor:
        """Run a model on a packed batch, and return the 0-dim loss that an objective computes from its logits.

        The objective runs inside the model's forward, where the head's weight is whole also if the model is sharded.
        """
        if not isinstance(batch, PackedBatch):
            raise DataError(f"{type(self).__name__} trains on packed batches of PackedDataModule or collate.")
        model = self.model if model is None else model
        if id(model) not in self._checked_models:
            from lightning_fastft.patches.head import check_objective

            check_objective(model.get_base_model() if hasattr(model, "peft_config") else model)
            self._checked_models.add(id(model))
        batch.context.objective = objective
        try:
            loss: torch.Tensor = self._call_model(batch, model=model).loss
        finally:
            batch.context.objective = None
        return loss

    @torch.no_grad()
    def _read(self, batch: PackedBatch, read: Callable[[LazyLogits], ReadT], *, model: Any = None) -> ReadT:
        """Return what a function reads from the lazy logits of a model, without a graph."""
        found: list[ReadT] = []

        def objective(logits: LazyLogits) -> torch.Tensor:
            found.append(read(logits))
            return logits.hidden.new_zeros(())

        self._minimise(batch, objective, model=model)
        return found[0]

    def _read_log_probs(self, batch: PackedBatch, *, temperature: float = 1.0, model: Any = None) -> torch.Tensor:
        """Return the log-probability of each labelled row's target, shape (R,), without a graph."""
        return self._read(batch, lambda logits: logits.log_probs(temperature=temperature).log_prob_R, model=model)

    def _open_frozen(self, source: str | nn.Module) -> None:
        """Hold a second model: read it from a folder or the hub in the dtype of the arithmetic, or take it as it is.

        Raises:
            OptionError: The trained model is sharded, beside which a whole one would take the memory that was saved.
        """
        if self._sharding is not None:
            raise OptionError(
                "A second model is not sharded beside the trained one: under strategy='fastft_fsdp' use adapters, "
                "whose base is the reference, or values that are stored before the training."
            )
        if isinstance(source, nn.Module):
            self.frozen_model = source
        else:
            from lightning_fastft.hf.loading.model import build_model
            from lightning_fastft.hf.loading.source import ModelSource

            device = self.device if self._trainer is None else self.trainer.strategy.root_device
            self.frozen_model = build_model(
                ModelSource(source, init="pretrained"), device=device, dtype=self._compute_dtype
            )
        self.frozen_model.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the trained model; a frozen one stays in evaluation mode."""
        super().train(mode)
        if self.frozen_model is not None:
            self.frozen_model.eval()
        return self

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

    def _log_means(self, means: Mapping[str, torch.Tensor], *, prefix: str, count: int, shown: tuple[str, ...]) -> None:
        """Log means over ``count`` examples of one batch: at each step in training, over all batches elsewhere.

        Args:
            means: Names without prefix; 0-dim tensors on the device, which stay there.
            prefix: "train", "val" or "test".
            count: Weight of the batch.
            shown: Names for the progress bar.
        """
        is_training = prefix == "train"
        for name, value in means.items():
            self.log(
                f"{prefix}_{name}",
                value,
                on_step=is_training,
                on_epoch=not is_training,
                sync_dist=not is_training,
                # A bar of Lightning would read a training value at every step, with a host sync.
                prog_bar=name in shown and not is_training,
                # Lightning averages the weights of ranks, and would round an average of integers.
                batch_size=float(count),  # type: ignore[arg-type]
            )

    def _call_model(self, batch: PackedBatch | Mapping[str, Any], *, model: Any = None) -> Any:
        model = self.model if model is None else model
        if not isinstance(batch, PackedBatch):
            return model(**batch)
        num_reads = batch.context.num_reads
        output = model(**batch)
        if batch.context.num_documents > 1 and batch.context.num_reads == num_reads:
            raise ContextError(
                f"No attention layer of {type(model).__name__} read the context of a packed batch: its documents "
                "saw each other. Use "
                "Trainer(strategy='fastft'), or add the callback PackedTraining() under another strategy."
            )
        return output

    # Optimisation.

    def configure_optimizers(self) -> Any:
        """Return the optimizer over every trainable parameter, and its schedule."""
        optimizer = self._make_optimizer()
        if isinstance(self.scheduler, str):
            schedule = LambdaLR(optimizer, self._make_schedule(self.scheduler))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        scheduler = self.scheduler(optimizer)
        options: dict[str, Any] = {"scheduler": scheduler, "interval": self.scheduler_interval}
        if isinstance(scheduler, ReduceLROnPlateau):
            options.update(interval="epoch", monitor=getattr(scheduler, "monitor", "val_loss"))
        return {"optimizer": optimizer, "lr_scheduler": options}

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
        if not parameters:
            raise OptionError(
                f"{type(self.model).__name__} has no trainable parameter: give lora, or set requires_grad on what is "
                "to be trained."
            )
        has_narrow = any(parameter.dtype is torch.bfloat16 for parameter in parameters)
        wants_masters = has_narrow and self._sharding is None and self.master_dtype_name == "float32"
        if self.optimizer_factory is not None:
            if wants_masters:
                raise OptionError(
                    "master_dtype='float32' holds masters in FineTuner's own optimizer, and another one was given: "
                    "leave it out, or give "
                    "FusedAdamW(..., master_weights=True) and leave master_dtype at 'auto'."
                )
            groups = group_parameters(parameters, learning_rate=self.learning_rate, weight_decay=self.weight_decay)
            try:
                return self.optimizer_factory(groups)
            except ValueError as error:
                raise OptionError(
                    f"The optimizer refused the {len(parameters)} trainable tensors of {type(self.model).__name__}: "
                    f"{error} An optimizer of matrices "
                    "alone (Muon) needs a configure_optimizers of your own, with a second one for vectors and "
                    "embeddings."
                ) from error
        learning_rate = DEFAULT_LEARNING_RATE if self.learning_rate is None else self.learning_rate
        groups = group_parameters(parameters, learning_rate=learning_rate, weight_decay=self.weight_decay or 0.0)
        # Lightning's loss scaler cannot clip gradients of a fused optimizer (2.6.6).
        is_fused = (
            all(parameter.device.type in ("cuda", "cpu") for parameter in parameters) and self.trainer.scaler is None
        )
        is_whole = (
            isinstance(self.trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
            and len({p.device for p in parameters}) == 1
        )
        is_served = is_fused and is_whole and all(map(is_steppable, parameters))
        if wants_masters and not is_served:
            raise OptionError(
                "master_dtype='float32' needs whole, plain bf16 or fp32 weights on one device: use "
                "Trainer(strategy='fastft_fsdp')."
            )
        # Without masters, moments of bf16 weights stay bf16, as master_dtype promises and the plan of memory counts.
        if is_served and (wants_masters or all(parameter.dtype is torch.float32 for parameter in parameters)):
            return FusedAdamW(groups, master_weights=wants_masters)
        return torch.optim.AdamW(groups, fused=is_fused)

    def _make_schedule(self, name: str) -> Callable[[int], float]:
        num_steps = self.trainer.estimated_stepping_batches
        is_endless = math.isinf(num_steps) or num_steps < 0
        if is_endless and (name != "constant" or (self.warmup_steps is None and self.warmup_share > 0)):
            raise OptionError(
                f"scheduler={name!r} needs the length of the run: set max_steps or max_epochs, or 'constant' with "
                "warmup_steps."
            )
        num_steps = 0 if is_endless else int(num_steps)
        num_warmup_steps = math.ceil(self.warmup_share * num_steps) if self.warmup_steps is None else self.warmup_steps
        return learning_rate_schedule(
            name, num_steps=num_steps, num_warmup_steps=num_warmup_steps, end_share=self.min_learning_rate_share
        )

    # Saving and loading.

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Return the module of a checkpoint, with Lightning's options; a URL of this package's checkpoints is verified.

        Args:
            checkpoint_path: A local file, an open file, or the URL that ModelCheckpoint saved to.
            *args: Passed to Lightning.
            **kwargs: Passed to Lightning.

        Raises:
            OptionError: The checkpoint is a local folder, as several ranks write it.
            DamagedCheckpointError: No save at the URL is whole.

        Cost:
            A URL is downloaded to the temporary folder (``TMPDIR``) and read once more for its SHA-256.
        """
        if not isinstance(checkpoint_path, (str, Path)):
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        if is_remote(checkpoint_path):
            with downloaded(str(checkpoint_path)) as file:
                return super().load_from_checkpoint(file, *args, **kwargs)
        place = local_path(checkpoint_path, use="loaded from")
        if place.is_dir():
            raise OptionError(
                f"{place} is a folder, not a checkpoint file. If several ranks wrote it, resume it with "
                "strategy='fastft_fsdp' and call save_pretrained on the module."
            )
        return super().load_from_checkpoint(place, *args, **kwargs)

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the trained parameters only where adapters are trained, else everything."""
        destination = {} if destination is None else destination
        if not (self._is_built and self.has_adapters):
            with self._without_frozen():
                return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                destination[prefix + name] = parameter if keep_vars else parameter.detach()
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load trained parameters, and refresh the compute copies of adapters.

        Raises:
            ResumeError: Adapter weights are missing, or there are weights that are no adapter's.
        """
        if self._is_built and self.has_adapters:
            expected, given = set(self.state_dict()), set(state_dict)
            if expected != given:
                advice = "Use the lora settings of the run that wrote it."
                if self._default_targets is not None:
                    advice += (
                        " Where lora names no target_modules, earlier versions adapted other layers of mixtures of "
                        "experts: resume theirs with lora={..., 'target_modules': 'all-linear'}."
                    )
                raise ResumeError(
                    f"The checkpoint does not hold the adapters of this run: {_some(expected - given)} missing, "
                    f"{_some(given - expected)} left over. {advice}"
                )
            strict = False
        with self._without_frozen():
            result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self._refresh_low_precision_adapters()
        return result

    @contextmanager
    def _without_frozen(self) -> Iterator[None]:
        """Take the frozen model out of the module for the time of a block."""
        frozen, self.frozen_model = self.frozen_model, None
        try:
            yield
        finally:
            self.frozen_model = frozen

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note which base the trained parameters belong to."""
        name = None if self.source is None else self.source.name
        init = "given" if self.source is None else self.source.init
        checkpoint["fastft_base"] = {"name": name, "init": init, "seed": self._seed, "digest": self._base_digest}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse adapters that were trained on another base; a checkpoint without a digest of it is taken.

        Raises:
            ResumeError: The base of this run has other weights, or was initialised with another seed.
        """
        base = checkpoint.get("fastft_base", {})
        if self.has_adapters and base.get("init") == "random" and self._is_built and base["seed"] != self._seed:
            raise ResumeError(
                f"The adapters were trained on a base initialised with seed {base['seed']}, this run has {self._seed}: "
                f"call seed_everything({base['seed']})."
            )
        saved, present = str(base.get("digest", "")), self._base_digest
        # Files and tensors in memory are not comparable.
        is_known = bool(saved and present) and saved.partition(":")[0] == present.partition(":")[0]
        if self.has_adapters and is_known and saved != present:
            told = (
                f"The adapters were trained on the base {base.get('name') or 'of the run'} with other weights than "
                "the present one has"
            )
            if not self.accept_other_base:
                raise ResumeError(
                    f"{told} (digest {saved.partition(':')[2][:12]}, now {present.partition(':')[2][:12]}). Give the "
                    "base of that run, or accept "
                    "this one: FineTuner(..., accept_other_base=True), --model.accept_other_base true, or "
                    "--accept-other-base in an export."
                )
            rank_zero_warn(f"{told}; they are loaded all the same (accept_other_base=True).")

    def save_pretrained(self, folder: str) -> None:
        """Write a plain PEFT adapter, or a plain transformers model where all weights are trained, and the tokenizer.

        Args:
            folder: Made if it is not there, by rank 0; a sharded model is gathered, so every rank makes this call.
                ``PeftModel.from_pretrained`` or ``AutoModelForCausalLM.from_pretrained`` reads it without this package.

        Raises:
            OptionError: There is no model yet.
            UnsupportedModelError: PEFT would not read the adapters back; nothing is written.
            CheckpointNotSavedError: Stock PEFT reads other adapters than were saved; the folder is as before.
        """
        if self.model is None:
            raise OptionError("There is no model yet: run the Trainer first, or call configure_model().")
        has_peft = hasattr(self.model, "peft_config")
        if has_peft:
            from lightning_fastft.hf.export import check_readable, save_adapters

            check_readable(self.model)
        state = None
        if self._sharding is not None:
            from lightning_fastft.hf.sharding.state import gather_state

            # What leaves is in the dtype of the model, as without masters.
            dtype = None if self.has_adapters else self._compute_dtype
            state = gather_state(self.model, is_trained_only=self.has_adapters, dtype=dtype)
        if self._trainer is not None and not self.trainer.is_global_zero:
            return
        if has_peft:
            save_adapters(self.model, Path(folder), state_dict=state)
        else:
            self.model.save_pretrained(folder, **({} if state is None else {"state_dict": state}))
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    # Generation.

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[Mapping[str, str]]],
        *,
        max_new_tokens: int = 128,
        **options: Any,
    ) -> list[str]:
        """Generate a continuation of each prompt in evaluation mode, and restore the mode of every module.

        Args:
            prompts: Texts, or conversations (lists of messages with role and content) for the chat template.
            max_new_tokens: Most tokens to write.
            **options: Of transformers' ``generate``, for example ``do_sample=False``.

        Raises:
            OptionError: There is no model or no tokenizer.
        """
        from lightning_fastft.hf.generation import generate_texts

        tokenizer = self.tokenizer
        if self.model is None or tokenizer is None:
            raise OptionError(
                "generate needs a model and a tokenizer; "
                f"{'the model is not built' if self.model is None else 'tokenizer is None'}."
            )
        return generate_texts(
            self.model, tokenizer=tokenizer, prompts=prompts, max_new_tokens=max_new_tokens, **options
        )


def check_second_model(name: str, model: object) -> None:
    """Check that a reference or a teacher is a name, a folder or a model."""
    if isinstance(model, nn.Module):
        return
    if not isinstance(model, str):
        raise OptionError(f"{name} must be a name, a folder or a model, got {model!r} ({type(model).__name__}).")
    check_string(name, model)


def _check_kinds(*, revision: object, optimizer: object, scheduler: object) -> None:
    """Check that each value is a name or a callable."""
    if revision is not None:
        check_string("revision", revision)  # type: ignore[arg-type]
    if optimizer is not None and not callable(optimizer):
        raise OptionError(
            f"optimizer must be called with the parameters, got {optimizer!r} ({type(optimizer).__name__})."
        )
    if not callable(scheduler):
        check_choice("scheduler", scheduler, SCHEDULES)


def _check_optional_numbers(
    *, learning_rate: float | None, weight_decay: float | None, warmup_steps: int | None
) -> None:
    """Refuse numbers that are given and cannot be."""
    if learning_rate is not None:
        check_float("learning_rate", learning_rate, low=0.0, high=LARGEST_RATE)
    if weight_decay is not None:
        check_float("weight_decay", weight_decay, low=0.0, high=LARGEST_RATE)
    if warmup_steps is not None:
        check_int("warmup_steps", warmup_steps, low=0, high=LARGEST_STEP)


def _some(names: Iterable[str]) -> str:
    """Return up to three names and the count."""
    ordered = sorted(names)
    return f"{len(ordered)} ({', '.join(ordered[:3])}{', ...' if len(ordered) > 3 else ''})" if ordered else "0"
