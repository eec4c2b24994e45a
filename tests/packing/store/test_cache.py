"""Bad rows are answered as the table has it, good rows all arrive, and the second start reads the cache."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizer

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.rows import rejects
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.store import cache, ingest
from lightning_fastft.packing.store.cache import TokenizedDataset, tokenize_sources
from lightning_fastft.packing.store.dataset import digest_meta, write_beside
from lightning_fastft.packing.tokens import workers
from lightning_fastft.training.data.describe import render_example
from tests.packing.bad_rows import BAD_ROWS, MAX_TOKENS, NUM_GOOD, POSITIONS, VOCAB_SIZE, good_row, write_corpus
from tests.packing.conftest import MARKED, build_tokenizer
from tests.packing.light_tokenizer import HeavyTokenizer, LightTokenizer, as_class
from tests.support.processes import children_of, is_there

pytestmark = pytest.mark.covering

SHARED = Path(__file__).parents[4] / "shared" / "data"
ASKED = {"role": "user", "content": "two"}
FOUR, FIVE = ({"role": "assistant", "content": word} for word in ("four", "five"))


@pytest.fixture
def few_rows_are_enough(monkeypatch):
    """Workers from the second chunk of rows on."""
    monkeypatch.setattr(workers, "WORKERS_AFTER_S", 1e-9)


def tokens_of(dataset):
    return [(document.input_ids.tolist(), document.labels.tolist()) for document in dataset]


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def ids_rows(number, *, base=5):
    return [{"input_ids": [base, base + 1, base + 2 + index % 90]} for index in range(number)]


def tokenize_ids(sources, **changes):
    options = {
        "max_tokens": 64,
        **{name: changes.pop(name) for name in ("too_long", "extra_columns", "format") if name in changes},
    }
    return tokenize_sources(sources, tokenizer=None, options=FormatOptions(**options), **changes)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("bad", BAD_ROWS, ids=lambda bad: bad.kind)
def test_bad_row_is_answered_and_good_rows_all_arrive(tmp_path, marked_tokenizer, bad, position):
    path = tmp_path / "rows.jsonl"
    good, line = write_corpus(path, bad, position)
    options = FormatOptions(max_tokens=MAX_TOKENS, too_long=bad.too_long)
    run = {
        "tokenizer": marked_tokenizer,
        "options": options,
        "vocab_size": VOCAB_SIZE,
        "rejected_path": tmp_path / "rejected.jsonl",
    }
    if bad.answer == "stop":
        with pytest.raises(DataError) as caught:
            tokenize_sources(path, **run)
        assert bad.reason in str(caught.value)
        assert f"{path}, line {line}" in str(caught.value)
        return

    dataset = tokenize_sources(path, **run)
    expected = tokenize_sources(good, tokenizer=marked_tokenizer, options=options)
    assert len(good) == NUM_GOOD + (bad.accepted is not None)
    assert tokens_of(dataset) == tokens_of(expected)
    if bad.answer == "accept":
        assert dataset.report.rejects == {}
        assert not (tmp_path / "rejected.jsonl").exists()
    else:
        assert dataset.report.rejects == {bad.reason: 1}
        (record,) = [json.loads(entry) for entry in (tmp_path / "rejected.jsonl").read_text().splitlines()]
        assert (record["file"], record["line"], record["reason"]) == (str(path), line, bad.reason)
        assert record["first_bytes"] == bad.line[:80].decode("utf-8", "backslashreplace")


def test_there_are_thirty_kinds():
    assert len({bad.kind for bad in BAD_ROWS}) == len(BAD_ROWS) == 30


@pytest.mark.usefixtures("few_rows_are_enough")
def test_workers_give_what_one_process_gives_and_import_no_torch(tmp_path):
    tokenizer = as_class(build_tokenizer(chat_template=MARKED), LightTokenizer)
    lines = [json.dumps(good_row("chat", number)).encode() for number in range(1500)]
    lines[0] = lines[700] = lines[1499] = b"garbage"
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    before = set(children_of(os.getpid()))
    run = {"tokenizer": tokenizer, "options": FormatOptions(max_tokens=MAX_TOKENS)}
    alone = tokenize_sources(tmp_path, **run, rejected_path=tmp_path / "out" / "alone")
    shared = tokenize_sources(tmp_path, **run, rejected_path=tmp_path / "out" / "shared", num_proc=2)
    assert tokens_of(alone) == tokens_of(shared)
    assert len(alone) == 1497
    assert alone.report == shared.report
    assert (tmp_path / "out" / "alone").read_text() == (tmp_path / "out" / "shared").read_text()
    assert set(children_of(os.getpid())) <= before


@pytest.mark.fault
@pytest.mark.usefixtures("few_rows_are_enough")
def test_a_tokenizer_of_a_worker_may_use_the_package():
    values = [good_row("chat", number) for number in range(300)]
    run = {"options": FormatOptions(max_tokens=MAX_TOKENS), "tokenizer": build_tokenizer(chat_template=MARKED)}
    alone = tokens_of(tokenize_sources(values, **run))
    run["tokenizer"] = as_class(run["tokenizer"], HeavyTokenizer)
    assert tokens_of(tokenize_sources(values, **run, num_proc=2)) == alone


def use_as_worker(script, *, folder, monkeypatch):
    """Start workers by a shell script."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


