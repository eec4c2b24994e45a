from unittest import mock

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels import logit_rows
from lightning_fastft.kernels.cross_entropy import op, reference
from lightning_fastft.kernels.cross_entropy.op import labelled_cross_entropy, labelled_log_probs, token_statistics
from lightning_fastft.kernels.logit_rows import Head, LabelledRows, logit_chunks
from tests.support.kernel_harness import load_with_fault, planted_faults
from tests.support.loss_twins import cross_entropy_twin, log_probs_twin
from tests.support.truth import Watch, assert_within_bound, one_unit, poisoned

NUM_TOKENS, WIDTH, VOCABULARY = 41, 12, 29


def make_inputs(num_rows, dtype, *, num_padded=0, has_bias=False, ignored=False):
    """States inside a NaN buffer, with NaN in every row that is not trained."""
    hidden_TD = torch.full((NUM_TOKENS, WIDTH), float("nan"))
    row_R = torch.randperm(NUM_TOKENS)[:num_rows].sort().values
    hidden_TD[row_R] = torch.randn(num_rows, WIDTH)
    target_R = torch.randint(0, VOCABULARY, (num_rows,))
    if ignored and num_rows > 1:
        target_R[1] = reference.IGNORED_TARGET
    # Padding rows point at a real row and a real token: whoever reads them is wrong.
    row_R = torch.cat([row_R, row_R.new_zeros(num_padded)])
    target_R = torch.cat([target_R, target_R.new_zeros(num_padded)])
    weight_VD = torch.randn(VOCABULARY, WIDTH)
    bias_V = torch.randn(VOCABULARY).to(dtype).requires_grad_() if has_bias else None
    hidden_TD, weight_VD = (poisoned(tensor.to(dtype)).detach().requires_grad_() for tensor in (hidden_TD, weight_VD))
    return hidden_TD, weight_VD, bias_V, row_R, target_R


def run_reference(hidden_TD, weight_VD, bias_V, *, dtype, loss_factor=1.0, scale=1.0, softcap=None, **arguments):
    inputs = [
        None if tensor is None else tensor.detach().to(dtype).requires_grad_()
        for tensor in (hidden_TD, weight_VD, bias_V)
    ]
    loss = cross_entropy_twin(Head(*inputs, scale, softcap), **arguments)
    (loss * loss_factor).backward()
    return [loss.detach(), *(None if tensor is None else tensor.grad for tensor in inputs)]


def loss_of_rounded_logits(hidden_TD, weight_VD, bias_V, *, dtype, row_R, target_R, num_items, scale, softcap):
    """The loss in dtype from logits that are as narrow as the states: what the sums and the softmax add to the
    GEMM's rounding.
    """
    logits_RV = torch.nn.functional.linear(
        hidden_TD.detach()[row_R], weight_VD.detach(), None if bias_V is None else bias_V.detach()
    ).to(dtype)
    logits_RV = reference.scale_and_cap(logits_RV, scale=scale, softcap=softcap)
    return (
        torch.nn.functional.cross_entropy(logits_RV, target_R, reduction="sum", ignore_index=reference.IGNORED_TARGET)
        / num_items
    )


