"""Attention over a packed row: the public function, the limits of each backend, and the choice between backends.

Axes: T tokens of the pack, H query heads, G key/value heads, W width of a head.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from lightning_fastft.core.autocast import autocast_off
from lightning_fastft.core.checks import check_choice, check_int, check_tensor
from lightning_fastft.core.errors import BackendError, MissingDependencyError, ShapeError
from lightning_fastft.core.extras import pip_line
from lightning_fastft.core.linear_map import linear_map
from lightning_fastft.kernels.attention.cudnn_backend import cudnn_attention, is_cudnn_installed
from lightning_fastft.kernels.attention.flash import MAX_HEAD_WIDTH, Collect, Remember, varlen_attention
from lightning_fastft.kernels.attention.flex import flex_attention
from lightning_fastft.kernels.attention.reference import masked_attention
from lightning_fastft.kernels.attention.sdpa import sdpa_attention
from lightning_fastft.kernels.attention.tiled import HEAD_WIDTHS, tiled_attention
from lightning_fastft.kernels.backends import capability_of, must_check
from lightning_fastft.kernels.expert_rows.op import combine_rows
from lightning_fastft.kernels.launch import current_recorder
from lightning_fastft.kernels.repeat_heads.op import repeat_heads
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.prefixes import PrefixKeys

BACKENDS = ("tiled", "varlen", "cudnn", "flex", "sdpa", "reference")
# From this length on cuDNN is faster than our tiled kernels (forward and backward on an H200, 32 query and 4 key heads:
# 1.30x at 8192, 1.24x at 4096, slower at 2048: python -m benchmarks.attention_backends).
CUDNN_MIN_DOCUMENT_LENGTH = 4096
CUDNN_HEAD_WIDTH = 128
# A new token count costs cuDNN up to 1 s to build a plan, so cuDNN is chosen only for packs padded to a recurring
# length.
CUDNN_TOKEN_STEP = 512
# The oldest GPUs with torch's flash kernels and FlexAttention in bf16 (Ampere), and with cuDNN's packed backward
# (Hopper).
AMPERE, HOPPER = (8, 0), (9, 0)


class AttentionNeed(NamedTuple):
    """Properties of a call that decide its backend.

    Args:
        device_type: "cuda", "cpu", ...
        capability: CUDA compute capability; (0, 0) on other devices.
        dtype: Dtype of queries, keys and values.
        head_width: Width of a query and key head, in elements.
        value_width: Width of a value head, in elements.
        has_window: A sliding window shorter than the longest document.
        has_softcap: Scores are soft-capped.
        has_sinks: A learned sink per head takes part in the softmax.
        needs_grad: A backward will follow.
        document_length: Length of a token's document, averaged over tokens.
        num_tokens: Tokens of the pack.
        has_cudnn: nvidia-cudnn-frontend is installed.
        has_prefixes: Documents continue prefixes.
        has_spans: Tokens of an image see each other in both directions.
    """

    device_type: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_width: int
    value_width: int
    has_window: bool
    has_softcap: bool
    has_sinks: bool
    needs_grad: bool
    document_length: int
    num_tokens: int
    has_cudnn: bool
    has_prefixes: bool = False
    has_spans: bool = False


def packed_attention(
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    *,
    context: BatchContext,
    scale: float,
    window: int | None,
    softcap: float | None,
    sink_H: torch.Tensor | None,
    backend: str = "auto",
    remember: Remember | None = None,
    collect: Collect | None = None,
    is_checked: bool = True,
) -> torch.Tensor:
    """Return causal attention in which every document of the pack attends only to its prefix and itself.

    Tokens of an image also attend to the later tokens of this image where ``context.spans`` says so.

    Records in the context which backend ran.

    Args:
        q_THW: Queries, shape (T, H, W).
        k_TGW: Keys, shape (T, G, W), where G divides H.
        v_TGW: Values, shape (T, G, any width); dtype and device of q_THW, as k_TGW.
        context: The metadata of the pack, on the same device; its masks and offsets are built once and reused by all
            layers.
        scale: Factor on the scores.
        window: Keys that a query attends to, itself included; None for all keys of its document.
        softcap: Scores become softcap * tanh(score / softcap); None for no cap.
        sink_H: One learned logit per query head in the denominator, shape (H,); None for no sinks.
        backend: "auto", or one of BACKENDS.
        remember: Takes a function that computes the kernel's outputs, and returns them: computed now, or kept from an
            earlier equal call (activation checkpointing). "tiled", "varlen" and "cudnn" call it; the others always
            compute.
        collect: Receives in the backward the gradients of keys and values before they are summed over the query heads
            that share them, both (T, H, W), if the backend computes them per query head ("tiled" and "varlen", H > G).
            Keys and values then get no gradient through autograd.
        is_checked: As in ``must_check``.

    Returns:
        Shape (T, H, width of a value), dtype of q_THW, differentiable in q_THW, k_TGW, v_TGW and sink_H.

    Raises:
        ShapeError: Shapes, dtypes or devices do not match each other or the context.
        BackendError: The forced backend does not support this call; the message names the backends that can.
        OptionError: backend is unknown or window is below 1.
        MissingDependencyError: "cudnn" is forced and nvidia-cudnn-frontend is not installed.

    Cost:
        The cost of the backend; no host sync.

    Source:
        own (the choice); each backend names its own.

    Example:
        >>> context = BatchContext(lengths=[2, 1], label_T=torch.tensor([-100, 5, -100]), num_items=1)
        >>> q = torch.zeros(3, 1, 4)
        >>> v = torch.tensor([1.0, 3.0, 7.0])[:, None, None].expand(3, 1, 4)
        >>> options = {"scale": 1.0, "window": None, "softcap": None, "sink_H": None}
        >>> packed_attention(q, q, v, context=context, **options)[:, 0, 0].tolist()
        [1.0, 2.0, 7.0]
    """
    if must_check(is_checked):
        _check_inputs(q_THW, k_TGW, v_TGW, context=context, window=window, sink_H=sink_H)
    need = describe_need(q_THW, k_TGW, v_TGW, context=context, window=window, softcap=softcap, sink_H=sink_H)
    name = choose_backend(need) if backend == "auto" else _check_forced(backend, need)
    if q_THW.is_meta:
        name = _choose_on_meta(need)
    context.note_read(name)
    if name == "tiled":
        return tiled_attention(
            q_THW, k_TGW, v_TGW, context=context, scale=scale, window=window, sink_H=sink_H, remember=remember,
            collect=collect,
        )  # fmt: skip
    if name == "varlen":
        if context.prefix_keys is not None:
            k_TGW, v_TGW = (gather_keys(x, context.prefix_keys) for x in (k_TGW, v_TGW))
            # The gradients of a prefix have to be summed over the documents that read it first.
            collect = None
        return varlen_attention(
            q_THW, k_TGW, v_TGW, context=context, scale=scale, window=window, sink_H=sink_H, remember=remember,
            repeat=_repeat_heads, collect=collect,
        )  # fmt: skip
    if name == "cudnn":
        return cudnn_attention(q_THW, k_TGW, v_TGW, context=context, scale=scale, window=window, remember=remember)
    if name == "flex":
        return flex_attention(
            q_THW, k_TGW, v_TGW, context=context, scale=scale, window=window, softcap=softcap, sink_H=sink_H
        )
    if name == "sdpa":
        return sdpa_attention(q_THW, k_TGW, v_TGW, context=context, scale=scale, window=window)
    mask_TT = context.dense_mask(window=window)[0, 0]
    # Autocast would round values that the definition keeps in float32.
    with autocast_off(q_THW.device.type):
        return masked_attention(q_THW, k_TGW, v_TGW, mask_TT=mask_TT, scale=scale, softcap=softcap, sink_H=sink_H)


# The heads come from packed_attention, which has checked them.
_repeat_heads = functools.partial(repeat_heads, is_checked=False)


def gather_keys(x_TGW: torch.Tensor, keys: PrefixKeys) -> torch.Tensor:
    """Return the keys or values of each document after those of its prefix, shape (N, G, W).

    The gradient of a row is the sum over the documents that read it, in document order, so every run gives equal bits.

    Cost:
        One pass over N rows in the forward and one in the backward; no host sync.
    """

    def sum_readers(d_out_NGW: torch.Tensor) -> tuple[torch.Tensor]:
        # The last offset is N; entries from N on are empty.
        d_x_TC = combine_rows(
            d_out_NGW.reshape(d_out_NGW.shape[0], -1), keys.place_TK, keys.start_S1[-1:], is_checked=False
        )
        return (d_x_TC.view(-1, *d_out_NGW.shape[1:]),)

    gathered: torch.Tensor = linear_map(lambda x_TGW: x_TGW.index_select(0, keys.row_N), sum_readers, x_TGW)
    return gathered


def _choose_on_meta(need: AttentionNeed) -> str:
    """Return the backend on the meta device: our kernels if a run on a GPU launches them and launches are recorded.

    Else only shapes matter, and those of flash attention are the same for every call.
    """
    if current_recorder() is None:
        return "varlen"
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else need.capability
    chosen = choose_backend(need._replace(device_type="cuda", capability=capability))
    return chosen if chosen == "tiled" else "varlen"


@functools.lru_cache(maxsize=64)
def choose_backend(need: AttentionNeed) -> str:
    """Return the fastest backend that supports a call.

    On CUDA: cuDNN for long documents of width 128 in packs of a fixed length; on Hopper our tiled kernels for heads of
    width 64 and 128; else torch's flash kernels; FlexAttention for capped scores; scaled_dot_product_attention for
    float32 and heads wider than 256. On other devices: scaled_dot_product_attention with a dense mask, or the plain
    formula for caps and sinks.

    Example:
        >>> flags = (False, False, False, True)
        >>> need = AttentionNeed("cpu", (0, 0), torch.float32, 64, 64, *flags, 512, 8192, False)
        >>> choose_backend(need), choose_backend(need._replace(has_softcap=True))
        ('sdpa', 'reference')
    """
    order = ("sdpa", "reference")
    if need.device_type == "cuda":
        is_long = need.document_length >= CUDNN_MIN_DOCUMENT_LENGTH and need.num_tokens % CUDNN_TOKEN_STEP == 0
        prefers_cudnn = is_long and need.head_width == CUDNN_HEAD_WIDTH and not need.has_window
        order = (*(("cudnn",) if prefers_cudnn else ()), "tiled", "varlen", "sdpa", "flex", "reference")
    return next(name for name in order if not find_obstacle(name, need))


def find_obstacle(backend: str, need: AttentionNeed) -> str:
    """Return why a backend cannot run a call; an empty string if it can."""
    device = f"this device has {need.capability[0]}.{need.capability[1]}"
    obstacles: dict[str, tuple[tuple[bool, str], ...]] = {
        "tiled": (
            (need.device_type != "cuda", "runs on CUDA only"),
            (need.capability != HOPPER, f"was measured on compute capability 9.0 only, {device}"),
            (need.dtype not in (torch.float16, torch.bfloat16), f"takes float16 and bfloat16, not {need.dtype}"),
            (
                need.head_width not in HEAD_WIDTHS or need.value_width != need.head_width,
                f"takes heads 64 or 128 wide and values as wide, not {need.head_width} and {need.value_width}",
            ),
            (need.has_softcap, "has no soft cap"),
            (need.has_prefixes, "takes no documents that continue a prefix"),
            (need.has_spans, "is causal, also within images"),
        ),
        "varlen": (
            (need.device_type != "cuda", "runs on CUDA only"),
            (need.capability < AMPERE, f"needs compute capability 8.0, {device}"),
            (need.dtype not in (torch.float16, torch.bfloat16), f"takes float16 and bfloat16, not {need.dtype}"),
            (
                max(need.head_width, need.value_width) > MAX_HEAD_WIDTH,
                f"takes heads up to {MAX_HEAD_WIDTH} wide, not {max(need.head_width, need.value_width)}",
            ),
            (need.has_softcap, "has no soft cap"),
            (need.has_spans, "is causal, also within images"),
        ),
        "cudnn": (
            (need.device_type != "cuda", "runs on CUDA only"),
            (need.capability < HOPPER, f"needs compute capability 9.0, {device}"),
            (need.dtype not in (torch.float16, torch.bfloat16), f"takes float16 and bfloat16, not {need.dtype}"),
            (
                need.head_width > CUDNN_HEAD_WIDTH or need.head_width % 8 > 0,
                f"takes heads up to 128 in steps of 8, not {need.head_width}",
            ),
            (need.value_width != need.head_width, "takes values as wide as keys"),
            (need.has_softcap, "has no soft cap"),
            (need.has_sinks, "has no sinks"),
            (need.has_prefixes, "takes no documents that continue a prefix"),
            (need.has_spans, "is causal, also within images"),
            (not need.has_cudnn, f"needs the package nvidia-cudnn-frontend ({pip_line('hopper')})"),
        ),
        "flex": (
            (need.device_type not in ("cuda", "cpu"), f"does not run on {need.device_type}"),
            (need.device_type == "cpu" and need.needs_grad, "has no backward on a CPU"),
            (need.device_type == "cuda" and need.capability < AMPERE, f"needs compute capability 8.0, {device}"),
            (
                need.device_type == "cuda" and min(need.head_width, need.value_width) < 16,
                f"needs heads at least 16 wide, not {min(need.head_width, need.value_width)}",
            ),
        ),
        "sdpa": (
            (need.has_softcap, "has no soft cap"),
            (need.has_sinks, "has no sinks"),
        ),
        "reference": (),
    }
    return "; ".join(reason for applies, reason in obstacles[backend] if applies)


def describe_need(
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    *,
    context: BatchContext,
    window: int | None,
    softcap: float | None,
    sink_H: torch.Tensor | None,
) -> AttentionNeed:
    """Return the properties of a call that decide its backend; all are known on the host."""
    tensors = (q_THW, k_TGW, v_TGW) if sink_H is None else (q_THW, k_TGW, v_TGW, sink_H)
    return AttentionNeed(
        device_type=q_THW.device.type,
        capability=capability_of(q_THW.device),
        dtype=q_THW.dtype,
        head_width=q_THW.shape[2],
        value_width=v_TGW.shape[2],
        has_window=window is not None and window < context.max_length,
        has_softcap=softcap is not None,
        has_sinks=sink_H is not None,
        needs_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        document_length=context.sum_squared_lengths // context.num_tokens,
        num_tokens=context.num_tokens,
        has_cudnn=q_THW.is_cuda and is_cudnn_installed(),
        has_prefixes=context.has_prefixes,
        has_spans=context.spans_of(window) is not None,
    )


def _check_forced(backend: str, need: AttentionNeed) -> str:
    check_choice("backend", backend, ("auto", *BACKENDS))
    obstacle = find_obstacle(backend, need)
    if obstacle and not find_obstacle(backend, need._replace(has_cudnn=True)):
        raise MissingDependencyError(f"Attention backend {backend!r} {obstacle}.")
    if obstacle:
        able = ", ".join(repr(name) for name in BACKENDS if not find_obstacle(name, need))
        raise BackendError(
            f"Attention backend {backend!r} {obstacle}. Able to do this: {able}; or leave the choice to 'auto'."
        )
    return backend


def _check_inputs(
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    *,
    context: BatchContext,
    window: int | None,
    sink_H: torch.Tensor | None,
) -> None:
    if window is not None:
        check_int("window", window, low=1)
    for name, tensor in (("q_THW", q_THW), ("k_TGW", k_TGW), ("v_TGW", v_TGW)):
        check_tensor(name, tensor, ndim=3, dtypes=(q_THW.dtype,))
        if tensor.shape[0] != context.num_tokens:
            raise ShapeError(f"{name} has {tensor.shape[0]} tokens, the context describes {context.num_tokens}.")
        if tensor.device != context.device:
            raise ShapeError(
                f"{name} is on {tensor.device}, the context on {context.device}: move the batch with batch.to(device)."
            )
    num_heads, num_groups = q_THW.shape[1], k_TGW.shape[1]
    if q_THW.shape[2] != k_TGW.shape[2] or num_groups != v_TGW.shape[1] or num_groups == 0 or num_heads % num_groups:
        raise ShapeError(f"Heads do not fit: q {tuple(q_THW.shape)}, k {tuple(k_TGW.shape)}, v {tuple(v_TGW.shape)}.")
    if sink_H is not None and sink_H.shape != (num_heads,):
        raise ShapeError(f"sink_H must have shape ({num_heads},), got {tuple(sink_H.shape)}.")
