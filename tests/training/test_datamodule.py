import json
import logging
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_fastft.core.errors import DataError, OptionError, ResumeError
from lightning_fastft.training.data.trainer_facts import LoopFacts
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.rollouts import RolloutDataModule
from tests.packing.conftest import UNMARKED, build_tokenizer
from tests.support.datamodule_worker import (
    TWO_PROCESS_CASES,
    SaveAt,
    TinyModel,
    make_data,
    make_rows,
    make_trainer,
    rows_in,
    run,
    run_and_resume,
)
from tests.support.training_parts import quiet_data
from tests.support.two_ranks import run_two_ranks

NUM_ROWS = 61
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning.*", "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)


@pytest.fixture(autouse=True)
def quiet_lightning(caplog):
    # Through caplog, which gives the level back.
    caplog.set_level(logging.ERROR, logger="lightning.pytorch")


def loop_of(world_size: int, rank: int) -> LoopFacts:
    """The facts of one rank's own loop."""
    return LoopFacts(world_size, rank, 1, SimpleNamespace(root_device=torch.device("cpu")), None)


def indices(run) -> list[int]:
    return [index for index, _ in run.seen]


def rows_of(seen) -> list[int]:
    return sorted(row for _, rows in seen for row in rows)


def assert_goes_on(whole, resumed, *, after: int) -> None:
    """The resumed run sees what the run without a stop saw after its save, and ends with the same bits."""
    assert resumed.seen == whole.seen[after:]
    assert torch.equal(resumed.weight, whole.weight)


