"""GenerateSamples: show what the model answers to a few prompts at each validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CometLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fastft.checkpoint.lightning_internals import logged_step
from lightning_fastft.checkpoint.rng import RandomState
from lightning_fastft.core.checks import check_int, tokenizer_of
from lightning_fastft.core.errors import OptionError, printable
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.core.status import Status

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

STATUS_NAME = "samples"
# Validations whose answers are kept: the first one and the last ones.
MOST_VALIDATIONS = 8


class Samples(NamedTuple):
    """Optimizer step of a validation, and the answer to each prompt."""

    step: int
    answers: list[str]


class GenerateSamples(GivenOnce, Callback):
    """Generate an answer to each prompt at the end of each validation of a fit, for the loggers and RunReport.

    Decoding is greedy, so that answers depend on the weights alone. Training is not changed: random states and the mode
    of every module are restored. Rank 0 generates while the other ranks continue; with FSDP2 all ranks generate
    together. TensorBoard, W&B, MLflow and Comet get the texts through Lightning's loggers. Without one of these, they
    are printed.

    Args:
        prompts: Texts that the model continues, or conversations (lists of messages with role and content) that it
            answers with its chat template and the DataModule's variables of it (chat_template_kwargs).
        max_new_tokens: Most tokens of an answer.
        tokenizer: Tokenizer of the model; None uses the one that the DataModule trains with, else the module's, else
            the DataModule's.

    Raises:
        OptionError: An option is not allowed. When fit begins: there is no model that generates, no tokenizer, or the
            strategy is FSDP1 or DeepSpeed, whose shards ``generate`` cannot read.

    Cost:
        One batch of len(prompts) rows per validation, with a host sync per token and a key-value cache of
        len(prompts) x (longest prompt + max_new_tokens) tokens.

    Example:
        >>> GenerateSamples(["Once upon a time"], max_new_tokens=32).samples
        []
    """

    def __init__(
        self,
        prompts: Sequence[str] | Sequence[Sequence[Mapping[str, str]]],
        *,
        max_new_tokens: int = 64,
        tokenizer: Any = None,
    ) -> None:
        if not isinstance(prompts, (list, tuple)) or not prompts:
            raise OptionError(f"prompts must be a list of at least one prompt, got {prompts!r}.")
        for prompt in prompts:
            _check_prompt(prompt)
        self.prompts: list[Any] = list(prompts)
        self.max_new_tokens = check_int("max_new_tokens", max_new_tokens, low=1)
        self.tokenizer = tokenizer
        self.samples: list[Samples] = []
        self.num_validations = 0
        self._is_told = False
        self._status = Status(STATUS_NAME, "inactive", "no validation yet")

    def status(self) -> Status:
        """Return the status, which names the loggers that get the answers."""
        return self._status

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that there is a model to generate with, before training."""
        self.samples, self.num_validations = [], 0
        if isinstance(trainer.strategy, (FSDPStrategy, DeepSpeedStrategy)):
            raise OptionError(
                f"GenerateSamples cannot generate under {type(trainer.strategy).__name__}: use strategy='fastft_fsdp', "
                "or remove the callback."
            )
        _find_model(pl_module)
        self._find_tokenizer(trainer, pl_module)
        names = [type(logger).__name__ for logger in trainer.loggers if _log_function(logger) is not None]
        self._is_told = not names
        told = "no logger takes texts, so they are printed; RunReport has them too"
        self._status = Status(STATUS_NAME, "active", f"logged by {', '.join(names)}" if names else told)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate and log."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        # Imported on first use: callbacks must be importable without transformers.
        from lightning_fastft.hf.generation import add_stop, generate_texts
        from lightning_fastft.hf.sharding.state import is_sharded
        from lightning_fastft.moe.expert_axis import on_equal_tokens

        model = _find_model(pl_module)
        is_shared = is_sharded(model)
        if not (is_shared or trainer.is_global_zero):
            return
        data = getattr(trainer, "datamodule", None)
        end = getattr(data, "answer_end", None)
        stops = {} if end is None else {"eos_token_id": add_stop(model.generation_config, end).eos_token_id}
        device = trainer.strategy.root_device
        before = RandomState.capture(device)
        try:
            # A later backward could not use tensors that a layer caches in inference mode.
            with torch.inference_mode(False), torch.no_grad(), on_equal_tokens(model):
                answers = generate_texts(
                    model,
                    tokenizer=self._find_tokenizer(trainer, pl_module),
                    prompts=self.prompts,
                    max_new_tokens=self.max_new_tokens,
                    chat_template_kwargs=getattr(data, "chat_template_kwargs", None),
                    do_sample=False,
                    **stops,
                    # Ranks whose answers have ended take part in the collectives of the others.
                    synced_gpus=is_shared,
                )
        finally:
            before.restore(device)
        if trainer.is_global_zero:
            self._add(trainer, Samples(trainer.global_step, answers))

    def describe(self) -> dict[str, Any] | None:
        """Return prompts and answers as plain values, the newest first; None before the first validation."""
        if not self.samples:
            return None
        prompts = [
            {
                "prompt": _show_prompt(prompt),
                "answers": [{"step": found.step, "text": found.answers[place]} for found in reversed(self.samples)],
            }
            for place, prompt in enumerate(self.prompts)
        ]
        return {
            "max_new_tokens": self.max_new_tokens,
            "num_left": self.num_validations - len(self.samples),
            "prompts": prompts,
        }

    def _add(self, trainer: Trainer, found: Samples) -> None:
        self.samples.append(found)
        self.num_validations += 1
        if len(self.samples) > MOST_VALIDATIONS:
            del self.samples[1]
        prompts = [_show_prompt(prompt) for prompt in self.prompts]
        for prompt, answer in zip(prompts, found.answers) if self._is_told else ():
            rank_zero_info(printable(f"sample at step {found.step}: {prompt!r} -> {answer!r}"))
        for logger in trainer.loggers:
            log = _log_function(logger)
            if log is not None:
                log(logger, prompts, found, step=logged_step(trainer))

    def _find_tokenizer(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        data = getattr(trainer, "datamodule", None)
        # The tokenizer of the DataModule has the chat template of the training.
        places = ((self, "tokenizer"), (data, "trained_tokenizer"), (pl_module, "tokenizer"), (data, "tokenizer"))
        tokenizer = next((found for owner, name in places if (found := getattr(owner, name, None)) is not None), None)
        if tokenizer is None:
            raise OptionError(
                "GenerateSamples found no tokenizer in the LightningModule or DataModule. Give it one: "
                "GenerateSamples(prompts, tokenizer=...)."
            )
        return tokenizer_of(tokenizer)


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str) and prompt:
        return
    is_conversation = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    if not is_conversation or not all(isinstance(message, Mapping) and "role" in message for message in prompt):
        raise OptionError(
            f"A prompt is a text, or a list of messages with role and content, got {prompt!r}. For example "
            '[{"role": "user", "content": "What is 2 + 2?"}].'
        )


