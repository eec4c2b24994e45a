"""BatchContext: the sequence metadata of a packed batch, built once by the collator and read by every layer.

Axes: T tokens of the pack, S documents (S1 = S + 1 offsets), R labelled rows padded to a bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from lightning_fastft.core.errors import ContextError, OptionError, ShapeError
from lightning_fastft.packing.chunks import Chunks, build_chunks, load_chunks, recordable_chunks
from lightning_fastft.packing.context_content import check_content, find_labelled_rows
from lightning_fastft.packing.document import IGNORED_LABEL
from lightning_fastft.packing.masks import build_block_mask, build_dense_mask, build_mask_blocks
from lightning_fastft.packing.parts import PackPart
from lightning_fastft.packing.prefixes import PrefixKeys, VarlenArguments, check_prefixes, list_keys
from lightning_fastft.packing.spans import BidirectionalSpans
from lightning_fastft.packing.static_documents import load_documents

if TYPE_CHECKING:
    from lightning_fastft.packing.completions import Completions

T = TypeVar("T")

# Choice of attention= that runs the documents of a pack one at a time, and the name under which a context counts that.
ONE_BY_ONE = "one_by_one"


class BatchContext:
    """Hold the metadata of one packed batch, on the host and on one device.

    This is a plain class because Lightning and FSDP2 rebuild or cast dataclasses, dicts and tensor subclasses.

    A document may continue an earlier one, its prefix: its tokens see the whole prefix and then themselves, and their
    positions continue from it. So a prompt with several completions is computed once.

    Arguments are attributes too: lengths and prefixes (-1 for none) as tuples, label_T and completions on ``device``.
    The other attributes are Python ints and tensors on ``device``, unless they say otherwise.

    Args:
        lengths: Length of each document in tokens, in the order of the pack, pad documents last; each at least 1.
        label_T: Unshifted labels, shape (T,), int64, on the CPU; -100 where nothing is trained. The first token of
            every document must be -100.
        num_pad_tokens: Tokens at the end of the pack that belong to pad documents.
        num_items: Divisor of the summed loss: labelled tokens (or examples, by the loss) of the accumulation window /
            (micro-batches x ranks).
        prefixes: For each document, the number of the document that it continues, -1 for none; None if none does.
        completions: Which labelled rows belong to which completion, for losses on completions.

    Attributes:
        num_tokens: Tokens of the pack, T.
        num_documents: Documents of the pack, S, pad documents included.
        position_lengths: Largest position of each document plus 1: its length, or less with images under M-RoPE.
        max_length: Tokens of the longest document, its prefix included.
        max_own_length: Tokens of the longest document without its prefix.
        sum_squared_lengths: Twice the pairs of query and key: sum of length x (length + 2 x length of the prefix).
        has_prefixes: Whether any document continues another one (bool).
        prefix_keys: The rows that each document attends to (``PrefixKeys``); None without prefixes.
        start_S1: First row of each document, then T; shape (S + 1,), int32.
        start_host_S1: The same on the CPU.
        document_T: Number of the document of each token; shape (T,), int32.
        position_T: Position of each token in its document, counted from the start of its prefix; shape (T,), int64.
        num_labelled: Rows that predict a label.
        labelled_row_R: These rows, one before each label, then zeros up to a multiple of 128; shape (R,), int64.
        labelled_target_R: The label that each of them predicts, then -100; shape (R,), int64.
        reads: Reads by attention layers and mixers, by backend (Counter). They are counted here because a layer sees no
            more of the step: also in recomputation, in a replayed graph and under a foreign strategy.
        num_builds: Masks and offsets that were built, by kind (Counter).
        attention_backend: Backend of attention (str); "auto" picks by device, head shape and longest document.
        output_logits: Whether loss heads return full logits (bool).
        objective: Function of ``LazyLogits`` whose value loss heads return; None for the cross-entropy.
        is_model_prepared: Whether rotary angles, mixers and guards of the model are prepared too (bool).
        is_in_prepared_forward: Whether the forward of such a model is running (bool).
        part: The part of a pack that this context describes (``PackPart``, by ``cut``); None for a whole pack.
        spans: Images whose tokens see each other in both directions (``BidirectionalSpans``); None if none do.

    Raises:
        ShapeError: A document is empty, lengths do not add up to T, a label is trained across a document border, the
            pad tail does not end on one, or a prefix is not an earlier document without a prefix.
        OptionError: num_items is not above 0.

    Cost:
        O(T) on the host, no device work. A mask is built on first use, once per (kind, device, dtype, window).

    Source:
        Metadata once per batch: the packed-sequence optimisation of Unsloth and NVIDIA (2026); the form is own.

    Example:
        >>> context = BatchContext(lengths=[2, 3], label_T=torch.tensor([-100, 7, -100, 8, 9]), num_items=3)
        >>> context.start_S1.tolist(), context.max_length, context.num_labelled
        ([0, 2, 5], 3, 3)
    """

    _DEVICE_TENSORS = ("start_S1", "document_T", "position_T", "label_T", "labelled_row_R", "labelled_target_R")

    # Set after construction; these are the defaults.
    attention_backend: str = "auto"
    output_logits: bool = False
    objective: Callable[[Any], torch.Tensor] | None = None
    is_model_prepared: bool = False
    is_in_prepared_forward: bool = False
    part: PackPart | None = None
    spans: BidirectionalSpans | None = None

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
        check_content(length_S=length_S, label_T=label_T, num_pad_tokens=num_pad_tokens, num_items=num_items)
        prefix_S = check_prefixes(prefixes, num_documents=length_S.numel())
        prefix_length_S = torch.where(prefix_S >= 0, length_S[prefix_S.clamp(min=0)], 0)
        offset_S1 = torch.nn.functional.pad(length_S.cumsum(0), (1, 0))

        self.num_tokens = int(label_T.numel())
        self.num_pad_tokens = num_pad_tokens
        self.num_documents = int(length_S.numel())
        self.lengths: tuple[int, ...] = tuple(length_S.tolist())
        self.position_lengths = self.lengths
        self.max_length = int((prefix_length_S + length_S).max())
        self.max_own_length = int(length_S.max())
        self.sum_squared_lengths = int((length_S * (length_S + 2 * prefix_length_S)).sum())
        self.num_items = float(num_items)
        self.prefixes: tuple[int, ...] = tuple(prefix_S.tolist())
        self.has_prefixes = bool((prefix_S >= 0).any())
        self.completions = completions

        document_T = torch.repeat_interleave(torch.arange(self.num_documents), length_S)
        self.start_host_S1 = self.start_S1 = offset_S1.to(torch.int32)
        self.document_T = document_T.to(torch.int32)
        self.position_T = torch.arange(self.num_tokens) - offset_S1[document_T] + prefix_length_S[document_T]
        self.label_T = label_T
        self.prefix_keys = list_keys(offset_S1, prefix_S=prefix_S, document_T=document_T) if self.has_prefixes else None
        self.num_labelled, self.labelled_row_R, self.labelled_target_R = find_labelled_rows(label_T)

        self.reads: Counter[str] = Counter()
        self.num_builds: Counter[str] = Counter()
        self._built: dict[Hashable, Any] = {}
        # Static memory of a recordable context.
        self._recorded_chunks: Chunks | None = None

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

    @property
    def causal_obstacle(self) -> str:
        """Why attention over the pack is not causal attention within each document; an empty string if it is."""
        if self.has_prefixes:
            return "documents continue prefixes"
        return "" if self.spans is None else "tokens of an image see each other in both directions"

    @property
    def whole(self) -> BatchContext:
        """The metadata of the whole pack: of this context, or of the one that it is a part of."""
        return self if self.part is None else self.part.whole

    def cut(self, rank: int, *, num_parts: int, group: Any = None) -> BatchContext:
        """Return the context of one of several equal, contiguous parts of this pack.

        Tokens, labels and labelled rows are those of the part. A row is labelled by the token that follows it in the
        pack, which may be in the next part. Documents (lengths, offsets) are those of the whole pack, because attention
        reads ``whole``. Reads are counted in both.

        Args:
            rank: Number of the part, from 0.
            num_parts: Number of parts.
            group: Process group of the ranks that hold the parts.

        Raises:
            ShapeError: The parts would not be equal, documents continue prefixes, images are attended in both
                directions, or the context is not on the CPU.

        Example:
            >>> context = BatchContext(lengths=[1, 3], label_T=torch.tensor([-100, -100, 8, 9]), num_items=2)
            >>> part = context.cut(0, num_parts=2)
            >>> part.labelled_row_R[: part.num_labelled].tolist(), part.labelled_target_R[: part.num_labelled].tolist()
            ([1], [8])
        """
        if self.num_tokens % num_parts:
            raise ShapeError(
                f"A pack of {self.num_tokens} tokens has no {num_parts} equal parts. Pad it to a multiple: "
                f"collate(..., pad_to_multiple_of={num_parts})."
            )
        if self.causal_obstacle or self.device.type != "cpu":
            problem = self.causal_obstacle or f"the pack is on {self.device}"
            raise ShapeError(f"Only a pack of causal documents is cut, on the host; {problem}.")
        part = PackPart(self, rank, num_parts, group)
        begin, end = part.rows.start, part.rows.stop
        other = self._map(lambda tensor: tensor)
        other.part = part
        other.num_tokens = end - begin
        other.num_pad_tokens = min(other.num_tokens, max(0, end - self.num_real_tokens))
        # The heads of attention are shared out, and with them the pairs of tokens that are computed.
        other.sum_squared_lengths = self.sum_squared_lengths // num_parts
        labels = find_labelled_rows(self.label_T[begin : end + 1])
        other.num_labelled, other.labelled_row_R, other.labelled_target_R = labels
        other._join_whole()
        return other

    def to(self, device: torch.device | str, non_blocking: bool = True) -> BatchContext:
        """Return a context on a device, without cached masks; the same object if it is on that device already."""
        if torch.device(device) == self.device:
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> BatchContext:
        """Return a context whose tensors are in pinned host memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def recordable(
        self, *, num_documents: int, max_length: int, num_tokens: int | None = None, chunk_size: int | None = None
    ) -> BatchContext:
        """Return a copy with static tensor addresses, for CUDA graphs that are recorded once and replayed per pack.

        The copy describes this pack until ``load`` copies another pack into it. It has no labelled rows. No pack to
        load may exceed a limit; kernels are recorded with num_tokens (None: of this pack) and max_length. Rows behind a
        pack's tokens are documents of at most max_length. Mixers read chunks of chunk_size tokens; None without mixers.

        Raises:
            ShapeError: This pack exceeds one of the limits, or its attention is not causal.
        """
        if self.causal_obstacle:
            raise ShapeError(f"The pack has no recordable context: {self.causal_obstacle}.")
        other = self._map(lambda tensor: tensor)
        other.num_tokens = self.num_tokens if num_tokens is None else num_tokens
        other.start_S1 = self.start_S1.new_empty(num_documents + 1)
        other.document_T = self.document_T.new_empty(other.num_tokens)
        other.position_T = self.position_T.new_empty(other.num_tokens)
        other.label_T = self.label_T.new_full((other.num_tokens,), IGNORED_LABEL)
        other.labelled_row_R = other.labelled_target_R = self.labelled_row_R.new_empty(0)
        other.num_documents = num_documents
        other.max_length = other.max_own_length = max_length
        if chunk_size is not None:
            other._recorded_chunks = recordable_chunks(other.start_S1, num_tokens=other.num_tokens, size=chunk_size)
        other.load(self)
        return other

    def load(self, other: BatchContext) -> None:
        """Copy another pack on the same device into this context, which ``recordable`` made.

        Raises:
            ShapeError: The other pack exceeds the limits of this context.

        Cost:
            That of ``load_documents``, with chunks five more small launches; no host sync.
        """
        further = load_documents(self, other)
        self._built.clear()
        if self._recorded_chunks is not None:
            size = self._recorded_chunks.size
            own = build_chunks((*other.lengths, *further), self.start_S1, size) if further else other.chunks(size)
            load_chunks(self._recorded_chunks, own, num_tokens=self.num_tokens)

    def note_read(self, backend: str) -> None:
        """Record that an attention layer read this context. A packed step without a read is an error."""
        self.reads[backend] += 1

    def once(self, kind: str, key: Hashable, build: Callable[[], T]) -> T:
        """Return ``build()``, called at most once per (kind, key) for this batch.

        The key has everything that the result depends on besides this batch: device, dtype, window. ``num_builds``
        counts by kind.
        """
        if self.part is not None:
            raise ContextError(
                f"{kind} of a part of a pack was requested, but attention reads the whole pack. Use context.whole."
            )
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
        arguments = VarlenArguments(self.start_S1, self.max_own_length, key_start_S1, self.max_length)
        return self.once("varlen", self.device, lambda: arguments)

    def chunks(self, size: int) -> Chunks:
        """Return the documents and their chunks of size tokens, for the kernels of recurrent mixers, on this device.

        Cost:
            Built on the host once per batch and copied without a host sync.
        """
        if self._recorded_chunks is not None and self._recorded_chunks.size == size:
            return self._recorded_chunks
        return self.once("chunks", (self.device, size), lambda: build_chunks(self.lengths, self.start_S1, size))

    def spans_of(self, window: int | None) -> BidirectionalSpans | None:
        """Return the spans whose tokens see each other in both directions in a layer with this window, or None."""
        return self.spans if self.spans is not None and self.spans.apply_to(window) else None

    def dense_mask(self, *, window: int | None = None, dtype: torch.dtype = torch.bool) -> torch.Tensor:
        """Return the causal document mask, shape (1, 1, T, T); it also shows tokens of ``spans`` their whole span.

        A bool mask is True where a query sees a key. A float mask is additive: 0 or the lowest finite value.

        Args:
            window: Keys a query sees, itself included; None for all keys of its document.
            dtype: torch.bool or a floating dtype.

        Cost:
            T x T elements, two or three element-wise launches, no loop over documents, no host sync.
        """
        return self._mask("dense_mask", build_dense_mask, window=window, key=dtype, dtype=dtype)

    def mask_blocks(
        self, *, window: int | None = None, dtype: torch.dtype, num_rows: int
    ) -> list[tuple[slice, slice, torch.Tensor]]:
        """Return the dense mask as blocks: queries, the only keys that they can see, and the mask between both.

        Args:
            window: As ``dense_mask``.
            dtype: As ``dense_mask``.
            num_rows: Queries of a block; the last one may have fewer.

        Cost:
            T x (num_rows + tokens of a document before a block) elements, half a dozen launches a block, no host sync.
        """
        options = {"lengths": self.lengths, "prefixes": self.prefixes, "dtype": dtype, "num_rows": num_rows}
        return self._mask("dense_mask", build_mask_blocks, window=window, key=(dtype, num_rows), **options)

    def block_mask(self, *, window: int | None = None) -> Any:
        """Return a FlexAttention BlockMask of this pack, built from block borders without a T x T tensor.

        The window is the keys that a query sees, itself included; None for all keys of its document.

        Cost:
            (T / 128) squared elements, times 128 if documents continue prefixes; a dozen launches, no host sync.
        """
        return self._mask("block_mask", build_block_mask, window=window, document_T=self.document_T)

    def _mask(
        self, kind: str, build: Callable[..., T], *, window: int | None, key: Hashable = None, **options: Any
    ) -> T:
        """Return the mask of a layer with this window; the key has the options that the mask depends on."""
        if window is not None and window < 1:
            raise OptionError(f"A sliding window must be at least 1 token, got {window}.")
        spans = self.spans_of(window)
        # If no document exceeds the window, sliding and full layers share one mask.
        window = None if window is None or window >= self.max_length else window
        prefix_range_2T = None if self.prefix_keys is None else self.prefix_keys.range_2T
        return self.once(
            kind,
            (self.device, window, spans is None, key),
            lambda: build(self.position_T, prefix_range_2T, spans=spans, window=window, **options),
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
        if self.spans is not None:
            other.spans = self.spans.map(move)
        other.reads, other.num_builds, other._built = Counter(), Counter(), {}
        if self.part is not None:
            other.part = self.part._replace(whole=self.part.whole._map(move))
            other._join_whole()
        return other

    def _join_whole(self) -> None:
        """Take the rows of the part from the whole pack, and count reads there."""
        assert self.part is not None
        whole, rows = self.part.whole, self.part.rows
        self.start_S1, self.reads = whole.start_S1, whole.reads
        self.document_T, self.position_T = whole.document_T[rows], whole.position_T[rows]
        self.label_T = whole.label_T[rows]