class TestResume:
    @pytest.mark.covering
    @pytest.mark.parametrize("accumulate", [1, 3])
    @pytest.mark.parametrize("micro_batch", [3, 12, 13, 14, 15, 16, 18, 28, 29, 30])
    def test_goes_on_bit_for_bit_from_the_middle_and_the_end_of_an_epoch(self, tmp_path, accumulate, micro_batch):
        whole, resumed = run_and_resume(
            tmp_path,
            save={"micro_batch": micro_batch},
            data={},
            trainer={"accumulate_grad_batches": accumulate},
            asks_for_steps=micro_batch % 2 == 0,
        )
        assert_goes_on(whole, resumed, after=micro_batch // accumulate * accumulate)

    @pytest.mark.parametrize(("micro_batch", "words"), [(4, "its 1 micro-batch is"), (5, "its 2 micro-batches are")])
    def test_says_what_is_trained_again(self, tmp_path, caplog, micro_batch, words):
        options = {"accumulate_grad_batches": 3}
        with caplog.at_level(logging.WARNING, logger="lightning_fastft"):
            run_and_resume(tmp_path, save={"micro_batch": micro_batch}, data={}, trainer=options)
        assert f"{words} trained again" in caplog.text

    @pytest.mark.slow
    @pytest.mark.parametrize("accumulate", [1, 3])
    @pytest.mark.parametrize("save", [{"micro_batch": 9}, {"epoch": 1}])
    def test_goes_on_bit_for_bit_with_two_workers(self, tmp_path, accumulate, save):
        whole, resumed = run_and_resume(
            tmp_path,
            save=save,
            data={"num_workers": 2},
            trainer={"accumulate_grad_batches": accumulate},
            asks_for_steps=True,
        )
        assert_goes_on(whole, resumed, after=save.get("micro_batch", 2 * whole.data.plan.num_micro_batches))

    @pytest.mark.covering
    @pytest.mark.parametrize("accumulate", [1, 3])
    @pytest.mark.parametrize("limit", [7, 0.5])
    @pytest.mark.parametrize("save", [{"micro_batch": 3}, {"micro_batch": 9}, {"epoch": 0}])
    def test_goes_on_bit_for_bit_with_limit_train_batches(self, tmp_path, accumulate, limit, save):
        whole, resumed = run_and_resume(
            tmp_path,
            save=save,
            data={},
            trainer={"accumulate_grad_batches": accumulate, "limit_train_batches": limit},
            asks_for_steps=True,
        )
        num_per_epoch = 7
        assert whole.data.plan.num_micro_batches == num_per_epoch
        assert len(whole.seen) == 3 * num_per_epoch
        position = save.get("micro_batch", num_per_epoch)
        assert_goes_on(whole, resumed, after=position - position % num_per_epoch % accumulate)

    @pytest.mark.covering
    @pytest.mark.parametrize("limits", [{"max_epochs": -1, "max_steps": 20}, {"max_epochs": None, "max_steps": 20}])
    @pytest.mark.parametrize("save", [{"micro_batch": 5}, {"micro_batch": 14}, {"epoch": 0}])
    def test_goes_on_bit_for_bit_where_steps_limit_the_run(self, tmp_path, limits, save):
        whole, resumed = run_and_resume(tmp_path, save=save, data={}, trainer=limits)
        assert_goes_on(whole, resumed, after=save.get("micro_batch", 14))

    @pytest.mark.covering
    @pytest.mark.parametrize(
        "options", [{}, {"val_check_interval": 5}, {"val_check_interval": 5, "check_val_every_n_epoch": None}]
    )
    @pytest.mark.parametrize("save", [{"validation": 2}, {"micro_batch": 5}])
    def test_goes_on_bit_for_bit_around_validation(self, tmp_path, options, save):
        whole, resumed = run_and_resume(
            tmp_path, save=save, data={"val_share": 0.2}, trainer={"num_sanity_val_steps": 2, **options}
        )
        assert_goes_on(whole, resumed, after=len(whole.seen) - len(resumed.seen))
        assert len(whole.seen) - len(resumed.seen) == {"micro_batch": 5}.get(
            next(iter(save)), 10 if options else 2 * whole.data.plan.num_micro_batches
        )

    def test_goes_on_from_lightnings_own_checkpoints(self, tmp_path):
        saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        whole = run(
            tmp_path, data={}, trainer={"enable_checkpointing": True, "accumulate_grad_batches": 3}, callbacks=[saver]
        )
        resumed = run(tmp_path, data={}, trainer={"accumulate_grad_batches": 3}, ckpt_path=tmp_path / "step=8.ckpt")
        assert_goes_on(whole, resumed, after=24)

    def test_goes_on_after_an_exception_inside_a_window(self, tmp_path):
        class Failure(Callback):
            def on_train_batch_start(self, trainer, module, batch, number):
                if batch.index == 10:
                    raise RuntimeError("planted")

            def on_exception(self, trainer, *_):
                trainer.save_checkpoint(tmp_path / "failed.ckpt")

        options = {"accumulate_grad_batches": 3}
        whole = run(tmp_path, data={}, trainer=options)
        with pytest.raises(RuntimeError, match="planted"):
            run(tmp_path, data={}, trainer=options, callbacks=[Failure()])
        resumed = run(tmp_path, data={}, trainer=options, ckpt_path=tmp_path / "failed.ckpt")
        assert_goes_on(whole, resumed, after=9)

    @pytest.mark.parametrize(("limits", "is_cut"), [({"max_epochs": 3}, True), ({"max_steps": 12}, False)])
    def test_rest_of_an_epoch_that_max_steps_ended_is_trained_or_missed_aloud(self, tmp_path, caplog, limits, is_cut):
        class SaveLast(Callback):
            def on_fit_end(self, trainer, *_):
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

        first = run(tmp_path, data={}, trainer={"max_steps": 5}, callbacks=[SaveLast()])
        with caplog.at_level(logging.WARNING, logger="lightning_fastft"):
            resumed = run(tmp_path, data={}, trainer=limits, ckpt_path=tmp_path / "saved.ckpt")
        assert indices(first) == [0, 1, 2, 3, 4]
        assert indices(resumed)[0] == (first.data.plan.num_micro_batches if is_cut else 5)
        assert ("is not trained" in caplog.text) == is_cut

    @pytest.mark.parametrize("save", [{"micro_batch": 5}, {"validation": 2}])
    def test_nobody_is_warned_of_a_loader_that_does_go_on(self, tmp_path, save, recwarn):
        run_and_resume(tmp_path, save=save, data={"val_share": 0.2}, trainer={})
        assert [str(warning.message) for warning in recwarn if "not resumable" in str(warning.message)] == []
        assert torch.load(tmp_path / "saved.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"][
            "combined_loader"
        ] == [{}]

    def test_goes_on_from_a_checkpoint_without_a_loaders_state(self, tmp_path):
        """As they were written before the loader had one."""
        whole = run(tmp_path, data={}, trainer={}, callbacks=[SaveAt(tmp_path / "saved.ckpt", micro_batch=5)])
        checkpoint = torch.load(tmp_path / "saved.ckpt", weights_only=True)
        del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        torch.save(checkpoint, tmp_path / "old.ckpt")
        resumed = run(tmp_path, data={}, trainer={}, ckpt_path=tmp_path / "old.ckpt")
        assert_goes_on(whole, resumed, after=5)

    def test_position_is_one_integer_and_loads_without_pickled_code(self, tmp_path):
        run(tmp_path, data={}, trainer={}, callbacks=[SaveAt(tmp_path / "saved.ckpt", micro_batch=17)])
        state = torch.load(tmp_path / "saved.ckpt", weights_only=True)["PackedDataModule"]
        assert state["micro_batches"] == 17
        assert set(state) == {"micro_batches", "plan"}

    @pytest.mark.parametrize(
        ("data", "trainer", "word"),
        [
            ({"seed": 6}, {}, "seed was 5 and is 6"),
            ({"max_tokens": 80}, {}, "max_tokens was 64 and is 80"),
            ({"rows": make_rows(60)}, {}, "data was"),
            ({"val_share": 0.1}, {}, "val_share was 0.0 and is 0.1"),
            ({"seed": 6}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches was 1 and is 2"),
            ({}, {"limit_train_batches": 9}, "micro_batches_per_epoch was 14 and is 9"),
        ],
    )
    def test_refuses_a_checkpoint_of_another_plan_and_names_what_changed(self, tmp_path, data, trainer, word):
        path = tmp_path / "saved.ckpt"
        run(tmp_path, data={}, trainer={}, callbacks=[SaveAt(path, micro_batch=5)])
        with pytest.raises(ResumeError, match=word):
            run(tmp_path, data=data, trainer=trainer, ckpt_path=path)

    # An integer is the same limit whatever the sizes; the epochs that it cuts are not.
    @pytest.mark.parametrize("limit", [7, 0.5])
    def test_other_sizes_are_refused_where_epochs_are_cut(self, tmp_path, limit):
        path = tmp_path / "saved.ckpt"
        cut = {"limit_train_batches": limit}
        run(tmp_path, data={}, trainer=cut, callbacks=[SaveAt(path, micro_batch=3)])
        with pytest.raises(ResumeError, match="cut by limit_train_batches"):
            run(tmp_path, data={}, trainer={**cut, "accumulate_grad_batches": 2}, ckpt_path=path)

    @pytest.mark.covering
    @pytest.mark.parametrize("cache", [None, "cache"])
    @pytest.mark.parametrize("change", ["touch", "copy", "other path", "memory"])
    def test_same_rows_touched_or_elsewhere_are_the_same_data(self, tmp_path, change, cache):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
        options = {"cache_dir": None if cache is None else str(tmp_path / cache)}
        whole = run(
            tmp_path,
            data={"rows": str(path), **options},
            trainer={},
            callbacks=[SaveAt(tmp_path / "saved.ckpt", micro_batch=5)],
        )
        rows = str(path)
        if change == "memory":
            rows = make_rows()
        elif change == "touch":
            os.utime(path, (1, 1))
        else:
            (tmp_path / "b").mkdir()
            shutil.copy(path, tmp_path / "b" / "rows.jsonl")
            path.unlink()
            rows = str(tmp_path / "b" / "rows.jsonl")
            if change == "copy":
                shutil.move(rows, path)
                rows = str(path)
        resumed = run(tmp_path, data={"rows": rows, **options}, trainer={}, ckpt_path=tmp_path / "saved.ckpt")
        assert_goes_on(whole, resumed, after=5)

    @pytest.mark.parametrize("change", ["one token", "one label", "order"])
    def test_other_rows_under_the_same_path_and_time_are_refused(self, tmp_path, change):
        path = tmp_path / "rows.jsonl"

        def write(rows):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            os.utime(path, (1, 1))

        rows = make_rows()
        write(rows)
        run(tmp_path, data={"rows": str(path)}, trainer={}, callbacks=[SaveAt(tmp_path / "saved.ckpt", micro_batch=5)])
        if change == "order":
            rows[3], rows[4] = rows[4], rows[3]
        elif change == "one token":
            rows[3]["input_ids"][-1] = (rows[3]["input_ids"][-1] + 1) % 40
            rows[3]["labels"][-1] = rows[3]["input_ids"][-1]
        else:
            rows[3]["labels"][-1] = -100
        write(rows)
        with pytest.raises(ResumeError, match="data was"):
            run(tmp_path, data={"rows": str(path)}, trainer={}, ckpt_path=tmp_path / "saved.ckpt")

    def test_goes_on_from_a_checkpoint_that_knows_its_data_by_path_and_time(self):
        data = make_data()
        data.setup("fit")
        state = data.state_dict()
        state["plan"]["data"] = "0" * 64
        state["micro_batches"] = 3
        with pytest.warns(UserWarning, match="by path and time"):
            data.load_state_dict(state)
        assert data.position == 3

    @pytest.mark.covering
    @pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 5)])
    @pytest.mark.parametrize("micro_batch", [4, 6, 14, 18])
    def test_goes_on_with_another_accumulation_and_trains_each_row_once(self, tmp_path, before, after, micro_batch):
        path = tmp_path / "saved.ckpt"
        whole = run(
            tmp_path,
            data={},
            trainer={"accumulate_grad_batches": before},
            callbacks=[SaveAt(path, micro_batch=micro_batch)],
        )
        num_per_epoch = whole.data.plan.num_micro_batches
        resumed = run(tmp_path, data={}, trainer={"accumulate_grad_batches": after}, ckpt_path=path)
        num_trained = micro_batch % num_per_epoch // before * before
        epoch = micro_batch // num_per_epoch
        first = whole.seen[epoch * num_per_epoch :][:num_trained]
        own = resumed.data.plan.num_micro_batches
        num_left = len(resumed.seen) - (2 - epoch) * own
        assert rows_of([*first, *resumed.seen[:num_left]]) == list(range(NUM_ROWS))
        for number in range(2 - epoch):
            seen = resumed.seen[num_left + number * own :][:own]
            assert rows_of(seen) == list(range(NUM_ROWS))

    def test_resizes_in_one_epoch_are_remembered(self, tmp_path):
        one, two = tmp_path / "one.ckpt", tmp_path / "two.ckpt"
        first = run(tmp_path, data={}, trainer={"max_epochs": 1}, callbacks=[SaveAt(one, micro_batch=4)]).seen[:4]
        second = run(
            tmp_path, data={}, trainer={"max_epochs": 1, "accumulate_grad_batches": 2}, ckpt_path=one,
            callbacks=[SaveAt(two, micro_batch=2)],
        ).seen[:2]  # fmt: skip
        state = torch.load(two, weights_only=True)["PackedDataModule"]
        assert [entry["micro_batches"] for entry in state["resized"]] == [4]
        for accumulate in (2, 3):
            third = run(
                tmp_path, data={}, trainer={"max_epochs": 1, "accumulate_grad_batches": accumulate}, ckpt_path=two
            ).seen
            assert rows_of([*first, *second, *third]) == list(range(NUM_ROWS))

    @pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 3), (1, 4)])
    def test_goes_on_with_another_number_of_ranks(self, before, after):
        """Every example of the epoch is trained once, over all ranks of both runs."""

        def data_of(world_size, rank=0):
            data = make_data()
            data.loop = loop_of(world_size, rank)
            data.setup("fit")
            return data

        seen = []
        for rank in range(before):
            data = data_of(before, rank)
            batches = iter(data.train_dataloader())
            seen += [rows_in(next(batches)) for _ in range(3)]
            next(batches)
            state = data.state_dict()
        assert state["micro_batches"] == 3
        for rank in range(after):
            data = data_of(after, rank)
            data.load_state_dict(state)
            seen += [rows_in(batch) for batch in data.train_dataloader()]
            assert data.position % data.plan.num_micro_batches == 0
        assert sorted(row for rows in seen for row in rows) == list(range(NUM_ROWS))

    @pytest.mark.slow
    def test_two_processes_go_on_bit_for_bit_and_share_every_row(self, tmp_path):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad/rows.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in [*make_rows(), {"input_ids": [1]}])
        )
        run_two_ranks("tests.support.datamodule_worker", tmp_path, timeout_s=400)
        ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
        refusals = [results.pop()["refused"] for results in ranks]
        assert refusals[0] == refusals[1]
        assert "Rank 0 plans" in refusals[0]
        # Beside the run's other outputs, once, and no logger found its folder taken.
        assert [path.relative_to(tmp_path / "bad") for path in (tmp_path / "bad").rglob("rejected.jsonl")] == [
            Path("logs/lightning_logs/version_0/rejected.jsonl")
        ]
        assert not any(
            "not empty" in text
            for rank in (0, 1)
            for text in json.loads((tmp_path / f"bad/warned{rank}.json").read_text())
        )
        for case, *results in zip(TWO_PROCESS_CASES, *ranks, strict=True):
            num_per_epoch = len(results[0]["whole"]) // 3
            after = case["save"].get("micro_batch", 2 * num_per_epoch)
            for result in results:
                assert result["resumed"] == result["whole"][after:], case
                assert result["equal"], case
                assert result["sum"] == results[0]["sum"], case
            assert len(results[0]["whole"]) == len(results[1]["whole"]), case
            for epoch in range(3):
                both = [
                    entry
                    for result in results
                    for entry in result["whole"][epoch * num_per_epoch : (epoch + 1) * num_per_epoch]
                ]
                assert rows_of(both) == list(range(NUM_ROWS)), case


