"""Functions that replace transformers' kernels in a mixer's forward: GPU kernels for packs, or plain PyTorch.

The mixer runs a copy of its forward in which the names of transformers' kernels refer to these functions. transformers
itself does not change.

Axes: T tokens of the pack, C channels of a convolution, K taps of a convolution, H heads, W width of a head.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.extras import pip_line
from lightning_fastft.hf.families import ADVICE
from lightning_fastft.hf.mixers import Kind, MixerFamily
from lightning_fastft.kernels.chunk_gradients.reference import CHUNK
from lightning_fastft.mixers import mamba2
from lightning_fastft.mixers.delta_rule import delta_rule
from lightning_fastft.mixers.fla_functions import fla_functions
from lightning_fastft.packing.context import BatchContext

# Activations of fla-core's convolution.
_ACTIVATIONS = (None, "silu", "swish")


def find_kernels(family: MixerFamily, *, is_meta: bool = False) -> dict[str, Callable[..., Any]]:
    """Return the packed kernels of a kind of mixer, keyed by the names that transformers' code calls.

    Args:
        family: Description of the model's mixers.
        is_meta: For tensors on the meta device, where the kernels return shapes and fla-core is not needed.

    Raises:
        UnsupportedModelError: The kind has no GPU kernel, or fla-core is not installed.
    """
    if family.kind not in _FUNCTIONS:
        raise UnsupportedModelError(
            f"{family.class_name} ({family.kind}) has no GPU kernel yet, which packed documents need. {ADVICE}"
        )
    if is_meta:
        return _FUNCTIONS[family.kind]
    try:
        import fla.modules.causal_conv1d
        import fla.ops.gated_delta_rule
        import fla.ops.kda  # noqa: F401
    except ImportError as error:
        raise UnsupportedModelError(
            f"{family.class_name} ({family.kind}) needs the kernels of fla-core for packed documents on a GPU, and "
            f"they cannot be imported ({error}). Install them: {pip_line('hybrid')}"
        ) from error
    return _FUNCTIONS[family.kind]


def run_on_kernels(
    mixer: nn.Module,
    functions: dict[str, Callable[..., Any]],
    hidden_states: torch.Tensor,
    *,
    context: BatchContext,
    **keywords: Any,
) -> torch.Tensor:
    """Return the output of a mixer for each separate document, computed in one call on the whole pack.

    Each packed kernel takes the keyword ``context``; functions names them as the mixer's code does.

    Raises:
        UnsupportedModelError: The mixer's code does not call one of the functions.
    """
    check_calls(type(mixer), functions)
    bound = {name: functools.partial(function, context=context) for name, function in functions.items()}
    result: torch.Tensor = _with_functions(type(mixer).forward, bound)(mixer, hidden_states, **keywords)
    return result


def check_calls(mixer_class: type[nn.Module], functions: dict[str, Callable[..., Any]]) -> None:
    """Raise on a mixer whose code does not call every one of the functions.

    Raises:
        UnsupportedModelError: A function is not called.
    """
    missing = sorted(set(functions) - set(inspect.unwrap(mixer_class.forward).__code__.co_names))
    if missing:
        raise UnsupportedModelError(
            f"{mixer_class.__name__} of this version of transformers does not call {', '.join(missing)}, so its GPU "
            "kernels get no document borders. Train this model with one document per row."
        )


def without_kernels(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward of transformers that calls the plain PyTorch versions of its functions, which run on any device.

    At import, transformers replaces these functions by those of fla, mamba_ssm and causal_conv1d if the package is
    installed, and calls them for tensors on a CPU too.
    """
    home, names = inspect.unwrap(forward).__globals__, inspect.unwrap(forward).__code__.co_names
    plain = {name: inspect.unwrap(home[name]) for name in names if hasattr(home.get(name), "__wrapped__")}
    return _with_functions(forward, plain)


def _with_functions(forward: Callable[..., Any], functions: dict[str, Any]) -> Callable[..., Any]:
    """Return a copy of a forward in which some names refer to other functions."""
    own = inspect.unwrap(forward)
    copy = types.FunctionType(
        own.__code__, {**own.__globals__, **functions}, own.__name__, own.__defaults__, own.__closure__
    )
    copy.__kwdefaults__ = own.__kwdefaults__
    return copy


def _convolve(
    x_1CT: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    context: BatchContext,
    **keywords: Any,
) -> torch.Tensor:
    """Compute transformers' ``causal_conv1d_fn`` with weights (C, K), each document from zeros."""
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"The convolution of a mixer has the activation {activation!r}; the GPU kernel supports 'silu' or none. "
            "Train this model with one document per row."
        )
    out_1TC, _ = fla_functions(x_1CT.device).causal_conv1d(
        x_1CT.transpose(1, 2).to(weight.dtype),
        weight,
        bias,
        activation=activation,
        cu_seqlens=context.start_S1,
        chunk_indices=context.chunks(CHUNK).index_C2,
    )
    return out_1TC.transpose(1, 2).to(x_1CT.dtype)


def _gated_delta_rule(
    query_1THW: torch.Tensor,
    key_1THW: torch.Tensor,
    value_1THW: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    context: BatchContext,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Compute transformers' ``torch_chunk_gated_delta_rule``, each document from an empty state."""
    if use_qk_l2norm_in_kernel:
        l2norm = fla_functions(query_1THW.device).l2norm
        query_1THW, key_1THW = l2norm(query_1THW.contiguous()), l2norm(key_1THW.contiguous())
    out_THW = delta_rule(query_1THW[0], key_1THW[0], value_1THW[0], g[0], beta[0], context.chunks(CHUNK))
    return out_THW[None], None


def _delta_attention(
    query_1THW: torch.Tensor,
    key_1THW: torch.Tensor,
    value_1THW: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    context: BatchContext,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Compute transformers' ``chunk_kimi_delta_attention``, each document from an empty state.

    Cost:
        No host sync: in its graph mode ``chunk_kda`` finds the chunks on the device, with space for the largest
        possible number. Otherwise it reads their number on the host.
    """
    out_1THW, _ = fla_functions(query_1THW.device).chunk_kda(
        query_1THW,
        key_1THW,
        value_1THW,
        g=g,
        beta=beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=context.start_S1,
        use_graph=True,
    )
    return out_1THW, None


_FUNCTIONS: MappingProxyType[Kind, dict[str, Callable[..., Any]]] = MappingProxyType(
    {
        "short convolution": {"causal_conv1d_fn": _convolve},
        "gated delta rule": {"causal_conv1d_fn": _convolve, "torch_chunk_gated_delta_rule": _gated_delta_rule},
        "Kimi delta attention": {"causal_conv1d_fn": _convolve, "chunk_kimi_delta_attention": _delta_attention},
        "Mamba-2": {"causal_conv1d_fn": _convolve, **mamba2.FUNCTIONS},
    }
)
KINDS = tuple(_FUNCTIONS)
