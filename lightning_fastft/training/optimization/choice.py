"""The optimizer and the schedule of a tuner, from its options."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_fastft.core.errors import OptionError
from lightning_fastft.training.optimization.adamw_state import is_steppable
from lightning_fastft.training.optimization.muon import MuonAdamW
from lightning_fastft.training.optimization.schedules import group_parameters, learning_rate_schedule
from lightning_fastft.training.optimizer import FusedAdamW

if TYPE_CHECKING:
    from lightning.pytorch.cli import OptimizerCallable
    from torch.optim import Optimizer

DEFAULT_LEARNING_RATE = 2e-4


def find_fast_parameters(named: Iterable[tuple[str, nn.Parameter]]) -> list[nn.Parameter]:
    """Return the trained parameters that LoRA+ gives the larger rate: B of each adapter, and vectors, as in PEFT.

    Source:
        LoRA+, arXiv 2402.12354; the groups of peft.optimizers.create_loraplus_optimizer. PEFT gives adapters of
        embeddings a fixed rate, here they have the plain one.
    """
    return [value for name, value in named if value.requires_grad and ("lora_B" in name or value.ndim == 1)]


def find_undecayed_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the biases and the weights of norms in a module, which have no weight decay whatever their shape.

    Experts hold their biases as one matrix (gpt-oss), and norms of heads have a row for each head (Cohere).

    Source:
        The names that transformers.Trainer excludes.
    """
    return [
        value
        for owner in module.modules()
        for name, value in owner.named_parameters(recurse=False)
        if "bias" in name or "norm" in type(owner).__name__.lower()
    ]


def choose_optimizer(
    parameters: Sequence[nn.Parameter],
    *,
    learning_rate: float | None,
    weight_decay: float | None,
    wants_masters: bool,
    trainer: Trainer,
    undecayed: Collection[nn.Parameter] = (),
    fast: Sequence[nn.Parameter] = (),
    fast_ratio: float = 1.0,
) -> Optimizer:
    """Return ``FusedAdamW`` where it can step all parameters, else torch.optim.AdamW, fused where it can be.

    Rates are 2e-4 and decay is 0 unless given; ``undecayed`` parameters and vectors never have one, and ``fast``
    parameters have a rate fast_ratio times as large (LoRA+).

    Raises:
        OptionError: The masters asked for are not possible.
    """
    rate = DEFAULT_LEARNING_RATE if learning_rate is None else learning_rate
    groups = group_parameters(
        parameters,
        learning_rate=rate,
        weight_decay=weight_decay or 0.0,
        undecayed=undecayed,
        fast=fast,
        fast_rate=rate * fast_ratio,
    )
    # Lightning's loss scaler cannot clip gradients of a fused optimizer (2.6.6).
    is_fused = all(parameter.device.type in ("cuda", "cpu") for parameter in parameters) and trainer.scaler is None
    is_known = (
        isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy))
        and len({parameter.device for parameter in parameters}) == 1
    )
    is_served = is_fused and is_known and all(map(is_steppable, parameters))
    if wants_masters and not is_served:
        raise OptionError(
            "master_dtype='float32' needs whole, plain bf16 or fp32 weights on one device: use "
            "Trainer(strategy='fastft_fsdp')."
        )
    # Without masters, moments of bf16 weights stay bf16, as master_dtype promises and the plan of memory counts.
    if is_served and (wants_masters or all(parameter.dtype is torch.float32 for parameter in parameters)):
        return FusedAdamW(groups, master_weights=wants_masters)
    return torch.optim.AdamW(groups, fused=is_fused)


