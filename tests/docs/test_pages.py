"""READMEs, docs and CONTRIBUTING: links lead somewhere, commands are taken by the command line, code names what
exists, messages are ours.
"""

import ast
import functools
import inspect
import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest
from lightning.pytorch.strategies import DDPStrategy

import lightning_fastft
from lightning_fastft.cli.command import main
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.option_order import check_order
from lightning_fastft.cli.usage import USAGE
from lightning_fastft.cli.words import CONFIG_FOLDER, take_option
from lightning_fastft.demo.files import write_demo_files
from lightning_fastft.demo.generator import generate_rows
from lightning_fastft.packing.rows.formats import COLUMNS, TUNERS
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.losses import PREFERENCE_LOSSES

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")]
)
# Commands with a parser of their own.
READERS = ("init", "chat", "eval", "export", "push")
# Options of our own commands, which the Trainer's parser does not know.
OWN_OPTIONS = {
    "plan": ("--gpu", "--vram-gib", "--host-gib", "--document-tokens", "--gpus", "--nodes"),
    "data": ("--out",),
}


def page_name(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page):
    """Yield the words of every fastft command on a page."""
    text = page.read_text().replace("\\\n", " ")
    inline = re.findall(r"`(fastft [^`]+)`", text)
    fenced = [
        line.strip()
        for block in re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    for line in (
        *inline,
        *(line for line in fenced if line.startswith("fastft ") and "NAME|FILE" not in line and "[" not in line),
    ):
        words = shlex.split(line.partition("   #")[0])[1:]
        if len(words) > 1 and words[0].isidentifier():
            yield words


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_page_of_clusters_shows_how_to_start_every_script():
    page = (ROOT / "docs" / "clusters.md").read_text()
    scripts = sorted((ROOT / "clusters").iterdir())
    assert scripts
    for script in scripts:
        assert f"(../clusters/{script.name})" in page
        usage = next(line for line in script.read_text().splitlines() if f"clusters/{script.name} --" in line)
        # Names of files and nodes differ.
        assert usage.strip("# ").partition(f"clusters/{script.name}")[0].split("=")[0] in page


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_are_taken_by_the_command_line(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "my_rewards.py").write_text("def score(prompts, completions, **columns): ...\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for command, *words in commands(page):
        assert f"fastft {command}" in USAGE, command
        if command in READERS:
            (tmp_path / "config.yaml").unlink(missing_ok=True)
            for name in (word for word in words if word.endswith((".ckpt", ".jsonl"))):
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).touch()
            for name in (word for word in words if word.startswith("exported/") and word == words[0]):
                (tmp_path / name).mkdir(parents=True, exist_ok=True)
            if not any(name.isupper() for name in words[:1]) and words != ["--help"]:
                import_module(f"lightning_fastft.cli.{command}")._parse_args(words)
            continue
        if command in ("demo", "bench", "convert"):
            continue
        # What fastft init writes.
        (tmp_path / "config.yaml").write_text((CONFIG_FOLDER / "qlora_qwen3_8b.yaml").read_text())
        assert "--config" in words or words == ["--help"], words
        if words == ["--help"]:
            continue
        for option in OWN_OPTIONS.get(command, ()):
            _, words = take_option(words, option, default="")
        _, words = take_option(words, "--ckpt_path", default="")
        cli = FastFTCLI([*words, "--trainer.accelerator", "cpu", "--trainer.logger", "false"], run=False)
        assert cli.datamodule is not None


JOB = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
LAUNCHERS = {
    "torchrun.sh": {"TORCHELASTIC_RUN_ID": "job", **JOB},
    "elastic.sh": {"TORCHELASTIC_RUN_ID": "job", **JOB},
    "slurm.sh": {
        "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
    },
    "plain.sh": {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0"},
}  # fmt: skip


@pytest.mark.parametrize("script", LAUNCHERS)
def test_the_line_of_a_launcher_trains_on_every_gpu_of_two_nodes(script, monkeypatch):
    """The options of the script and those of its line on the page, as a rank of the job gets them."""
    for name, value in LAUNCHERS[script].items():
        monkeypatch.setenv(name, value)
    page = (ROOT / "docs/clusters.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"clusters/{re.escape(script)} (--.+)", page)
    (fixed,) = re.findall(r"fastft fit (.*)\"\$@\"", (ROOT / "clusters" / script).read_text())
    _, words = take_option(shlex.split(fixed.replace("${NODES:-2}", "2")), "--ckpt_path", default="")
    words += [*shlex.split(line), "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
    trainer = FastFTCLI(words, run=False).trainer
    assert isinstance(trainer.strategy, DDPStrategy)
    assert (trainer.num_nodes, trainer.num_devices) == (2, 8)


@pytest.mark.parametrize("script", LAUNCHERS)
def test_a_launcher_takes_the_strategy_of_a_config(script, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("trainer: {strategy: fastft_fsdp}\n")
    (fixed,) = re.findall(r"fastft fit (.*)\"\$@\"", (ROOT / "clusters" / script).read_text())
    check_order([*shlex.split(fixed.replace("${NODES:-2}", "2")), "--config", str(config)])


def test_every_data_format_is_described():
    meanings = inspect.getdoc(PackedDataModule)
    assert [name for name in COLUMNS if f'"{name}"' not in meanings] == [], "name it under format of PackedDataModule"
    rows = [line for line in (ROOT / "docs/guide.md").read_text().splitlines() if line.startswith("| `")]
    required = {name: columns for name, (columns, _) in COLUMNS.items() if name not in TUNERS}
    for name, columns in required.items():
        assert any(all(f"`{column}`" in row for column in columns) for row in rows), f"docs/guide.md, Formats: {name}"


def test_every_preference_loss_is_described():
    text = (ROOT / "docs/tuning.md").read_text()
    assert [loss for loss in PREFERENCE_LOSSES if f'"{loss}"' not in text] == [], "name it in docs/tuning.md, Losses"


# Raised, shown or used by Lightning; docs/options.md describes them.
NOT_CALLED_BY_USERS = {"FastFTError", "Status", "VerifiedCheckpointIO"}


def test_every_public_class_is_on_a_page_that_is_written_by_hand():
    text = "".join(path.read_text() for path in PAGES if path.name != "options.md")
    missing = {name for name in lightning_fastft.__all__ if not re.search(rf"\b{name}\b", text)}
    assert missing == NOT_CALLED_BY_USERS, "say on a page, such as docs/guide.md, what it is for"


def test_guide_ends_with_a_list_of_all_other_pages():
    listed = (ROOT / "docs/guide.md").read_text().partition("\n## Further pages\n")[2]
    assert "\n## " not in listed
    names = {path.name for path in (ROOT / "docs").glob("*.md")} - {"guide.md"}
    assert set(re.findall(r"^- \[([\w.]+)\]", listed, flags=re.MULTILINE)) == names


def test_readme_commands_are_found():
    found = {words[0] for words in commands(ROOT / "README.md")}
    assert found >= {"fit", "data", "doctor", "export"}


@pytest.mark.parametrize(
    "command", ["make demo", "fastft bench", "python -m benchmarks.compare", "python -m benchmarks.published table"]
)
def test_readme_has_one_command_for(command):
    assert re.search(rf"^{re.escape(command)}( |$)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_benchmarks_that_are_run_exist(page):
    text = page.read_text()
    for module in re.findall(r"python -m (benchmarks[\w.]*)", text):
        place = ROOT / Path(*module.split("."))
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module
    for script in re.findall(r"bash (benchmarks/[\w.]+)", text):
        assert (ROOT / script).is_file(), script


def test_every_benchmark_has_its_row():
    """Scripts that are run by themselves, and folders of them; what only helps them has no command."""
    rows = (ROOT / "benchmarks/README.md").read_text().partition("## One command")[0]
    runnable = [
        path
        for path in (ROOT / "benchmarks").glob("*.py")
        if "\ndef main(" in path.read_text() and path.name != "results.py"
    ]
    folders = [f"{path.parent.name}/" for path in (ROOT / "benchmarks").glob("*/__main__.py")]
    names = [*(path.name for path in (*runnable, *(ROOT / "benchmarks").glob("gpu_*.sh"))), *folders]
    assert len(names) > 15
    assert [name for name in names if f"| `{name}` |" not in rows] == []


@pytest.mark.slow
def test_readme_command_without_gpu_or_network_trains_and_reports(tmp_path, monkeypatch):
    """The first thing that a newcomer runs on rows of their own: NF4, adapters, the report and the checkpoint, on
    the model that the demo leaves.
    """
    (words,) = [found for found in commands(ROOT / "README.md") if "runs/demo/trained" in found]
    # What it needs is here: the package's parts, once more in a folder of the test.
    monkeypatch.chdir(tmp_path)
    files = write_demo_files(generate_rows(num_train=40, num_validation=4), tmp_path / "runs/demo", vocab_size=320)
    tuner = FineTuner(str(files.model), init="random", dtype="float32")
    tuner.configure_model()
    tuner.save_pretrained("runs/demo/trained")
    rows = [{"prompt": f"How many are {number} and {number}?", "completion": f"{2 * number}"} for number in range(200)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*words, "--data.num_proc", "1", "--trainer.accelerator", "cpu", "--trainer.max_steps", "3"]) == 0
    assert (tmp_path / "runs/small/last.ckpt").is_file()
    (report,) = tmp_path.glob("lightning_logs/*/run_report.html")
    assert "NF4 base" in report.read_text()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z\-]+)", page.read_text(), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_blocks_name_what_exists(page):
    """Imports are run; every call of an imported class or function has arguments that it takes."""
    for block in blocks(page, "python"):
        tree, names = ast.parse(block), {}
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                exec(compile(ast.Module([node], []), str(page), "exec"), names)
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names:
                inspect.signature(names[call.func.id]).bind(
                    *call.args, **{keyword.arg: keyword.value for keyword in call.keywords}
                )


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_that_are_named_exist(page):
    for name in re.findall(r"`((?:lightning_fastft|tests|benchmarks|docs)/[\w./]+\.\w+)", page.read_text()):
        assert "NAME" in name or (ROOT / name).is_file(), name


@functools.cache
def messages_of_the_package():
    """Return every text of the source, parts of formatted ones joined by what stands between them in quotation
    marks of a page: anything.
    """
    texts = []
    for path in (ROOT / "lightning_fastft").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
    return texts


def test_messages_of_troubleshooting_are_ours():
    quoted = re.findall(r'^\| "([^"]+)" \|', (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE)
    texts = messages_of_the_package()
    assert len(quoted) > 20
    assert [message for message in quoted if not any(message in text for text in texts)] == []
    assert not any("its documents did not see each other" in text for text in texts)


def test_reasons_in_the_table_of_the_readme_are_ours():
    """Each part of a reason is a part of a text of the package, which has any value at the place of a variable."""
    table = (ROOT / "README.md").read_text().partition("optimisation  ")[2].partition("```")[0]
    reasons = [re.split(r"\s{2,}", line)[2] for line in table.splitlines()[1:]]
    assert len(reasons) > 5
    known = [
        part.split("\0")
        for text in messages_of_the_package()
        for part in text.split("; ")
        if re.search(r"[a-zA-Z]{3}", part)
    ]

    def is_known(part):
        # Patterns of what cannot match are not compiled: thousands.
        likely = [pieces for pieces in known if all(piece in part for piece in pieces)]
        return any(re.fullmatch(".*".join(map(re.escape, pieces)), part) for pieces in likely)

    assert [part for reason in reasons for part in reason.split("; ") if not is_known(part)] == []
