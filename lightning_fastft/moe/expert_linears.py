"""One linear of every expert on routed rows: its weight, its adapter, and the products of forward and backward.

Axes: N routed rows, E experts, I input columns, O output columns, R adapter rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.hf.expert_nf4 import QuantisedWeight
from lightning_fastft.kernels.expert_pack.op import exchange_ends
from lightning_fastft.kernels.grouped_mm.op import grouped_mm, grouped_weight_grad
from lightning_fastft.kernels.grouped_mm.reference import Rows, rows_of

if TYPE_CHECKING:
    from lightning_fastft.moe.fp8_experts import Fp8Stack


class ExpertAdapter(NamedTuple):
    """LoRA on a stack of expert weights: ``x @ weight[e] + scale * (x @ a[e]) @ b[e]``.

    Without low-precision copies each pass casts and transposes the factors. With copies the factors are not read and
    only receive gradients, in their own dtype. Autograd raises if a copy changes between forward and backward.

    Args:
        a_EIR: Shape (E, I, R); any floating dtype (the product runs in the dtype of the tokens); any view.
        b_ERO: Shape (E, R, O); as a_EIR.
        scale: Factor on the low-rank product.
        copy_a_ERI: a with its last two axes transposed. Shape (E, R, I), contiguous; dtype of the tokens. Given
            together with copy_b_ERO.
        copy_b_ERO: b. Shape (E, R, O), contiguous; dtype of the tokens.
    """

    a_EIR: torch.Tensor
    b_ERO: torch.Tensor
    scale: float
    copy_a_ERI: torch.Tensor | None = None
    copy_b_ERO: torch.Tensor | None = None


class ExpertLinear(NamedTuple):
    """One linear of every expert.

    Args:
        weight_EIO: Weight of ``x @ weight[e]``. Shape (E, I, O); any view with a stride of 1 along I or O, or in
            NF4. A wider dtype than that of the tokens (fp32 masters) is cast for each product; gradients have it.
        bias_EO: Shape (E, O), dtype of the weight; None for none.
        adapter: LoRA on the weight; None for none.
        fp8: The same weight in fp8, frozen, for both products; None to multiply in the dtype of the tokens.
    """

    weight_EIO: torch.Tensor | QuantisedWeight
    bias_EO: torch.Tensor | None = None
    adapter: ExpertAdapter | None = None
    fp8: Fp8Stack | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The differentiable tensors: weight, bias, A and B."""
        factors = (None, None) if self.adapter is None else (self.adapter.a_EIR, self.adapter.b_ERO)
        return self.weight_EIO, self.bias_EO, *factors  # type: ignore[return-value]

    @property
    def copies(self) -> tuple[torch.Tensor | None, ...]:
        """The low-precision copies as views with the shapes of the factors."""
        if self.adapter is None or self.adapter.copy_a_ERI is None:
            return None, None
        return self.adapter.copy_a_ERI.transpose(1, 2), self.adapter.copy_b_ERO

    @property
    def scale(self) -> float:
        """The factor on the low-rank product; 0 without an adapter."""
        return 0.0 if self.adapter is None else self.adapter.scale


def check_copies(name: str, adapter: ExpertAdapter | None, *, dtype: torch.dtype) -> None:
    """Raise on low-precision copies that would be cast or copied in each pass, or belong to another adapter."""
    if adapter is None or (adapter.copy_a_ERI is None and adapter.copy_b_ERO is None):
        return
    num_experts, num_inputs, rank = adapter.a_EIR.shape
    expected = {"copy_a_ERI": (num_experts, rank, num_inputs), "copy_b_ERO": tuple(adapter.b_ERO.shape)}
    for factor, copy in zip(expected, (adapter.copy_a_ERI, adapter.copy_b_ERO)):
        if copy is None or tuple(copy.shape) != expected[factor] or copy.dtype is not dtype or not copy.is_contiguous():
            given = "missing" if copy is None else f"{tuple(copy.shape)} in {copy.dtype} with strides {copy.stride()}"
            raise ShapeError(
                f"{factor} of {name} is {given}; it must be {expected[factor]} in {dtype}, contiguous. Give both "
                "low-precision copies or none."
            )


