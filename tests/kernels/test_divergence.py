"""Divergences of a student from a live and a stored teacher, on a CPU by the plain twin of the kernels."""

from unittest import mock

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.divergence import op
from lightning_fastft.kernels.divergence.op import labelled_divergence, labelled_topk_divergence
from lightning_fastft.kernels.divergence.reference import KINDS
from lightning_fastft.kernels.logit_rows import Head
from tests.support import loss_twins
from tests.support.kernel_harness import planted_faults
from tests.support.truth import Watch, one_unit, poisoned

NUM_TOKENS, WIDTH, TEACHER_WIDTH, VOCABULARY, NUM_STORED = 41, 12, 7, 29, 5
OPTIONS = ({}, {"scale": 0.5, "softcap": 2.0, "has_bias": True})
WIDE_AND_NARROW = (torch.float64, torch.float32, torch.bfloat16)


def make_head(row_R, width, dtype, *, scale=1.0, softcap=None, has_bias=False, is_trained=True, vocabulary=VOCABULARY):
    """A head with NaN in every row that is not labelled, and around its tensors."""
    hidden_TD = torch.full((NUM_TOKENS, width), float("nan"))
    hidden_TD[row_R] = torch.randn(len(row_R), width)
    tensors = [poisoned(tensor.to(dtype)).detach() for tensor in (hidden_TD, torch.randn(vocabulary, width))]
    tensors += [torch.randn(vocabulary).to(dtype)] if has_bias else [None]
    tensors = [None if tensor is None else tensor.requires_grad_(is_trained) for tensor in tensors]
    return Head(*tensors, scale, softcap)


def make_rows(num_rows, num_padded=5):
    """Rows; the padding points at a real one."""
    row_R = torch.randperm(NUM_TOKENS)[:num_rows]
    return row_R, torch.cat([row_R, row_R[:1].expand(num_padded)])


def make_stored(num_rows, num_padded=5):
    """Log-probabilities of a stored teacher, without a real token in the padding."""
    stored = torch.randn(num_rows, VOCABULARY).mul(2).log_softmax(dim=1).topk(NUM_STORED, dim=1)
    id_RK = torch.cat([stored.indices, torch.full((num_padded, NUM_STORED), -1)])
    return id_RK, torch.cat([stored.values, torch.full((num_padded, NUM_STORED), float("nan"))])


def cast_head(head, dtype):
    tensors = [None if tensor is None else tensor.detach().to(dtype).requires_grad_() for tensor in head.inputs]
    return Head(*tensors, head.scale, head.softcap)


def check_against_truth(compute, compute_plain, student, *, dtype, num_rows, num_padded=5):
    """Values, and every gradient of a weighted sum, where the weights of padding rows are not read."""
    # Plain PyTorch is judged on more weights than the first, and on logits summed in other orders: its error of one sum
    # may be small by luck. Beside the largest of 4, 13 of 480 draws of inputs were refused; beside that of 32, none.
    weights = [torch.randn(num_rows) for _ in range(32)]
    width = student.hidden_TD.shape[1]
    orders = [torch.arange(width), *(torch.randperm(width) for _ in weights[1:])]

    def run_plain(wide, weight_R, order_D):
        head = cast_head(student, wide)
        value_R = compute_plain(
            head._replace(hidden_TD=head.hidden_TD[:, order_D], weight_VD=head.weight_VD[:, order_D])
        )
        value_R.backward(weight_R.to(value_R.dtype))
        return [value_R.detach(), *(tensor.grad for tensor in head.inputs if tensor is not None)]

    truths = [run_plain(torch.float64, weight_R, orders[0]) for weight_R in weights]
    plains = [run_plain(dtype, weight_R, order_D) for weight_R, order_D in zip(weights, orders)]
    value_R = compute(student)
    value_R.backward(torch.nn.functional.pad(weights[0], (0, num_padded), value=float("nan")).to(value_R.dtype))
    assert value_R.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert (value_R[num_rows:] == 0).all()
    ours = [value_R.detach()[:num_rows], *(tensor.grad for tensor in student.inputs if tensor is not None)]
    for place, (name, one) in enumerate(zip(("value", "hidden", "weight", "bias"), ours)):
        error, *plain_errors = (
            (tensor.double() - truth).abs().max().item()
            for tensor, truth in [
                (one, truths[0][place]),
                *((plain[place], truth[place]) for plain, truth in zip(plains, truths)),
            ]
        )
        # In float64 plain PyTorch is the truth.
        unit = one_unit(truths[0][place], dtype) * (64 if dtype is torch.float64 else 1)
        assert torch.isfinite(one).all()
        assert error <= max(2 * max(plain_errors), unit), (
            f"{name}: error {error:.3g}, plain PyTorch {max(plain_errors):.3g}"
        )