def call_factory(
    factory: OptimizerCallable,
    parameters: Sequence[nn.Parameter],
    *,
    learning_rate: float | None,
    weight_decay: float | None,
    wants_masters: bool,
    model_name: str,
    undecayed: Collection[nn.Parameter] = (),
    of_tokens: Collection[nn.Parameter] = (),
    fast: Sequence[nn.Parameter] = (),
    fast_ratio: float = 1.0,
) -> Optimizer:
    """Return the user's own optimizer; ``MuonAdamW`` steps undecayed parameters and those of_tokens with AdamW.

    Raises:
        OptionError: It refuses the parameters, or has no weight decay where one is given, ``master_dtype`` asks for
            masters in the tuner's own optimizer, or LoRA+ has no learning rate to multiply.
    """
    if fast and learning_rate is None:
        raise OptionError(
            "loraplus_lr_ratio multiplies learning_rate, which is not set together with optimizer. Set "
            "FineTuner(learning_rate=...)."
        )
    if wants_masters:
        raise OptionError(
            "master_dtype='float32' holds masters in FineTuner's own optimizer, and another one was given: remove it, "
            "or give FusedAdamW or MuonAdamW with master_weights=True and leave master_dtype at 'auto'."
        )
    groups = group_parameters(
        parameters,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        undecayed=undecayed,
        fast=fast,
        fast_rate=None if learning_rate is None else learning_rate * fast_ratio,
    )
    try:
        optimizer = factory(groups)
    except OptionError:
        # Of our own optimizers, about their options.
        raise
    except ValueError as error:
        raise OptionError(
            f"The optimizer refused the {len(parameters)} trainable tensors of {model_name}: {error} torch.optim.Muon "
            "trains matrices alone, such as adapters (lora). For every weight use lightning_fastft.optim.MuonAdamW, "
            "which steps embeddings, the output layer, norms and biases with AdamW."
        ) from error
    if isinstance(optimizer, MuonAdamW):
        optimizer.use_adamw([*undecayed, *of_tokens])
    # PyTorch keeps unknown options of a group without a word.
    if weight_decay and optimizer.defaults and "weight_decay" not in optimizer.defaults:
        raise OptionError(
            f"weight_decay={weight_decay} has no effect on {type(optimizer).__name__}, which has no such option. "
            "Remove it, or use another optimizer."
        )
    return optimizer


def make_schedule(
    name: str, *, num_steps: float, warmup_share: float, warmup_steps: int | None, end_share: float
) -> Callable[[float], float]:
    """Return the schedule of a run: the function from optimizer step to share of the peak learning rate.

    Args:
        name: "cosine", "linear" or "constant".
        num_steps: Optimizer steps of the run; infinite or negative if it has no end.
        warmup_share: Share of the steps in the warm-up.
        warmup_steps: Steps of the warm-up; replaces warmup_share.
        end_share: Share of the peak at the end.

    Raises:
        OptionError: The schedule needs the length of a run that has none.
    """
    is_endless = math.isinf(num_steps) or num_steps < 0
    if is_endless and (name != "constant" or (warmup_steps is None and warmup_share > 0)):
        raise OptionError(
            f"scheduler={name!r} needs the length of the run: set max_steps or max_epochs, or 'constant' with "
            "warmup_steps."
        )
    whole_steps = 0 if is_endless else int(num_steps)
    num_warmup_steps = math.ceil(warmup_share * whole_steps) if warmup_steps is None else warmup_steps
    return learning_rate_schedule(name, num_steps=whole_steps, num_warmup_steps=num_warmup_steps, end_share=end_share)


def check_schedule_length(trainer: Trainer, name: str, *, num_steps: float) -> None:
    """Check that a falling schedule ends with the run; warn in a second fit of a Trainer that it begins anew and does
    not reach its end.

    Raises:
        OptionError: A callback changes the number of steps of an epoch.
    """
    num_done = trainer.global_step
    callbacks: list[object] = trainer.callbacks  # type: ignore[attr-defined]
    changing = [each.scheduling for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
    if name != "constant" and num_steps != trainer.max_steps and any(set(each.values()) != {1} for each in changing):
        raise OptionError(
            f"GradientAccumulationScheduler({changing[0]}) changes the number of optimizer steps, and "
            f"scheduler={name!r} would not end with the run. Set Trainer(accumulate_grad_batches=...) instead, or "
            "Trainer(max_steps=...)."
        )
    if name != "constant" and trainer.ckpt_path is None and 0 < num_done < num_steps:
        rank_zero_warn(
            f"This Trainer has trained {num_done} of {num_steps:.0f} optimizer steps, and its next fit has a new "
            f"optimizer and a new {name!r} schedule, which ends {num_done} steps too early. To continue, save a "
            "checkpoint and give it to fit as ckpt_path. For a new run, make a new Trainer."
        )
