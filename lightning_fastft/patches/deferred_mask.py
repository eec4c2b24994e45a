"""Attention masks that are built when an attention layer without a batch context needs them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import eager_mask

from lightning_fastft.core.errors import BackendError
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.pack_mask import hides_tokens


class _MaskReadError(BackendError, AttributeError):
    """Error for model code that reads a tensor attribute of a deferred mask; ``hasattr`` still returns False."""


class DeferredMask:
    """Store the arguments of a mask, and build it when an attention layer without a batch context needs it.

    A mask function does not get the keywords of the model, so it cannot know whether there is a context.

    Args:
        arguments: Arguments that transformers passes to a mask function.
    """

    # transformers treats any mask that is not two-dimensional as complete.
    ndim = 4

    def __init__(self, arguments: dict[str, Any]) -> None:
        # A static cache changes its length in place before the first layer needs the mask.
        self._arguments: dict[str, Any] = {
            name: value.clone() if name.endswith("_offset") and torch.is_tensor(value) else value
            for name, value in arguments.items()
        }
        self._hides_tokens: bool | None = None
        self._built: dict[torch.dtype, torch.Tensor | None] = {}
        # The batch context, for attention that gets no keyword except its mask.
        self.context: BatchContext | None = None

    def with_context(self, context: BatchContext) -> DeferredMask:
        """Return this mask with a batch context."""
        other = object.__new__(DeferredMask)
        other.__dict__.update(self.__dict__)
        other.context = context
        return other

    def __getitem__(self, index: Any) -> Any:
        """Return the mask of a slice of queries.

        It is this mask for a slice of all queries (Gemma 4 takes one), and with a context, where its values are unused.
        """
        parts = index if isinstance(index, tuple) else (index,)
        if self.context is not None or all(part == slice(None) or part == slice(0, None) for part in parts):
            return self
        built = self.contiguous()
        if built is None:
            raise _MaskReadError("There is no mask to slice: attention is causal without one.")
        return built[index]

    def __getattr__(self, name: str) -> Any:
        # Called only for names that this class lacks. Protocols probe for dunders.
        if name.startswith("_"):
            raise AttributeError(name)
        raise _MaskReadError(
            f"This model reads the attention mask itself (its {name}), so its attention may not be plain causal and "
            "cannot be packed. "
            "Train it with one document per row and its own attention."
        )

    def find_obstacle(self, window: int | None, *, max_length: int) -> str:
        """Return how the mask differs from causal attention within documents for a layer with this window; an empty
        string if it does not.

        A window or chunk that no document exceeds has no effect.
        """
        if self._arguments.get("use_vmap") or "allow_is_bidirectional_skip" in self._arguments:
            return "is not causal everywhere"
        mask_window = self._arguments.get("local_size")
        narrow = [size if size is not None and size < max_length else None for size in (mask_window, window)]
        if narrow[0] != narrow[1]:
            return f"has a window or chunk of {mask_window} where the layer passes sliding_window={window}"
        return ""

    def hides_tokens(self, context: BatchContext) -> bool:
        """Return whether the caller's own mask hides tokens of documents (``hides_tokens``); found once per mask."""
        if self._hides_tokens is None:
            self._hides_tokens = hides_tokens(self._arguments.get("attention_mask"), context)
        return self._hides_tokens

    def contiguous(self) -> torch.Tensor | None:
        """Return the built mask; generation with a static cache calls this before the forward (transformers 5.23)."""
        dtype: torch.dtype = self._arguments["dtype"]
        return self.additive(dtype)

    def additive(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask of eager attention, shape (B, 1, Q, T), in this dtype; built once per dtype."""
        if dtype not in self._built:
            self._built[dtype] = eager_mask(**{**self._arguments, "dtype": dtype})
        return self._built[dtype]