class TestFit:
    @pytest.mark.parametrize("accumulate", [1, 4])
    def test_every_row_is_trained_once_per_epoch_in_another_order(self, tmp_path, accumulate):
        done = run(tmp_path, data={}, trainer={"accumulate_grad_batches": accumulate})
        num_per_epoch = done.data.plan.num_micro_batches
        epochs = [done.seen[number * num_per_epoch : (number + 1) * num_per_epoch] for number in range(3)]
        assert all(rows_of(epoch) == list(range(NUM_ROWS)) for epoch in epochs)
        assert num_per_epoch % accumulate == 0
        assert [rows for _, rows in epochs[0]] != [rows for _, rows in epochs[1]]
        assert indices(done) == list(range(3 * num_per_epoch))

    def test_a_step_is_the_token_mean_of_its_window(self, tmp_path):
        class Gradient(Callback):
            gradients = []

            def on_before_optimizer_step(self, trainer, module, optimizer):
                self.gradients.append(module.weight.grad.clone())
                module.weight.grad.zero_()

        # The last window is cut to one micro-batch.
        recorded = Gradient()
        done = run(
            tmp_path,
            data={},
            trainer={"accumulate_grad_batches": 3, "max_epochs": 1, "limit_train_batches": 7},
            callbacks=[recorded],
        )
        rows = make_rows()
        weight = TinyModel().weight.detach().double().requires_grad_()
        expected = []
        for begin in (0, 3, 6):
            documents = [rows[number] for _, members in done.seen[begin : begin + 3] for number in members]
            inputs = torch.tensor([token for row in documents for token in row["input_ids"][:-1]])
            targets = torch.tensor([label for row in documents for label in row["labels"][1:]])
            loss = torch.nn.functional.cross_entropy(weight[inputs], targets, ignore_index=-100)
            expected.append(torch.autograd.grad(loss, weight)[0])
        # Weights move little in three steps of AdamW without a gradient; the first window is exact, the others need the
        # weights of their time.
        assert torch.linalg.norm(recorded.gradients[0] - expected[0]) <= 1e-6 * torch.linalg.norm(expected[0])
        assert len(recorded.gradients) == 3
        assert torch.linalg.norm(recorded.gradients[2] - expected[2]) <= 5e-2 * torch.linalg.norm(expected[2])

    def test_second_fit_begins_a_new_epoch(self, tmp_path):
        model, data = TinyModel(), make_data()
        trainer = make_trainer(tmp_path, max_epochs=None, max_steps=17)
        trainer.fit(model, data)
        trainer.fit_loop.epoch_loop.max_steps = 20
        trainer.fit(model, data)
        assert [index for index, _ in model.seen] == [*range(17), 28, 29, 30]

    def test_epoch_that_a_hook_ends_is_over(self, tmp_path):
        class Short(TinyModel):
            def on_train_batch_start(self, batch, number):
                return -1 if number == 4 else None

        model = Short()
        make_trainer(tmp_path, max_epochs=2).fit(model, make_data())
        assert [index for index, _ in model.seen] == [0, 1, 2, 3, 14, 15, 16, 17]

    def test_new_trainer_begins_at_0(self, tmp_path):
        data = make_data()
        for _ in range(2):
            model = TinyModel()
            make_trainer(tmp_path, max_epochs=1).fit(model, data)
            assert [index for index, _ in model.seen] == list(range(14))

    def test_overfit_batches_repeats_the_same_packs(self, tmp_path):
        done = run(tmp_path, data={}, trainer={"overfit_batches": 3})
        rows = [rows for _, rows in done.seen]
        assert rows == rows[:3] * 3

    def test_no_warning_about_the_loader(self, tmp_path, recwarn):
        run(tmp_path, data={"val_share": 0.2}, trainer={"max_epochs": 1})
        assert not [
            str(warning.message)
            for warning in recwarn
            if "dataloader" in str(warning.message).lower() or "IterableDataset" in str(warning.message)
        ]

    def test_accumulation_that_changes_is_refused(self, tmp_path):
        class Change(Callback):
            def on_train_epoch_start(self, trainer, *_):
                trainer.accumulate_grad_batches = 1 + trainer.current_epoch

        with pytest.raises(OptionError, match="accumulate_grad_batches changed from 1 to 2"):
            run(tmp_path, data={}, trainer={}, callbacks=[Change()])
        with pytest.raises(OptionError, match="GradientAccumulationScheduler"):
            run(tmp_path, data={}, trainer={}, callbacks=[GradientAccumulationScheduler({0: 1, 1: 4})])

    def test_search_for_a_batch_size_that_packs_would_not_follow_is_refused(self, tmp_path):
        with pytest.raises(OptionError, match="max_tokens"):
            run(tmp_path, data={}, trainer={}, callbacks=[BatchSizeFinder(batch_arg_name="max_tokens", max_trials=1)])

    def test_extra_packs_are_reported_apart(self, tmp_path, caplog):
        with caplog.at_level(logging.INFO, logger="lightning_fastft"):
            done = run(tmp_path, data={}, trainer={"accumulate_grad_batches": 8, "max_epochs": 1})
        assert len(done.data.packs("train")) == 14
        assert done.data.plan.num_extra_packs == 2
        assert "14 packs, and 2 more by splitting" in caplog.text


