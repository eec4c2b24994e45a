"""SavedCausalLM: a TextCausalLM that is saved, resumed and exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fastft.checkpoint.remote import downloaded, is_remote
from lightning_fastft.core.checks import local_path
from lightning_fastft.core.errors import OptionError
from lightning_fastft.training.model.base_identity import check_adapter_names, check_base, describe_base
from lightning_fastft.training.model.export import save_model
from lightning_fastft.training.model.run_record import (
    RUN_KEY,
    describe_run,
    warn_of_other_template,
    warn_of_other_tuner,
)
from lightning_fastft.training.model.texts import TextCausalLM

if TYPE_CHECKING:
    from typing_extensions import Self

    from lightning_fastft.hf.lora_init import Initial


class SavedCausalLM(TextCausalLM):
    """Save what is trained, load it onto the same base, and export plain PEFT or transformers files.

    Args:
        args: Of ``CausalLMModule``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Of a load by a module around this one, which does not call load_state_dict below (WeightAveraging).
        self.register_load_state_dict_post_hook(_drop_frozen)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Return the module of a checkpoint, with Lightning's options; a URL and a folder of shards are verified.

        The path is a local file, an open file, the folder of a ``fastft_fsdp`` run, or the URL that ModelCheckpoint
        saved to.

        Raises:
            OptionError: A local folder is not a checkpoint.
            DamagedCheckpointError: No save at the URL is whole, or a file of the folder is damaged.

        Cost:
            A URL is downloaded to the temporary folder (``TMPDIR``) and read once more for its SHA-256; the weights of
            a folder are written there as one file.
        """
        if not isinstance(checkpoint_path, (str, Path)):
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        if is_remote(checkpoint_path):
            with downloaded(str(checkpoint_path)) as file:
                return super().load_from_checkpoint(file, *args, **kwargs)
        place = local_path(checkpoint_path, use="loaded from")
        if place.is_dir():
            # Imported late: torch.distributed.checkpoint is slow to import.
            from lightning_fastft.checkpoint.folders import as_one_file

            with as_one_file(place) as whole:
                return super().load_from_checkpoint(whole, *args, **kwargs)
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
            ResumeError: Adapter weights are missing, or other weights than those of adapters are present.
        """
        if self._is_built and self.has_adapters:
            check_adapter_names(
                state_dict, expected=self.state_dict(), has_default_targets=self._skipped_targets is not None
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
        """Add which base the trained parameters belong to, and what a model card says of the run."""
        from lightning_fastft.hf.lora_init import probe_initial

        checkpoint["fastft_base"] = {
            **describe_base(self.source, seed=self._seed, digest=self._base_digest),
            "initial": probe_initial(self._initial),
            "dtype": str(self._compute_dtype).removeprefix("torch."),
        }
        if self._trainer is not None:
            checkpoint[RUN_KEY] = describe_run(self.trainer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse adapters that were trained on another base; a checkpoint without a digest of it is accepted.

        Warn of a checkpoint of another class or chat template. A resumed run keeps the seed of the checkpoint, for
        noise on embeddings.

        Raises:
            ResumeError: The base of this run has other weights, or was initialised with another seed.
        """
        if self._trainer is not None:
            warn_of_other_tuner(self.trainer, checkpoint.get(RUN_KEY, {}))
            warn_of_other_template(self.trainer, checkpoint.get(RUN_KEY, {}))
        self._read_tokenizer(checkpoint, run=checkpoint.get(RUN_KEY, {}))
        if self.has_adapters:
            check_base(
                checkpoint.get("fastft_base", {}),
                source=self.source,
                seed=self._seed if self._is_built else None,
                digest=self._base_digest,
                accept_other=self.accept_other_base,
            )
        if self._initial is not None:
            from lightning_fastft.hf.lora_init import check_initial

            check_initial(checkpoint.get("fastft_base", {}).get("initial", {}), initial=self._initial)
        self._seed = checkpoint.get("fastft_base", {}).get("seed", self._seed)

    def save_pretrained(self, folder: str) -> None:
        """Write a plain PEFT adapter, or a plain transformers model where all weights are trained, and its companions:
        the tokenizer with the chat template of the training data, the processor of images, and a generation
        configuration that stops where the answers of the data end.

        Adapters of PiSSA and OLoRA are written as plain LoRA of twice the rank, which fits the original base.

        Args:
            folder: Made if it is not there, by rank 0; a sharded model is gathered, so every rank makes this call.
                ``PeftModel.from_pretrained`` or ``AutoModelForCausalLM.from_pretrained`` reads it without this package.

        Raises:
            OptionError: There is no model yet. Or the folder holds a whole model and adapters are saved, or the
                reverse; nothing is written.
            UnsupportedModelError: PEFT would not read the adapters back; nothing is written.
            CheckpointNotSavedError: The files cannot be written, or stock PEFT reads other adapters than were saved;
                the folder is as before.
        """
        if self.model is None:
            raise OptionError("There is no model yet: run the Trainer first, or call configure_model().")
        self.use_average()
        save_model(self, folder)

    def _finish_files(self, part: Path) -> None:
        """Complete the files of a save before they replace earlier ones; called by the rank that writes."""

    @property
    def initial_adapters(self) -> Initial | None:
        """The first adapters, where their initialisation changed the base (PiSSA, OLoRA): files need them."""
        return self._initial

    def to_plain_lora(self) -> None:
        """Make adapters whose initialisation changed the base plain LoRA on the original base, for an export.

        The module cannot be trained afterwards. Other models do not change.
        """
        if self._initial is not None:
            from lightning_fastft.hf.lora_init import as_plain_lora

            self.model, self._initial = as_plain_lora(self.model, initial=self._initial), None


def _drop_frozen(module: SavedCausalLM, incompatible: Any) -> None:
    """Remove the frozen weights of a module with adapters from the missing keys of a load: no file has them."""
    if module._is_built and module.has_adapters:
        trained = tuple(f".{name}" for name, parameter in module.named_parameters() if parameter.requires_grad)
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if f".{key}".endswith(trained)]
