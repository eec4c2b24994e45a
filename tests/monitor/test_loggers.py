"""The numbers of the run report are in TensorBoard, W&B, MLflow and Comet too, through Lightning's loggers."""

import json
import zipfile
from importlib.util import find_spec

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_fastft import GenerateSamples, RunReport, TokenThroughput
from tests.support.fine_tuners import tuner, word_tokenizer
from tests.support.training_parts import packed_loader, quiet_trainer

NUM_STEPS, PROMPTS = 6, ["w3 w4 w5", "w6"]
PACKAGES = {"csv": "csv", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml"}


def make_logger(name, folder):
    """A logger that writes to files: no server, account or network."""
    if name == "tensorboard":
        return TensorBoardLogger(folder)
    if name == "wandb":
        return WandbLogger(save_dir=folder, offline=True, project="tests")
    if name == "mlflow":
        return MLFlowLogger("tests", save_dir=str(folder))
    if name == "comet":
        return CometLogger(api_key="none", offline_directory=str(folder), project="tests")
    return CSVLogger(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run with every logger that is installed: the report's data, the samples, loggers and folders by name."""
    folder = tmp_path_factory.mktemp("loggers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("COMET_DISABLE_AUTO_LOGGING", "1")
        # With online=False Lightning 2.6.6 disables the experiment, and nothing is written.
        patch.setenv("COMET_START_ONLINE", "false")
        patch.setenv("COMET_LOGGING_FILE", str(folder / "comet.log"))
        found = [name for name, package in PACKAGES.items() if find_spec(package) is not None]
        loggers = {name: make_logger(name, folder / name) for name in found if not (folder / name).mkdir()}
        samples = GenerateSamples(PROMPTS, max_new_tokens=4, tokenizer=word_tokenizer())
        report = RunReport(folder / "run.html", profile_step=None)
        trainer = quiet_trainer(
            folder,
            strategy="fastft",
            max_steps=NUM_STEPS,
            val_check_interval=2,
            log_every_n_steps=1,
            logger=list(loggers.values()),
            callbacks=[report, samples, TokenThroughput(log_every_n_steps=1), LearningRateMonitor("step")],
        )
        trainer.fit(tuner("lora", tokenizer=None), packed_loader(NUM_STEPS), packed_loader(2, seed=40))
        if "wandb" in loggers:
            loggers["wandb"].experiment.finish()
        if "comet" in loggers:
            loggers["comet"].experiment.end()
    return json.loads(report.json_path.read_text()), samples, loggers, folder


def check(read, data):
    """Compare what a logger read back, lists of (step, value) by name, with the report; Lightning's steps begin at 0."""
    metrics = {metric["name"]: metric["points"] for metric in data["validation"]["metrics"]}
    (rate,) = data["learning_rates"]
    # A number that a training batch logs belongs to the step that it ends, and that of a validation to the last one.
    truth = {
        "train_loss": [(step, value) for step, _, value in data["curves"]["loss"]["points"]],
        rate["name"]: [(step, value) for step, _, value in rate["points"]],
        **{name: [(step - 1, value) for step, _, value in points] for name, points in metrics.items()},
    }
    assert {"val_loss", "val_perplexity", "val_token_accuracy", "lr-FusedAdamW"} <= truth.keys()
    for name, points in truth.items():
        assert len(points) == (NUM_STEPS // 2 if name in metrics else NUM_STEPS)
        assert [step for step, _ in read[name]] == [step for step, _ in points], name
        assert [value for _, value in read[name]] == pytest.approx([value for _, value in points], rel=1e-6), name
    steps = [step for step, _ in read["throughput/tokens_per_s"]]
    assert len(steps) >= 2
    assert steps[-1] == NUM_STEPS - 1


def need(run, name):
    if name not in run[2]:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    return run[2][name], run[3] / name


def test_csv(run):
    import csv

    logger, _ = need(run, "csv")
    with open(logger.experiment.metrics_file_path, newline="") as file:
        rows = list(csv.DictReader(file))
    names = {name for row in rows for name in row}
    check({name: [(int(row["step"]), float(row[name])) for row in rows if row.get(name)] for name in names}, run[0])


def test_tensorboard(run):
    logger, _ = need(run, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    tags = events.Tags()
    check({tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in tags["scalars"]}, run[0])
    for number, prompt in enumerate(PROMPTS):
        texts = [
            (one.step, one.tensor_proto.string_val[0].decode())
            for one in events.Tensors(f"samples/{number}/text_summary")
        ]
        assert texts == [(found.step - 1, f"{prompt}\n\n{found.answers[number]}") for found in run[1].samples]


def read_leveldb_log(content, block=32768, header=7):
    """Yield the records of a log in LevelDB's format, whose first block lacks the header of the file."""
    place, parts = 0, b""
    while place + header <= len(content):
        left = block - (place + header) % block
        if left < header:
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + header : place + header + length]
        place += header + length
        # Full, first, middle, last.
        if kind in (1, 4):
            yield parts
            parts = b""


def test_wandb(run):
    _, folder = need(run, "wandb")
    from wandb.proto import wandb_internal_pb2

    # The run folder, without the link to the latest one.
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    read = {}
    for words in read_leveldb_log(file.read_bytes()[7:]):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(words)
        items = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for name, value in items.items():
            read.setdefault(name, []).append((int(items["trainer/global_step"]), json.loads(value)))
    check({name: points for name, points in read.items() if isinstance(points[0][1], (int, float))}, run[0])
    assert [step for step, _ in read["samples.nrows"]] == [found.step - 1 for found in run[1].samples]
    tables = sorted(folder.glob("wandb/offline-run-*/files/media/table/samples*.table.json"))
    rows = sorted(row for table in tables for row in json.loads(table.read_text())["data"])
    assert rows == sorted([found.step, *pair] for found in run[1].samples for pair in zip(PROMPTS, found.answers))


def test_mlflow(run):
    logger, folder = need(run, "mlflow")
    client, run_id = logger.experiment, logger.run_id
    names = client.get_run(run_id).data.metrics
    read = {name: sorted((one.step, one.value) for one in client.get_metric_history(run_id, name)) for name in names}
    check(read, run[0])
    for found in run[1].samples:
        (file,) = folder.rglob(f"step={found.step}.txt")
        assert file.read_text() == "\n\n".join(f"{one}\n\n{two}" for one, two in zip(PROMPTS, found.answers))


def test_comet(run):
    _, folder = need(run, "comet")
    (archive,) = folder.rglob("*.zip")
    read, texts = {}, []
    with zipfile.ZipFile(archive) as files:
        for line in files.read("messages.json").decode().splitlines():
            payload = json.loads(line)["payload"]
            metric = payload.get("metric", {"step": None})
            if metric["step"] is not None:
                read.setdefault(metric["metricName"], []).append((metric["step"], float(metric["metricValue"])))
            if payload.get("upload_type") == "text-sample":
                texts.append((payload["additional_params"]["step"], files.read(payload["file_path"]).decode()))
    check(read, run[0])
    assert texts == [
        (found.step - 1, f"{prompt}\n\n{answer}")
        for found in run[1].samples
        for prompt, answer in zip(PROMPTS, found.answers)
    ]