def check_against_truth(
    function, num_rows, dtype, *, num_padded=0, has_bias=False, ignored=False, scale=1.0, softcap=None, chunk_rows=8
):
    hidden_TD, weight_VD, bias_V, row_R, target_R = make_inputs(
        num_rows, dtype, num_padded=num_padded, has_bias=has_bias, ignored=ignored
    )
    given = {
        "row_R": row_R[:num_rows],
        "target_R": target_R[:num_rows],
        "num_items": 3.5,
        "scale": scale,
        "softcap": softcap,
    }
    truth = run_reference(hidden_TD, weight_VD, bias_V, dtype=torch.float64, loss_factor=2.0, **given)
    plain = run_reference(hidden_TD, weight_VD, bias_V, dtype=dtype, loss_factor=2.0, **given)
    loss = function(
        Head(hidden_TD, weight_VD, bias_V, scale, softcap),
        row_R=row_R,
        target_R=target_R,
        num_rows=num_rows,
        num_items=3.5,
        chunk_rows=chunk_rows,
    )
    # Something other than 1 must arrive in the backward; a power of two rounds nothing.
    (2.0 * loss).backward()
    ours = [loss.detach(), hidden_TD.grad, weight_VD.grad, None if bias_V is None else bias_V.grad]
    assert loss.dtype is torch.float32
    for name, one, other, true in zip(("hidden", "weight", "bias"), ours[1:], plain[1:], truth[1:]):
        if true is not None:
            assert_within_bound(name, one, plain=other, truth=true, dtype=dtype)
    true_loss, plain_loss = (
        loss_of_rounded_logits(hidden_TD, weight_VD, bias_V, dtype=wide, **given).item()
        for wide in (torch.float64, torch.float32)
    )
    # Half a unit in the last place of the sum for each addition.
    unit = num_rows * one_unit(torch.tensor(true_loss * 3.5), torch.float32) / 2 / 3.5
    error, plain_error = abs(ours[0].item() - true_loss), abs(plain_loss - true_loss)
    assert error <= max(2 * plain_error, unit), f"loss: error {error} above {unit}, plain {plain_error}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 16, 31, NUM_TOKENS])
def test_loss_and_every_gradient_equal_the_truth(num_rows, dtype):
    check_against_truth(labelled_cross_entropy, num_rows, dtype, num_padded=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        {"has_bias": True},
        {"scale": 0.125},
        {"softcap": 3.0},
        {"scale": 0.5, "softcap": 2.0, "has_bias": True},
        {"ignored": True},
    ],
)
def test_bias_scale_softcap_and_ignored_targets(case, dtype):
    check_against_truth(labelled_cross_entropy, 19, dtype, **case)


def check_log_probs(
    function, num_rows, dtype, *, num_padded=0, has_bias=False, ignored=False, scale=1.0, softcap=None, chunk_rows=8
):
    hidden_TD, weight_VD, bias_V, row_R, target_R = make_inputs(
        num_rows, dtype, num_padded=num_padded, has_bias=has_bias, ignored=ignored
    )
    # The gradient of padding rows must not arrive.
    d_log_prob_R = torch.randn(num_rows + num_padded)
    d_log_prob_R[num_rows:] = float("nan")

    def run_plain(wide):
        inputs = [
            None if tensor is None else tensor.detach().to(wide).requires_grad_()
            for tensor in (hidden_TD, weight_VD, bias_V)
        ]
        log_prob_R, entropy_R = log_probs_twin(
            Head(*inputs, scale, softcap), row_R=row_R[:num_rows], target_R=target_R[:num_rows]
        )
        log_prob_R.backward(d_log_prob_R[:num_rows].to(log_prob_R.dtype))
        return log_prob_R.detach(), entropy_R.detach(), *(tensor.grad for tensor in inputs if tensor is not None)

    log_prob_R, entropy_R = function(
        Head(hidden_TD, weight_VD, bias_V, scale, softcap),
        row_R=row_R,
        target_R=target_R,
        num_rows=num_rows,
        with_entropy=True,
        chunk_rows=chunk_rows,
    )
    log_prob_R.backward(d_log_prob_R.to(log_prob_R.dtype))
    assert log_prob_R.dtype is entropy_R.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert not entropy_R.requires_grad
    assert (log_prob_R[num_rows:] == 0).all()
    assert (entropy_R[num_rows:] == 0).all()
    names = ("log_prob_R", "entropy_R", "hidden", "weight", "bias")
    ours = [log_prob_R.detach()[:num_rows], entropy_R[:num_rows]]
    ours += [tensor.grad for tensor in (hidden_TD, weight_VD, bias_V) if tensor is not None]
    for name, one, other, true in zip(names, ours, run_plain(dtype), run_plain(torch.float64)):
        if dtype is torch.float64:
            torch.testing.assert_close(one, true, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert_within_bound(name, one, plain=other, truth=true, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 8, 9, NUM_TOKENS])
