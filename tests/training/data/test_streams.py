"""Training data that is read as a stream: exact resumption, equal ranks, bounded memory, and refusals by name."""

import itertools
import json
import logging
from collections import Counter

import datasets
import psutil
import pytest
import torch

from lightning_fastft.core.errors import DataError, OptionError, ResumeError
from lightning_fastft.packing.reading.sources import open_sources
from lightning_fastft.packing.reading.streams import open_stream
from lightning_fastft.packing.rows.rejects import read_rejects
from tests.support.datamodule_worker import SaveAt, TinyModel, make_data, make_rows, make_trainer, rows_in
from tests.support.stream_worker import NUM_ROWS, make_stream, train, train_and_resume
from tests.support.two_ranks import run_two_ranks


def generated():
    return datasets.IterableDataset.from_generator(make_rows, gen_kwargs={"num_rows": NUM_ROWS})


def mixed():
    return datasets.interleave_datasets(
        [make_stream(400, num_shards=2), make_stream(400, num_shards=2)],
        probabilities=[0.7, 0.3],
        seed=3,
        stopping_strategy="all_exhausted",
    )


def shuffled():
    return make_stream().shuffle(seed=4, buffer_size=100)


def mapped():
    return make_stream().map(lambda row: row).filter(lambda row: len(row["input_ids"]) % 7 > 0)


# 900 rows are about 226 packs, 61 of 64 tokens in a window on one rank.
@pytest.mark.parametrize(
    ("make", "save_at", "options"),
    [
        (make_stream, 9, {}),
        # At the border of two windows, and inside an accumulation window that is trained again.
        (generated, 64, {"num_workers": 1}),
        (mapped, 80, {"trainer": {"accumulate_grad_batches": 3}}),
        (mixed, 90, {}),
        (shuffled, 70, {}),
        # In the second pass.
        (make_stream, 260, {"trainer": {"max_steps": 300}}),
    ],
    ids=["shards", "generator", "map and filter", "mixture", "shuffle buffer", "second pass"],
)
def test_a_resumed_run_equals_one_without_a_stop(tmp_path, make, save_at, options):
    options = {"trainer": {"max_steps": 110}, **options}
    options["trainer"] = {"max_steps": 110, **options["trainer"]}
    whole, resumed = train_and_resume(tmp_path, make=make, save_at=save_at, **options)
    accumulate = options["trainer"].get("accumulate_grad_batches", 1)
    assert resumed.seen == whole.seen[save_at - save_at % accumulate :]
    assert torch.equal(whole.weight, resumed.weight)


def test_an_epoch_that_a_hook_ends_inside_a_window_is_followed_by_whole_windows(tmp_path):
    class Short(TinyModel):
        def on_train_batch_start(self, batch, number):
            return -1 if number == 2 else None

    model = Short()
    trainer = make_trainer(tmp_path, max_epochs=None, max_steps=3, accumulate_grad_batches=2)
    trainer.fit(model, make_data(rows=make_stream()))
    assert [index for index, _ in model.seen] == [0, 1, 2, 3, 4, 5]


def test_a_pass_has_every_row_once_in_full_packs_and_the_next_is_read_in_another_order():
    data = make_data(rows=make_stream(), num_workers=1)
    data.setup("fit")
    batches = list(itertools.islice(data.train_dataloader(), 300))
    num_in_pass, seen = 0, Counter()
    while len(seen) < NUM_ROWS:
        seen.update(rows_in(batches[num_in_pass]))
        num_in_pass += 1
    assert set(seen.values()) == {1}
    fill = sum(batch.context.num_real_tokens for batch in batches[:num_in_pass]) / (64 * num_in_pass)
    assert fill > 0.97
    first, second = ([rows_in(batch) for batch in part[:20]] for part in (batches, batches[num_in_pass:]))
    assert first != second
    assert [batch.index for batch in batches] == list(range(300))


