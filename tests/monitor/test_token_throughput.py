"""TokenThroughput: counts what the batches hold, on its interval, and hands numbers to the loggers."""

import csv
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_fastft.core import marks
from lightning_fastft.hf.families import decoder_layers
from lightning_fastft.monitor.flops import count_flops
from lightning_fastft.monitor.token_throughput import TokenThroughput
from lightning_fastft.strategies.registry import register_strategies
from tests.support.training_parts import PlainModule, packed_batches, packed_loader, quiet_trainer, tiny_llama

register_strategies()


class Clock:
    """One second passes at each look."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


def fit(tmp_path, callback, *, batches=None, val=None, **options):
    module = PlainModule(tiny_llama())
    logger = mock.Mock(spec=CSVLogger, save_dir=str(tmp_path), version=0)
    logger.name = "test"
    loader = torch.utils.data.DataLoader(batches if batches is not None else packed_batches(5), batch_size=None)
    with mock.patch.object(marks, "time", Clock()):
        trainer = quiet_trainer(
            tmp_path,
            **{
                "strategy": "fastft",
                "callbacks": [callback],
                "logger": logger,
                "max_steps": -1,
                "max_epochs": 1,
                **options,
            },
        )
        trainer.fit(module, loader, val)
    calls = [
        call.kwargs or {"metrics": call.args[0], "step": call.args[1]} for call in logger.log_metrics.call_args_list
    ]
    logged = [(call.args[0], call.kwargs["step"]) for call in logger.log_metrics.call_args_list if call.args]
    assert calls
    return [(metrics, step) for metrics, step in logged if "throughput/tokens_per_s" in metrics], module


def test_counts_tokens_of_each_interval_behind_the_first_step(tmp_path):
    batches = packed_batches(5, pad_to=64)
    logged, _ = fit(tmp_path, TokenThroughput(log_every_n_steps=2), batches=batches)
    assert [step for _, step in logged] == [2, 4]
    for (metrics, _), pair in zip(logged, (batches[1:3], batches[3:5])):
        real = sum(batch.context.num_real_tokens for batch in pair)
        assert metrics["throughput/tokens_per_s"] == real
        assert metrics["throughput/labelled_tokens_per_s"] == sum(batch.context.num_labelled for batch in pair)
        assert metrics["throughput/padding_share"] == pytest.approx(1 - real / 128)
        assert metrics["throughput/peak_memory_gib"] > 0
        assert all(isinstance(value, float) for value in metrics.values())


def test_utilisation_is_model_operations_over_the_peak(tmp_path):
    batches, callback = packed_batches(2), TokenThroughput(log_every_n_steps=1, peak_flops=1e6)
    ((metrics, _),), module = fit(tmp_path, callback, batches=batches)
    context = batches[1].context
    expected = count_flops(module.model, decoder_layers(module.model)).step_flops(
        num_tokens=context.num_tokens,
        num_labelled=context.num_labelled,
        sum_squared_lengths=context.sum_squared_lengths,
    )
    assert metrics["throughput/mfu"] == pytest.approx(expected / 1e6)
    assert callback.latest["mfu"] == metrics["throughput/mfu"]
    assert "1.0 TFLOPS" not in callback.status().reason


def test_unknown_device_reports_no_utilisation_and_says_so(tmp_path):
    callback = TokenThroughput(log_every_n_steps=1)
    logged, _ = fit(tmp_path, callback)
    assert all("throughput/mfu" not in metrics for metrics, _ in logged)
    assert "no peak known for cpu" in callback.status().reason


def test_whole_windows_of_accumulation(tmp_path):
    batches = packed_batches(6)
    logged, _ = fit(tmp_path, TokenThroughput(log_every_n_steps=1), batches=batches, accumulate_grad_batches=2)
    assert [step for _, step in logged] == [1, 2]
    assert logged[0][0]["throughput/tokens_per_s"] == sum(batch.context.num_tokens for batch in batches[2:4])


def test_validation_is_left_out(tmp_path):
    batches = packed_batches(6)
    logged, _ = fit(
        tmp_path,
        TokenThroughput(log_every_n_steps=1),
        batches=batches,
        val=packed_loader(1),
        val_check_interval=3,
        num_sanity_val_steps=0,
    )
    assert [step for _, step in logged] == [1, 2, 4, 5]


def test_interval_ends_with_its_epoch_and_at_validation(tmp_path):
    batches = packed_batches(4)
    real = [batch.context.num_real_tokens for batch in batches]
    logged, _ = fit(tmp_path, TokenThroughput(), batches=batches, max_epochs=2)
    assert [step for _, step in logged] == [3, 7]
    assert [metrics["throughput/tokens_per_s"] for metrics, _ in logged] == [sum(real[1:])] * 2
    options = {"val_check_interval": 2, "num_sanity_val_steps": 0}
    logged, _ = fit(tmp_path, TokenThroughput(), batches=batches, val=packed_loader(1), **options)
    assert [(metrics["throughput/tokens_per_s"], step) for metrics, step in logged] == [(real[1], 1), (real[3], 3)]


def test_short_run_has_its_throughput_in_the_file_of_metrics(tmp_path):
    logger = CSVLogger(tmp_path)
    options = {"logger": logger, "log_every_n_steps": 1, "max_steps": 14}
    quiet_trainer(tmp_path, strategy="fastft", callbacks=[TokenThroughput()], **options).fit(
        PlainModule(tiny_llama()), packed_loader(7)
    )
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    # At the step of the loss that ends the interval.
    steps = {name: [row["step"] for row in rows if row[name]] for name in ("throughput/tokens_per_s", "train_loss")}
    assert steps == {"throughput/tokens_per_s": ["6", "13"], "train_loss": [str(step) for step in range(14)]}


def test_plain_batches_are_counted_by_their_ids(tmp_path):
    batches = [{"input_ids": torch.randint(1, 90, (2, 8)), "labels": torch.randint(1, 90, (2, 8))} for _ in range(3)]
    logged, _ = fit(tmp_path, TokenThroughput(log_every_n_steps=2), batches=batches)
    assert logged[0][0]["throughput/tokens_per_s"] == 32


@pytest.mark.gpu
def test_events_need_no_host_wait_on_a_gpu(tmp_path):
    callback = TokenThroughput(log_every_n_steps=2)
    trainer = quiet_trainer(tmp_path, accelerator="cuda", strategy="fastft", callbacks=[callback], max_steps=7)
    trainer.fit(PlainModule(tiny_llama()), packed_loader(7))
    assert callback.latest["tokens_per_s"] > 0
    assert callback.latest["peak_memory_gib"] > 0