def test_log_probs_and_every_gradient_equal_the_truth(num_rows, dtype):
    check_log_probs(labelled_log_probs, num_rows, dtype, num_padded=5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [{"scale": 0.5, "softcap": 2.0, "has_bias": True}, {"ignored": True}])
def test_log_probs_with_bias_scale_softcap_and_ignored_targets(case, dtype):
    check_log_probs(labelled_log_probs, 19, dtype, **case)


FAULTS = {
    "num_items missing in the backward": "factor = d_loss {/ ctx.divisor => }",
    "gradient of the loss dropped": "factor = {d_loss => torch.ones_like(d_loss)} / ctx.divisor",
    "mantissa of num_items dropped": "return 1.0 {/ mantissa => }, 2.0**exponent",
    "scale of the loss dropped": "head = Head(hidden_TD, weight_VD, bias_V, {scale => 1.0}, softcap)",
    "targets of the first chunk": "target_R[{chunk.begin : chunk.end => : chunk.end - chunk.begin}],",
    "log-probability descended": "gradient_factor = {- => }1.0 if writes_gradient",
    "sign of the log-probability": "return {- => }nll_R, entropy_R",
}
# In the code that cross-entropy shares with other functions of rows.
SHARED_FAULTS = {
    "padding rows trained": (
        "for begin in range(0, rows.{num_rows => num_padded}, chunk_rows): end = min(begin + "
        "chunk_rows, rows.{num_rows => num_padded})"
    ),
    "last chunk lost": (
        "for begin in range(0, rows.num_rows{ => - chunk_rows}, chunk_rows): end = min(begin + "
        "chunk_rows, rows.num_rows)"
    ),
    "weight gradient of the last chunk only": "sum_VD.addmm_(left_VR, right_RD{ => , beta=0})",
    "rows not scattered": "d_hidden_TD{.index_copy_(0, row_R[:num_rows], d_row_RD) => [:num_rows] = d_row_RD}",
    "bias dropped": "if {head.bias_V is None => True}: return torch.mm",
    "gradient of a value dropped": "multiply(d_row_RD[: rows.num_rows], {d_value_R => torch.ones_like(d_value_R)},",
    "weight of a row dropped": "(chunk.hidden_RD{ * share_R1 => }).to(dtype)",
    "largest gradient dropped": "multiply(d_weight_VD, {largest => torch.ones_like(largest)}, dtype",
    "largest gradient of the bias dropped": "multiply(d_bias_V1[:, 0], {largest => torch.ones_like(largest)},",
    "value of a chunk misplaced": "value_R[{chunk.begin : chunk.end => : chunk.end - chunk.begin}] = values",
}


def check_both(module):
    options = {"num_padded": 5, "has_bias": True, "scale": 0.5}
    check_against_truth(module.labelled_cross_entropy, 19, torch.float32, **options)
    check_log_probs(module.labelled_log_probs, 19, torch.float32, **options)


def check_with_shared(module):
    with mock.patch.object(op, "logit_rows", module):
        check_both(op)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(op, check_both, FAULTS)
test_a_planted_fault_of_shared_code_is_seen, test_without_a_fault_of_shared_code_the_same_check_passes = planted_faults(
    logit_rows, check_with_shared, SHARED_FAULTS, errors=(AssertionError, RuntimeError)
)


def test_rows_in_order_need_no_index():
    hidden_TD, weight_VD, _, _, _ = make_inputs(NUM_TOKENS, torch.float32)
    target_R = torch.randint(0, VOCABULARY, (NUM_TOKENS,))
    results = []
    for row_R in (None, torch.arange(NUM_TOKENS)):
        loss = labelled_cross_entropy(
            Head(hidden_TD, weight_VD), row_R=row_R, target_R=target_R, num_rows=NUM_TOKENS, num_items=4.0, chunk_rows=8
        )
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden_TD, weight_VD))))
    assert all(torch.equal(one, other) for one, other in zip(*results))