# Ends in the middle of its input, and needs no second to start.
DYING = "head -c 500 > /dev/null\nexit 7"


def test_rows_of_a_few_seconds_start_no_worker(tmp_path, monkeypatch):
    use_as_worker(DYING, folder=tmp_path, monkeypatch=monkeypatch)
    assert len(tokenize_ids(ids_rows(5000), num_proc=2)) == 5000


@pytest.mark.usefixtures("few_rows_are_enough")
def test_workers_start_side_by_side(tmp_path, monkeypatch):
    # Each waits for the other before it reads a setup larger than a pipe holds.
    started = tmp_path / "started"
    started.mkdir()
    script = f"""
        : > {started}/$$
        for try in $(seq 200); do
            [ $(ls {started} | wc -l) = 2 ] && exec {sys.executable} "$@"
            sleep 0.05
        done
        exit 7"""
    template = MARKED + "{# " + "comment " * 50_000 + "#}"
    tokenizer = as_class(build_tokenizer(chat_template=template), LightTokenizer)
    values = [good_row("chat", number) for number in range(700)]
    run = {"tokenizer": tokenizer, "options": FormatOptions(max_tokens=MAX_TOKENS)}
    alone = tokens_of(tokenize_sources(values, **run))
    use_as_worker(script, folder=tmp_path, monkeypatch=monkeypatch)
    assert tokens_of(tokenize_sources(values, **run, num_proc=2)) == alone


@pytest.mark.usefixtures("few_rows_are_enough")
def test_dead_worker_is_an_error_and_not_a_hang(tmp_path, monkeypatch):
    use_as_worker(DYING, folder=tmp_path, monkeypatch=monkeypatch)
    before = set(children_of(os.getpid()))
    with pytest.raises(DataError, match="exit code 7"):
        tokenize_ids(ids_rows(600), num_proc=2)
    assert set(children_of(os.getpid())) <= before


def test_error_of_the_reader_ends_the_workers(monkeypatch):
    run_chunks, ended = ingest.run_chunks, []

    def watched(*args, **options):
        try:
            yield from run_chunks(*args, **options)
        finally:
            ended.append(True)

    monkeypatch.setattr(ingest, "run_chunks", watched)
    with pytest.raises(DataError, match="impossible") as caught:
        tokenize_ids(ids_rows(30, base=900), vocab_size=100)
    # The traceback keeps the frame of the reader, and so the generator with its processes.
    assert caught.tb is not None
    assert ended == [True]