class WantedGradient(NamedTuple):
    """Dtype and memory order of the gradient of one parameter."""

    dtype: torch.dtype
    is_expert_last: bool = False
    # Stored as (E, O, I).
    is_transposed: bool = False


class CastLinear(NamedTuple):
    """One linear in the layouts of the grouped products: contiguous factors, and all but the weight in the dtype of the
    tokens.
    """

    weight_EIO: torch.Tensor | QuantisedWeight
    bias_EO: torch.Tensor | None
    a_ERI: torch.Tensor | None
    b_ERO: torch.Tensor | None
    scale: float
    fp8: Fp8Stack | None

    def product(self, x_NI: Rows, end_E: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the output, and the adapter's low-rank rows if there is an adapter."""
        if self.a_ERI is None:
            return (self._multiply(x_NI, end_E, bias_EO=self.bias_EO),)
        low_NR = grouped_mm(x_NI, self.a_ERI.transpose(1, 2), end_E)
        addend: dict[str, Any] = {"low_NR": low_NR, "low_ERO": self.b_ERO, "low_scale": self.scale}
        return self._multiply(x_NI, end_E, bias_EO=self.bias_EO, **addend), low_NR

    def input_gradient(self, d_NO: Rows, end_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradient of the input, and of the adapter's low-rank rows without its scale."""
        if self.a_ERI is None or self.b_ERO is None:
            return self._multiply(d_NO, end_E, is_backward=True), None
        d_low_NR = grouped_mm(d_NO, self.b_ERO.transpose(1, 2), end_E, is_checked=False)
        addend: dict[str, Any] = {"low_NR": d_low_NR, "low_ERO": self.a_ERI, "low_scale": self.scale}
        return self._multiply(d_NO, end_E, is_backward=True, **addend), d_low_NR

    def parameter_gradients(
        self,
        x_NI: Rows,
        d_NO: Rows,
        end_E: torch.Tensor,
        *,
        low_NR: torch.Tensor | None,
        d_low_NR: torch.Tensor | None,
        weight_N: torch.Tensor | None = None,
        needs: Sequence[bool],
        wanted: Sequence[WantedGradient | None],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of weight, bias, A and B; None where not needed.

        Args:
            x_NI: Input.
            d_NO: Gradient of the output.
            end_E: One past the last row of each expert.
            low_NR: Low-rank rows of the adapter, shape (N, R); None computes them again.
            d_low_NR: Gradient of these rows without the adapter's scale; None without an adapter.
            weight_N: Factor of each row on the gradient of the output; None for 1.
            needs: Whether each gradient is needed.
            wanted: Dtype and memory order of each gradient.
        """

        def gradient(left: Rows, right: Rows, *, index: int, scale: float = 1.0) -> torch.Tensor:
            want = wanted[index]
            assert want is not None
            grad = grouped_weight_grad(
                left, right, end_E, dtype=want.dtype, scale=scale, row_weight_N=weight_N, is_checked=False
            )
            # Autograd keeps a gradient whose memory order matches its parameter, and copies any other.
            return exchange_ends(grad, is_checked=False).permute(2, 1, 0) if want.is_expert_last else grad

        weight = bias = a = b = None
        if needs[0]:
            is_transposed = wanted[0] is not None and wanted[0].is_transposed
            weight = gradient(d_NO, x_NI, index=0).transpose(1, 2) if is_transposed else gradient(x_NI, d_NO, index=0)
        if needs[1]:
            bias = gradient(rows_of(d_NO).new_ones(d_NO.shape[0], 1), d_NO, index=1)[:, 0]
        if needs[2]:
            assert d_low_NR is not None
            a = gradient(d_low_NR, x_NI, index=2, scale=self.scale).transpose(1, 2)
        if needs[3]:
            assert self.a_ERI is not None
            if low_NR is None:
                low_NR = grouped_mm(x_NI, self.a_ERI.transpose(1, 2), end_E, is_checked=False)
            b = gradient(low_NR, d_NO, index=3, scale=self.scale)
        return [weight, bias, a, b]

    def _multiply(self, rows: Rows, end_E: torch.Tensor, *, is_backward: bool = False, **addend: Any) -> torch.Tensor:
        """Return the product of rows and the weight, or its transpose, plus the addend."""
        if self.fp8 is not None:
            return self.fp8.product(rows, end_E, is_backward=is_backward, **addend)
        weight_EIO = dense_weight(self.weight_EIO, dtype=rows_of(rows).dtype)
        weight_EIO = weight_EIO.transpose(1, 2) if is_backward else weight_EIO
        return grouped_mm(rows, weight_EIO, end_E, is_checked=not is_backward, **addend)


def cast_linear(
    weight_EIO: torch.Tensor | None,
    bias_EO: torch.Tensor | None,
    a_EIR: torch.Tensor | None,
    b_ERO: torch.Tensor | None,
    *,
    scale: float,
    fp8: Fp8Stack | None,
    dtype: torch.dtype,
) -> CastLinear:
    """Return a linear with its factors in dtype.

    Low-precision copies already have this dtype; other factors are cast in each pass and not kept.
    """
    assert weight_EIO is not None
    a_ERI = None
    if a_EIR is not None and b_ERO is not None:
        a_ERI, b_ERO = _lay_out(a_EIR.transpose(1, 2), dtype=dtype), _lay_out(b_ERO, dtype=dtype)
    return CastLinear(weight_EIO, None if bias_EO is None else bias_EO.to(dtype), a_ERI, b_ERO, scale, fp8)


def _lay_out(factor: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return a factor of shape (E, R, columns) in dtype, contiguous; the tensor itself if it is already."""
    if _is_expert_last(factor):
        return exchange_ends(factor.permute(2, 1, 0), dtype=dtype, is_checked=False)
    # One kernel casts and lays out; ``to`` alone returns a factor of this dtype in any order.
    return factor.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _is_transposed(weight_EIO: torch.Tensor | QuantisedWeight) -> bool:
    """Return whether the memory order of an (E, I, O) weight is (E, O, I)."""
    is_dense = isinstance(weight_EIO, torch.Tensor) and not weight_EIO.is_contiguous()
    return is_dense and weight_EIO.transpose(1, 2).is_contiguous()  # type: ignore[union-attr]


def _is_expert_last(factor: torch.Tensor) -> bool:
    """Return whether the memory order of an (E, R, columns) factor is (columns, R, E), as in PEFT's second factor."""
    return not factor.is_contiguous() and factor.permute(2, 1, 0).is_contiguous()


def wanted_gradients(parameters: Sequence[torch.Tensor | None]) -> list[WantedGradient | None]:
    """Return dtype and memory order of the gradients of ``ExpertLinear.tensors``; None for a missing tensor."""
    weight_EIO, bias_EO, a_EIR, b_ERO = parameters
    factors = (None if a_EIR is None else a_EIR.transpose(1, 2), b_ERO)
    return [
        None if weight_EIO is None else WantedGradient(weight_EIO.dtype, is_transposed=_is_transposed(weight_EIO)),
        None if bias_EO is None else WantedGradient(bias_EO.dtype),
        *(
            None if factor is None else WantedGradient(factor.dtype, is_expert_last=_is_expert_last(factor))
            for factor in factors
        ),
    ]


def dense_weight(weight_EIO: torch.Tensor | QuantisedWeight, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a weight as a dense tensor; one dequantised from NF4 is valid until the next is dequantised.

    A weight in another dtype (an fp32 master) is cast for one product. None keeps its dtype.
    """
    dense = weight_EIO if isinstance(weight_EIO, torch.Tensor) else weight_EIO.dense()
    return dense if dtype is None else dense.to(dtype)