def test_rows_without_a_label_get_a_gradient_of_exactly_zero():
    hidden_TD, weight_VD, _, row_R, target_R = make_inputs(11, torch.float32)
    labelled_cross_entropy(
        Head(hidden_TD, weight_VD), row_R=row_R, target_R=target_R, num_rows=11, num_items=1.0
    ).backward()
    is_trained_T = torch.zeros(NUM_TOKENS, dtype=torch.bool).index_fill_(0, row_R, True)
    assert (hidden_TD.grad[~is_trained_T] == 0).all()
    assert (hidden_TD.grad[is_trained_T] != 0).any(dim=1).all()


def test_no_rows_give_a_zero_loss_with_a_graph_and_zero_gradients():
    hidden_TD, weight_VD, bias_V, _, _ = make_inputs(0, torch.float32, has_bias=True)
    empty = torch.zeros(0, dtype=torch.int64)
    for rows in (empty, torch.zeros(128, dtype=torch.int64)):
        loss = labelled_cross_entropy(
            Head(hidden_TD, weight_VD, bias_V), row_R=rows, target_R=rows, num_rows=0, num_items=5.0
        )
        gradients = torch.autograd.grad(loss, (hidden_TD, weight_VD, bias_V))
        assert loss.item() == 0.0
        assert all((gradient == 0).all() for gradient in gradients)
        log_prob_R, entropy_R = labelled_log_probs(
            Head(hidden_TD, weight_VD, bias_V), row_R=rows, target_R=rows, num_rows=0, with_entropy=True
        )
        gradients = torch.autograd.grad(log_prob_R.sum(), (hidden_TD, weight_VD, bias_V))
        assert log_prob_R.shape == entropy_R.shape == rows.shape
        assert all((tensor == 0).all() for tensor in (log_prob_R, entropy_R, *gradients))
    nll_sum, num_correct = token_statistics(Head(hidden_TD, weight_VD), row_R=empty, target_R=empty, num_rows=0)
    assert (nll_sum.item(), num_correct.item()) == (0.0, 0)


def test_a_frozen_head_costs_no_weight_gradient_and_frozen_states_none_of_theirs():
    hidden_TD, weight_VD, _, row_R, target_R = make_inputs(9, torch.float32)
    arguments = {"row_R": row_R, "target_R": target_R, "num_rows": 9, "num_items": 1.0, "chunk_rows": 2}
    with Watch() as watch:
        labelled_cross_entropy(Head(hidden_TD, weight_VD.detach()), **arguments).backward()
    # Nothing of the size of the weight is ever made; the states' gradient is the largest tensor.
    assert watch.largest <= max(hidden_TD.numel(), 2 * VOCABULARY, weight_VD.numel())
    assert hidden_TD.grad is not None
    labelled_cross_entropy(Head(hidden_TD.detach(), weight_VD), **arguments).backward()
    assert weight_VD.grad is not None
    assert labelled_cross_entropy(Head(hidden_TD.detach(), weight_VD.detach()), **arguments).grad_fn is None


def test_log_probs_of_a_frozen_head_form_logits_once():
    hidden_TD, weight_VD, _, row_R, target_R = make_inputs(9, torch.float32)
    arguments = {"row_R": row_R, "target_R": target_R, "num_rows": 9, "chunk_rows": 2}
    for is_trained, num_passes in ((False, 1), (True, 2)):
        with mock.patch.object(op, "_row_losses", wraps=op._row_losses) as row_losses:
            weight_VD = weight_VD.detach().requires_grad_(is_trained)
            labelled_log_probs(Head(hidden_TD, weight_VD), **arguments).log_prob_R.sum().backward()
        assert row_losses.call_count == 5 * num_passes
    labelled_log_probs(Head(hidden_TD.detach(), weight_VD), **arguments).log_prob_R.sum().backward()
    log_probs = labelled_log_probs(Head(hidden_TD.detach(), weight_VD.detach()), **arguments)
    assert log_probs.log_prob_R.grad_fn is None
    assert log_probs.entropy_R is None


