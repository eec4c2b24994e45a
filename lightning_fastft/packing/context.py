"""BatchContext: the sequence metadata of a packed batch, built once by the collator and read by every layer.

Axes: T tokens of the pack, S documents (S1 = S + 1 offsets), R labelled rows padded to a bucket, Q blocks of a block
    mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from lightning_fastft.core.errors import OptionError, ShapeError

if TYPE_CHECKING:
    from lightning_fastft.packing.completions import Completions
    from lightning_fastft.packing.images import ImageFile, ImageInputs

T = TypeVar("T")

IGNORED_LABEL = -100
# Rows passed to the loss are padded to a multiple of this, so that the allocator sees few different sizes.
LABELLED_ROW_BUCKET = 128
BLOCK_SIZE = 128
# Choice of attention= that runs the documents of a pack one at a time, and the name under which a context counts that.
ONE_BY_ONE = "one_by_one"


class Document(NamedTuple):
    """One tokenised example: ids and unshifted labels, each of shape (length,), -100 where nothing is trained.

    An example of a tuner with completions (preference, reward, policy) is a prompt and its completions, one after
    another in the ids.

    Args:
        input_ids: Token ids, int64.
        labels: Ids where a token is trained, else -100, int64.
        images: Its images in encoded form.
        image_inputs: What the images become for the model (packing/images.py).
        segment_lengths: Tokens of the prompt, then of each completion, all at least 1; () without completions.
        scores: One number per completion: what it is worth, a margin, a label or a reward.
        log_probs: Log-probability of each token under the model that wrote it, float32, shape (length,), 0 outside of
            completions; None where it is not known.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    images: tuple[ImageFile, ...] = ()
    image_inputs: ImageInputs | None = None
    segment_lengths: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    log_probs: np.ndarray | None = None


class VarlenArguments(NamedTuple):
    """Arguments of a variable-length attention kernel: offsets on the device, the longest document on the host.

    Keys have offsets of their own where documents continue a prefix (``PrefixKeys``).
    """

    start_S1: torch.Tensor
    max_length: int
    key_start_S1: torch.Tensor
    max_key_length: int


class PrefixKeys(NamedTuple):
    """Keys of a pack whose documents continue prefixes: each document's keys are its prefix's and then its own.

    Args:
        range_2T: First row of the prefix that each token sees, and one past its last, shape (2, T), int64; 0 and 0 for
            none.
        row_N: Row of the pack of each key, shape (N,), int64.
        place_TK: Places of each row among the keys, shape (T, K), int64, for at most K readers; N where there are
            fewer.
        start_S1: Offset of each document's keys, and N, shape (S + 1,), int32.
    """

    range_2T: torch.Tensor
    row_N: torch.Tensor
    place_TK: torch.Tensor
    start_S1: torch.Tensor


