"""flash-attn 2's public functions from the FA2 kernels inside torch, for peers on machines where flash-attn has no wheel.

`write_package` writes a folder that Python imports as `flash_attn`; the driver puts it on the path of a peer's process
if the real package is missing. Records of such rows say so (benchmarks/ruler/attention.py). On a CPU, for tests,
documents run one by one through SDPA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VERSION = "2.8.3"
# Summary in `importlib.metadata`, which marks the package as a stand-in.
SUMMARY = "stand-in of lightning_fastft's benchmarks: FA2 kernels of torch"
_METADATA = f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\nSummary: {SUMMARY}\n"
_NAMES = "flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache"
_FILES = {
    "flash_attn/__init__.py": f"from benchmarks.ruler.flash_attn_stand_in import VERSION as __version__, {_NAMES}\n",
    "flash_attn/flash_attn_interface.py": (
        f"from benchmarks.ruler.flash_attn_stand_in import {_NAMES}\nflash_attn_gpu = flash_attn_cuda = object()\n"
    ),
    "flash_attn/bert_padding.py": (
        "from benchmarks.ruler.flash_attn_stand_in import index_first_axis, pad_input, unpad_input\n"
    ),
    f"flash_attn-{VERSION}.dist-info/METADATA": _METADATA,
    f"flash_attn-{VERSION}.dist-info/top_level.txt": "flash_attn\n",
    f"flash_attn-{VERSION}.dist-info/INSTALLER": "benchmarks\n",
    f"flash_attn-{VERSION}.dist-info/RECORD": "",
}


def write_package(folder: Path) -> Path:
    """Write the package and its metadata into a folder, and return the folder."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **options: Any,
) -> torch.Tensor:
    """Return attention within each document, (T, H, W); arguments as in flash-attn 2.

    Raises:
        NotImplementedError: The call asks for what torch's kernels do not have.
    """
    _refuse(softcap=softcap, **options)
    left, right = (None if size is None or size < 0 else size for size in window_size)
    if not q.is_cuda:
        return _per_document(
            q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, causal=causal, window=(left, right)
        )
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), dropout_p, causal, False,
        scale=softmax_scale, window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **options: Any,
) -> torch.Tensor:
    """Return attention within each row of a batch, (B, T, H, W); arguments as in flash-attn 2.

    Raises:
        NotImplementedError: The call asks for what torch's kernels do not have.
    """
    offsets = [
        torch.arange(0, (len(x) + 1) * x.shape[1], x.shape[1], dtype=torch.int32, device=x.device) for x in (q, k)
    ]
    packed = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), *offsets, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal,
        window_size, softcap, **options,
    )  # fmt: skip
    return packed.view(q.shape)


def flash_attn_with_kvcache(*arguments: Any, **options: Any) -> torch.Tensor:
    """Refuse generation: no benchmark generates with a peer.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("The stand-in for flash-attn trains only; install flash-attn to generate.")


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return rows of a tensor."""
    return x[indices]


def pad_input(x: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Return packed rows in a padded batch, (B, T, ...), zeros elsewhere."""
    padded = x.new_zeros(batch * seqlen, *x.shape[1:])
    return padded.index_copy(0, indices, x).view(batch, seqlen, *x.shape[1:])


def unpad_input(
    x: torch.Tensor, mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Return the rows of a padded batch that a mask keeps, their indices, offsets, longest length and lengths."""
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[indices], indices, offsets, int(lengths.max()), lengths


def _refuse(**options: Any) -> None:
    allowed = {"deterministic", "return_attn_probs"}
    unsupported = [name for name, value in options.items() if value and name not in allowed]
    if unsupported or options.get("return_attn_probs"):
        raise NotImplementedError(
            f"The stand-in for flash-attn has no {', '.join(unsupported) or 'return_attn_probs'}."
        )


def _per_document(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    *,
    scale: float | None,
    causal: bool,
    window: tuple[int | None, int | None],
) -> torch.Tensor:
    """Return the result of the kernels, computed by SDPA; the last query of a document is aligned with its last key."""
    outputs = []
    for number in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[number : number + 2].tolist()), slice(*starts_k[number : number + 2].tolist())
        num_rows, num_keys = rows.stop - rows.start, keys.stop - keys.start
        ahead = torch.arange(num_keys) - torch.arange(num_rows)[:, None] - (num_keys - num_rows)
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool)
        if causal or window[1] is not None:
            mask &= ahead <= (0 if causal else window[1])
        if window[0] is not None:
            mask &= ahead >= -window[0]
        heads = [x[part].transpose(0, 1) for x, part in ((q, rows), (k, keys), (v, keys))]
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=scale, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(outputs)