@pytest.mark.usefixtures("few_rows_are_enough")
def test_tokenizer_that_no_worker_can_make_serves_in_this_process(monkeypatch, marked_tokenizer):
    values = [good_row("chat", number) for number in range(300)]
    run = {"tokenizer": marked_tokenizer, "options": FormatOptions(max_tokens=MAX_TOKENS)}
    alone = tokens_of(tokenize_sources(values, **run))
    monkeypatch.setattr(marked_tokenizer, "of_a_notebook", lambda: 0, raising=False)
    with pytest.warns(UserWarning, match="num_proc=1"):
        assert tokens_of(tokenize_sources(values, **run, num_proc=2)) == alone


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_workers_end_with_the_process_that_started_them(number):
    parent = subprocess.Popen([sys.executable, "-m", "tests.packing.endless_rows"], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    try:
        parent.send_signal(number)
        assert parent.wait(timeout=120) == -number
    finally:
        parent.kill()
    deadline = time.monotonic() + 120
    while any(is_there(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in workers if is_there(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    parent.stdout.close()
    assert left == []


def test_flat_storage_keeps_every_label_over_chunk_borders():
    random = np.random.default_rng(0)
    values = []
    for _ in range(900):
        ids = random.integers(0, 1000, size=random.integers(2, 40))
        labels = np.where(random.random(len(ids)) < 0.5, ids, -100)
        labels[-1] = ids[-1]
        values.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    dataset = tokenize_ids(values)
    assert tokens_of(dataset) == [(value["input_ids"], value["labels"]) for value in values]
    assert dataset.length_N.tolist() == [len(value["input_ids"]) for value in values]
    assert dataset.num_labelled_N.tolist() == [sum(label != -100 for label in value["labels"][1:]) for value in values]
    assert dataset.length_N.dtype == dataset.num_labelled_N.dtype == np.int64
    assert dataset.report.num_tokens == dataset.length_N.sum()
    assert dataset[-1].input_ids.tolist() == values[-1]["input_ids"]
    with pytest.raises(IndexError):
        dataset[900]


def test_second_start_reads_no_row(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "rows.jsonl", [*ids_rows(150), {}])
    first = tokenize_ids(path, cache_dir=tmp_path / "cache", rejected_path=tmp_path / "rejected.jsonl")
    record = (tmp_path / "rejected.jsonl").read_bytes()
    (tmp_path / "rejected.jsonl").unlink()
    monkeypatch.setattr(ingest, "run_chunks", None)
    second = tokenize_ids(path, cache_dir=tmp_path / "cache", rejected_path=tmp_path / "rejected.jsonl")
    assert tokens_of(first) == tokens_of(second)
    assert isinstance(second._id_T, np.memmap)
    assert first.report == second.report
    assert first.fingerprint == second.fingerprint
    assert (tmp_path / "rejected.jsonl").read_bytes() == record


def test_cached_rejects_still_count_against_the_share(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [*ids_rows(150), {}])
    tokenize_ids(path, cache_dir=tmp_path / "cache")
    with pytest.raises(DataError, match=r"1 of 151 rows .* missing column 1.*rejected\.jsonl"):
        tokenize_ids(path, cache_dir=tmp_path / "cache", max_reject_share=0.0)


def test_fingerprint_follows_rows_options_and_tokenizer(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [good_row("chat", number) for number in range(20)])

    def fingerprint(tokenizer, **options):
        return tokenize_sources(
            path, tokenizer=tokenizer, options=FormatOptions(**{"max_tokens": MAX_TOKENS, **options})
        ).fingerprint

    tokenizer = build_tokenizer(chat_template=MARKED)
    first = fingerprint(tokenizer)
    tokenizer("a b c", truncation=True, max_length=2)
    assert fingerprint(tokenizer) == first
    changed = [build_tokenizer(chat_template=MARKED + " "), build_tokenizer(chat_template=MARKED, eos_token=None)]
    others = [*map(fingerprint, changed), fingerprint(tokenizer, loss_on="all"), fingerprint(tokenizer, max_tokens=99)]
    text = path.read_text()
    path.write_text(text.replace("plus 7", "plus 8"))
    others.append(fingerprint(tokenizer))
    assert len({first, *others}) == 6


def test_a_new_option_at_its_default_keeps_the_fingerprint():
    assert (
        tokenize_ids([{"input_ids": [1, 2, 3]}]).fingerprint
        == "6d1073dde9344c5515aae2df141c9008427084545a9cf632368372904034ca7a"
    ), (
        "all data would be tokenised again: remove a new option at its default in _fingerprint of packing/store/cache.py; "
        "if rows do give other tokens, increase _FINGERPRINT_VERSION and change this digest"
    )


class WordTokenizer(PreTrainedTokenizer):
    """Words of a list; a tokenizer in Python, as remote code is."""

    def __init__(self, do_lower_case=False, **options):
        self._words = ["<unk>", "</s>", "A", "a"]
        self.do_lower_case = do_lower_case
        super().__init__(do_lower_case=do_lower_case, unk_token="<unk>", eos_token="</s>", **options)

    vocab_size = property(lambda self: len(self._words))

    def get_vocab(self):
        return {word: number for number, word in enumerate(self._words)}

    def _tokenize(self, text, **options):
        return (text.lower() if self.do_lower_case else text).split()

    def _convert_token_to_id(self, token):
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index):
        return self._words[index]


@pytest.mark.parametrize(
    ("make", "name"),
    [(partial(build_tokenizer, bos_token="<s>"), "split_special_tokens"), (WordTokenizer, "do_lower_case")],
)
def test_cache_is_not_used_for_a_tokenizer_with_another_flag(tmp_path, make, name):
    found = []
    for value in (False, True, False):
        tokenizer = make()
        setattr(tokenizer, name, value)
        options = FormatOptions(max_tokens=MAX_TOKENS)
        rows = [{"text": "A a <|im_end|>"}]
        dataset = tokenize_sources(rows, tokenizer=tokenizer, options=options, cache_dir=tmp_path)
        assert np.array_equal(
            dataset[0].input_ids, tokenize_sources(rows, tokenizer=tokenizer, options=options)[0].input_ids
        )
        found.append(dataset[0].input_ids.tolist())
    assert found[0] == found[2] != found[1]
    assert len(list(tmp_path.iterdir())) == 2


def test_dataset_in_files_pickles_as_a_path_and_one_in_memory_whole(tmp_path):
    values = ids_rows(2000)
    on_disk, in_memory = tokenize_ids(values, cache_dir=tmp_path), tokenize_ids(values)
    assert len(pickle.dumps(on_disk)) < 500
    assert (
        tokens_of(pickle.loads(pickle.dumps(on_disk)))
        == tokens_of(pickle.loads(pickle.dumps(in_memory)))
        == tokens_of(in_memory)
    )


def test_error_leaves_no_part_of_an_entry(tmp_path):
    with pytest.raises(DataError):
        tokenize_ids([*ids_rows(300), {"input_ids": [1, -1]}], cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_killed_processes_are_swept_and_those_of_live_ones_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    with write_beside(tmp_path / "entry") as mine:
        left = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
        left.mkdir()
        with write_beside(tmp_path / "other"):
            assert not left.exists()
            assert mine.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["entry", "other"]


def test_entry_of_a_process_that_was_first_stays(tmp_path):
    with write_beside(tmp_path / "entry") as second:
        with write_beside(tmp_path / "entry") as first:
            (first / "file").write_text("first")
        (second / "file").write_text("second")
    assert (tmp_path / "entry" / "file").read_text() == "first"


def test_too_many_rejects_stop_and_are_written(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [*ids_rows(96), {"input_ids": [1]}, {}, {"input_ids": "5"}, {}])
    with pytest.raises(DataError) as caught:
        tokenize_ids(path, cache_dir=tmp_path / "cache")
    message = str(caught.value)
    written = tmp_path / "cache" / "rejected.jsonl"
    assert "4 of 100 rows (4.00 %)" in message
    assert "missing column 2, fewer than 2 tokens 1, wrong type 1" in message
    assert f"{path}, line 97" in message
    assert str(written) in message
    assert [json.loads(record)["line"] for record in written.read_text().splitlines()] == [97, 98, 99, 100]
    assert len(tokenize_ids(path, cache_dir=tmp_path / "cache", max_reject_share=0.04)) == 96


def test_first_hundred_rows_rejected_for_one_reason_stop_the_run():
    values = [*({"input_ids": []} for _ in range(100)), *ids_rows(400)]
    with pytest.raises(DataError, match=r"\(zero tokens 100\); row 1: the row has no ids, or the tokenizer"):
        tokenize_ids(values, max_reject_share=1.0)
    values = [*({"input_ids": [1]} for _ in range(100)), *ids_rows(400)]
    # A reason without a detail.
    with pytest.raises(
        DataError, match=r"all of the first 100 rows are rejected \(fewer than 2 tokens 100\); row 1\. "
    ):
        tokenize_ids(values, max_reject_share=1.0)
    values[50] = {"input_ids": [1, 2]}
    assert len(tokenize_ids(values, max_reject_share=1.0)) == 401


def test_an_empty_row_in_memory_has_the_reason_of_one_in_a_file(tmp_path):
    values = [*ids_rows(3), {}]
    for source in (values, write_lines(tmp_path / "rows.jsonl", values)):
        assert tokenize_ids(source, max_reject_share=0.5).report.rejects == {rejects.MISSING_COLUMN: 1}


def test_garbage_file_stops_the_run(tmp_path):
    (tmp_path / "rows.jsonl").write_text("garbage\n" * 200)
    with pytest.raises(DataError, match=r"all of the first 100 rows .*malformed JSON"):
        tokenize_ids(tmp_path / "rows.jsonl", max_reject_share=1.0)
    (tmp_path / "rows.jsonl").write_text("garbage\n" * 3)
    with pytest.raises(DataError, match="3 of 3 rows"):
        tokenize_ids(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"[]"])
def test_empty_file_stops_the_run(tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.json is empty"):
        tokenize_ids([write_lines(tmp_path / "good.jsonl", ids_rows(5)), path])


def test_embedding_smaller_than_the_ids_stops_also_from_the_cache(tmp_path, plain_tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", [{"text": "two plus two"}, {"text": "is four"}])
    run = {"tokenizer": plain_tokenizer, "options": FormatOptions(max_tokens=32), "cache_dir": tmp_path / "cache"}
    with pytest.raises(
        DataError,
        match=rf"line 1: token id \d+ is impossible: ids are 0 to 99.*The tokenizer has {len(plain_tokenizer)} tokens",
    ):
        tokenize_sources(path, **run, vocab_size=100)
    tokenize_sources(path, **run)
    with pytest.raises(DataError, match=r"line \d: token id \d+ is impossible"):
        tokenize_sources(path, **run, vocab_size=100)
    assert len(tokenize_sources(path, **run, vocab_size=len(plain_tokenizer))) == 2


def test_first_impossible_id_is_named_and_not_the_highest():
    values = [*ids_rows(20), {"input_ids": [1, 500]}, *ids_rows(20), {"input_ids": [1, 900]}]
    with pytest.raises(DataError, match=r"row 21: token id 500 is impossible"):
        tokenize_ids(values, vocab_size=400)
    with pytest.raises(DataError, match=r"row 1: .*99999999999"):
        tokenize_ids([{"input_ids": [1, 99999999999]}])
    with pytest.raises(DataError, match="impossible"):
        tokenize_ids([{"input_ids": [1, 10**30]}])


LABELLED = [{**row, "labels": row["input_ids"]} for row in ids_rows(3)]
LONG = {"input_ids": list(range(150)), "labels": [-100] * 70 + list(range(70, 80)) + [-100] * 70}


def test_long_rows_are_refused_with_numbers_unless_an_option_says_otherwise():
    values = [*LABELLED, LONG, {"input_ids": list(range(65)), "labels": list(range(65))}]
    with pytest.raises(
        DataError,
        match=r"2 of 5 rows are longer than max_tokens=64; the longest has 150 tokens \(list of rows, row "
        r"4\).*truncate.*split",
    ):
        tokenize_ids(values)


def test_long_rows_are_truncated_if_a_trained_token_is_left():
    keeps = {"input_ids": list(range(150)), "labels": [-100] * 63 + list(range(63, 150))}
    dataset = tokenize_ids([*LABELLED[:2], LONG, keeps], too_long="truncate", max_reject_share=0.5)
    assert dataset.report.rejects == {rejects.ALL_MASKED_TRUNCATED: 1}
    assert (dataset.report.num_too_long, dataset.report.num_truncated) == (2, 1)
    assert dataset[2].input_ids.tolist() == list(range(64))
    assert dataset.num_labelled_N.tolist() == [2, 2, 1]


def test_long_rows_are_split_and_pieces_without_trained_tokens_dropped():
    dataset = tokenize_ids([*LABELLED[:2], LONG], too_long="split")
    assert (dataset.report.num_too_long, dataset.report.num_split, dataset.report.num_dropped_pieces) == (1, 1, 2)
    assert dataset[2].input_ids.tolist() == list(range(64, 128))
    assert dataset.num_labelled_N.tolist() == [2, 2, 10]
    assert dataset.report.num_rows == len(dataset) == 3


def test_duplicates_are_counted_and_kept():
    values = ids_rows(90)
    dataset = tokenize_ids(
        [*values, values[3], values[3], {**values[3], "labels": [-100, -100, values[3]["input_ids"][2]]}],
        extra_columns="ignore",
    )
    assert dataset.report.num_duplicates == 2
    assert len(dataset) == 93


def test_optional_column_of_several_rows_belongs_to_the_file():
    values = [*ids_rows(50), {"input_ids": [1, 2], "id": 1}, {"input_ids": [1, 2], "id": 2}]
    assert len(tokenize_ids(values)) == 52
    with pytest.raises(DataError, match=r"unexpected column 1.*extra_columns='ignore'"):
        tokenize_ids(values[:-1])
    assert len(tokenize_ids(values[:-1], extra_columns="ignore")) == 51


@pytest.mark.parametrize("missing", [{}, {"labels": None}])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_row_without_the_labels_of_its_file_is_rejected_and_not_trained_whole(tmp_path, missing, suffix):
    values = [{**row, "labels": [-100, *row["input_ids"][1:]]} for row in ids_rows(9)] + [
        {"input_ids": [1, 2], **missing}
    ]
    path = write_lines(tmp_path / "rows.jsonl", values)
    if suffix == "parquet":
        datasets = pytest.importorskip("datasets")
        path = tmp_path / "rows.parquet"
        datasets.Dataset.from_list(values).to_parquet(path)
    dataset = tokenize_ids(path, max_reject_share=0.5)
    assert dataset.report.rejects == {rejects.MISSING_COLUMN: 1}
    assert len(dataset) == 9
    with pytest.raises(DataError, match=r"missing column.*labels"):
        tokenize_ids(path)


def test_progress_goes_to_stderr_if_it_is_a_terminal(capfd, monkeypatch):
    tokenize_ids(ids_rows(30), show_progress=True)
    assert "30/30" not in capfd.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")
    tokenize_ids(ids_rows(30), show_progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "30/30" in shown.err
    tokenize_ids(ids_rows(30))
    assert capfd.readouterr() == ("", "")


def test_a_vocabulary_without_tokens_is_refused():
    with pytest.raises(OptionError):
        tokenize_ids(ids_rows(3), vocab_size=0)


def test_own_files_within_a_folder_of_data_are_no_data(tmp_path):
    write_lines(tmp_path / "rows.jsonl", [*ids_rows(200), {}])
    for name in ("rejected.jsonl", "rejected_val.jsonl", "rejected.jsonl"):
        dataset = tokenize_ids(tmp_path, cache_dir=tmp_path / "cache", rejected_path=tmp_path / name)
        assert list(dataset.report.rows_per_source) == [str(tmp_path / "rows.jsonl")]
    assert (tmp_path / "rejected_val.jsonl").exists()


def test_report_says_what_happened_as_text(tmp_path):
    write_lines(tmp_path / "a.jsonl", ids_rows(120))
    write_lines(tmp_path / "b.jsonl", [*ids_rows(9, base=7), {"input_ids": [3]}])
    dataset = tokenize_ids(tmp_path)
    text = dataset.report.render()
    assert "130 rows, 129 examples, 387 tokens, 258 trained (66.7 %)" in text
    assert "formats: input_ids 130" in text
    assert "a.jsonl 120" in text
    assert "rejected: 1 (0.77 %): fewer than 2 tokens 1" in text
    assert "duplicates: 30, kept" in text


def test_packing_imports_no_heavy_library():
    # The package's own __init__ imports Lightning, which is another matter: it is left out here.
    package = Path(cache.__file__).parents[2]
    code = (
        f"import sys, types; package = types.ModuleType('lightning_fastft'); package.__path__ = [{str(package)!r}]; "
        "sys.modules['lightning_fastft'] = package; import lightning_fastft.packing.store.cache; "
        "heavy = {'transformers', 'datasets', 'pyarrow', 'rich', 'pandas', 'lightning'}; print(heavy & set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "set()"
    )


@pytest.mark.slow
def test_gsm8k_is_tokenised_whole_by_two_processes(tmp_path):
    if not (SHARED / "gpt2_bpe" / "vocab.json").is_file():
        pytest.skip(f"needs the data sets of {SHARED.name}, which are not part of the project")
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer(str(SHARED / "gpt2_bpe" / "vocab.json"), str(SHARED / "gpt2_bpe" / "merges.txt"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>")
    options = FormatOptions(max_tokens=4096, columns={"prompt": "question", "completion": "answer"}, separator="\n")
    path = SHARED / "gsm8k" / "train.jsonl"
    dataset = tokenize_sources(
        path, tokenizer=tokenizer, options=options, cache_dir=tmp_path, num_proc=2, vocab_size=50257
    )
    assert len(dataset) == 7473
    assert dataset.report.num_rejected == 0
    values = [json.loads(line) for line in path.read_text().splitlines()]
    for index in range(0, 7473, 500):
        document = dataset[index]
        ids, labels = document.input_ids, document.labels
        assert tokenizer.decode(ids) == values[index]["question"] + "\n" + values[index]["answer"] + "<|endoftext|>"
        assert tokenizer.decode(labels[labels != -100]) == values[index]["answer"] + "<|endoftext|>"


@pytest.mark.parametrize(
    ("row", "is_missed"),
    [
        ({"text": "two is four"}, True),
        ({"prompt": "two", "chosen": "four", "rejected": "five"}, True),
        ({"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "four"}]}, False),
        ({"chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]}, False),
        ({"prompt": "two", "completions": ["is four"], "labels": [True]}, False),
    ],
)
def test_a_note_tells_of_a_missing_end_of_sequence_token_where_one_belongs(row, is_missed):
    tokenizer = build_tokenizer(chat_template=MARKED, eos_token=None)
    dataset = tokenize_sources([row], tokenizer=tokenizer, options=FormatOptions(max_tokens=64))
    assert any("end-of-sequence" in note for note in dataset.report.notes) == is_missed


def test_absent_fields_that_a_table_filled_with_nulls_are_dropped(tmp_path):
    import datasets

    template = (
        "{{ tools | tojson }}{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}"
        "{{ message.tool_calls | tojson if message.tool_calls }}<|im_end|>{% endfor %}"
    )
    rows = [
        {
            "messages": [
                {"role": "user", "content": "two"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
                },
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": name,
                        "parameters": {"properties": {key: {"type": "number"} for key in arguments}},
                    },
                }
            ],
        }
        for name, arguments in (("add", {"a": 1, "b": 2}), ("look", {"word": "four"}))
    ]
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    tokenizer = build_tokenizer(chat_template=template)
    options = FormatOptions(max_tokens=1024)
    plain, table = (tokenize_sources(source, tokenizer=tokenizer, options=options) for source in (rows, path))
    assert [example.input_ids.tolist() for example in table] == [example.input_ids.tolist() for example in plain]
    assert any("null" in note for note in table.report.notes)
    # Of a row of JSON a null is the user's own.
    rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["b"] = None
    assert "null" in tokenizer.decode(tokenize_sources(rows, tokenizer=tokenizer, options=options)[0].input_ids)


def test_rows_with_control_tokens_are_counted_and_the_first_is_named():
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "four"}]}
        for text in ("two", "a<|im_end|>", "<s>")
    ]
    dataset = tokenize_sources(
        rows, tokenizer=build_tokenizer(chat_template=MARKED), options=FormatOptions(max_tokens=128)
    )
    (note,) = [note for note in dataset.report.notes if "control tokens" in note]
    assert note.startswith("2 ")
    assert "row 2" in note


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "two plus two plus two is\n", "completion": "four"},
        {"prompt": "two plus two plus two is\n", "chosen": "four", "rejected": "five"},
    ],
    ids=["completion", "preference"],
)
def test_completions_that_begin_with_their_prompt_are_counted_and_the_first_is_named(row):
    answers = [name for name in row if name != "prompt"]
    repeated = {**row, **{name: f"{row['prompt']}{row[name]}" for name in answers}}
    # A short prompt may begin an answer by chance.
    short = {"prompt": "two", **{name: f"two {row[name]}" for name in answers}}
    options = FormatOptions(max_tokens=128)
    dataset = tokenize_sources([row, repeated, short, repeated], tokenizer=build_tokenizer(), options=options)
    (note,) = [note for note in dataset.report.notes if "begins with its prompt" in note]
    assert note.startswith("2 ")
    assert "row 2" in note


@pytest.mark.parametrize("answers", [("completion",), ("chosen", "rejected")], ids=["completion", "preference"])
def test_conversations_behind_their_own_prompt_are_counted_too(answers):
    asked = {"role": "user", "content": "two plus two is"}
    said = [{"role": "assistant", "content": word} for word in ("four", "five")]
    row = {"prompt": [asked], **{name: [answer] for name, answer in zip(answers, said)}}
    repeated = {"prompt": [asked], **{name: [asked, *row[name]] for name in answers}}
    # The answer of the prompt is said again.
    again = {"prompt": [asked, said[0]], **{name: [said[0], asked, *row[name]] for name in answers}}
    dataset = tokenize_sources(
        [row, repeated, again, repeated],
        tokenizer=build_tokenizer(chat_template=MARKED),
        options=FormatOptions(max_tokens=128),
    )
    (note,) = [note for note in dataset.report.notes if "begins with its prompt" in note]
    assert note.startswith("2 ")
    assert "row 2" in note


def damage_entry(path, name, change):
    content = bytearray((path / name).read_bytes())
    (path / name).write_bytes(change(content))


@pytest.mark.parametrize(
    "name", ["ids.bin", "trained.bin", "start.bin", "num_labelled.bin", "rejected.jsonl", "meta.json"]
)
@pytest.mark.parametrize("kind", ["bit", "shift", "gone"])
def test_damage_of_any_file_of_an_entry_is_seen_and_repaired(tmp_path, name, kind, caplog):
    values = [*({**row, "labels": [-100, *row["input_ids"][1:]]} for row in ids_rows(200)), {}]
    first = tokenize_ids(values, cache_dir=tmp_path)
    tokens = tokens_of(first)
    middle = (first.path / name).stat().st_size // 2
    if kind == "gone":
        (first.path / name).unlink()
    elif kind == "shift":
        damage_entry(first.path, name, lambda content: content[7:] + content[:7])
    else:
        damage_entry(
            first.path, name, lambda content: content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        )
    with pytest.raises(DataError, match="Delete the folder"):
        TokenizedDataset.open(first.path)
    assert tokens_of(tokenize_ids(values, cache_dir=tmp_path)) == tokens
    assert "deleted" in caplog.text
    assert tokens_of(TokenizedDataset.open(first.path)) == tokens


@pytest.mark.parametrize("change", [{"highest_id": 5}, {"num_tokens": 7}, {"num_documents": 7}, {"unknown": 1}])
def test_entry_whose_numbers_do_not_fit_is_refused(tmp_path, change):
    path = tokenize_ids(ids_rows(50), cache_dir=tmp_path).path
    meta = json.loads((path / "meta.json").read_text())
    meta["report"] |= change
    meta["own_sha256"] = digest_meta(meta)
    (path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match="Delete the folder"):
        TokenizedDataset.open(path)


def test_content_digest_is_that_of_the_tokens_wherever_they_are(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ids_rows(50))
    copy = write_lines(tmp_path / "b.jsonl", ids_rows(50))
    on_disk = tokenize_ids(path, cache_dir=tmp_path / "cache")
    others = [
        tokenize_ids(copy, cache_dir=tmp_path / "cache"),
        tokenize_ids(ids_rows(50)),
        pickle.loads(pickle.dumps(on_disk)),
    ]
    assert {other.content_digest for other in others} == {on_disk.content_digest}
    assert pickle.loads(pickle.dumps(others[1])).content_digest == on_disk.content_digest
    values = ids_rows(50)
    values[7] = {**values[7], "labels": [-100, -100, values[7]["input_ids"][2]]}
    assert tokenize_ids(values, extra_columns="ignore").content_digest != on_disk.content_digest


def test_entry_of_a_copy_names_the_copy(tmp_path):
    path, copy = (write_lines(tmp_path / name, [*ids_rows(150), {}]) for name in ("a.jsonl", "b.jsonl"))
    for source in (path, copy):
        dataset = tokenize_ids(source, cache_dir=tmp_path / "cache", rejected_path=tmp_path / "rejected.jsonl")
        assert list(dataset.report.rows_per_source) == [str(source)]
        assert json.loads((tmp_path / "rejected.jsonl").read_text())["file"] == str(source)


def test_saved_data_set_that_was_replaced_is_read_again(tmp_path):
    import datasets

    for name, base in (("one", 1), ("two", 2)):
        datasets.Dataset.from_list(ids_rows(20, base=base)).save_to_disk(tmp_path / name)
    first = tokenize_ids(tmp_path / "one", cache_dir=tmp_path / "cache")
    arrow, other = (next((tmp_path / name).glob("*.arrow")) for name in ("one", "two"))
    status = arrow.stat()
    arrow.write_bytes(other.read_bytes())
    os.utime(arrow, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = tokenize_ids(tmp_path / "one", cache_dir=tmp_path / "cache")
    assert tokens_of(second) == tokens_of(tokenize_ids(tmp_path / "two"))
    assert tokens_of(second) != tokens_of(first)


@pytest.mark.parametrize("folder", ["file/cache", "file"])
def test_cache_folder_that_cannot_be_written_is_named_before_rows_are_read(tmp_path, monkeypatch, folder):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(ingest, "make_chunks", None)
    with pytest.raises(OptionError, match="cache_dir"):
        tokenize_ids(ids_rows(5), cache_dir=tmp_path / folder)


def test_rejects_that_cannot_be_written_name_the_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"file/rejected\.jsonl cannot be written"):
        tokenize_ids([*ids_rows(150), {}], rejected_path=tmp_path / "file" / "rejected.jsonl")


@pytest.mark.parametrize("place", ["sync_file", "write_file", "digest_file"])
def test_full_disk_of_the_cache_is_an_error_with_a_way_out(tmp_path, monkeypatch, place):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ingest, place, fail)
    with pytest.raises(OptionError, match=r"No space left.*cache_dir"):
        tokenize_ids(ids_rows(50), cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


ESCAPE = "a\x1b[2J\x07\x9b\u202eb\r"


def is_safe(text):
    return not any(character in text for character in "\x1b\x07\x9b\u202e\r\x7f")


def test_control_characters_of_names_columns_and_rows_are_shown_as_escapes(tmp_path, plain_tokenizer):
    path = write_lines(tmp_path / f"{ESCAPE}.jsonl", [*({"text": ESCAPE} for _ in range(150)), {ESCAPE: 1}])
    options = FormatOptions(max_tokens=64)
    dataset = tokenize_sources(
        path,
        tokenizer=plain_tokenizer,
        options=options,
        cache_dir=tmp_path / "cache",
        rejected_path=tmp_path / "rejected.jsonl",
    )
    write_lines(tmp_path / "b.jsonl", [{"text": "b"}])
    several = tokenize_sources(tmp_path, tokenizer=plain_tokenizer, options=options)
    shown = [
        several.report.render(),
        (tmp_path / "rejected.jsonl").read_text(),
        render_example(dataset[0], plain_tokenizer),
    ]
    for run in ({"max_reject_share": 0.0}, {"vocab_size": 3}):
        with pytest.raises(DataError) as caught:
            tokenize_sources(path, tokenizer=plain_tokenizer, options=options, **run)
        shown.append(str(caught.value))
    for lines in ([{ESCAPE: 1}], [{"text": ESCAPE, "messages": ESCAPE}]):
        with pytest.raises(DataError) as caught:
            tokenize_sources(write_lines(path, lines), tokenizer=build_tokenizer(chat_template=MARKED), options=options)
        shown.append(str(caught.value))
    assert [text for text in shown if not is_safe(text)] == []
    assert [text for text in shown if "\\x1b[2J" not in text.replace("\\u001b", "\\x1b")] == []
    # Rows are trained as they are.
    assert plain_tokenizer.decode(dataset[0].input_ids[:-1]) == ESCAPE


def test_changed_count_in_the_report_of_an_entry_is_damage(tmp_path):
    path = tokenize_ids(ids_rows(50), cache_dir=tmp_path).path
    meta = json.loads((path / "meta.json").read_text())
    meta["report"]["num_rows"] += 1
    (path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match="damaged"):
        TokenizedDataset.open(path)
