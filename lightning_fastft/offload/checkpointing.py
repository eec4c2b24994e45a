"""OffloadCheckpointing: the one switch for what happens to activations between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fastft.checks import check_choice
from lightning_fastft.errors import OptionError, SwapError
from lightning_fastft.status import Status

Policy = Literal["keep", "recompute"]
_POLICIES = ("keep", "recompute")
_LATER_POLICIES = ("offload", "auto")
STATUS_NAME = "activations"


class Ledger(Protocol):
    """Where instance changes are written down and undone (lightning_fastft.models.swap.SwapLedger)."""

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:  # noqa: ANN401 - any attribute of any instance
        """Set an attribute of one instance and remember the old value."""


class OffloadCheckpointing:
    """Decide per decoder layer whether its activations are kept or recomputed in the backward.

    Works through the layer's own checkpointing attributes (``gradient_checkpointing`` and ``_gradient_checkpointing_func``, as the decoder layers of
    transformers have them), so no class and no source is touched. Gradients are bit-equal for every policy when the kernels are deterministic. Inert
    in evaluation mode and where no gradients are recorded.

    Args:
        policy: "keep" holds every activation; "recompute" holds the input of each decoder layer and runs the layer again in the backward.

    Raises:
        OptionError: The policy is unknown, or not available yet ("offload", "auto").

    Example:
        >>> OffloadCheckpointing("recompute").describe()
        'recompute: the input of each decoder layer is held, the layer runs again in the backward'
    """

    def __init__(self, policy: Policy = "keep") -> None:
        if policy in _LATER_POLICIES:
            raise OptionError(f"policy={policy!r} is not available yet; this version has 'keep' and 'recompute'.")
        self.policy = check_choice("policy", policy, _POLICIES)

    def __repr__(self) -> str:
        return f"OffloadCheckpointing({self.policy!r})"

    def describe(self) -> str:
        """Return in one line what happens to activations."""
        if self.policy == "keep":
            return "keep: every activation is held, nothing is recomputed"
        return "recompute: the input of each decoder layer is held, the layer runs again in the backward"

    def attach(self, layers: Sequence[nn.Module], ledger: Ledger, *, stacks: Iterable[nn.Module] = ()) -> Status:
        """Put the policy into effect on these decoder layers, until the ledger is undone.

        Args:
            layers: Decoder layers with the attribute ``gradient_checkpointing``, in order.
            ledger: Where every change is written down.
            stacks: Modules around the layers that carry the same flag; it keeps them from building a key/value cache in training.

        Returns:
            What is active.

        Raises:
            SwapError: There is no layer, or one has no checkpointing attributes.
            OptionError: Policy "keep" meets a model that recomputes already: this plugin is the only switch.

        Cost:
            "recompute": one more forward of the layers per backward. No host synchronisation.
        """
        _check_layers(layers)
        stacks = list(stacks)
        checkpointed = [module for module in [*layers, *stacks] if getattr(module, "gradient_checkpointing", False)]
        if self.policy == "keep":
            if checkpointed:
                raise OptionError(
                    f"{type(checkpointed[0]).__name__} recomputes its activations already (gradient_checkpointing_enable() was called on the model), "
                    "and the policy here is 'keep'. Activation checkpointing has one switch: remove that call, and to recompute pass "
                    'activations=OffloadCheckpointing("recompute").'
                )
            return Status(STATUS_NAME, "active", self.describe())

        is_random = any(_is_random(module) for layer in layers for module in layer.modules())
        # Plain where no gradients are recorded: torch's checkpoint sees to that.
        run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=is_random)
        for module in [*layers, *stacks]:
            ledger.set_attribute(module, "_gradient_checkpointing_func", run_again)
            ledger.set_attribute(module, "gradient_checkpointing", True)
        taken_over = ", taken over from the model's own checkpointing" if checkpointed else ""
        return Status(STATUS_NAME, "active", f"{self.describe()}; {len(layers)} layers{taken_over}")

    def check_training_mode(self, layers: Sequence[nn.Module]) -> None:
        """Refuse layers in evaluation mode, where their own code never recomputes.

        Raises:
            OptionError: The policy is "recompute" and a layer is in evaluation mode.
        """
        idle = [layer for layer in layers if not layer.training]
        if self.policy == "recompute" and idle:
            raise OptionError(
                f"{len(idle)} of {len(layers)} decoder layers ({type(idle[0]).__name__}) are in evaluation mode, where transformers recomputes "
                "nothing: it loads models in that mode and Lightning keeps it: call .train() on the model once after loading it."
            )


def _check_layers(layers: Sequence[nn.Module]) -> None:
    if not layers:
        raise SwapError("There is no decoder layer to attach activation checkpointing to.")
    for number, layer in enumerate(layers):
        if not hasattr(layer, "gradient_checkpointing"):
            raise SwapError(
                f"Decoder layer {number} ({type(layer).__name__}) has no attribute 'gradient_checkpointing'; layers must have the checkpointing "
                "attributes of transformers' GradientCheckpointingLayer."
            )


def _is_random(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training: dropout, or router noise, above 0."""
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return True
    return any(isinstance(value, float) and value > 0 and ("dropout" in name or "jitter" in name) for name, value in vars(module).items())
