"""The loss head and the adapters on a CUDA device: kernels against the truth, no host wait, memory."""

import functools

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
from lightning_fastft.kernels.cross_entropy.op import labelled_cross_entropy, labelled_log_probs, token_statistics
from lightning_fastft.kernels.divergence.op import TAILS, labelled_divergence, labelled_topk_divergence
from lightning_fastft.kernels.divergence.reference import KINDS
from lightning_fastft.kernels.logit_rows import Head
from lightning_fastft.kernels.lora_linear.op import lora_addmm
from lightning_fastft.packing.collate import collate
from lightning_fastft.packing.document import Document, is_untouched_view
from lightning_fastft.patches.attention import install_attention
from lightning_fastft.patches.head import install_head
from lightning_fastft.patches.lazy_logits import LazyLogits
from tests.support.host_waits import waits_are_errors
from tests.support.loss_twins import (
    cross_entropy_twin,
    divergence_twin,
    log_probs_twin,
    lora_addmm_twin,
    topk_divergence_twin,
)
from tests.support.tiny_models import VOCABULARY, build_tiny
from tests.support.truth import assert_within_bound

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", [{}, {"softcap": 5.0}, {"scale": 0.25}, {"has_bias": True}])
def test_loss_and_every_gradient_equal_the_truth(dtype, case):
    case = {"softcap": None, "scale": 1.0, "has_bias": False, **case}
    num_tokens, width, vocabulary, num_rows = 700, 96, 5003, 613
    hidden_TD = torch.randn(num_tokens, width, device="cuda").to(dtype).requires_grad_()
    weight_VD = (torch.randn(vocabulary, width, device="cuda") * 0.2).to(dtype).requires_grad_()
    bias_V = torch.randn(vocabulary, device="cuda").to(dtype).requires_grad_() if case["has_bias"] else None
    row_R = torch.randperm(num_tokens, device="cuda")[:num_rows]
    target_R = torch.randint(0, vocabulary, (num_rows,), device="cuda")
    inputs = [tensor for tensor in (hidden_TD, weight_VD, bias_V) if tensor is not None]
    arguments = {"row_R": row_R, "target_R": target_R, "num_items": 512.0}

    def head_of(tensors):
        return Head(*tensors, *([None] * (3 - len(tensors))), case["scale"], case["softcap"])

    def gradients_of_reference(wide):
        cast = [tensor.detach().to(wide).requires_grad_() for tensor in inputs]
        loss = cross_entropy_twin(head_of(cast), **arguments)
        return torch.autograd.grad(loss, cast, torch.tensor(1024.0, device="cuda", dtype=loss.dtype)), loss

    (truth, true_loss), (plain, plain_loss) = gradients_of_reference(torch.float64), gradients_of_reference(dtype)
    loss = labelled_cross_entropy(head_of(inputs), num_rows=num_rows, chunk_rows=200, **arguments)
    ours = torch.autograd.grad(loss, inputs, torch.tensor(1024.0, device="cuda"))
    assert_within_bound("loss", loss, plain=plain_loss, truth=true_loss, dtype=dtype)
    for name, one, other, true in zip(("hidden", "weight", "bias"), ours, plain, truth):
        assert_within_bound(name, one, plain=other, truth=true, dtype=dtype)
    nll_sum, num_correct = token_statistics(
        head_of(inputs), row_R=row_R, target_R=target_R, num_rows=num_rows, chunk_rows=200
    )
    torch.testing.assert_close(nll_sum / 512, loss.detach())
    assert 0 <= num_correct.item() <= num_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["log_probs", *KINDS, *TAILS])
