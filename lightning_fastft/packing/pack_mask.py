"""PackMask: the attention mask of a packed batch, which refuses a transformers model without packed attention."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, cast

import torch

from lightning_fastft.core.errors import ContextError
from lightning_fastft.packing.context import BatchContext

_MASK_BUILDERS = "transformers.masking_utils"
_TRACER = "torch._dynamo.variables."
# Methods whose result is the same mask. They do not count as reading it; nor do functions that return no tensor.
_COPIES = frozenset(
    [
        "__getitem__",
        "bool",
        "clone",
        "contiguous",
        "cpu",
        "cuda",
        "detach",
        "int",
        "long",
        "pin_memory",
        "reshape",
        "to",
        "type",
        "unsqueeze",
        "view",
    ]
)

HIDDEN_MESSAGE = (
    "attention_mask hides tokens inside the documents of a packed batch, and packed attention would ignore it: the "
    "batch context alone says what a token sees. Pass the attention_mask of the batch, or remove these tokens before "
    "packing."
)


def hides_tokens(mask: object, context: BatchContext) -> bool:
    """Return whether a two-dimensional mask that is not that of the batch has a zero before the pad tail.

    Cost:
        None for the mask of the batch; one host sync for another one.
    """
    # A planned step runs on the meta device, where a mask has no values.
    if not isinstance(mask, torch.Tensor) or isinstance(mask, PackMask) or mask.ndim != 2 or mask.is_meta:
        return False
    return not bool(mask[:, : context.num_real_tokens].all())


class PackMask(torch.Tensor):
    """The mask of a packed batch: 0 at the pad tail, else 1. It says nothing about documents; only the context does.

    A model with packed attention passes the mask on without reading it. A model without it builds its own mask from
    this one, and the documents of the pack would see each other: that raises. Code outside transformers reads the
    mask as any other tensor.

    Example:
        >>> context = BatchContext(lengths=[2, 1], label_T=torch.tensor([-100, 7, -100]), num_items=1)
        >>> int(PackMask.of(torch.ones(1, 3), context).sum())
        3
    """

    context: BatchContext

    @classmethod
    def of(cls, mask_1T: torch.Tensor, context: BatchContext) -> PackMask:
        """Return a view of a mask that belongs to a context."""
        mask = mask_1T.as_subclass(cls)
        mask.context = context
        return mask

    def __deepcopy__(self, memo: dict[int, Any]) -> PackMask:
        # torch copies subclasses only where new_empty returns one.
        return PackMask.of(self.as_subclass(torch.Tensor).clone(), copy.deepcopy(self.context, memo))

    @classmethod
    # Operations on the mask run outside of compiled graphs, in which the caller is not visible.
    @torch.compiler.disable
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute on the plain tensor.

        Raises:
            ContextError: transformers reads the values, to build a mask or before any layer read the context.
        """
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor):
            return result
        mask = next((value for value in args if isinstance(value, PackMask)), None)
        if mask is None or mask.context.is_in_prepared_forward:
            return result
        if getattr(func, "__name__", "") in _COPIES and result.numel() == mask.numel():
            return PackMask.of(result, mask.context)
        # A single document cannot see another one.
        if mask.context.lengths[0] == mask.context.whole.num_real_tokens:
            return result
        reader = _find_reader()
        if reader == _MASK_BUILDERS or (reader.startswith("transformers") and mask.context.num_reads == 0):
            raise ContextError(
                "A transformers model without packed attention built its mask from a packed batch, so the "
                'documents of the batch would see each other. Train it with Trainer(strategy="fastft") or '
                "Trainer(callbacks=[PackedTraining()]), or in a loop of your own with FastFTFabric; a model without "
                'recurrent layers may also be loaded with attn_implementation="fastft" after '
                "lightning_fastft.register(), and called as model(**batch)."
            )
        return result


def _find_reader() -> str:
    """Return the name of the module that called a function of torch; "" if torch.compile looks at its inputs."""
    frame = sys._getframe(2)
    name = cast("str", frame.f_globals.get("__name__", ""))
    while frame.f_back is not None and name.split(".")[0] == "torch":
        if name.startswith(_TRACER):
            return ""
        frame = frame.f_back
        name = cast("str", frame.f_globals.get("__name__", ""))
    return name