def check_divergence(function, num_rows, dtype, *, kind, beta=0.3, temperature=1.0, vocab_size=None, **options):
    row_R, padded_R = make_rows(num_rows)
    student = make_head(row_R, WIDTH, dtype, **options)
    teacher = make_head(row_R, TEACHER_WIDTH, dtype, scale=1.5, vocabulary=VOCABULARY + 3 * (vocab_size is not None))

    def compute(head):
        return function(
            head, teacher, row_R=padded_R, num_rows=num_rows, kind=kind, beta=beta, temperature=temperature,
            vocab_size=vocab_size, chunk_rows=8,
        )  # fmt: skip

    def compute_plain(head):
        other = cast_head(teacher, head.hidden_TD.dtype)
        if vocab_size is not None:
            bias_V = None if head.bias_V is None else head.bias_V[:vocab_size]
            head = head._replace(weight_VD=head.weight_VD[:vocab_size], bias_V=bias_V)
            other = other._replace(weight_VD=other.weight_VD[:vocab_size])
        # Temperature without the arithmetic of scale and soft cap that the package has for it.
        with mock.patch.object(
            loss_twins, "scale_and_cap", lambda raw, **form: SCALE_AND_CAP(raw, **form) / temperature
        ):
            return loss_twins.divergence_twin(head, other, row_R=row_R, kind=kind, beta=beta)

    check_against_truth(compute, compute_plain, student, dtype=dtype, num_rows=num_rows)
    assert all(tensor.grad is None for tensor in teacher.inputs if tensor is not None)


SCALE_AND_CAP = loss_twins.scale_and_cap


def check_topk(function, num_rows, dtype, *, tail, **options):
    row_R, padded_R = make_rows(num_rows)
    student = make_head(row_R, WIDTH, dtype, **options)
    id_RK, log_prob_RK = make_stored(num_rows)

    def compute(head):
        return function(
            head, teacher_id_RK=id_RK, teacher_log_prob_RK=log_prob_RK, row_R=padded_R, num_rows=num_rows, tail=tail,
            chunk_rows=8,
        )  # fmt: skip

    def compute_plain(head):
        return loss_twins.topk_divergence_twin(
            head, teacher_id_RK=id_RK[:num_rows], teacher_log_prob_RK=log_prob_RK[:num_rows], row_R=row_R, tail=tail
        )

    check_against_truth(compute, compute_plain, student, dtype=dtype, num_rows=num_rows)


@pytest.mark.parametrize("dtype", WIDE_AND_NARROW)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_divergence_and_every_gradient_equal_the_truth(kind, options, dtype):
    check_divergence(labelled_divergence, 36, dtype, kind=kind, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 8, 9, NUM_TOKENS - 5])
