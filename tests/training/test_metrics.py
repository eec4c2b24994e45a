"""Token metrics: exact over batches and ranks of any size, from sums and from full logits."""

import math

import pytest
import torch
from torch.nn import functional

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.training.metrics import CHUNK_ROWS, TokenMean, TokenPerplexity, logits_statistics

METRICS = (TokenMean, TokenPerplexity)


@pytest.mark.parametrize("metric_class", METRICS)
def test_metric_weighs_batches_and_ranks_by_their_tokens(metric_class):
    batches = [(3.0, 2), (100.0, 70), (0.5, 1)]
    mean = 103.5 / 73
    truth = mean if metric_class is TokenMean else math.exp(mean)
    ranks = [metric_class(), metric_class()]
    for index, (total, num_tokens) in enumerate(batches):
        ranks[index % 2].update(torch.tensor(total), num_tokens)
    states = [{name: getattr(rank, name) for name in rank._defaults} for rank in ranks]
    together = metric_class()
    for name, reduction in together._reductions.items():
        setattr(together, name, reduction(torch.stack([state[name] for state in states])))
    together._update_count = 1
    assert float(together.compute()) == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("metric_class", METRICS)
def test_sums_stay_exact_past_what_fp32_counts(metric_class):
    metric = metric_class()
    # As Trainer(precision="bf16-true") does to every module.
    torch.nn.ModuleList([metric]).to(torch.bfloat16)
    metric.update(2**25, num_tokens=2**25)
    for _ in range(3):
        metric.update(torch.tensor(1), num_tokens=torch.tensor(1))
    assert float(metric.total) == 2**25 + 3
    assert int(metric.num_tokens) == 2**25 + 3


@pytest.mark.parametrize("metric_class", METRICS)
def test_metric_without_tokens_is_not_a_number_and_reset_forgets(metric_class):
    metric = metric_class()
    metric.update(0.0, num_tokens=0)
    assert torch.isnan(metric.compute())
    metric.update(2.0, num_tokens=4)
    metric.reset()
    metric.update(1.0, num_tokens=1)
    assert float(metric.total) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 2, 37, CHUNK_ROWS, CHUNK_ROWS + 1, CHUNK_ROWS + 2])
def test_logits_statistics_equal_a_direct_computation(num_tokens, dtype):
    logits = torch.randn(2, num_tokens, 11).to(dtype)
    labels = torch.randint(0, 11, (2, num_tokens))
    labels[torch.rand(2, num_tokens) < 0.4] = -100
    nll_sum, num_correct, num_labelled = logits_statistics(logits, labels)
    rows, targets = logits[:, :-1].double().reshape(-1, 11), labels[:, 1:].reshape(-1)
    kept = targets != -100
    expected = functional.cross_entropy(rows[kept], targets[kept], reduction="sum")
    assert float(nll_sum) == pytest.approx(float(expected), rel=1e-6)
    assert int(num_correct) == int((rows.argmax(-1) == targets)[kept].sum())
    assert int(num_labelled) == int(kept.sum())


def test_logits_statistics_refuse_shapes_that_do_not_belong_together():
    with pytest.raises(ShapeError, match=r"\(1, 3, 4\).*\(1, 2\)"):
        logits_statistics(torch.zeros(1, 3, 4), torch.zeros(1, 2, dtype=torch.int64))
