"""Divergence of a student from a live or a stored teacher on the labelled rows of a pack, in chunks.

Full logits are never materialised, and the forward computes the gradient of each row.
Axes: T tokens of the pack, D and E model widths of student and teacher, V vocabulary, R labelled rows (padded to a
    bucket; the first num_rows count), K tokens of a stored teacher.
"""

from __future__ import annotations

from typing import Literal

import torch

from lightning_fastft.core.checks import check_choice, check_int, check_tensor
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels import logit_rows
from lightning_fastft.kernels.backends import choose_module, wide_dtype
from lightning_fastft.kernels.cross_entropy.reference import scale_and_cap
from lightning_fastft.kernels.divergence import reference
from lightning_fastft.kernels.divergence.reference import KINDS, DivergenceForm, Kind
from lightning_fastft.kernels.logit_rows import DEFAULT_CHUNK_ROWS, Chunk, Head, LabelledRows

Tail = Literal["bucket", "renormalise"]
TAILS: tuple[Tail, ...] = ("bucket", "renormalise")


def labelled_divergence(
    student: Head,
    teacher: Head,
    *,
    row_R: torch.Tensor,
    num_rows: int,
    kind: Kind = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    is_teacher_stored: bool = False,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> torch.Tensor:
    """Return the divergence of the student's distribution from the teacher's, for each row.

    Differentiable in the student's tensors; the teacher gets no gradient. Student and teacher may have different
    widths. The gradient of a row's divergence is kept undivided and multiplied by the incoming gradient in fp32.

    Args:
        student: Hidden states and output layer of the student.
        teacher: Hidden states, with the same rows, and output layer of the teacher.
        row_R: Rows of the states, int64, each at most once among the first num_rows.
        num_rows: Number of labelled rows; the rows after them are padding.
        kind: "forward_kl" is KL(teacher || student), "reverse_kl" KL(student || teacher), "jsd" is
            ``beta KL(teacher || m) + (1 - beta) KL(student || m)`` with ``m = beta teacher + (1 - beta) student``.
        beta: Share of the teacher in the mixture of "jsd", above 0 and below 1.
        temperature: Divides the logits of both, after their soft caps. The divergence is not multiplied by its square.
        vocab_size: Number of leading columns to compare, if student and teacher pad their embeddings differently.
        is_teacher_stored: Whether the teacher's states are those of the labelled rows alone, shape (R, E), in the order
            of row_R.
        chunk_rows: Rows of logits of each model in memory at a time.

    Returns:
        Shape (R,), fp32 (float64 for float64 states of the student); 0 from num_rows on.

    Raises:
        ShapeError: Shapes or dtypes do not match, or the vocabularies differ and vocab_size is not given.
        OptionError: An option is out of range.

    Cost:
        2 V D FLOP per row each for the logits of the student and for their gradient, 2 V E for the logits of the
        teacher. A trained weight or bias of the student costs both logits once more, and 2 V D for its gradient.
        Memory: twice chunk_rows x V logits; with a gradient, R x D states for the backward, and V x D in fp32 if the
        weight is trained. No host sync.

    Source:
        Generalised Jensen-Shannon divergence: arXiv 2306.13649. The gradient in the forward is own.

    Example:
        >>> student = Head(torch.zeros(3, 2), torch.zeros(4, 2))
        >>> teacher = Head(torch.ones(3, 1), torch.tensor([[0.0], [0.0], [0.0], [1.0]]))
        >>> labelled_divergence(student, teacher, row_R=torch.tensor([1, 0]), num_rows=1)
        tensor([0.1180, 0.0000])
    """
    check_choice("kind", kind, KINDS)
    if not 0 < beta < 1:
        raise OptionError(f"beta must be above 0 and below 1, got {beta}; use 'forward_kl' or 'reverse_kl' instead.")
    num_states = len(row_R) if is_teacher_stored else len(student.hidden_TD)
    student, teacher = _same_columns(student, teacher, vocab_size=vocab_size, num_states=num_states)
    student, teacher = student.with_temperature(temperature), teacher.with_temperature(temperature)
    rows = _check_rows(student, row_R, num_padded=None, num_rows=num_rows, chunk_rows=chunk_rows)
    form = DivergenceForm(kind, beta, student.scale, student.softcap, teacher.scale, teacher.softcap)
    teacher_dtype = teacher.compute_dtype
    teacher = teacher.cast(teacher_dtype)
    teacher_rows = rows._replace(row_R=None) if is_teacher_stored else rows

    def divergences(chunk: Chunk, writes_gradient: bool) -> tuple[torch.Tensor, None]:
        hidden_RE = teacher_rows.select(teacher.hidden_TD, chunk.begin, chunk.end).to(teacher_dtype)
        teacher_RV = logit_rows.write_raw_logits(hidden_RE, teacher)
        wider_RV = max(chunk.logits_RV, teacher_RV, key=lambda logits_RV: logits_RV.dtype.itemsize)
        module = choose_module(reference, wider_RV, dtypes=logit_rows.KERNEL_DTYPES)
        return module.row_divergences(chunk.logits_RV, teacher_RV, form=form, writes_gradient=writes_gradient), None

    return logit_rows.evaluate_rows(student, rows, divergences)[0]


@torch.no_grad()
def likeliest_tokens(
    head: Head,
    *,
    row_R: torch.Tensor,
    num_rows: int,
    top_k: int,
    temperature: float = 1.0,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely tokens of each row in descending order, and their log-probabilities, for a stored teacher.

    Returns:
        Tokens, int64, and log-probabilities, fp32, both (R, K); 0 from num_rows on.

    Raises:
        OptionError: top_k or temperature is out of range.

    Cost:
        2 V D FLOP per row, and chunk_rows x V logits in fp32. No host sync.

    Example:
        >>> head = Head(torch.ones(1, 1), torch.tensor([[0.0], [2.0], [1.0]]))
        >>> likeliest_tokens(head, row_R=torch.tensor([0]), num_rows=1, top_k=2)[0].tolist()
        [[1, 2]]
    """
    check_int("top_k", top_k, low=1, high=head.weight_VD.shape[0])
    head = head.with_temperature(temperature)
    id_RK = torch.zeros(len(row_R), top_k, dtype=torch.int64, device=head.hidden_TD.device)
    log_prob_RK = torch.zeros(len(row_R), top_k, device=head.hidden_TD.device)
    rows = LabelledRows(row_R, len(row_R), num_rows, chunk_rows)
    for chunk in logit_rows.logit_chunks(head, rows, dtype=head.compute_dtype):
        value_RV = scale_and_cap(chunk.logits_RV.float(), scale=head.scale, softcap=head.softcap)
        top_RK = (value_RV - value_RV.logsumexp(1, keepdim=True)).topk(top_k, dim=1)
        log_prob_RK[chunk.begin : chunk.end] = top_RK.values
        id_RK[chunk.begin : chunk.end] = top_RK.indices
    return id_RK, log_prob_RK


def labelled_topk_divergence(
    student: Head,
    *,
    teacher_id_RK: torch.Tensor,
    teacher_log_prob_RK: torch.Tensor,
    row_R: torch.Tensor,
    num_rows: int,
    temperature: float = 1.0,
    tail: Tail = "bucket",
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> torch.Tensor:
    """Return KL(teacher || student) for each row, from the log-probabilities of the teacher's K most likely tokens.

    Differentiable in the student's tensors, like ``labelled_divergence``.

    Args:
        student: Hidden states and output layer of the student.
        teacher_id_RK: Tokens that the teacher stored, int64, each at most once in a row.
        teacher_log_prob_RK: Their log-probabilities under the teacher, floating; -inf to ignore a token.
        row_R: Rows of the states, int64, each at most once among the first num_rows.
        num_rows: Number of labelled rows; the rows after them are padding, and their stored tokens are not read.
        temperature: Divides the student's logits, after the soft cap. The teacher's logits must have been divided by it
            before they were stored.
        tail: "bucket" treats all other tokens as one more token, with the remaining mass of each side. "renormalise"
            divides both sides by their mass on the stored tokens.
        chunk_rows: Rows of logits in memory at a time.

    Returns:
        Shape (R,), fp32 (float64 for float64 states); 0 from num_rows on.

    Raises:
        ShapeError: Shapes or dtypes do not match, or all tokens are stored and "bucket" has none left.
        OptionError: An option is out of range.

    Cost:
        The cost of ``labelled_divergence`` without the teacher's logits.

    Source:
        The definition; the gradient in the forward is own.

    Example:
        >>> student = Head(torch.zeros(3, 2), torch.zeros(4, 2))
        >>> stored = {"teacher_id_RK": torch.tensor([[3]]), "teacher_log_prob_RK": torch.tensor([[0.5]]).log()}
        >>> labelled_topk_divergence(student, **stored, row_R=torch.tensor([1]), num_rows=1)
        tensor([0.1438])
    """
    check_choice("tail", tail, TAILS)
    logit_rows.check_head(student)
    check_tensor("teacher_id_RK", teacher_id_RK, ndim=2, dtypes=(torch.int64,))
    check_tensor("teacher_log_prob_RK", teacher_log_prob_RK, ndim=2)
    num_padded, num_stored = teacher_id_RK.shape
    num_columns = student.weight_VD.shape[0]
    if teacher_log_prob_RK.shape != teacher_id_RK.shape:
        raise ShapeError(
            f"teacher_log_prob_RK is {tuple(teacher_log_prob_RK.shape)}, teacher_id_RK {tuple(teacher_id_RK.shape)}."
        )
    if not 1 <= num_stored <= num_columns - (tail == "bucket"):
        raise ShapeError(
            f"Each row stores {num_stored} of {num_columns} tokens. tail='bucket' needs at least one stored and one "
            "other token. Store fewer, or use tail='renormalise'."
        )
    student = student.with_temperature(temperature)
    rows = _check_rows(student, row_R, num_padded=num_padded, num_rows=num_rows, chunk_rows=chunk_rows)
    teacher_log_prob_RK = teacher_log_prob_RK.detach()

    def divergences(chunk: Chunk, writes_gradient: bool) -> tuple[torch.Tensor, None]:
        id_RK, log_p_RK = (tensor[chunk.begin : chunk.end] for tensor in (teacher_id_RK, teacher_log_prob_RK))
        compare = _bucket_divergences if tail == "bucket" else _renormalised_divergences
        return compare(chunk.logits_RV, student, id_RK, log_p_RK, writes_gradient=writes_gradient), None

    return logit_rows.evaluate_rows(student, rows, divergences)[0]


def _bucket_divergences(
    logits_RV: torch.Tensor, head: Head, id_RK: torch.Tensor, log_p_RK: torch.Tensor, *, writes_gradient: bool
) -> torch.Tensor:
    """Return the divergences with all unknown tokens as one.

    The gradient is q - p at known tokens; the other tokens split theirs in proportion to their probabilities.
    """
    value_RK, slope_RK = _known_values(logits_RV, head, id_RK)
    log_p_RK = log_p_RK.to(value_RK.dtype)
    # Logarithms are relative to the highest known logit, so they are not rounded at the magnitude of the logits.
    highest_R = value_RK.amax(dim=1)
    value_RK = value_RK - highest_R[:, None]
    known_R = value_RK.logsumexp(dim=1)
    teacher_rest_R = (-torch.expm1(log_p_RK.logsumexp(dim=1))).clamp(min=0.0)
    logits_RV.scatter_(1, id_RK, -torch.inf)
    rest_R = choose_module(reference, logits_RV, dtypes=logit_rows.KERNEL_DTYPES).rest_rows(
        logits_RV,
        highest_R,
        known_R,
        teacher_rest_R,
        scale=head.scale,
        softcap=head.softcap,
        writes_gradient=writes_gradient,
    )
    total_R = torch.logaddexp(known_R, rest_R)
    log_q_RK = value_RK - total_R[:, None]
    if writes_gradient:
        gradient_RK = (log_q_RK.exp() - log_p_RK.exp()) * slope_RK
        logits_RV.scatter_(1, id_RK, gradient_RK.to(logits_RV.dtype))
    # 0 times the logarithm of 0 is 0.
    rest_term_R = torch.special.xlogy(teacher_rest_R, teacher_rest_R) - teacher_rest_R * (rest_R - total_R)
    return reference.kl(log_p_RK, log_q_RK) + rest_term_R


def _renormalised_divergences(
    logits_RV: torch.Tensor, head: Head, id_RK: torch.Tensor, log_p_RK: torch.Tensor, *, writes_gradient: bool
) -> torch.Tensor:
    """Return the divergences over the known tokens; only they get a gradient."""
    value_RK, slope_RK = _known_values(logits_RV, head, id_RK)
    log_q_RK, log_p_RK = value_RK.log_softmax(dim=1), log_p_RK.to(value_RK.dtype).log_softmax(dim=1)
    if writes_gradient:
        gradient_RK = (log_q_RK.exp() - log_p_RK.exp()) * slope_RK
        logits_RV.zero_().scatter_(1, id_RK, gradient_RK.to(logits_RV.dtype))
    return reference.kl(log_p_RK, log_q_RK)


def _known_values(
    logits_RV: torch.Tensor, head: Head, id_RK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the student's logits of known tokens in a wide dtype, and their slopes."""
    raw_RK = logits_RV.gather(1, id_RK).to(wide_dtype(logits_RV.dtype))
    return reference.value_and_slope(raw_RK, scale=head.scale, softcap=head.softcap)


def _same_columns(student: Head, teacher: Head, *, vocab_size: int | None, num_states: int) -> tuple[Head, Head]:
    """Return both heads with the same number of columns, the teacher's tensors without a graph."""
    logit_rows.check_head(student)
    logit_rows.check_head(teacher, name="teacher ")
    if teacher.hidden_TD.shape[0] != num_states:
        raise ShapeError(
            f"The student needs a teacher's states of {num_states} tokens, the teacher has "
            f"{teacher.hidden_TD.shape[0]}. Give both the same batch."
        )
    sizes = student.weight_VD.shape[0], teacher.weight_VD.shape[0]
    if vocab_size is None and sizes[0] != sizes[1]:
        raise ShapeError(
            f"The student has {sizes[0]} tokens, the teacher {sizes[1]}. If both have the same tokenizer and only the "
            "padding of their embeddings differs, give vocab_size=, the number of tokens of the tokenizer."
        )
    if vocab_size is not None:
        check_int("vocab_size", vocab_size, low=1, high=min(sizes))
        student, teacher = _first_columns(student, vocab_size), _first_columns(teacher, vocab_size)
    bias_V = None if teacher.bias_V is None else teacher.bias_V.detach()
    return student, teacher._replace(
        hidden_TD=teacher.hidden_TD.detach(), weight_VD=teacher.weight_VD.detach(), bias_V=bias_V
    )


def _first_columns(head: Head, num_columns: int) -> Head:
    bias_V = None if head.bias_V is None else head.bias_V[:num_columns]
    return head._replace(weight_VD=head.weight_VD[:num_columns], bias_V=bias_V)


def _check_rows(
    student: Head, row_R: torch.Tensor, *, num_padded: int | None, num_rows: int, chunk_rows: int
) -> LabelledRows:
    """Return rows that match the student, and the stored rows of a teacher if there are any."""
    check_tensor("row_R", row_R, ndim=1, dtypes=(torch.int64,))
    rows = LabelledRows(row_R, row_R.shape[0] if num_padded is None else num_padded, num_rows, chunk_rows)
    logit_rows.check_rows(student, rows)
    return rows