def test_number_of_rows(num_rows, kind):
    check_divergence(labelled_divergence, num_rows, torch.float64, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_temperature_divides_the_logits_behind_the_soft_cap(kind):
    check_divergence(labelled_divergence, 9, torch.float64, kind=kind, temperature=2.5, scale=0.5, softcap=2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_of_the_embeddings_takes_no_part(kind):
    check_divergence(labelled_divergence, 9, torch.float64, kind=kind, vocab_size=VOCABULARY - 2, has_bias=True)


@pytest.mark.parametrize("dtype", WIDE_AND_NARROW)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tail", op.TAILS)
def test_stored_divergence_and_every_gradient_equal_the_truth(tail, options, dtype):
    check_topk(labelled_topk_divergence, 36, dtype, tail=tail, **options)


FAULTS = {
    "teacher's scale of the student": "student.softcap, {teacher.scale => student.scale},",
    "teacher's rows of another chunk": "rows.select(teacher.hidden_TD, {chunk.begin, chunk.end => 0, chunk.end - chunk.begin})",
    "temperature dropped": "student.with_temperature({temperature => 1.0}), teacher.with",
    "teacher's temperature dropped": "teacher.with_temperature({temperature => 1.0})",
    "bucket of the teacher dropped": "{torch.special.xlogy(teacher_rest_R, teacher_rest_R) => 0.0} -",
    "bucket of the student dropped": "{teacher_rest_R * (rest_R - total_R) => 0.0}",
    "known tokens in the rest": "{logits_RV.scatter_(1, id_RK, -torch.inf) => }",
    "known tokens without gradient": "logits_RV.scatter_(1, id_RK, gradient_RK.to(logits_RV.dtype){ => * 0.0})",
    "other tokens with gradient": "logits_RV{.zero_() => }.scatter_(1, id_RK, gradient_RK",
    "student not renormalised": "log_q_RK, log_p_RK = {value_RK.log_softmax(dim=1) => value_RK},",
    "stored rows of another chunk": "id_RK, log_p_RK = (tensor[{chunk.begin : chunk.end => : chunk.end - chunk.begin}]",
}


def check_every_part(module):
    options = {"scale": 0.5, "softcap": 2.0}
    for kind in KINDS:
        check_divergence(module.labelled_divergence, 19, torch.float64, kind=kind, temperature=1.5, **options)
    for tail in op.TAILS:
        check_topk(module.labelled_topk_divergence, 19, torch.float64, tail=tail, **options)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    op, check_every_part, FAULTS, errors=(AssertionError, RuntimeError)
)


def test_a_student_equal_to_its_teacher_has_no_divergence():
    row_R, padded_R = make_rows(9)
    student = make_head(row_R, WIDTH, torch.float32)
    for kind in KINDS:
        value_R = labelled_divergence(student, student, row_R=padded_R, num_rows=9, kind=kind)
        gradients = torch.autograd.grad(value_R.sum(), student.inputs[:2])
        for tensor in (value_R, *gradients):
            torch.testing.assert_close(tensor, torch.zeros_like(tensor), rtol=0, atol=1e-5)


def test_the_mixture_tends_to_both_kl_divergences():
    """Divided by beta and by 1 - beta, as arXiv 2306.13649 says."""
    row_R, padded_R = make_rows(9)
    student, teacher = (make_head(row_R, width, torch.float64, scale=0.2) for width in (WIDTH, TEACHER_WIDTH))
    for kind, beta, share in (("forward_kl", 1e-7, 1e-7), ("reverse_kl", 1 - 1e-7, 1e-7)):
        expected_R = labelled_divergence(student, teacher, row_R=padded_R, num_rows=9, kind=kind)
        mixed_R = labelled_divergence(student, teacher, row_R=padded_R, num_rows=9, kind="jsd", beta=beta)
        torch.testing.assert_close(mixed_R / share, expected_R, rtol=1e-3, atol=1e-6)


def test_all_tokens_stored_and_renormalised_are_the_live_teacher():
    row_R, padded_R = make_rows(9)
    student, teacher = (make_head(row_R, width, torch.float64) for width in (WIDTH, TEACHER_WIDTH))
    log_prob_RV = (teacher.hidden_TD[padded_R] @ teacher.weight_VD.T).log_softmax(dim=1)
    stored = {"teacher_id_RK": torch.arange(VOCABULARY).repeat(14, 1), "teacher_log_prob_RK": log_prob_RV}
    found_R = labelled_topk_divergence(student, **stored, row_R=padded_R, num_rows=9, tail="renormalise")
    torch.testing.assert_close(found_R, labelled_divergence(student, teacher, row_R=padded_R, num_rows=9))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_stored_states_of_the_labelled_rows_are_the_live_teacher(kind, options):
    row_R, padded_R = make_rows(9)
    student, teacher = (make_head(row_R, width, torch.float32, **options) for width in (WIDTH, TEACHER_WIDTH))
    stored = teacher._replace(hidden_TD=teacher.hidden_TD.detach()[padded_R])
    rows = {"row_R": padded_R, "num_rows": 9, "kind": kind, "chunk_rows": 4}
    live_R = labelled_divergence(student, teacher, **rows)
    found_R = labelled_divergence(student, stored, **rows, is_teacher_stored=True)
    assert torch.equal(found_R, live_R)
    one, other = (torch.autograd.grad(value_R.sum(), student.inputs[:2]) for value_R in (found_R, live_R))
    assert all(map(torch.equal, one, other))
    with pytest.raises(ShapeError, match="14 tokens"):
        labelled_divergence(student, teacher, **rows, is_teacher_stored=True)


def test_a_stored_token_of_probability_zero_does_not_count():
    row_R, padded_R = make_rows(9)
    student = make_head(row_R, WIDTH, torch.float64)
    id_RK, log_prob_RK = make_stored(9)
    log_prob_RK[:, -1] = -torch.inf
    for tail in op.TAILS:
        found = [
            labelled_topk_divergence(
                student, teacher_id_RK=ids, teacher_log_prob_RK=stored, row_R=padded_R, num_rows=9, tail=tail
            )
            for ids, stored in ((id_RK, log_prob_RK), (id_RK[:, :-1], log_prob_RK[:, :-1]))
        ]
        assert all(torch.isfinite(value_R).all() for value_R in found)
        if tail == "bucket":
            # One token more apart from the rest cannot lessen a divergence.
            assert (found[0][:9] >= 0).all()


def test_full_logits_never_exist_and_the_host_never_waits():
    num_tokens, vocabulary = 64, 501
    student = Head(torch.randn(num_tokens, 4).requires_grad_(), torch.randn(vocabulary, 4).requires_grad_())
    teacher = Head(torch.randn(num_tokens, 3), torch.randn(vocabulary, 3))
    rows = {"row_R": torch.arange(num_tokens), "num_rows": num_tokens, "chunk_rows": 8}
    stored = {
        "teacher_id_RK": torch.arange(5).repeat(num_tokens, 1),
        "teacher_log_prob_RK": torch.full((num_tokens, 5), -2.0),
    }
    with Watch() as watch:
        for kind in KINDS:
            labelled_divergence(student, teacher, **rows, kind=kind).sum().backward()
        for tail in op.TAILS:
            labelled_topk_divergence(student, **stored, **rows, tail=tail).sum().backward()
    assert watch.waits == []
    assert watch.largest == 8 * vocabulary


def test_no_rows_and_no_graph():
    student, teacher = (make_head(torch.arange(3), width, torch.float32) for width in (WIDTH, TEACHER_WIDTH))
    padding_R = torch.zeros(4, dtype=torch.int64)
    value_R = labelled_divergence(student, teacher, row_R=padding_R, num_rows=0)
    gradients = torch.autograd.grad(value_R.sum(), student.inputs[:2])
    assert all((tensor == 0).all() for tensor in (value_R, *gradients))
    with torch.no_grad():
        assert labelled_divergence(student, teacher, row_R=padding_R, num_rows=1).grad_fn is None


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"kind": "kl"}, OptionError, "kind"),
        ({"beta": 0.0}, OptionError, "beta"),
        ({"beta": float("nan")}, OptionError, "beta"),
        ({"temperature": 0.0}, OptionError, "temperature"),
        ({"vocab_size": VOCABULARY + 1}, OptionError, "vocab_size"),
        ({"num_rows": 4}, OptionError, "num_rows"),
        ({"row_R": torch.zeros(3)}, ShapeError, "row_R"),
    ],
)
def test_impossible_options_are_refused(change, error, word):
    student, teacher = (make_head(torch.arange(3), width, torch.float32) for width in (WIDTH, TEACHER_WIDTH))
    with pytest.raises(error, match=word):
        labelled_divergence(student, teacher, **{"row_R": torch.arange(3), "num_rows": 3, **change})