def test_small_fp16_gradients_of_log_probs_are_summed_before_they_are_rounded():
    num_tokens = 512
    hidden_TD = torch.ones(num_tokens, 2, dtype=torch.float16)
    weight_VD = torch.zeros(3, 2, dtype=torch.float16, requires_grad=True)
    rows = torch.arange(num_tokens)
    log_probs = labelled_log_probs(
        Head(hidden_TD, weight_VD), row_R=rows, target_R=torch.zeros_like(rows), num_rows=num_tokens
    )
    # One row's gradient is below the smallest fp16 number, 2 ** -24.
    (log_probs.log_prob_R * 2.0**-26).sum().backward()
    torch.testing.assert_close(weight_VD.grad[0].float(), torch.full((2,), 2.0**-17 * 2 / 3), rtol=1e-2, atol=0)


def test_small_fp16_gradients_of_log_probs_survive_until_the_loss_scale_comes_in():
    hidden_TD, weight_VD, _, row_R, target_R = make_inputs(9, torch.float16)
    rows = {"row_R": row_R, "target_R": target_R}
    log_prob_R = labelled_log_probs(Head(hidden_TD, weight_VD), num_rows=9, **rows).log_prob_R
    (log_prob_R.sum() / -1e6 * 2.0**20).backward()
    truth = run_reference(hidden_TD, weight_VD, None, dtype=torch.float64, num_items=1e6 / 2.0**20, **rows)
    torch.testing.assert_close(hidden_TD.grad.double(), truth[1], rtol=2e-2, atol=2e-3)


def test_full_logits_never_exist_and_the_host_never_waits():
    num_tokens, vocabulary = 64, 501
    hidden_TD = torch.randn(num_tokens, 4, requires_grad=True)
    weight_VD = torch.randn(vocabulary, 4)
    arguments = {
        "row_R": torch.arange(num_tokens),
        "target_R": torch.randint(0, vocabulary, (num_tokens,)),
        "num_rows": num_tokens,
        "chunk_rows": 8,
    }
    with Watch() as watch:
        labelled_cross_entropy(Head(hidden_TD, weight_VD), num_items=7.0, **arguments).backward()
        token_statistics(Head(hidden_TD, weight_VD), **arguments)
        log_probs = labelled_log_probs(
            Head(hidden_TD, weight_VD.clone().requires_grad_()), **arguments, with_entropy=True
        )
        log_probs.log_prob_R.sum().backward()
    assert watch.waits == []
    assert watch.largest == 8 * vocabulary


def test_the_dispatch_watch_sees_a_wait():
    with Watch() as watch:
        torch.ones(1).item()
        torch.ones(2)[torch.tensor([True, False])]
    assert len(watch.waits) >= 2


def test_num_items_may_be_a_tensor():
    hidden_TD, weight_VD, _, row_R, target_R = make_inputs(9, torch.float32)
    results = []
    for num_items in (6, torch.tensor(6), torch.tensor(6.0)):
        loss = labelled_cross_entropy(
            Head(hidden_TD, weight_VD), row_R=row_R, target_R=target_R, num_rows=9, num_items=num_items
        )
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden_TD, weight_VD))))
    for result in results[1:]:
        torch.testing.assert_close(results[0], result)


