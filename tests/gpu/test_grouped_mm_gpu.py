"""Grouped products on a CUDA device: both backends against the truth at real sizes, no host wait, no tensor of
the low-rank product.
"""

import pytest
import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.kernels.grouped_mm import choice
from lightning_fastft.kernels.grouped_mm.choice import choose_backend, choose_grad_backend
from lightning_fastft.kernels.grouped_mm.op import grouped_mm, grouped_weight_grad
from tests.kernels.test_grouped_mm import check_grad, check_product, make_case, public_grad, public_product
from tests.support.host_waits import waits_are_errors

pytestmark = pytest.mark.gpu
# Skewed, with experts without rows at both ends and within, single rows, and borders that no tile knows.
COUNTS = (0, 1500, 1, 0, 700, 127, 129, 64, 0, 333, 1, 2, 900, 128, 256, 0)
BACKENDS = ("auto", "torch", "triton")


def is_torch_fast():
    return torch.cuda.get_device_capability()[0] == 9


def skip_without(backend):
    if backend == "torch" and not is_torch_fast():
        pytest.skip("torch's grouped GEMM serves both products on compute capability 9.x")


def real_case(dtype=torch.bfloat16, *, counts=COUNTS, num_inputs=512, num_outputs=384, step=8, **options):
    return make_case(
        counts, num_inputs, num_outputs, dtype=dtype, num_sentinels=37, step=step, device="cuda", **options
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("rank", "has_bias"), [(0, False), (16, False), (0, True), (8, True)])
def test_bf16_equals_the_truth(rank, has_bias, is_transposed, backend):
    skip_without(backend)
    case = real_case(rank=rank, has_bias=has_bias, is_transposed=is_transposed)
    # A result of torch's that is copied into a buffer takes the rows of nobody along.
    check_product(public_product(backend), case, step=8, is_tail_kept=backend == "triton" or rank > 0 or has_bias)
    check_grad(public_grad(backend), case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_equal_the_truth(dtype):
    case = real_case(dtype, rank=16, has_bias=True, is_transposed=True)
    assert choose_backend(case.x_NI, case.weight_EIO) == "triton"
    check_product(public_product("auto"), case, step=8)
    check_grad(public_grad("auto"), case)


@pytest.mark.parametrize("num_terms", [2048, 4096])
def test_long_fp32_sums_are_as_good_as_those_of_plain_products(num_terms):
    assert torch.get_float32_matmul_precision() == "highest", "TF32 is no yardstick"

    def relative_error(name, values, truth):
        assert values.isfinite().all(), name
        return ((values.double() - truth).norm() / truth.norm()).item()

    def check(name, ours, pairs):
        truth = torch.cat([a.double() @ b.double() for a, b in pairs])
        plain_error = relative_error("torch.mm", torch.cat([torch.mm(a, b) for a, b in pairs]), truth)
        error = relative_error(name, ours, truth)
        assert error <= 2 * plain_error, (
            f"{name} over {num_terms} terms: error {error:.3g}, that of torch.mm {plain_error:.3g}"
        )

    x_NI, weight_EIO = torch.randn(300, num_terms, device="cuda"), torch.randn(2, num_terms, 256, device="cuda")
    end_E = torch.tensor([130, 300], dtype=torch.int32, device="cuda")
    check("product", grouped_mm(x_NI, weight_EIO, end_E), [(x_NI[:130], weight_EIO[0]), (x_NI[130:], weight_EIO[1])])

    x_NI, d_NO = torch.randn(2 * num_terms, 192, device="cuda"), torch.randn(2 * num_terms, 256, device="cuda")
    end_E = torch.tensor([num_terms, 2 * num_terms], dtype=torch.int32, device="cuda")
    halves = [(x.T, d) for x, d in zip(x_NI.chunk(2), d_NO.chunk(2))]
    check("weight gradient", grouped_weight_grad(x_NI, d_NO, end_E).flatten(0, 1), halves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_thin_products_of_adapters(backend):
    skip_without(backend)
    for num_inputs, num_outputs in ((512, 16), (16, 512), (8, 8)):
        case = real_case(num_inputs=num_inputs, num_outputs=num_outputs, is_transposed=num_outputs == 16)
        check_product(public_product(backend), case, step=8, is_tail_kept=backend == "triton")
        check_grad(public_grad(backend), case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_to_one_expert_and_no_rows_at_all(backend):
    skip_without(backend)
    for counts in ((0, 0, 900, 0), (0, 0, 0, 0)):
        case = real_case(counts=counts, rank=8, has_bias=True)
        check_product(public_product(backend), case, step=8)
        check_grad(public_grad(backend), case)


def test_a_gradient_wider_than_its_inputs():
    check_grad(public_grad("auto"), real_case(), dtype=torch.float32)


def test_misaligned_tensors_take_our_kernel():
    case = real_case(num_inputs=130, num_outputs=77, step=1, rank=5, has_bias=True)
    assert choose_backend(case.x_NI, case.weight_EIO) == "triton"
    check_product(public_product("auto"), case)
    check_grad(public_grad("auto"), case)
    with pytest.raises(OptionError, match="torch"):
        public_product("torch")(case, torch.empty_like(case.d_NO))


def test_every_backend_gives_the_same_within_a_rounding_and_auto_says_which_it_took():
    case = real_case(rank=16, has_bias=True, is_transposed=True)
    name = choose_backend(case.x_NI, case.weight_EIO, has_addend=True)
    assert name == (
        "torch"
        if is_torch_fast() and torch.cuda.get_device_capability()[0] not in choice._ONE_PASS_CAPABILITIES
        else "triton"
    )
    assert choose_grad_backend(case.x_NI, case.d_NO, num_experts=len(COUNTS)) == (
        "torch" if is_torch_fast() else "triton"
    )
    chosen, named = (
        public_product(backend)(case, torch.empty_like(case.d_NO))[: case.num_real] for backend in ("auto", name)
    )
    assert torch.equal(chosen, named)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_host_never_waits(backend):
    skip_without(backend)
    case = real_case(rank=16, has_bias=True)
    for _ in range(2):
        grouped_mm(case.x_NI, case.weight_EIO, case.end_E, **case.addend_arguments(), backend=backend)
        grouped_weight_grad(case.x_NI, case.d_NO, case.end_E, backend=backend)
    torch.cuda.synchronize()
    with waits_are_errors():
        grouped_mm(case.x_NI, case.weight_EIO, case.end_E, backend=backend)
        grouped_mm(case.x_NI, case.weight_EIO, case.end_E, **case.addend_arguments(), backend=backend)
        grouped_weight_grad(case.x_NI, case.d_NO, case.end_E, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_added_costs_no_memory(backend):
    skip_without(backend)
    counts = (4096, 0, 4096)
    case = real_case(counts=counts, num_inputs=64, num_outputs=2048, rank=16, has_bias=True)
    grouped_mm(case.x_NI, case.weight_EIO, case.end_E, **case.addend_arguments(), backend=backend)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y_NO = grouped_mm(case.x_NI, case.weight_EIO, case.end_E, **case.addend_arguments(), backend=backend)
    # The result, and the lists of a grouped GEMM.
    assert torch.cuda.max_memory_allocated() - before_bytes <= y_NO.numel() * y_NO.element_size() + 2**20