def test_teachers_that_do_not_fit_are_refused():
    rows = {"row_R": torch.arange(3), "num_rows": 3}
    student = make_head(torch.arange(3), WIDTH, torch.float32)
    larger = make_head(torch.arange(3), WIDTH, torch.float32, vocabulary=VOCABULARY + 3)
    with pytest.raises(ShapeError, match="vocab_size="):
        labelled_divergence(student, larger, **rows)
    with pytest.raises(ShapeError, match="same batch"):
        labelled_divergence(student, student._replace(hidden_TD=student.hidden_TD[1:]), **rows)
    with pytest.raises(ShapeError, match="teacher hidden_TD is"):
        labelled_divergence(student, student._replace(hidden_TD=student.hidden_TD.double()), **rows)


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"tail": "none"}, OptionError, "tail"),
        ({"teacher_id_RK": torch.zeros(3, 2)}, ShapeError, "teacher_id_RK"),
        ({"teacher_id_RK": torch.zeros(3, 1, dtype=torch.int64)}, ShapeError, "teacher_log_prob_RK"),
        ({"row_R": torch.arange(4)}, ShapeError, "row_R"),
        (
            {
                "teacher_id_RK": torch.arange(VOCABULARY).repeat(3, 1),
                "teacher_log_prob_RK": torch.zeros(3, VOCABULARY),
            },
            ShapeError,
            "renormalise",
        ),
    ],
)
def test_stored_teachers_that_do_not_fit_are_refused(change, error, word):
    stored = {"teacher_id_RK": torch.arange(2).repeat(3, 1), "teacher_log_prob_RK": torch.full((3, 2), -1.0)}
    arguments = {**stored, "row_R": torch.arange(3), "num_rows": 3, **change}
    with pytest.raises(error, match=word):
        labelled_topk_divergence(make_head(torch.arange(3), WIDTH, torch.float32), **arguments)