def test_a_second_backward_names_retain_graph_and_works_with_it():
    hidden_TD, weight_VD, _, row_R, target_R = make_inputs(9, torch.float32)
    arguments = {"row_R": row_R, "target_R": target_R, "num_rows": 9, "num_items": 2.0}
    loss = labelled_cross_entropy(Head(hidden_TD, weight_VD), **arguments)
    first = torch.autograd.grad(loss, (hidden_TD, weight_VD), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden_TD, weight_VD))
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    with pytest.raises(RuntimeError, match="retain_graph"):
        torch.autograd.grad(loss, (hidden_TD, weight_VD))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_gradient_of_the_loss_is_one_rounding_away(dtype):
    check_gradient_of_the_loss(labelled_cross_entropy, dtype)


def test_a_factor_rounded_to_a_narrow_dtype_is_seen(tmp_path):
    faulty = load_with_fault(logit_rows, "factor{ => .to(tensor.dtype)}.reshape(-1,", tmp_path)
    with mock.patch.object(op, "logit_rows", faulty), pytest.raises(AssertionError):
        check_gradient_of_the_loss(labelled_cross_entropy, torch.bfloat16)


def check_gradient_of_the_loss(function, dtype):
    hidden_TD, weight_VD, _, row_R, target_R = make_inputs(9, dtype)
    loss = function(Head(hidden_TD, weight_VD), row_R=row_R, target_R=target_R, num_rows=9, num_items=3.0)
    once = torch.autograd.grad(loss, (hidden_TD, weight_VD), retain_graph=True)
    scaled = torch.autograd.grad(
        loss, (hidden_TD, weight_VD), grad_outputs=torch.tensor(1.7)
    )  # rounds to 1.703 in bf16
    # Half a unit for rounding the product; the weight's own gradient was rounded once before, too.
    for one, other, num_roundings in zip(once, scaled, (1, 2)):
        rtol = num_roundings * torch.finfo(dtype).eps * 0.51
        torch.testing.assert_close(other.double(), one.double() * torch.tensor(1.7).double(), rtol=rtol, atol=0)


def test_small_fp16_gradients_survive_a_large_number_of_items():
    # Divided by 1e6 before the backward, gradients would lie below the smallest fp16 number; the loss scale comes in
    # first.
    hidden_TD, weight_VD, _, row_R, target_R = make_inputs(9, torch.float16)
    arguments = {"row_R": row_R, "target_R": target_R, "num_rows": 9}
    (2.0**20 * labelled_cross_entropy(Head(hidden_TD, weight_VD), num_items=1e6, **arguments)).backward()
    truth = run_reference(
        hidden_TD, weight_VD, None, dtype=torch.float64, row_R=row_R, target_R=target_R, num_items=1e6 / 2.0**20
    )
    torch.testing.assert_close(hidden_TD.grad.double(), truth[1], rtol=2e-2, atol=2e-3)


def test_weight_gradients_of_many_chunks_are_summed_in_fp32():
    num_tokens = 4096
    hidden_TD = torch.ones(num_tokens, 2, dtype=torch.bfloat16)
    weight_VD = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.arange(num_tokens)
    loss = labelled_cross_entropy(
        Head(hidden_TD, weight_VD),
        row_R=rows,
        target_R=torch.zeros_like(rows),
        num_rows=num_tokens,
        num_items=1.0,
        chunk_rows=8,
    )
    loss.backward()
    # In bf16 a sum of 4096 equal terms stops growing at 256 of them.
    torch.testing.assert_close(weight_VD.grad[1].float(), torch.full((2,), num_tokens / 3), rtol=1e-2, atol=0)


def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_inputs():
    hidden_TD, weight_VD, _, row_R, target_R = make_inputs(9, torch.float32)
    arguments = {"row_R": row_R, "target_R": target_R, "num_rows": 9, "num_items": 2.0}
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden_TD, weight_VD)]
    expected = labelled_cross_entropy(Head(*narrow), **arguments)
    expected.backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = labelled_cross_entropy(Head(hidden_TD, weight_VD), **arguments)
    loss.backward()
    assert torch.equal(loss, expected)
    assert hidden_TD.grad.dtype is weight_VD.grad.dtype is torch.float32
    torch.testing.assert_close(hidden_TD.grad.bfloat16(), narrow[0].grad)
    del arguments["num_items"]
    wanted = torch.autograd.grad(labelled_log_probs(Head(*narrow), **arguments).log_prob_R.sum(), narrow)
    with torch.autocast("cpu", torch.bfloat16):
        log_probs = labelled_log_probs(Head(hidden_TD, weight_VD), **arguments)
    # The backward runs outside of autocast, and forms the logits again in its dtype.
    gradients = torch.autograd.grad(log_probs.log_prob_R.sum(), (hidden_TD, weight_VD))
    for one, other in zip(gradients, wanted):
        assert one.dtype is torch.float32
        torch.testing.assert_close(one.bfloat16(), other)