class BatchContext:
    """Hold the metadata of one packed batch, on the host and on one device.

    This is a plain class because Lightning and FSDP2 rebuild or cast dataclasses, dicts and tensor subclasses. Masks
    are built on first use, once per (kind, device, dtype, window), and cached in this object.

    ``reads`` counts attention layers and mixers by backend. It is the only record of a step here, because the context
    is all that a layer sees of the step: also in recomputation, in a replayed graph and under a foreign strategy.

    A document may continue an earlier one, its prefix: its tokens see the whole prefix and then themselves, and their
    positions go on from it. So a prompt with several completions is computed once.

    Args:
        lengths: Length of each document in tokens, in the order of the pack, pad documents last; each at least 1.
        label_T: Unshifted labels, shape (T,), int64, on the CPU; -100 where nothing is trained. The first token of
            every document must be -100.
        num_pad_tokens: Tokens at the end of the pack that belong to pad documents.
        num_items: Divisor of the summed loss: labelled tokens (or examples, by the loss) of the accumulation window /
            (micro-batches x ranks).
        prefixes: For each document, the number of the document that it continues, -1 for none; None if none does.
        completions: Which labelled rows belong to which completion, for losses on completions.

    Raises:
        ShapeError: A document is empty, lengths do not add up to T, a label is trained across a document border, the
            pad tail does not end on one, or a prefix is not an earlier document without a prefix.
        OptionError: num_items is not above 0.

    Cost:
        O(T) on the host, no device work. Each mask is built once, on first use.

    Source:
        Metadata once per batch: the packed-sequence optimisation of Unsloth and NVIDIA (2026); the form is own.

    Example:
        >>> context = BatchContext(lengths=[2, 3], label_T=torch.tensor([-100, 7, -100, 8, 9]), num_items=3)
        >>> context.start_S1.tolist(), context.max_length, context.num_labelled
        ([0, 2, 5], 3, 3)
    """

    def __init__(
        self,
        *,
        lengths: Sequence[int],
        label_T: torch.Tensor,
        num_pad_tokens: int = 0,
        num_items: float,
        prefixes: Sequence[int] | None = None,
        completions: Completions | None = None,
    ) -> None:
        length_S = torch.as_tensor(lengths, dtype=torch.int64)
        _check_content(length_S=length_S, label_T=label_T, num_pad_tokens=num_pad_tokens, num_items=num_items)
        prefix_S = _check_prefixes(prefixes, num_documents=length_S.numel())
        prefix_length_S = torch.where(prefix_S >= 0, length_S[prefix_S.clamp(min=0)], 0)
        offset_S1 = torch.nn.functional.pad(length_S.cumsum(0), (1, 0))

        self.num_tokens = int(label_T.numel())
        self.num_pad_tokens = num_pad_tokens
        self.num_documents = int(length_S.numel())
        self.lengths: tuple[int, ...] = tuple(length_S.tolist())
        # Of the documents with their prefixes.
        self.max_length = int((prefix_length_S + length_S).max())
        self.max_own_length = int(length_S.max())
        # A token of a document sees its prefix whole, and half of its own document on average.
        self.sum_squared_lengths = int((length_S * (length_S + 2 * prefix_length_S)).sum())
        self.num_items = float(num_items)
        self.prefixes: tuple[int, ...] = tuple(prefix_S.tolist())
        self.has_prefixes = bool((prefix_S >= 0).any())
        self.completions = completions

        document_T = torch.repeat_interleave(torch.arange(self.num_documents), length_S)
        row_L = torch.nonzero(label_T[1:] != IGNORED_LABEL).flatten()
        self.num_labelled = int(row_L.numel())
        num_padding_rows = -self.num_labelled % LABELLED_ROW_BUCKET
        target_L = label_T[row_L + 1]

        self.start_host_S1 = offset_S1.to(torch.int32)
        self.start_S1 = self.start_host_S1
        self.document_T = document_T.to(torch.int32)
        self.position_T = torch.arange(self.num_tokens) - offset_S1[document_T] + prefix_length_S[document_T]
        self.label_T = label_T
        self.prefix_keys = (
            _list_keys(offset_S1, prefix_S=prefix_S, document_T=document_T) if self.has_prefixes else None
        )
        self.labelled_row_R = torch.nn.functional.pad(row_L, (0, num_padding_rows))
        self.labelled_target_R = torch.nn.functional.pad(target_L, (0, num_padding_rows), value=IGNORED_LABEL)

        # Set by the strategy or by a caller that forces a backend; "auto" picks by device, head shape and longest
        # document.
        self.attention_backend = "auto"
        # Loss heads return full logits when a user asks for them.
        self.output_logits = False
        # Loss heads return this function of their lazy logits in place of the cross-entropy (patches/lazy_logits.py).
        self.objective: Callable[[Any], torch.Tensor] | None = None
        # Set by a model of which more than the attention was prepared: its rotary angles, mixers and guards.
        self.is_model_prepared = False
        # Whether the forward of such a model runs now.
        self.is_in_prepared_forward = False
        self.reads: Counter[str] = Counter()
        self.num_builds: Counter[str] = Counter()
        self._built: dict[Hashable, Any] = {}

    _DEVICE_TENSORS = ("start_S1", "document_T", "position_T", "label_T", "labelled_row_R", "labelled_target_R")

    @property
    def device(self) -> torch.device:
        """Device of the tensors of this context (start_host_S1 always stays on the CPU)."""
        return self.label_T.device

    @property
    def num_real_tokens(self) -> int:
        """Number of tokens of the pack that are not padding."""
        return self.num_tokens - self.num_pad_tokens

    @property
    def num_reads(self) -> int:
        """Number of reads by attention layers and mixers."""
        return self.reads.total()

    def to(self, device: torch.device | str, non_blocking: bool = True) -> BatchContext:
        """Return a context on a device, without cached masks; the same object if it is on that device already."""
        if torch.device(device) == self.device:
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> BatchContext:
        """Return a context whose tensors are in pinned host memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def recordable(self, *, num_documents: int, max_length: int) -> BatchContext:
        """Return a copy with static tensor addresses, for CUDA graphs that are recorded once and replayed per pack.

        The copy describes this pack until ``load`` copies another pack into it. Its offsets are padded with those of
        empty documents, and it has no labelled rows.

        Args:
            num_documents: Maximum number of documents of any pack to load.
            max_length: Maximum length of any document to load, in tokens; kernels are recorded with this length.

        Raises:
            ShapeError: This pack exceeds one of the limits, or its documents continue prefixes.
        """
        if self.has_prefixes:
            raise ShapeError("A pack whose documents continue prefixes has no recordable context.")
        other = self._map(torch.clone)
        other.start_S1 = self.start_S1.new_empty(num_documents + 1)
        other.labelled_row_R = other.labelled_target_R = self.labelled_row_R.new_empty(0)
        other.num_documents = num_documents
        other.max_length = other.max_own_length = max_length
        other.load(self)
        return other

    def load(self, other: BatchContext) -> None:
        """Copy another pack into this context, which ``recordable`` made.

        Both packs have the same number of tokens and are on the same device.

        Raises:
            ShapeError: The other pack exceeds the limits of this context.

        Cost:
            Three small copies on the device; no host sync.
        """
        if (
            other.num_tokens != self.num_tokens
            or other.num_documents > self.num_documents
            or other.max_length > self.max_length
            or other.has_prefixes
        ):
            raise ShapeError(
                f"The pack has {other.num_tokens} tokens, {other.num_documents} documents and a longest document of "
                f"{other.max_length}. This recordable context takes exactly {self.num_tokens} tokens, at most "
                f"{self.num_documents} documents and a longest document of {self.max_length}."
            )
        # Write through ``.data``: autograd saved these tensors at recording time and must read the new values.
        self.start_S1.data[: other.num_documents + 1].copy_(other.start_S1)
        self.start_S1.data[other.num_documents + 1 :].fill_(self.num_tokens)
        self.document_T.data.copy_(other.document_T)
        self.position_T.data.copy_(other.position_T)
        self._built.clear()

    def note_read(self, backend: str) -> None:
        """Record that an attention layer read this context. A packed step without a read is an error."""
        self.reads[backend] += 1

    def once(self, kind: str, key: Hashable, build: Callable[[], T]) -> T:
        """Return ``build()``, called at most once per (kind, key) for this batch.

        Args:
            kind: Name under which builds are counted in ``num_builds``.
            key: Everything the result depends on besides this batch: device, dtype, window.
            build: Called without arguments on first use.
        """
        full_key = (kind, key)
        if full_key not in self._built:
            self.num_builds[kind] += 1
            # A batch may be used for validation first; inference tensors could not be saved for a later backward.
            with torch.inference_mode(False):
                self._built[full_key] = build()
        return cast("T", self._built[full_key])

    def varlen(self) -> VarlenArguments:
        """Return offsets (int32, shape (S+1,), on this device) and the longest document (a Python int), of queries and
        of keys.
        """
        key_start_S1 = self.start_S1 if self.prefix_keys is None else self.prefix_keys.start_S1
        return self.once(
            "varlen",
            self.device,
            lambda: VarlenArguments(self.start_S1, self.max_own_length, key_start_S1, self.max_length),
        )

    def dense_mask(self, *, window: int | None = None, dtype: torch.dtype = torch.bool) -> torch.Tensor:
        """Return the causal document mask, shape (1, 1, T, T).

        A bool mask is True where a query sees a key. A float mask is additive: 0 or the lowest finite value.

        Args:
            window: Keys a query sees, itself included; None for all keys of its document.
            dtype: torch.bool or a floating dtype.

        Cost:
            T x T elements, two or three element-wise launches, no loop over documents, no host sync.
        """
        window = self._effective_window(window)
        return self.once(
            "dense_mask", (self.device, dtype, window), lambda: self._build_dense_mask(window=window, dtype=dtype)
        )

    def block_mask(self, *, window: int | None = None) -> Any:
        """Return a FlexAttention BlockMask of this pack, built from block borders without a T x T tensor.

        Args:
            window: Keys a query sees, itself included; None for all keys of its document.

        Cost:
            (T / 128) squared elements, a dozen launches, no host sync.
        """
        window = self._effective_window(window)
        return self.once("block_mask", (self.device, window), lambda: self._build_block_mask(window=window))

    def _effective_window(self, window: int | None) -> int | None:
        """Return None if no document exceeds the window, so that sliding and full layers share one mask."""
        if window is not None and window < 1:
            raise OptionError(f"A sliding window must be at least 1 token, got {window}.")
        return None if window is None or window >= self.max_length else window

    def _seen_ranges(self, *, window: int | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the first row that each token sees of its own document, shape (T,), and the first row of its prefix
        and one past the last, or None and None.
        """
        index_T = torch.arange(self.num_tokens, device=self.device)
        # Documents are contiguous, so "same document and not later" is "between the document's start and the query".
        first_T = index_T - self.position_T
        if self.prefix_keys is None:
            return first_T if window is None else torch.maximum(first_T, index_T - (window - 1)), None, None
        begin_T, end_T = self.prefix_keys.range_2T
        first_T = first_T + (end_T - begin_T)
        if window is not None:
            first_T = torch.maximum(first_T, index_T - (window - 1))
            begin_T = torch.maximum(begin_T, begin_T + self.position_T - (window - 1))
        return first_T, begin_T, end_T

    def _build_dense_mask(self, *, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        index_T = torch.arange(self.num_tokens, device=self.device)
        first_T, begin_T, end_T = self._seen_ranges(window=window)
        seen_TT = (index_T[None, :] >= first_T[:, None]) & (index_T[None, :] <= index_T[:, None])
        if begin_T is not None and end_T is not None:
            seen_TT |= (index_T[None, :] >= begin_T[:, None]) & (index_T[None, :] < end_T[:, None])
        if dtype is not torch.bool:
            lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=self.device)
            return torch.where(seen_TT, lowest.new_zeros(()), lowest)[None, None]
        return seen_TT[None, None]

    def _build_block_mask(self, *, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        num_blocks = -(-self.num_tokens // BLOCK_SIZE)
        begin_Q = torch.arange(num_blocks, device=self.device) * BLOCK_SIZE
        end_Q = (begin_Q + BLOCK_SIZE - 1).clamp(max=self.num_tokens - 1)
        document_T = self.document_T
        first_document_Q, last_document_Q = document_T[begin_Q], document_T[end_Q]
        query_begin, query_end = begin_Q[:, None], end_Q[:, None]
        key_begin, key_end = begin_Q[None, :], end_Q[None, :]

        touched_QQ = (key_begin <= query_end) & (last_document_Q[None, :] >= first_document_Q[:, None])
        full_QQ = (key_end <= query_begin) & (first_document_Q[None, :] == last_document_Q[:, None])
        # A last block that reaches past T is never full, so that the kernel applies the mask there.
        full_QQ &= (query_begin + BLOCK_SIZE <= self.num_tokens) & (key_begin + BLOCK_SIZE <= self.num_tokens)
        if window is not None:
            touched_QQ &= query_begin - key_end < window
            full_QQ &= query_end - key_begin < window
        first_T, prefix_begin_T, prefix_end_T = self._seen_ranges(window=window)
        if prefix_begin_T is not None and prefix_end_T is not None:
            touched_TQ, full_TQ = _blocks_in_ranges(prefix_begin_T, prefix_end_T, num_blocks=num_blocks)
            touched_QQ = touched_QQ | touched_TQ.view(num_blocks, BLOCK_SIZE, -1).any(1)
            full_QQ = full_QQ | full_TQ.view(num_blocks, BLOCK_SIZE, -1).all(1)
        partial_QQ = touched_QQ & ~full_QQ

        def mask_mod(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            is_own = (key >= first_T[query]) & (key <= query)
            if prefix_begin_T is None or prefix_end_T is None:
                return is_own
            return is_own | ((key >= prefix_begin_T[query]) & (key < prefix_end_T[query]))

        return BlockMask.from_kv_blocks(
            *_ordered_blocks(partial_QQ),
            *_ordered_blocks(full_QQ),
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=mask_mod,
            seq_lengths=(self.num_tokens, self.num_tokens),
        )

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> BatchContext:
        other = object.__new__(BatchContext)
        other.__dict__.update(self.__dict__)
        for name in self._DEVICE_TENSORS:
            setattr(other, name, move(getattr(self, name)))
        if self.prefix_keys is not None:
            other.prefix_keys = PrefixKeys(*map(move, self.prefix_keys))
        if self.completions is not None:
            other.completions = self.completions.map(move)
        other.reads = Counter()
        other.num_builds = Counter()
        other._built = {}
        return other


def _blocks_in_ranges(
    begin_T: torch.Tensor, end_T: torch.Tensor, *, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which key blocks each query's range touches, and which it holds whole, both (whole blocks of T, blocks).

    Rows that pad the last query block have an empty range.
    """
    padding = num_blocks * BLOCK_SIZE - begin_T.shape[0]
    begin_T1, end_T1 = (torch.nn.functional.pad(x_T, (0, padding))[:, None] for x_T in (begin_T, end_T))
    block_begin_Q = torch.arange(num_blocks, device=begin_T.device) * BLOCK_SIZE
    block_end_Q = block_begin_Q + BLOCK_SIZE
    touched_TQ = (begin_T1 < block_end_Q) & (end_T1 > block_begin_Q) & (begin_T1 < end_T1)
    return touched_TQ, (begin_T1 <= block_begin_Q) & (end_T1 >= block_end_Q)


def _ordered_blocks(chosen_QQ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of chosen key blocks per query block, and all key block indices with the chosen ones first."""
    count_Q = chosen_QQ.sum(dim=1, dtype=torch.int32)
    order_QQ = torch.argsort(chosen_QQ.to(torch.int32), dim=1, descending=True, stable=True).to(torch.int32)
    return count_Q[None, None], order_QQ[None, None].contiguous()


def _check_prefixes(prefixes: Sequence[int] | None, *, num_documents: int) -> torch.Tensor:
    """Return the prefix of each document, -1 for none, shape (S,), int64."""
    prefix_S = torch.full((num_documents,), -1) if prefixes is None else torch.as_tensor(prefixes, dtype=torch.int64)
    if prefix_S.shape != (num_documents,):
        raise ShapeError(f"prefixes has shape {tuple(prefix_S.shape)}; {num_documents} documents need one entry each.")
    wrong_S = (prefix_S < -1) | (prefix_S >= torch.arange(num_documents))
    wrong_S |= (prefix_S >= 0) & (prefix_S[prefix_S.clamp(min=0, max=max(0, num_documents - 1))] >= 0)
    if bool(wrong_S.any()):
        number = int(wrong_S.nonzero()[0])
        raise ShapeError(
            f"Document {number} continues document {int(prefix_S[number])}. A prefix is an earlier document of the "
            "pack that continues none itself; -1 means none."
        )
    return prefix_S


def _list_keys(start_S1: torch.Tensor, *, prefix_S: torch.Tensor, document_T: torch.Tensor) -> PrefixKeys:
    """Return the keys of each document: the rows of its prefix, then its own."""
    length_S = start_S1.diff()
    begin_S, end_S = (torch.where(prefix_S >= 0, x_S1[prefix_S.clamp(min=0)], 0) for x_S1 in (start_S1, start_S1[1:]))
    spans = [
        (begin, end)
        for prefix_begin, prefix_end, own_begin, own_end in zip(
            begin_S.tolist(), end_S.tolist(), start_S1[:-1].tolist(), start_S1[1:].tolist()
        )
        for begin, end in ((prefix_begin, prefix_end), (own_begin, own_end))
    ]
    row_N = torch.cat([torch.arange(begin, end) for begin, end in spans])
    key_start_S1 = torch.nn.functional.pad((length_S + end_S - begin_S).cumsum(0), (1, 0))
    # The keys of a row, found by sorting, and numbered within the row.
    place_N = row_N.argsort(stable=True)
    num_places_T = row_N.bincount(minlength=document_T.numel())
    first_T = num_places_T.cumsum(0) - num_places_T
    place_TK = torch.full((document_T.numel(), int(num_places_T.max())), row_N.numel())
    sorted_N = row_N[place_N]
    place_TK[sorted_N, torch.arange(row_N.numel()) - first_T[sorted_N]] = place_N
    return PrefixKeys(torch.stack([begin_S, end_S])[:, document_T], row_N, place_TK, key_start_S1.to(torch.int32))


def _check_content(*, length_S: torch.Tensor, label_T: torch.Tensor, num_pad_tokens: int, num_items: float) -> None:
    """Reject metadata that would cause NaN, attention across documents or an illegal memory access in a kernel."""
    if label_T.ndim != 1 or label_T.dtype != torch.int64 or label_T.device.type != "cpu":
        raise ShapeError(
            f"label_T must be a 1-D int64 tensor on the CPU, got shape {tuple(label_T.shape)}, {label_T.dtype}, "
            f"{label_T.device}."
        )
    if length_S.ndim != 1 or length_S.numel() == 0:
        raise ShapeError(f"lengths must be 1-D with at least one document, got shape {tuple(length_S.shape)}.")
    if int(length_S.min()) < 1:
        raise ShapeError(
            f"Every document needs at least one token; document {int(length_S.argmin())} has {int(length_S.min())}."
        )
    if int(length_S.sum()) != label_T.numel():
        raise ShapeError(
            f"lengths sum to {int(length_S.sum())} tokens, but label_T has {label_T.numel()}. They must be equal."
        )
    end_S = length_S.cumsum(0)
    start_S = end_S - length_S
    crossing = torch.nonzero(label_T[start_S] != IGNORED_LABEL).flatten()
    if crossing.numel():
        raise ShapeError(
            f"The first token of document {int(crossing[0])} is labelled, so it would be predicted from another "
            "document. Set its label to -100."
        )
    num_real_tokens = label_T.numel() - num_pad_tokens
    if num_pad_tokens and not (num_pad_tokens > 0 and bool((start_S == num_real_tokens).any())):
        raise ShapeError(f"The pad tail of {num_pad_tokens} tokens must begin with a document of its own.")
    if num_pad_tokens and bool((label_T[num_real_tokens:] != IGNORED_LABEL).any()):
        raise ShapeError("The pad tail has trained labels. Set them to -100.")
    if not 0 < num_items < float("inf"):
        raise OptionError(f"num_items must be a finite number above 0, got {num_items}.")