def test_rows_of_log_probs_and_divergences_equal_the_truth_without_a_host_wait(name, dtype):
    num_tokens, width, vocabulary, num_rows, num_stored = 700, 96, 5003, 613, 16
    row_R = torch.randperm(num_tokens, device="cuda")[:num_rows]
    target_R = torch.randint(0, vocabulary, (num_rows,), device="cuda")
    hidden_TD, teacher_TD = (torch.randn(num_tokens, width, device="cuda").to(dtype) for _ in range(2))
    weight_VD, teacher_VD = ((torch.randn(vocabulary, width, device="cuda") * 0.2).to(dtype) for _ in range(2))
    stored = torch.randn(num_rows, vocabulary, device="cuda").mul(3).log_softmax(dim=1).topk(num_stored, dim=1)
    d_value_R = torch.randn(num_rows, device="cuda") * 1024
    inputs = [hidden_TD.requires_grad_(), weight_VD.requires_grad_()]

    def run(log_probs, live, kept, tensors):
        student = Head(*tensors, scale=0.5, softcap=5.0)
        if name == "log_probs":
            value_R = log_probs(student, row_R=row_R, target_R=target_R)[0]
        elif name in KINDS:
            teacher = Head(teacher_TD.to(tensors[0].dtype), teacher_VD.to(tensors[0].dtype))
            value_R = live(student, teacher, row_R=row_R, kind=name)
        else:
            known = {"teacher_id_RK": stored.indices, "teacher_log_prob_RK": stored.values}
            value_R = kept(student, **known, row_R=row_R, tail=name)
        return value_R.detach(), *torch.autograd.grad(value_R, tensors, d_value_R.to(value_R.dtype))

    def run_ours():
        counted = {"num_rows": num_rows, "chunk_rows": 200}
        functions = (labelled_log_probs, labelled_divergence, labelled_topk_divergence)
        return run(*(functools.partial(function, **counted) for function in functions), inputs)

    twins = (log_probs_twin, divergence_twin, topk_divergence_twin)
    truth = run(*twins, [tensor.detach().double().requires_grad_() for tensor in inputs])
    plain = run(*twins, inputs)
    # Kernels are compiled by the first call.
    run_ours()
    with waits_are_errors():
        ours = run_ours()
    for part, one, other, true in zip(("value", "hidden", "weight"), ours, plain, truth):
        assert_within_bound(part, one, plain=other, truth=true, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_low_rank_part_equals_the_truth(dtype):
    num_tokens, width, num_outputs, rank = 1031, 512, 384, 16
    shapes = ((num_tokens, num_outputs), (num_tokens, width), (rank, width), (num_outputs, rank))
    inputs = [(torch.randn(shape, device="cuda") * 0.1).to(dtype) for shape in shapes]
    masters = [tensor.float() if index > 1 else tensor for index, tensor in enumerate(inputs)]
    d_out = torch.randn(num_tokens, num_outputs, device="cuda").to(dtype)

    def run(function, tensors, **kwargs):
        tensors = [tensor.detach().requires_grad_() for tensor in tensors]
        out = function(*tensors, scale=2.0, **kwargs)
        return [out.detach(), *torch.autograd.grad(out, tensors, d_out.to(out.dtype))]

    truth = run(lora_addmm_twin, [tensor.double() for tensor in inputs])
    plain = run(lora_addmm_twin, inputs)
    ours = run(lora_addmm, masters, copy_a_RD=inputs[2], copy_b_NR=inputs[3])
    assert [tensor.dtype for tensor in ours] == [dtype, dtype, dtype, torch.float32, torch.float32]
    for name, one, other, true in zip(("out", "base", "x", "a_RD", "b_NR"), ours, plain, truth):
        assert_within_bound(name, one, plain=other, truth=true, dtype=dtype)


def make_batch(num_documents=24, seed=0):
    random = np.random.default_rng(seed)
    documents = []
    for length in random.integers(5, 60, num_documents):
        ids = random.integers(3, VOCABULARY, length)
        documents.append(Document(ids, np.where(random.random(length) < 0.4, ids, -100)))
    return collate(documents, pad_to=2048)


def test_a_copied_batch_still_names_its_labelled_rows():
    for batch in (make_batch().to("cuda"), make_batch().pin_memory().to("cuda")):
        assert is_untouched_view(batch["labels"], of=batch.context.label_T)


@pytest.mark.parametrize("name", ["qwen3", "granite", "llama"])
def test_a_step_of_a_lora_model_never_waits_for_the_device(name):
    model = build_tiny(name, hidden_size=128, head_dim=32).bfloat16().cuda()
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)).train()
    patcher = ModelPatcher()
    install_attention(model.get_base_model(), patcher)
    assert install_head(model.get_base_model(), patcher).state == "active"
    copies = install_low_precision_adapters(model, patcher, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2, fused=True
    )
    batches = [make_batch(seed=seed).pin_memory() for seed in range(4)]

    def step(batch):
        output = model(**batch.to("cuda"))
        assert isinstance(output.logits, LazyLogits)
        assert output.logits._tensor is None
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        copies.refresh()
        return output.loss.detach()

    losses = [step(batches[0])]
    with waits_are_errors():
        losses += [step(batch) for batch in batches[1:]]
        with torch.no_grad():
            model(**batches[0].to("cuda"))
    assert torch.isfinite(torch.stack(losses)).all()


def test_packed_loss_and_adapter_gradients_equal_transformers_and_peft_own():
    model = build_tiny("qwen3", hidden_size=128, head_dim=32).bfloat16().cuda()
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)).train()
    install_attention(model.get_base_model(), ModelPatcher())
    batch = make_batch().to("cuda")
    results = []
    for is_ours in (False, True):
        if is_ours:
            patcher = ModelPatcher()
            install_head(model.get_base_model(), patcher)
            install_low_precision_adapters(model, patcher, compute_dtype=torch.bfloat16)
        model.zero_grad(set_to_none=True)
        loss = model(**batch).loss
        loss.backward()
        results.append(
            (
                loss.item(),
                {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None},
            )
        )
    (loss, gradients), (our_loss, our_gradients) = results
    assert our_loss == pytest.approx(loss, rel=1e-2)
    assert gradients.keys() == our_gradients.keys()
    for name, gradient in gradients.items():
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), our_gradients[name].flatten(), dim=0)
        assert cosine > 0.999, f"{name}: {cosine.item()}"
        assert our_gradients[name].norm().item() == pytest.approx(gradient.norm().item(), rel=0.02), name


def test_the_head_needs_one_chunk_of_logits():
    num_tokens, width, vocabulary = 8192, 1024, 151936
    hidden_TD = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight_VD = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16) * 0.02
    rows = torch.arange(num_tokens, device="cuda")
    target_R = torch.randint(0, vocabulary, (num_tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    labelled_cross_entropy(
        Head(hidden_TD, weight_VD), row_R=rows, target_R=target_R, num_rows=num_tokens, num_items=8192.0
    ).backward()
    used_bytes = torch.cuda.max_memory_allocated() - before_bytes
    chunk_bytes = 2048 * vocabulary * 2
    states_bytes = num_tokens * width * 2
    assert used_bytes <= chunk_bytes + 4 * states_bytes + 2**25
