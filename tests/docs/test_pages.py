"""README, docs and CONTRIBUTING: links lead somewhere, commands are taken by the command line, code names what exists, messages are ours."""

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest

from lightning_fastft.cli.command import USAGE
from lightning_fastft.cli.lightning_cli import FastFTCLI, take_option

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
# Options of our own commands, which the Trainer's parser does not know.
OWN_OPTIONS = {"plan": ("--gpu", "--vram-gib", "--host-gib", "--document-tokens"), "data": ("--out",)}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page):
    """Yield the words of every fastft command on a page."""
    text = page.read_text().replace("\\\n", " ")
    inline = re.findall(r"`(fastft [^`]+)`", text)
    fenced = [line.strip() for block in re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL) for line in block.splitlines()]
    for line in (*inline, *(line for line in fenced if line.startswith("fastft ") and "NAME|FILE" not in line and "[" not in line)):
        words = shlex.split(line.partition("   #")[0])[1:]
        if len(words) > 1 and words[0].isidentifier():
            yield words


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_taken_by_the_command_line(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").touch()
    for command, *words in commands(page):
        assert f"fastft {command}" in USAGE, command
        if command in ("export", "demo"):
            continue
        assert "--config" in words or words == ["--help"], words
        if words == ["--help"]:
            continue
        for option in OWN_OPTIONS.get(command, ()):
            _, words = take_option(words, option, default="")
        _, words = take_option(words, "--ckpt_path", default="")
        cli = FastFTCLI([*words, "--trainer.accelerator", "cpu", "--trainer.logger", "false"], run=False)
        assert cli.datamodule is not None


def test_readme_commands_are_found():
    found = {words[0] for words in commands(ROOT / "README.md")}
    assert found >= {"fit", "data", "doctor", "export"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z\-]+)", page.read_text(), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_name_what_exists(page):
    """Imports are run; every call of an imported class or function has arguments that it takes."""
    for block in blocks(page, "python"):
        tree, names = ast.parse(block), {}
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                exec(compile(ast.Module([node], []), str(page), "exec"), names)
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names:
                inspect.signature(names[call.func.id]).bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    for name in re.findall(r"`((?:lightning_fastft|tests|benchmarks|docs)/[\w./]+\.\w+)", page.read_text()):
        assert (ROOT / name).is_file(), name


def messages_of_the_package():
    """Return every text of the source, parts of formatted ones joined by what stands between them in quotation marks of a page: anything."""
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