def _show_prompt(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """Return a prompt as text: of a conversation, one line for each message."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0].get("content", ""))
    return "\n".join(f"{message['role']}: {message.get('content', '')}" for message in prompt)


def _find_model(pl_module: LightningModule) -> Any:
    """Return the model of a LightningModule that generates.

    Raises:
        OptionError: There is no such model, or more than one.
    """
    from lightning_fastft.hf.families import find_causal_models

    model = getattr(pl_module, "model", None)
    if callable(getattr(model, "generate", None)):
        return model
    found = [model for _, model in find_causal_models(pl_module) if callable(getattr(model, "generate", None))]
    if len(found) != 1:
        raise OptionError(
            f"GenerateSamples needs one transformers model that generates in {type(pl_module).__name__}, and found "
            f"{len(found)}. Name it self.model, or remove the callback."
        )
    return found[0]


def _log_tensorboard(logger: TensorBoardLogger, prompts: Sequence[str], found: Samples, *, step: int) -> None:
    for number, (prompt, answer) in enumerate(zip(prompts, found.answers)):
        logger.experiment.add_text(f"samples/{number}", f"{prompt}\n\n{answer}", step)


def _log_wandb(logger: WandbLogger, prompts: Sequence[str], found: Samples, *, step: int) -> None:
    rows: list[Any] = [[found.step, prompt, answer] for prompt, answer in zip(prompts, found.answers)]
    logger.log_text(key="samples", columns=["step", "prompt", "answer"], data=rows, step=step)


def _log_mlflow(logger: MLFlowLogger, prompts: Sequence[str], found: Samples, *, step: int) -> None:
    text = "\n\n".join(f"{prompt}\n\n{answer}" for prompt, answer in zip(prompts, found.answers))
    logger.experiment.log_text(logger.run_id, text, f"samples/step={found.step}.txt")


def _log_comet(logger: CometLogger, prompts: Sequence[str], found: Samples, *, step: int) -> None:
    for number, (prompt, answer) in enumerate(zip(prompts, found.answers)):
        metadata = {"prompt": prompt, "number": number}
        logger.experiment.log_text(f"{prompt}\n\n{answer}", step=step, metadata=metadata)


def _log_function(logger: Any) -> Any:
    """Return the function that gives texts to a logger; None if it takes none."""
    functions = {
        TensorBoardLogger: _log_tensorboard,
        WandbLogger: _log_wandb,
        MLFlowLogger: _log_mlflow,
        CometLogger: _log_comet,
    }
    return next((function for kind, function in functions.items() if isinstance(logger, kind)), None)
