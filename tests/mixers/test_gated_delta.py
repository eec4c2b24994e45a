"""The gated delta rule in plain PyTorch: token by token, document by document, in value and gradient."""

import pytest
import torch

from lightning_fastft.kernels.delta_inputs.reference import DeltaInputs
from lightning_fastft.mixers.gated_delta import delta_rule_by_document

# One token, two, a whole chunk, and more than two chunks.
LENGTHS = (1, 2, 64, 130)


def make_inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    q, k = (torch.randn(num_tokens, 2, 8, generator=generator, dtype=dtype) for _ in range(2))
    k = k / k.norm(dim=2, keepdim=True)
    v = torch.randn(num_tokens, 4, 6, generator=generator, dtype=dtype)
    g = -torch.rand(num_tokens, 4, generator=generator, dtype=dtype)
    return DeltaInputs(q, k, v, g, torch.rand(num_tokens, 4, generator=generator, dtype=dtype))


def token_by_token(inputs, lengths):
    """The recurrence itself."""
    outputs, begin = [], 0
    q, k = (part.repeat_interleave(2, dim=1) for part in inputs[:2])
    for length in lengths:
        state = q.new_zeros(4, 8, 6)
        for t in range(begin, begin + length):
            state = state * inputs.g_TH[t].exp()[:, None, None]
            known = (state * k[t][:, :, None]).sum(1)
            update = inputs.beta_TH[t][:, None] * (inputs.v_THW[t] - known)
            state = state + k[t][:, :, None] * update[:, None]
            outputs.append((state * q[t][:, :, None]).sum(1) * 8**-0.5)
        begin += length
    return torch.stack(outputs)


def test_chunks_equal_the_recurrence_and_its_gradients():
    inputs = DeltaInputs(*(part.requires_grad_() for part in make_inputs()))
    d_out = torch.randn(sum(LENGTHS), 4, 6, dtype=torch.float64)
    found, expected = delta_rule_by_document(inputs, LENGTHS), token_by_token(inputs, LENGTHS)
    assert torch.allclose(found, expected, atol=1e-12)
    pairs = zip(*(torch.autograd.grad(out, inputs, d_out) for out in (found, expected)))
    assert all(torch.allclose(one, other, atol=1e-10) for one, other in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_the_dtype_of_the_queries(dtype):
    inputs = make_inputs()
    truth = delta_rule_by_document(inputs, LENGTHS)
    narrow = DeltaInputs(*(part.to(dtype) for part in inputs[:3]), *(part.float() for part in inputs[3:]))
    found = delta_rule_by_document(narrow, LENGTHS)
    assert found.dtype is dtype
    assert (found.double() - truth).norm() <= 8 * torch.finfo(dtype).eps * truth.norm()


def test_strong_decays_have_finite_gradients():
    inputs = make_inputs(torch.float32)
    inputs = DeltaInputs(*(part.requires_grad_() for part in inputs._replace(g_TH=inputs.g_TH * 200)))
    gradients = torch.autograd.grad(delta_rule_by_document(inputs, LENGTHS).sum(), inputs)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