@pytest.mark.parametrize(("width", "sizes"), [(8, [1024, 1024, 952]), (1152, [1152, 1152, 696]), (2560, [2048, 952])])
def test_logits_take_no_more_memory_than_the_weight_of_narrow_states(width, sizes):
    head = Head(torch.zeros(3000, width), torch.zeros(2, width))
    chunks = logit_chunks(head, LabelledRows(None, 3000, 3000), dtype=torch.float32)
    assert [chunk.logits_RV.shape[0] for chunk in chunks] == sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_statistics_equal_the_full_logits(softcap, dtype):
    hidden_TD, weight_VD, bias_V, row_R, target_R = make_inputs(23, dtype, num_padded=4, has_bias=True, ignored=True)
    head = Head(hidden_TD, weight_VD, bias_V, scale=0.5, softcap=softcap)
    nll_sum, num_correct = token_statistics(head, row_R=row_R, target_R=target_R, num_rows=23, chunk_rows=8)
    logits_RV = reference.scale_and_cap(
        torch.nn.functional.linear(hidden_TD[row_R[:23]], weight_VD, bias_V).float(), scale=0.5, softcap=softcap
    )
    torch.testing.assert_close(
        nll_sum, torch.nn.functional.cross_entropy(logits_RV, target_R[:23], reduction="sum").detach()
    )
    assert num_correct.item() == (logits_RV.argmax(dim=1) == target_R[:23]).sum().item()
    assert not nll_sum.requires_grad


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"num_rows": 10}, OptionError),
        ({"num_rows": -1}, OptionError),
        ({"num_items": 0.0}, OptionError),
        ({"num_items": float("nan")}, OptionError),
        ({"softcap": 0.0}, OptionError),
        ({"chunk_rows": 0}, OptionError),
        ({"row_R": torch.zeros(8, dtype=torch.int64)}, ShapeError),
        ({"row_R": torch.zeros(9, dtype=torch.int32)}, ShapeError),
        ({"target_R": torch.zeros(9)}, ShapeError),
        ({"bias_V": torch.zeros(VOCABULARY + 1)}, ShapeError),
    ],
)
def test_impossible_arguments_are_refused(change, error):
    hidden_TD, weight_VD, _, row_R, target_R = make_inputs(9, torch.float32)
    head = Head(hidden_TD, weight_VD)
    head = head._replace(**{name: value for name, value in change.items() if name in head._fields})
    arguments = {"row_R": row_R, "target_R": target_R, "num_rows": 9, "num_items": 2.0}
    arguments |= {name: value for name, value in change.items() if name not in head._fields}
    with pytest.raises(error):
        labelled_cross_entropy(head, **arguments)


def test_states_and_weight_of_different_dtype_or_width_are_refused():
    hidden_TD, weight_VD, _, row_R, target_R = make_inputs(9, torch.float32)
    arguments = {"row_R": row_R, "target_R": target_R, "num_rows": 9, "num_items": 2.0}
    with pytest.raises(ShapeError, match=r"bfloat16"):
        labelled_cross_entropy(Head(hidden_TD.bfloat16(), weight_VD), **arguments)
    with pytest.raises(ShapeError, match="width"):
        labelled_cross_entropy(Head(hidden_TD, weight_VD[:, 1:]), **arguments)
