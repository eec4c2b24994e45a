"""Lazy logits: hidden states and an output layer that replace logits until code uses them as a tensor.

Axes: R labelled rows of the context (padded to a bucket), K tokens of a stored teacher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_fastft.core.autocast import is_autocast_on
from lightning_fastft.core.errors import ContextError
from lightning_fastft.kernels.cross_entropy.op import LogProbs, labelled_log_probs
from lightning_fastft.kernels.divergence.op import (
    Tail,
    labelled_divergence,
    labelled_topk_divergence,
    likeliest_tokens,
)
from lightning_fastft.kernels.divergence.reference import Kind
from lightning_fastft.kernels.logit_rows import Head
from lightning_fastft.packing.context import BatchContext


class LazyLogits:
    """Represent logits that are not computed yet by hidden states, output layer and recorded operations.

    Multiplication and division by numbers, ``torch.tanh`` and ``float()`` are recorded. Every other use (indexing, an
    attribute, a torch function) computes the logits once, exactly like the model, and uses that tensor: with or without
    gradients and autocast as in the model's forward, whatever is set where they are read.

    ``log_probs``, ``divergence`` and ``topk_divergence`` are for losses on the labelled rows of the context: one value
    per row, shape (R,), 0 from ``context.num_labelled`` on, differentiable and without full logits. A loss inside the
    model's forward (``context.objective``) sees the full weight even if it is sharded.
    """

    def __init__(
        self, *, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, context: BatchContext
    ) -> None:
        self.hidden = hidden
        self.weight = weight
        self.bias = bias
        self.context = context
        # Sums over the labelled tokens, set by the loss function without gradients: negative log-likelihood, hits and
        # number. They are 0-dim tensors on the device of the logits; the number is an int if the context has it.
        self.statistics: tuple[torch.Tensor, torch.Tensor, int | torch.Tensor] | None = None
        # The cross-entropy that the loss function computed, before the model adds auxiliary losses; no graph.
        self.cross_entropy: torch.Tensor | None = None
        self._mode = _Mode(hidden.device.type)
        sources = [each for each in (hidden, weight, bias) if each is not None]
        self._source_versions = [(each, _version_of(each)) for each in sources]
        self._operations: tuple[tuple[Callable[..., torch.Tensor], tuple[Any, ...]], ...] = ()
        self._tensor: torch.Tensor | None = None
        self._tensor_version: int | None = None
        # The factor on the raw logits, inside the soft cap: logits are softcap * tanh(scale * raw / softcap).
        self.scale = 1.0
        self.softcap: float | None = None

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the logits."""
        if any(function is torch.Tensor.float for function, _ in self._operations):
            return torch.float32
        return self._mode.autocast_dtype or self.hidden.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the logits."""
        return self.hidden.device

    def tensor(self) -> torch.Tensor:
        """Return the logits as a tensor, computed on the first call.

        Raises:
            ContextError: The logits belong to a part of a pack, or the output layer was changed after the forward.

        Cost:
            All rows times the vocabulary, as without this class.
        """
        self._check_whole()
        if self._tensor is None:
            self._check_sources()
            with self._mode.entered():
                logits = nn.functional.linear(self.hidden, self.weight, self.bias)
                for function, arguments in self._operations:
                    logits = function(logits, *arguments)
            self._tensor, self._tensor_version = logits, _version_of(logits)
        return self._tensor

    @property
    def is_changed(self) -> bool:
        """Return whether the tensor was computed and then changed in place, as by ``logits.div_(2)``."""
        return self._tensor is not None and _was_written(self._tensor, since=self._tensor_version)

    def log_probs(self, *, temperature: float = 1.0, with_entropy: bool = False) -> LogProbs:
        """Return the log-probability of each labelled row's target, and the entropy of the row if asked."""
        self._check_whole()
        return labelled_log_probs(
            self.as_head().with_temperature(temperature),
            row_R=self.context.labelled_row_R,
            target_R=self.context.labelled_target_R,
            num_rows=self.context.num_labelled,
            with_entropy=with_entropy,
        )

    def divergence(
        self,
        teacher: LazyLogits | Head,
        *,
        kind: Kind = "forward_kl",
        beta: float = 0.5,
        temperature: float = 1.0,
        vocab_size: int | None = None,
    ) -> torch.Tensor:
        """Return the divergence from a teacher's distribution on each labelled row (``labelled_divergence``).

        Args:
            teacher: Lazy logits of the teacher for the same batch, or a head whose states are those of the labelled
                rows alone (a stored teacher). It gets no gradient.
            kind: "forward_kl", "reverse_kl" or "jsd".
            beta: Share of the teacher in the mixture of "jsd".
            temperature: Divides the logits of both, after their soft caps.
            vocab_size: Number of leading columns to compare, if student and teacher pad their embeddings differently.

        Raises:
            ContextError: The teacher's logits belong to another batch.
        """
        self._check_whole()
        if isinstance(teacher, LazyLogits) and teacher.context is not self.context:
            raise ContextError("Student and teacher have logits of different batches. Call both with the same batch.")
        return labelled_divergence(
            self.as_head(),
            teacher if isinstance(teacher, Head) else teacher.as_head(),
            row_R=self.context.labelled_row_R,
            num_rows=self.context.num_labelled,
            kind=kind,
            beta=beta,
            temperature=temperature,
            vocab_size=vocab_size,
            is_teacher_stored=isinstance(teacher, Head),
        )

    def topk_divergence(
        self,
        teacher_id_RK: torch.Tensor,
        teacher_log_prob_RK: torch.Tensor,
        *,
        temperature: float = 1.0,
        tail: Tail = "bucket",
    ) -> torch.Tensor:
        """Return KL(teacher || student) on each labelled row from stored tokens (``labelled_topk_divergence``)."""
        self._check_whole()
        return labelled_topk_divergence(
            self.as_head(),
            teacher_id_RK=teacher_id_RK,
            teacher_log_prob_RK=teacher_log_prob_RK,
            row_R=self.context.labelled_row_R,
            num_rows=self.context.num_labelled,
            temperature=temperature,
            tail=tail,
        )

    def likeliest(self, top_k: int, *, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most likely tokens of each labelled row and their log-probabilities (``likeliest_tokens``)."""
        self._check_whole()
        return likeliest_tokens(
            self.as_head(),
            row_R=self.context.labelled_row_R,
            num_rows=self.context.num_labelled,
            top_k=top_k,
            temperature=temperature,
        )

    def as_head(self) -> Head:
        """Return the head for the kernels: flat hidden states, output layer, scale and soft cap.

        The output layer has no gradient if the forward had none.

        Raises:
            ContextError: The output layer was changed after the forward, or the logits were changed in place.
        """
        self._check_sources()
        if self.is_changed:
            raise ContextError(
                "The logits were changed in place, and this loss is computed from hidden states and the output layer. "
                "Write logits = logits / 2 instead of logits.div_(2), or compute the loss from logits.tensor()."
            )
        hidden_TD = self.hidden.reshape(-1, self.hidden.shape[-1])
        weight, bias = self.weight, self.bias
        if not self._mode.has_gradients:
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        return Head(hidden_TD, weight, bias, self.scale, self.softcap)

    def _check_sources(self) -> None:
        """Raise if a tensor that the logits are computed from was changed in place, as by a step of the optimizer."""
        if any(_was_written(each, since=version) for each, version in self._source_versions):
            raise ContextError(
                "The logits of a packed batch were read for the first time after the output layer or its input was "
                "changed, as by optimizer.step(). Read them before, for example with logits.tensor(), or call the "
                "model with output_logits=True."
            )

    def _check_whole(self) -> None:
        """Raise on a part of a pack: its last row is labelled in the next part, and its loss is a part of a sum."""
        if self.context.part is not None:
            raise ContextError(
                "The logits of a part of a pack were read outside of the model's own loss. Under context parallelism "
                "use model(**batch).loss, or set context_parallel=1."
            )

    def _record(self, function: Callable[..., torch.Tensor], *arguments: Any) -> LazyLogits:
        other = object.__new__(LazyLogits)
        other.__dict__.update(self.__dict__)
        other._operations = (*self._operations, (function, arguments))
        other._tensor = None
        return other

    def _scaled(self, function: Callable[..., torch.Tensor], number: Any, factor: float) -> Any:
        # A tensor that exists may have been changed in place.
        if self._tensor is not None:
            return function(self._tensor, number)
        other = self._record(function, number)
        other.scale = self.scale * factor
        if self.softcap is not None:
            other.softcap = self.softcap * factor
        return other

    def __mul__(self, other: Any) -> Any:
        if _is_plain_factor(other):
            return self._scaled(torch.mul, other, float(other))
        return self.tensor() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if _is_plain_factor(other):
            return self._scaled(torch.div, other, 1.0 / float(other))
        return self.tensor() / other

    def _tanh(self) -> Any:
        if self.softcap is not None or self._tensor is not None:
            return torch.tanh(self.tensor())
        other = self._record(torch.tanh)
        other.softcap = 1.0
        return other

    def float(self) -> Any:
        """Record a cast to fp32; the loss computes in fp32 anyway."""
        return self._record(torch.Tensor.float) if self._tensor is None else self._tensor.float()

    def contiguous(self) -> LazyLogits:
        """Return self, because computed logits are contiguous."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record tanh and scalar products; call every other function with the tensor."""
        kwargs = kwargs or {}
        if func is torch.tanh and len(args) == 1 and not kwargs and isinstance(args[0], LazyLogits):
            return args[0]._tanh()
        if func in (torch.mul, torch.div) and len(args) == 2 and not kwargs and isinstance(args[0], LazyLogits):
            return args[0] * args[1] if func is torch.mul else args[0] / args[1]
        args, kwargs = torch.utils._pytree.tree_map_only(LazyLogits, LazyLogits.tensor, (args, kwargs))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Only called for names that this class lacks. Protocols look up dunders, which must not compute the logits.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __repr__(self) -> str:
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, scale={self.scale}, softcap={self.softcap})"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor()[index]

    def __iter__(self) -> Any:
        return iter(self.tensor())

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tensor()[index] = value

    def __add__(self, other: Any) -> Any:
        return self.tensor() + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.tensor() - other

    def __rsub__(self, other: Any) -> Any:
        return other - self.tensor()

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.tensor()

    def __pow__(self, other: Any) -> Any:
        return self.tensor() ** other

    def __neg__(self) -> torch.Tensor:
        return -self.tensor()

    def __matmul__(self, other: Any) -> Any:
        return self.tensor() @ other

    def __gt__(self, other: Any) -> Any:
        return self.tensor() > other

    def __lt__(self, other: Any) -> Any:
        return self.tensor() < other

    def __ge__(self, other: Any) -> Any:
        return self.tensor() >= other

    def __le__(self, other: Any) -> Any:
        return self.tensor() <= other

    def __eq__(self, other: Any) -> Any:
        return self.tensor() == other

    def __ne__(self, other: Any) -> Any:
        return self.tensor() != other

    # By identity, like a tensor: == compares elements.
    __hash__ = object.__hash__


class _Mode:
    """The gradient, inference and autocast modes at the time of its creation."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.has_gradients = torch.is_grad_enabled()
        self.is_inference = torch.is_inference_mode_enabled()
        self.autocast_dtype = torch.get_autocast_dtype(device_type) if is_autocast_on(device_type) else None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Restore these modes inside a with block."""
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled() is not self.is_inference:
                stack.enter_context(torch.inference_mode(self.is_inference))
            stack.enter_context(torch.set_grad_enabled(self.has_gradients))
            if self.autocast_dtype is not None or is_autocast_on(self.device_type):
                stack.enter_context(
                    torch.autocast(self.device_type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None)
                )
            yield


def _version_of(tensor: torch.Tensor) -> int | None:
    """Return the number of in-place changes; None where torch counts none."""
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def _was_written(tensor: torch.Tensor, *, since: int | None) -> bool:
    return since is not None and _version_of(tensor) not in (None, since)


def _is_plain_factor(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0