def test_litdata_chunks_are_shuffled_and_resumed(tmp_path):
    litdata = pytest.importorskip("litdata")
    folder = tmp_path / "chunks"
    cache = litdata.streaming.Cache(str(folder), chunk_bytes=10_000)
    for number, row in enumerate(make_rows(NUM_ROWS)):
        cache[number] = row
    cache.done()
    cache.merge()

    with pytest.raises(DataError, match="streaming=True"):
        make_data(rows=str(folder)).setup("fit")
    for make in (lambda: str(folder), lambda: litdata.StreamingDataset(str(folder), shuffle=True, seed=7)):
        options = {"streaming": True, "trainer": {"max_steps": 260}}
        whole, resumed = train_and_resume(tmp_path, make=make, save_at=240, **options)
        assert resumed.seen == whole.seen[240:]
        assert torch.equal(whole.weight, resumed.weight)
        assert {row for _, rows, *_ in whole.seen for row in rows} == set(range(NUM_ROWS))


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t")])
def test_tables_of_text_are_streamed(tmp_path, name, mark):
    (tmp_path / name).write_text(f"prompt{mark}completion\none{mark}two\n")
    stream = open_stream(str(tmp_path / name), seed=0)
    rows = [json.loads(row.raw) for row in stream.read(epoch=0, state="", num_behind=0)]
    assert rows == [{"prompt": "one", "completion": "two"}]


def test_paths_are_streamed_with_weights_and_a_second_reading(tmp_path):
    for name, begin in (("a", 0), ("b", 300)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in make_rows(600)[begin : begin + 300])
        )
    paths = {str(tmp_path / "a.jsonl"): 3, str(tmp_path / "b.jsonl"): 1}
    data = make_data(rows=paths, streaming=True)
    data.setup("fit")
    rows = [row for batch in itertools.islice(data.train_dataloader(), 100) for row in rows_in(batch)]
    assert 0.68 < sum(row < 300 for row in rows) / len(rows) < 0.82

    whole, resumed = train_and_resume(tmp_path, make=lambda: str(tmp_path / "*.jsonl"), save_at=20, streaming=True)
    assert torch.equal(whole.weight, resumed.weight)


def test_rows_of_a_table_lose_the_nulls_of_absent_keys():
    messages = [{"role": "user", "content": "a", "name": "b"}, {"role": "user", "content": "c"}]
    stream = datasets.Dataset.from_list([{"messages": messages}]).to_iterable_dataset()
    opened = streams_of(stream)
    assert [row.raw for row in opened] == [{"messages": messages}]
    assert opened[0].num_absent == 1


def test_nulls_of_json_columns_are_kept():
    row = {"messages": [{"role": "user", "content": "a", "calls": [{"x": None}]}], "n": {"y": None, "z": 1}}
    features = {"messages": datasets.List(datasets.Json()), "n": {name: datasets.Value("int64") for name in "yz"}}
    data = datasets.Dataset.from_list([row], features=datasets.Features(features))
    (found,) = streams_of(data.to_iterable_dataset())
    assert (found.raw, found.num_absent) == ({**row, "n": {"z": 1}}, 1)
    (source,) = open_sources([data])
    assert found == next(source.read(None))


def streams_of(stream):
    from lightning_fastft.packing.reading.streams import HubStream

    return list(HubStream(stream, name="stream").read(epoch=0, state="", num_behind=0))


def test_bad_rows_are_written_once_and_too_many_end_the_run(tmp_path):
    rows = make_rows(1500)
    bad = {5: "word", 700: [], 701: [-1.5]}
    for number, value in bad.items():
        rows[number] = {"input_ids": value, "labels": None}

    def generate():
        yield from rows

    def make():
        return datasets.IterableDataset.from_generator(generate)

    path = tmp_path / "rejected.jsonl"
    # A pass has about 400 packs; the second one begins before the end.
    options = {"rejected_path": str(path), "trainer": {"max_steps": 700}}
    train_and_resume(tmp_path, make=make, save_at=200, **options)
    assert [reject.line for reject in read_rejects(path)] == [6, 701, 702]
    with pytest.raises(DataError, match="max_reject_share"):
        train(tmp_path, stream=make(), max_reject_share=0.0)