class TestEvaluation:
    def test_validation_sees_every_row_once_in_order_with_its_own_weight(self, tmp_path):
        data = make_data(val_paths=make_rows(20, seed=3))
        data.setup("validate")
        batches = [list(data.val_dataloader()) for _ in range(2)]
        assert sorted(row for batch in batches[0] for row in rows_in(batch)) == list(range(20))
        assert [rows_in(batch) for batch in batches[0]] == [rows_in(batch) for batch in batches[1]]
        assert all(batch["num_items_in_batch"] == batch.context.num_labelled for batch in batches[0])

    @pytest.mark.parametrize("names", [(), ("one", "other")])
    def test_first_packs_of_an_evaluation_are_a_sample_of_all_for_every_seed(self, names):
        rows = [{"input_ids": [1] * (2 + 30 * number // 400)} for number in range(400)]
        seen = []
        for split, options in (("val", {"seed": 5}), ("val", {"seed": 6}), ("test", {})):
            data = make_data(**{f"{split}_paths": dict.fromkeys(names, rows) if names else rows}, **options)
            data.setup("validate" if split == "val" else "test")
            loader = getattr(data, f"{split}_dataloader")()
            seen.append([np.diff(batch.context.start_host_S1) for batch in (loader[names[1]] if names else loader)])
            # As Trainer(limit_val_batches=0.2): the documents of all packs have 17 tokens on average.
            assert 14 < np.concatenate(seen[-1][: len(seen[-1]) // 5]).mean() < 20
            assert sum(map(len, seen[-1])) == 400
        assert all(map(np.array_equal, seen[0], seen[1]))

    @pytest.mark.parametrize(("stage", "option"), [("validate", "val_paths or val_share"), ("test", "test_paths")])
    def test_trainer_refuses_to_evaluate_without_data(self, tmp_path, stage, option):
        class Tested(TinyModel):
            test_step = TinyModel.validation_step

        trainer, data = make_trainer(tmp_path), make_data()
        with pytest.raises(OptionError, match=f"no data to evaluate: give {option}"):
            getattr(trainer, stage)(Tested(), data)
        assert data.val_dataloader() == data.test_dataloader() == []

    def test_log_names_the_split_that_is_read(self, tmp_path, caplog):
        with caplog.at_level(logging.INFO, logger="lightning_fastft.phases"):
            make_trainer(tmp_path, max_steps=1).fit(TinyModel(), make_data(val_paths=make_rows(9, seed=4)))
        begun = [text for text in caplog.messages if text.endswith(" ...")]
        assert begun == ["reading train data ...", "reading val data ...", "planning packs ..."]

    def test_trainer_validates_and_tests(self, tmp_path):
        class Tested(TinyModel):
            def test_step(self, batch, number):
                self.seen.append((batch.index, rows_in(batch)))

        model, data = Tested(), make_data(val_share=0.2, test_paths=make_rows(9, seed=4))
        trainer = make_trainer(tmp_path)
        assert "val_loss" in trainer.validate(model, data, verbose=False)[0]
        trainer.test(model, data, verbose=False)
        assert rows_of(model.seen) == list(range(9))

    def test_ranks_share_the_packs_to_predict_from_in_a_fixed_order(self):
        data, seen = make_data(rows=None, predict_paths=make_rows(23, seed=4)), []
        for rank in (0, 1, 0):
            data.loop = loop_of(2, rank)
            data.setup("predict")
            batches = list(data.predict_dataloader())
            # The batch says which rows it holds.
            assert all(list(batch.numbers) == rows_in(batch) for batch in batches)
            seen.append([batch.numbers for batch in batches])
        assert sorted(number for numbers in seen[0] + seen[1] for number in numbers) == list(range(23))
        assert len(seen[0]) == len(seen[1])
        assert seen[0] == seen[2]

    def test_held_out_rows_are_a_fixed_share_and_never_trained(self, tmp_path):
        rows = make_rows(1000)
        parts = {}
        for name, options in {
            "a": {},
            "b": {},
            "seed": {"seed": 6},
            "more": {"rows": rows + make_rows(200, seed=9)},
        }.items():
            data = make_data(**{"rows": rows, "val_share": 0.1, **options})
            data.setup("fit")
            parts[name] = (data.subset("train").index_N, data.subset("val").index_N)
        train_N, val_N = parts["a"]
        assert sorted([*train_N, *val_N]) == list(range(1000))
        assert 70 <= len(val_N) <= 130
        assert (parts["b"][1] == val_N).all()
        assert not np.array_equal(parts["seed"][1], val_N)
        # Rows added at the end leave the choice among the old ones as it was.
        assert (parts["more"][1][parts["more"][1] < 1000] == val_N).all()

    def test_val_paths_replace_the_held_out_share(self, caplog):
        with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
            data = make_data(val_share=0.5, val_paths=make_rows(7, seed=9))
        data.setup("fit")
        assert (len(data.subset("train")), len(data.subset("val"))) == (len(make_rows()), 7)
        assert "val_paths replaces val_share=0.5" in caplog.text

    def test_a_small_share_still_holds_out_one_row(self):
        data = make_data(rows=make_rows(5), val_share=0.001)
        data.setup("fit")
        assert (len(data.subset("train")), len(data.subset("val"))) == (4, 1)

    def test_share_that_leaves_nothing_to_train_is_refused(self):
        with pytest.raises(DataError, match="none to train"):
            make_data(val_share=1.0).setup("fit")

    def test_without_validation_data_fit_runs(self, tmp_path):
        assert make_data().val_dataloader() == []
        assert len(run(tmp_path, data={}, trainer={"max_epochs": 1}).seen) == 14


class TestOptions:
    def test_tokenizer_and_vocabulary_come_from_the_module(self, tmp_path):
        class Owner(TinyModel):
            tokenizer = None
            vocab_size = 50

        with pytest.raises(DataError, match="the embedding has 50 rows"):
            make_trainer(tmp_path).fit(Owner(), make_data())

    def test_pad_to_max_pads_every_pack(self):
        data = make_data(pad_to_max=True)
        data.setup("fit")
        assert {batch["input_ids"].shape for batch in data.train_dataloader()} == {(1, 64)}

    def test_rejected_rows_go_beside_the_run(self, tmp_path):
        rows = [*make_rows(), {"input_ids": [1]}]
        run(
            tmp_path,
            data={"rows": rows, "max_reject_share": 0.5, "val_paths": [*make_rows(5), {"input_ids": []}]},
            trainer={"max_epochs": 1},
        )
        assert len((tmp_path / "rejected.jsonl").read_text().splitlines()) == 1
        assert len((tmp_path / "rejected_val.jsonl").read_text().splitlines()) == 1

    def test_rejected_rows_go_into_the_folder_of_the_logger(self, tmp_path, monkeypatch, caplog):
        monkeypatch.chdir(tmp_path)
        caplog.set_level(logging.INFO, logger="lightning.pytorch")
        rows, logger = [*make_rows(), {"input_ids": [1], "labels": [1]}], CSVLogger(tmp_path / "out")
        run(tmp_path, data={"rows": rows, "max_reject_share": 0.5}, trainer={"max_epochs": 1, "logger": logger})
        written = Path(logger.log_dir) / "rejected.jsonl"
        assert list(tmp_path.rglob("rejected*")) == [written]
        assert (
            f"train data: 1 of 62 rows are rejected (fewer than 2 tokens 1); they are in {written}" in caplog.messages
        )

    def test_what_is_lost_of_kept_rows_is_logged_and_how_they_are_read_is_not(self, caplog):
        caplog.set_level(logging.INFO, logger="lightning.pytorch")
        turns = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "four", "reasoning": "hm"}]
        rows = [{"messages": turns, "source": "a"}, {"messages": [turns[0], {**turns[1], "content": "four " * 99}]}]
        data = make_data(rows=rows, tokenizer=build_tokenizer(chat_template=UNMARKED), too_long="truncate")
        data.setup("fit")
        assert [message for message in caplog.messages if message.startswith("train data: ")] == [
            "train data: columns that are not read: source",
            "train data: 1 rows are longer than a pack: 1 truncated, 0 split, 0 pieces without trained tokens dropped",
            "train data: 2 rows with reasoning that the chat template drops from at least one turn (the first is list of "
            "rows, row 1)",
        ]
        assert "generation prompt" in data.report("train").render()

    def test_path_that_is_given_wins_over_the_folder_of_the_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        rows, logger = [*make_rows(), {"input_ids": [1], "labels": [1]}], CSVLogger(tmp_path / "out")
        data = {"rows": rows, "max_reject_share": 0.5, "rejected_path": "mine/bad.jsonl"}
        run(tmp_path, data=data, trainer={"max_epochs": 1, "logger": logger})
        assert (tmp_path / "mine/bad.jsonl").is_file()
        assert list(tmp_path.rglob("rejected*")) == []

    def test_good_rows_leave_no_file_of_rejected_ones(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
        for _ in range(2):
            # The second time from the cache, whose own file of them is empty.
            run(tmp_path, data={"rows": "rows.jsonl", "cache_dir": "cache"}, trainer={"max_epochs": 1})
        assert [path.parent.parent.name for path in tmp_path.rglob("rejected*")] == ["cache"]

    def test_ranks_fill_the_cache_before_the_loggers_stand_and_leave_their_folder_alone(self, tmp_path):
        """CSVLogger warns of a folder that is not empty; a run that stops has no logger to come."""
        (tmp_path / "rows.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in [*make_rows(), {"input_ids": [1]}])
        )
        folder = tmp_path / "out/lightning_logs/version_0"
        for most, is_there in ((0.5, False), (0.0, True)):
            data = make_data(
                rows=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / f"cache{most}"), max_reject_share=most
            )
            data.trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path / "out"))
            data.trainer.state.fn = "fit"
            stops = (
                pytest.raises(DataError, match=re.escape(f"Rejected rows are in {folder}/rejected.jsonl."))
                if is_there
                else nullcontext()
            )
            with mock.patch.object(Trainer, "world_size", 2), stops:
                data.prepare_data()
            assert (folder / "rejected.jsonl").exists() == is_there

    def test_cache_is_used_again(self, tmp_path):
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
        for _ in range(2):
            data = make_data(rows=str(source), cache_dir=str(tmp_path / "cache"))
            data.setup("fit")
            assert sorted(row for batch in data.train_dataloader() for row in rows_in(batch)) == list(range(NUM_ROWS))
        assert len(list((tmp_path / "cache").iterdir())) == 1

    def test_without_a_trainer_positions_are_counted_by_hand(self):
        data = make_data()
        data.setup("fit")
        first = [batch.index for batch in data.train_dataloader()]
        assert data.position == 14
        second = []
        for batch in data.train_dataloader():
            second.append(batch.index)
            if len(second) == 4:
                break
        assert first + second == list(range(18))
        other = make_data()
        other.setup("fit")
        other.load_state_dict(data.state_dict())
        # The batch in hand when the loop was left does not count as trained.
        assert next(iter(other.train_dataloader())).index == 17

    @pytest.mark.parametrize(
        ("options", "word"),
        [
            ({"rows": {"a.jsonl": 0.0}}, "weight of a.jsonl"),
            ({"rows": {"a.jsonl": "much"}}, "weight of a.jsonl"),
            ({"rows": {}}, "empty mapping"),
            ({"val_paths": {"a.jsonl": 0.5}}, "val_paths"),
            ({"predict_paths": {"a.jsonl": 0.5}}, "predict_paths"),
        ],
    )
    def test_weights_of_paths_that_cannot_be_are_refused(self, options, word):
        with pytest.raises(OptionError, match=word):
            make_data(**options)

    def test_plan_before_setup_is_refused(self):
        with pytest.raises(OptionError, match="setup"):
            make_data().train_dataloader()
        assert make_data().state_dict() == {}

    def test_command_line_reads_every_kind_of_source(self):
        jsonargparse = pytest.importorskip("jsonargparse")
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(PackedDataModule, "data")
        for words, expected in (
            (["--data.paths", "train.jsonl"], "train.jsonl"),
            (["--data.paths", "[a.jsonl, b.jsonl]"], ["a.jsonl", "b.jsonl"]),
            (["--data.paths=[{input_ids: [1, 2]}]"], [{"input_ids": [1, 2]}]),
        ):
            options = parser.parse_args(
                [*words, "--data.columns", "{prompt: question, completion: answer}", "--data.cache_dir", "null"]
            )
            assert options.data.paths == expected
            assert options.data.columns == {"prompt": "question", "completion": "answer"}
            assert options.data.cache_dir is None
            assert isinstance(parser.instantiate(options).data, PackedDataModule)


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        (pyarrow.table({"text": ["a"]}), r"got Table\. .*datasets\.Dataset\(table\)"),
        (pyarrow.table({"text": ["a"]}).to_pandas(), r"got DataFrame\. .*Dataset\.from_pandas\(table\)"),
        (({"text": text} for text in "ab"), r"got generator\. .*list\(rows\)"),
    ],
)
def test_tables_and_iterables_are_refused_with_what_to_give(source, advice):
    for options in ({"rows": source}, {"val_paths": source}, {"val_paths": {"a": source}}):
        with pytest.raises(OptionError, match=advice):
            make_data(**options)


