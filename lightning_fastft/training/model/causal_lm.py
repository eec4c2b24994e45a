"""CausalLMModule: a LightningModule that builds, adapts and shards a causal language model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_fastft.checkpoint.lightning_internals import wrap_average
from lightning_fastft.core.checks import check_choice, is_processor, tokenizer_of
from lightning_fastft.core.errors import OptionError, SwapError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status
from lightning_fastft.hf.added_tokens import count_rows
from lightning_fastft.strategies.patching import patcher_of
from lightning_fastft.training.model.base_identity import digest_base
from lightning_fastft.training.model.construction import (
    STAGES,
    Stage,
    Transform,
    add_lora,
    apply_transforms,
    check_averaging,
    check_processes,
    describe_model,
    find_device,
    find_mesh,
    first_packs,
    keep_equal_tensors,
    open_frozen_model,
    open_source,
    place_adapters,
    stream_if_larger,
)
from lightning_fastft.training.model.dtypes import (
    check_unsharded_masters,
    resolve_compute_dtype,
    resolve_sharded_masters,
)
from lightning_fastft.training.model.options import ModelOptions

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Self

    from lightning_fastft.hf.images import ImageEncoder
    from lightning_fastft.hf.lora_init import Initial
    from lightning_fastft.hf.sharding.fillers import Filler


class CausalLMModule(LightningModule):
    """Hold a causal language model, which ``configure_model`` builds on the device of its rank.

    Args:
        model: As in ``Tuner``.
        options: Those of ``Tuner`` from which the model is built.

    Raises:
        OptionError: A value is not allowed, or two options do not fit.
    """

    def __init__(self, model: str | dict[str, Any] | PretrainedConfig | PreTrainedModel, options: ModelOptions) -> None:
        super().__init__()
        from lightning_fastft.hf.dtypes import DTYPES
        from lightning_fastft.hf.loading.source import ModelSource, refuse_litgpt
        from lightning_fastft.hf.lora import parse_lora
        from lightning_fastft.hf.lora_folders import read_adapter_config
        from lightning_fastft.hf.lora_init import check_initialisation

        options.check(model)
        lora = options.lora if options.adapter is None else read_adapter_config(os.path.expanduser(options.adapter))
        is_instance = isinstance(model, nn.Module)
        self.source = None if is_instance else ModelSource(model, init=options.init, revision=options.revision)
        if isinstance(model, str) and options.init == "pretrained":
            refuse_litgpt(model)
        self.lora = None if lora is None else parse_lora(lora)
        self.quantization = options.quantization
        self.dtype_name = options.dtype
        self.adapter_dtype = DTYPES[options.adapter_dtype]
        self.master_dtype_name = options.master_dtype
        check_initialisation(
            self.lora, quantization=self.quantization, adapter_dtype=self.adapter_dtype, source=self.source
        )
        self._options = options
        # Not a hyperparameter: a checkpoint must not carry the permission.
        self.accept_other_base = options.accept_other_base
        self.model: Any = model if is_instance else None
        # A second model that is never trained or saved: a reference, a teacher.
        self.frozen_model: Any = None
        self.low_precision_adapters: Any = None
        # A processor of texts and images holds the tokenizer.
        self._tokenizer: Any = tokenizer_of(options.tokenizer)
        self._transforms: dict[str, tuple[Transform, Stage]] = {}
        self._is_built = False
        # Where the initialisation of the adapters changed the base: its factors.
        self._initial: Initial | None = None
        self._seed = 0
        self._base_digest = ""
        self._compute_dtype = torch.float32
        # Only for a model that is built without a Trainer.
        self._own_patcher = ModelPatcher()
        self._sharding: Status | None = None
        # What the default rule of LoRA's targets skipped, by reason; None if it did not run.
        self._skipped_targets: dict[str, int] | None = None
        self.save_hyperparameters(options.to_hyperparameters(model, source=self.source, lora=self.lora))

    # For data modules and callbacks.

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, loaded on first use; None where the model is a bare configuration and none was given."""
        if isinstance(self._tokenizer, str):
            from lightning_fastft.hf.loading.source import load_given_tokenizer

            self._tokenizer = load_given_tokenizer(self._tokenizer)
        elif self._tokenizer is None and self.source is not None:
            self._tokenizer = self.source.load_tokenizer()
        return self._tokenizer

    @property
    def image_encoder(self) -> ImageEncoder | None:
        """The processor of images, loaded on first use; None for a model without one."""
        from lightning_fastft.hf.images import ImageEncoder
        from lightning_fastft.hf.loading.source import ModelSource

        given = self._options.tokenizer
        if is_processor(given):
            return ImageEncoder(given)
        source = ModelSource(given) if isinstance(given, str) else self.source
        return ImageEncoder(source) if source is not None and source.has_processor else None

    @property
    def vocab_size(self) -> int:
        """Token ids the model can embed."""
        if self.model is not None:
            return count_rows(self.model.get_input_embeddings())
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
        sharding = [] if self._sharding is None else [self._sharding]
        model = describe_model(
            self.model,
            quantization=self.quantization,
            skipped=self._skipped_targets,
            initialisation=None if self.lora is None else self.lora.init_lora_weights,
        )
        copies = [] if self.low_precision_adapters is None else [self.low_precision_adapters.status]
        return [*sharding, *model, *copies]

    # Building.

    def configure_model(self) -> None:
        """Build the model once: load, transforms before adapters, adapters, transforms after them, training mode,
        shards where the strategy has them.

        Raises:
            OptionError: The Trainer's precision does not fit dtype and adapter_dtype, or the strategy does not fit the
                module.
            DataError: Weights are missing, left over or not finite.
        """
        device = find_device(self)
        mesh, filler = self._find_mesh(), None
        dtype = resolve_compute_dtype(
            self.dtype_name,
            present=self._compute_dtype if self._is_built else None if self.model is None else self.model.dtype,
            adapter_dtype=self.adapter_dtype,
            has_adapters=self.has_adapters,
            trainer=self._trainer,
            device=device,
        )
        is_copied_whole = self._is_built or (self.model is not None and self.lora is None)
        stream_if_larger(self, dtype=dtype, is_sharded=mesh is not None)
        if not self._is_built:
            filler = self._build(dtype=dtype, is_sharded=mesh is not None)
        averaging = check_averaging(self._trainer, self, is_copied_whole=is_copied_whole, is_sharded=mesh is not None)
        if averaging is not None:
            wrap_average(averaging, self._find_patcher(), keep_equal_tensors)
        if mesh is not None and self._sharding is None:
            self._shard(mesh, filler=filler)
        self._install_low_precision_adapters(self._find_patcher())
        self.model.train()

    def _find_mesh(self) -> DeviceMesh | None:
        """Return the mesh over which the model is sharded, else None; refuse options that do not fit it."""
        mesh = find_mesh(None if self._trainer is None else self.trainer.strategy)
        if mesh is None:
            if self._sharding is not None:
                raise OptionError(
                    "The model is sharded over the ranks of an earlier Trainer: make a new FineTuner, or use "
                    "strategy='fastft_fsdp'."
                )
            check_unsharded_masters(self.master_dtype_name, dtype=self.dtype_name)
        return mesh

    def _build(self, *, dtype: torch.dtype, is_sharded: bool) -> Filler | None:
        """Load and adapt the model; return what fills it where it will be sharded."""
        from lightning_fastft.hf.lora_init import changes_base, read_initial

        check_processes(self._trainer)
        # One seed for all ranks: adapters and random weights must be equal where nothing broadcasts them.
        seed = torch.initial_seed()
        self._seed = seed if self._trainer is None else int(self.trainer.strategy.broadcast(seed))
        model, filler = self.model, None
        if model is None:
            model, filler = open_source(self, dtype=dtype, is_sharded=is_sharded)
        # A base that is trained is part of every checkpoint and needs no digest.
        self._base_digest = digest_base(model, source=self.source) if self.has_adapters else ""
        model = apply_transforms(model, self._transforms.values(), stage="before_adapters")
        self._compute_dtype = model.dtype
        if self.lora is not None:
            lora = self._name_targets(model)
            model = add_lora(model, lora=lora, module=self, filler=filler)
            self._initial = read_initial(model) if changes_base(lora) else None
            if lora.init_lora_weights == "eva":
                self._initialise_eva(model, is_sharded=is_sharded)
        self.model = apply_transforms(model, self._transforms.values(), stage="after_adapters")
        self.strict_loading = not self.has_adapters
        self._is_built = True
        return filler

    def _name_targets(self, model: PreTrainedModel) -> LoraConfig:
        """Return the LoRA configuration with its targets; checkpoints hold those of the default rule by name."""
        from lightning_fastft.hf.lora_targets import copy_with_targets

        assert self.lora is not None
        lora, self._skipped_targets = copy_with_targets(model, self.lora)
        if self._skipped_targets is not None:
            self.hparams["lora"] = {**self.hparams["lora"], "target_modules": sorted(lora.target_modules or ())}
        return lora

    def _initialise_eva(self, model: PeftModel, *, is_sharded: bool) -> None:
        """Initialise adapters from the first packs of the data module; checkpoints hold the ranks that were found."""
        from lightning_fastft.hf.eva import initialise_eva
        from lightning_fastft.hf.lora import describe_lora

        packs = [] if self._trainer is None else first_packs(self.trainer)
        if not packs or is_sharded:
            raise OptionError(
                "lora.init_lora_weights='eva' reads activations of the training data: it needs PackedDataModule in "
                "trainer.fit, and a model that is not sharded. Use strategy='fastft' or 'fastft_ddp', or 'pissa'."
            )
        initialise_eva(model, packs, adapter_dtype=self.adapter_dtype, broadcast=self.trainer.strategy.broadcast)
        self.hparams["lora"] = describe_lora(model.peft_config["default"])  # type: ignore[arg-type]

    def _shard(self, mesh: DeviceMesh, *, filler: Filler | None) -> None:
        """Shard the model over the ranks; adapters keep their dtype, a trained base gets masters."""
        from lightning_fastft.hf.sharding.units import shard_model

        master_dtype = None
        if not self.has_adapters:
            master_dtype = resolve_sharded_masters(self.master_dtype_name, compute_dtype=self._compute_dtype)
        self._sharding = shard_model(
            self.model,
            mesh,
            filler=filler,
            compute_dtype=self._compute_dtype,
            master_dtype=master_dtype,
            adapters=place_adapters(self.trainer.strategy),
            owns_experts=getattr(self.trainer.strategy, "expert_parallel", 1) > 1,
        )

    def _find_patcher(self) -> ModelPatcher:
        """Return the patcher of the run."""
        return self._own_patcher if self._trainer is None else patcher_of(self.trainer)

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

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_validation_epoch_start(self) -> None:
        """Refresh them again: callbacks swap averages in here, and back at the end."""
        self._refresh_low_precision_adapters()

    on_validation_end = on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    def teardown(self, stage: str) -> None:
        """Leave a plain transformers or PEFT model; the run's patcher has undone its changes."""
        self._own_patcher.undo()

    def forward(self, **inputs: Any) -> Any:
        """Call the model."""
        return self.model(**inputs)

    # The second model.

    def _open_frozen(self, source: str | nn.Module) -> None:
        """Hold a second model: read it from a folder or the hub in the dtype of the arithmetic, or take it as it is.

        Raises:
            OptionError: The trained model is sharded; a whole second model would use up the memory that this saves.
        """
        if self._sharding is not None:
            raise OptionError(
                "A second model is not sharded: under strategy='fastft_fsdp' each device would hold all of it. Use "
                "adapters, whose base is the reference, or values that are stored before the training."
            )
        self.frozen_model = open_frozen_model(source, module=self, dtype=self._compute_dtype)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the trained model; a frozen one stays in evaluation mode."""
        super().train(mode)
        if self.frozen_model is not None:
            self.frozen_model.eval()
        return self

    # Generation.