def test_what_is_lost_of_kept_rows_is_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    rows = [row | {"source": "a" if number == 900 else None} for number, row in enumerate(make_rows(1500))]
    rows[1400] = {"input_ids": list(range(65)), "labels": list(range(65)), "source": None}
    data = make_data(rows=datasets.Dataset.from_list(rows).to_iterable_dataset(), too_long="truncate")
    data.setup("fit")
    list(itertools.islice(data.train_dataloader(), 900))
    assert [message for message in caplog.messages if "exhausted" not in message] == [
        "Rows of stream: column 'source' is not read",
        "Rows of stream: rows longer than a pack are truncated",
    ]


def test_no_more_than_three_windows_are_read_ahead():
    read = []

    def generate():
        for number in itertools.count():
            read.append(number)
            yield {"input_ids": [number % 40, 7, 8, 9]}

    data = make_data(rows=datasets.IterableDataset.from_generator(generate), num_workers=1)
    data.setup("fit")
    num_per_window = 64 * 64 // 4
    for number, _ in enumerate(itertools.islice(data.train_dataloader(), 200), start=1):
        assert len(read) <= number * 16 + 3 * num_per_window + 200


@pytest.mark.fault
def test_memory_stays_flat_over_a_million_rows():
    def generate():
        for number in range(1_000_000):
            yield {"input_ids": [number % 40, *range(3, 3 + number % 8)]}

    options = {"max_tokens": 2048, "num_workers": 1, "max_reject_share": 0.2}
    data = make_data(rows=datasets.IterableDataset.from_generator(generate), **options)
    data.setup("fit")
    process, used = psutil.Process(), []
    batches = iter(data.train_dataloader())
    for number in range(2100):
        next(batches)
        if number % 100 == 0:
            used.append(process.memory_info().rss)
    assert max(used[5:]) - used[5] < 24 * 2**20


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"trainer": {"max_steps": -1, "max_epochs": 1}}, OptionError, r"max_steps"),
        ({"trainer": {"overfit_batches": 2}}, OptionError, "overfit_batches"),
        ({"trainer": {"limit_train_batches": 3, "accumulate_grad_batches": 2}}, OptionError, "limit_train_batches"),
        ({"trainer": {"limit_train_batches": 0.5}}, OptionError, r"limit_train_batches=0\.5 is a share"),
        ({"trainer": {"val_check_interval": 0.5}}, OptionError, r"val_check_interval=0\.5 is a share"),
        ({"val_share": 0.1}, OptionError, "val_paths"),
        ({"max_tokens": 8}, DataError, "max_tokens is 8"),
        ({"stream": [{"text": "a"}], "streaming": True}, OptionError, "streaming=False"),
        ({"stream": "nowhere.jsonl", "streaming": True}, DataError, "no file or folder"),
        ({"streaming": 1}, OptionError, "streaming"),
        ({"val_paths": make_stream()}, DataError, "only the option paths"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(tmp_path, options, error, said):
    with pytest.raises(error, match=said):
        train(tmp_path, **{"stream": make_stream(), **options})


@pytest.mark.parametrize(("options", "is_said"), [({}, True), ({"val_check_interval": 2}, False)])
def test_validation_data_that_are_never_read_are_told(tmp_path, recwarn, options, is_said):
    train(tmp_path, stream=make_stream(), val_paths=make_rows(9), trainer={"max_steps": 2, **options})
    assert any("never read" in str(warning.message) for warning in recwarn) is is_said


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "preference"),
        ([{"input_ids": [1]}, {"input_ids": [2]}], "rejected"),
        ([{"colour": "a"}], "no known format"),
        ([{"input_ids": [1, -5, 3]}], "impossible"),
    ],
)
def test_rows_that_cannot_be_streamed_name_the_reason(tmp_path, rows, said):
    with pytest.raises(DataError, match=said):
        train(tmp_path, stream=datasets.Dataset.from_list(rows).to_iterable_dataset())