def test_splits_are_refused_where_one_data_set_is_wanted():
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "a"}])})
    for options in ({"rows": splits}, {"val_paths": {"a": splits}}, {"streaming": True, "rows": splits}):
        with pytest.raises(OptionError, match=r"DatasetDict with the splits 'train'.*data\['train'\]"):
            make_data(**options)
    with pytest.raises(OptionError, match="prompts is a DatasetDict"):
        RolloutDataModule(splits, rewards=len)


@pytest.mark.parametrize("name", ["rows", "rows.jsonl", "rows.csv", "rows.parquet"])
def test_mapping_to_a_column_that_no_row_has_is_named_with_what_was_meant(tmp_path, name):
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 3)
    (tmp_path / "rows.csv").write_text("question,answer\na,b\n")
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"], "answer": ["b"]}), tmp_path / "rows.parquet")
    source = [{"question": "a", "answer": "b"}] if name == "rows" else str(tmp_path / name)
    options = {"cache_dir": None, "num_proc": 1, "show_progress": False}
    wrong = PackedDataModule(source, columns={"prompt": "question", "completion": "answr"}, **options)
    with pytest.raises(DataError, match=r"'answr'.*Did you mean 'answer'"):
        wrong.setup("fit")
    with pytest.raises(
        DataError, match=r"make no known format .* --data.columns.prompt question --data.columns.completion answer"
    ):
        PackedDataModule(source, **options).setup("fit")


def test_text_counts_the_packs_of_each_loader_and_reads_none(monkeypatch):
    data = quiet_data([{"input_ids": [number, 2, 3]} for number in range(8)], val_share=0.25, max_tokens=4)
    unread = "\n".join(f"{{{name} dataloader: None}}" for name in ("Train", "Validation", "Test", "Predict"))
    assert str(data) == unread
    data.prepare_data()
    data.setup("fit")
    monkeypatch.setattr(data, "_open_training_stream", lambda: pytest.fail("read"))
    shown = str(data).splitlines()
    assert shown[:2] == ["{Train dataloader: 3 packs}", "{Validation dataloader: 5 packs}"]
    assert shown[2:] == unread.splitlines()[2:]
    assert str(RolloutDataModule([{"prompt": "two"}], rewards=len)).startswith("{Train dataloader: endless}")


def test_predict_says_what_to_call():
    data = quiet_data([{"input_ids": [1, 2, 3]}], max_tokens=8)
    with pytest.raises(OptionError, match=r"predict_paths.*generate"):
        data.predict_dataloader()