def test_a_position_in_another_stream_is_refused_by_name(tmp_path):
    path = tmp_path / "saved.ckpt"
    train(tmp_path, stream=make_stream(), callbacks=[SaveAt(path, micro_batch=10)], trainer={"max_steps": 10})
    for options, said in (
        ({"trainer": {"accumulate_grad_batches": 2}}, "accumulate_grad_batches was 1 and is 2"),
        ({"max_tokens": 128}, "max_tokens was 64"),
        ({"stream": make_stream(700)}, "other tokens than before"),
        ({"stream": make_stream().shuffle(buffer_size=10)}, "shuffle without a seed"),
        ({"stream": make_rows()}, "of a run on a stream"),
    ):
        with pytest.raises(ResumeError, match=said):
            train(tmp_path, **{"stream": make_stream(), "ckpt_path": path, **options})
    train(tmp_path, stream=make_rows(), callbacks=[SaveAt(path, micro_batch=10)], trainer={"max_steps": 10})
    with pytest.raises(ResumeError, match="read whole"):
        train(tmp_path, stream=make_stream(), ckpt_path=path)


@pytest.mark.parametrize(("trained", "validated"), [(make_stream, make_stream), (make_stream, make_rows)])
def test_a_checkpoint_of_a_stream_is_validated(tmp_path, trained, validated):
    path = tmp_path / "saved.ckpt"
    train(tmp_path, stream=trained(), callbacks=[SaveAt(path, micro_batch=3)], trainer={"max_steps": 3})
    data = make_data(rows=validated(), val_paths=make_rows(9))
    (metrics,) = make_trainer(tmp_path).validate(TinyModel(), data, ckpt_path=path, verbose=False)
    assert metrics["val_loss"] > 0


def test_two_ranks_read_disjoint_rows_train_as_many_batches_and_resume(tmp_path):
    run_two_ranks("tests.support.stream_worker", tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    for name, accumulate, num_rows in (("shards", 1, 900), ("odd shards", 3, 600), ("uneven", 1, 500)):
        ranks = first[name], second[name]
        assert ranks[0]["equal"]
        assert ranks[1]["equal"]
        assert ranks[0]["sum"] == ranks[1]["sum"]
        assert [entry[0] for entry in ranks[0]["whole"]] == [entry[0] for entry in ranks[1]["whole"]]
        for rank in ranks:
            assert rank["resumed"] == rank["whole"][-len(rank["resumed"]) :]
        check_divisors(ranks, accumulate=accumulate)
        seen = [row for pair in zip(ranks[0]["whole"], ranks[1]["whole"]) for _, rows, *_ in pair for row in rows]
        assert len(set(seen)) == num_rows
        # The second pass begins after the last row of the first.
        assert len(set(seen[:num_rows])) == num_rows
    assert "ZeroDivisionError" in first["broken"]
    assert "rank 0: " in second["broken"]
    assert "not split by rank" in first["split by hand"]
    with pytest.raises(ResumeError, match="world_size was 2 and is 1"):
        train(tmp_path, stream=make_stream(), ckpt_path=tmp_path / "shards/saved.ckpt")


def check_divisors(ranks, *, accumulate):
    """The divisor of a micro-batch is the share of its window's labelled tokens on both ranks."""
    whole = [rank["whole"] for rank in ranks]
    for begin in range(0, len(whole[0]), accumulate):
        window = [entry for seen in whole for entry in seen[begin : begin + accumulate]]
        total = sum(num_labelled for *_, num_labelled in window)
        assert {num_items for *_, num_items, _ in window} == {total / (2 * accumulate)}
