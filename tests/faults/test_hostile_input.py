"""Files from strangers: configurations, weights, tokenizers, templates and rows that would run code, hang, or take the
process down.

Hostile YAML is in tests/cli/hostile_configs.py. Every file here goes through the public way in, in a child process with
a limit of time and of memory. Whoever runs code makes the file ``canary`` in the current folder; the answer to every
file is an error with a reason, or a model that is harmless.
"""

import json
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.safe_files import check_config, check_index
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.training.datamodule import PackedDataModule
from tests.cli.hostile_configs import HOSTILE as HOSTILE_YAML
from tests.packing.conftest import UNMARKED, build_tokenizer

CONFIG = {
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "architectures": ["LlamaForCausalLM"],
}
CODE = "import os; os.system('touch canary')\n"
ROW = json.dumps({"messages": [{"role": "user", "content": "two plus two"}, {"role": "assistant", "content": "four"}]})
DEEP = "[" * 200_000 + "]" * 200_000
# Far above what the good folder takes; what is refused only when memory runs out is no answer.
MOST_BYTES, MOST_SECONDS = 16 * 2**30, 20.0


class Poison:
    def __reduce__(self):
        return os.system, ("touch canary",)


# How a folder is made hostile.


def config(**changes):
    return lambda folder: edit(folder / "config.json", lambda content: content.update(changes))


def tokenizer_config(**changes):
    return lambda folder: edit(folder / "tokenizer_config.json", lambda content: content.update(changes))


def template(text):
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def whole(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def header(change):
    """Weights whose header says something else."""

    def write(folder):
        path = folder / "model.safetensors"
        content = path.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        entries = json.loads(content[8 : 8 + length])
        change(entries, sorted(key for key in entries if key != "__metadata__"))
        text = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return write


def index(file, *, make=lambda folder: None):
    """An index that sends transformers to a file for every weight."""

    def write(folder):
        from safetensors import safe_open

        with safe_open(folder / "model.safetensors", framework="pt") as weights:
            names = list(weights.keys())
        (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
        make(folder)
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)})
        )

    return write


def poison(name):
    return lambda folder: (folder / name).write_bytes(pickle.dumps(Poison()))


def pickled_only(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Poison()}, folder / "pytorch_model.bin")


def remote(folder):
    (folder / "evil.py").write_text(CODE)
    config(auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, model_type="evil")(folder)


def remote_tokenizer(folder):
    (folder / "evil.py").write_text(CODE)
    tokenizer_config(auto_map={"AutoTokenizer": ["evil.Tok", None]}, tokenizer_class="Tok", trust_remote_code=True)(
        folder
    )


def nested_remote(folder):
    (folder / "evil.py").write_text(CODE)
    config(
        trust_remote_code=True,
        text_config={"trust_remote_code": True, "auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"},
    )(folder)


def fake_kernels(folder):
    """What transformers asks for a kernel of a repository; the real package would fetch the code and run it."""
    package = Path("kernels")
    package.mkdir()
    (package / "__init__.py").write_text(
        CODE + "__version__ = '0.18.2'\ndef get_kernel(*args, **kwargs): open('canary', 'w').close()\n"
    )
    Path("kernels-0.18.2.dist-info").mkdir()
    Path("kernels-0.18.2.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    config(
        _attn_implementation="evil/kernel",
        attn_implementation="evil/kernel",
        _attn_implementation_internal="evil/kernel",
    )(folder)


def rows(line):
    return lambda folder: (folder / "rows.jsonl").write_bytes(
        (ROW + "\n").encode() + (line if isinstance(line, bytes) else line.encode()) + b"\n"
    )


def templated(text):
    return lambda folder: (rows(ROW)(folder), template(text)(folder))


def swap_offsets(entries, names):
    entries[names[0]]["data_offsets"] = entries[names[1]]["data_offsets"]


CANARY = "{{ cycler.__init__.__globals__.os.system('touch canary') }}"
# Name: what is loaded ("model", "tokenizer" or "data"), what is done to the folder, and how a harmless end looks:
# "refused", or "harmless" where what it says is not acted on.
HOSTILE = {
    "config: code of the repository": ("model", remote, "refused"),
    "config: code in a nested part": ("model", nested_remote, "refused"),
    "config: kernel of a repository": ("model", fake_kernels, "refused"),
    "config: activation that is an expression": (
        "model",
        config(hidden_act="__import__('os').system('touch canary')"),
        "refused",
    ),
    "config: dtype that is an expression": (
        "model",
        config(dtype="__import__('os').system('touch canary')"),
        "refused",
    ),
    "config: weights outside of the folder": (
        "model",
        config(transformers_weights="../elsewhere.safetensors"),
        "refused",
    ),
    "config: nested without end": (
        "model",
        whole("config.json", '{"model_type": "llama", "a": ' + DEEP + "}"),
        "refused",
    ),
    "config: number of 5,000 digits": (
        "model",
        whole("config.json", '{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}"),
        "refused",
    ),
    "config: a billion layers": ("model", config(num_hidden_layers=10**9), "refused"),
    "config: a trillion columns": ("model", config(hidden_size=2**40), "refused"),
    "config: vocabulary of a petabyte": ("model", config(vocab_size=2**44), "refused"),
    "config: layers below zero": ("model", config(num_hidden_layers=-1), "refused"),
    "config: size that is a list": ("model", config(hidden_size=[64]), "refused"),
    "config: no heads": ("model", config(num_attention_heads=0), "refused"),
    "config: not an object": ("model", whole("config.json", "[1]"), "refused"),
    "config: bytes": ("model", whole("config.json", b"\xff\xfe\x00"), "refused"),
    "weights: header of 8 EiB": ("model", whole("model.safetensors", struct.pack("<Q", 2**63) + b"{}"), "refused"),
    "weights: header longer than the file": (
        "model",
        whole("model.safetensors", struct.pack("<Q", 90_000_000) + b"{}"),
        "refused",
    ),
    "weights: header nested without end": (
        "model",
        whole("model.safetensors", struct.pack("<Q", len(DEEP)) + DEEP.encode()),
        "refused",
    ),
    "weights: tensors that overlap": ("model", header(swap_offsets), "refused"),
    "weights: bytes behind the end": (
        "model",
        header(lambda entries, names: entries[names[-1]].update(data_offsets=[0, 10**12])),
        "refused",
    ),
    "weights: shape that overflows": (
        "model",
        header(lambda entries, names: entries[names[0]].update(shape=[2**40, 2**40])),
        "refused",
    ),
    "weights: unknown dtype": (
        "model",
        header(lambda entries, names: entries[names[0]].update(dtype="EVIL")),
        "refused",
    ),
    "weights: whole numbers": (
        "model",
        header(lambda entries, names: entries[names[0]].update(dtype="I32")),
        "refused",
    ),
    "weights: empty file": ("model", whole("model.safetensors", b""), "refused"),
    "weights: pickle under another name": ("model", poison("model.safetensors"), "refused"),
    "weights: pickle only": ("model", pickled_only, "refused"),
    "weights: pickle by the index": ("model", index("poison.bin", make=poison("poison.bin")), "refused"),
    "weights: index that leaves the folder": ("model", index("../elsewhere.safetensors"), "refused"),
    "weights: index nested without end": (
        "model",
        lambda folder: (index("x")(folder), whole("model.safetensors.index.json", DEEP)(folder)),
        "refused",
    ),
    "tokenizer: code of the repository": ("tokenizer", remote_tokenizer, "refused"),
    "tokenizer: class of a foreign module": ("tokenizer", tokenizer_config(tokenizer_class="os.system"), "harmless"),
    "tokenizer: nested without end": ("tokenizer", whole("tokenizer.json", DEEP), "refused"),
    "tokenizer: settings nested without end": (
        "tokenizer",
        whole("tokenizer_config.json", '{"a": ' + DEEP + "}"),
        "refused",
    ),
    "tokenizer: pickle": ("tokenizer", poison("tokenizer.json"), "refused"),
    "tokenizer: length of 401 digits": ("tokenizer", tokenizer_config(model_max_length=10**400), "harmless"),
    "template: reaches for the interpreter": ("data", templated(CANARY), "refused"),
    "template: range without end": ("data", templated("{% for a in range(10 ** 12) %}{{ a }}{% endfor %}"), "refused"),
    "template: calls itself without end": (
        "data",
        templated("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
        "refused",
    ),
    "rows: nested without end": ("data", rows('{"messages": ' + DEEP + "}"), "refused"),
    "rows: number of 5,000 digits": ("data", rows('{"messages": ' + "9" * 5000 + "}"), "refused"),
    "rows: half a character": ("data", rows(ROW.replace("four", "fo\\ud83dur")), "refused"),
    "rows: NUL": ("data", rows(ROW.replace("four", "fo\\u0000ur")), "refused"),
    "rows: template inside a message": ("data", rows(ROW.replace("four", "{{ 7 * 7 }}" + CANARY)), "harmless"),
}


def load(kind, folder):
    source = ModelSource(str(folder))
    if kind == "model":
        build_model(source, device=torch.device("cpu"), dtype=torch.float32)
    elif kind == "tokenizer":
        tokenizer = source.load_tokenizer()
        assert len(tokenizer("two plus two")["input_ids"]) > 0
    else:
        data = PackedDataModule(
            str(folder / "rows.jsonl"),
            tokenizer=str(folder),
            max_tokens=256,
            num_workers=0,
            num_proc=1,
            cache_dir=None,
            show_progress=False,
        )
        data.setup("fit")


def run_all(base, names):
    """Load every hostile folder, each in a current folder of its own, and write down how it ended."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    found = {}
    for number, name in enumerate(names):
        kind, change, _ = HOSTILE[name]
        place = base / f"case{number}"
        shutil.copytree(base / "good", place / "model")
        os.chdir(place)
        sys.path.append(str(place))
        begin = sum(os.times()[:4])
        # How a library refuses is its own; what matters is that it does, in time, and that the process stands.
        try:
            change(place / "model")
            load(kind, place / "model")
            end = "harmless"
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001
            end = f"refused: {type(error).__name__}: {str(error)[:200]}"
        sys.path.remove(str(place))
        found[name] = {"end": end, "seconds": sum(os.times()[:4]) - begin, "canary": (place / "canary").exists()}
        # Written after each: a case that takes the process down is the first that is missing.
        (base / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "good"
    build_model(ModelSource(CONFIG, init="random"), device=torch.device("cpu"), dtype=torch.float32).save_pretrained(
        folder
    )
    build_tokenizer(chat_template=UNMARKED).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def found(good_folder):
    base = good_folder.parent
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.test_hostile_input", str(base)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=1200)
    written = json.loads((base / "found.json").read_text())
    assert done.returncode == 0, (len(written), done.stderr[-3000:])
    return written


def test_the_good_folder_is_taken(good_folder):
    rows(ROW)(good_folder)
    for kind in ("model", "tokenizer", "data"):
        load(kind, good_folder)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_runs_no_code_and_takes_no_process_down(found, name):
    assert not found[name]["canary"]
    assert found[name]["end"].partition(":")[0] == HOSTILE[name][2], found[name]["end"]
    assert found[name]["seconds"] < MOST_SECONDS


def test_there_are_forty_and_the_figure_is_printed(found):
    num_bad = sum(entry["canary"] for entry in found.values()) + len(HOSTILE) - len(found)
    print(
        f"R18: {num_bad} of {len(HOSTILE)} hostile files ran code or took the process down, and {len(HOSTILE_YAML)} "
        "hostile configs in tests/cli"
    )
    assert len(HOSTILE) >= 40
    assert num_bad == 0


def test_the_canary_sings(tmp_path, monkeypatch):
    """What the cases would do if the protection failed."""
    monkeypatch.chdir(tmp_path)
    for act in (lambda: pickle.loads(pickle.dumps(Poison())), lambda: exec(CODE)):
        act()
        assert (tmp_path / "canary").exists()
        (tmp_path / "canary").unlink()


@pytest.mark.parametrize(
    "file",
    ["a.bin", "../a.safetensors", "/a.safetensors", "x/a.safetensors", "..\\a.safetensors", "", "a.safetensors.bin"],
)
def test_an_index_names_safetensors_files_beside_it(tmp_path, file):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}}))
    check_index(str(path), name="good")
    path.write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors", "b": file}}))
    with pytest.raises(DataError, match="only safetensors files in the same folder"):
        check_index(str(path), name="bad")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 1}'])
def test_an_index_that_is_none_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content)
    with pytest.raises(DataError, match="cannot be read"):
        check_index(str(path), name="bad")


def test_sizes_are_judged_in_every_part_of_a_configuration_before_it_is_made():
    good = {
        "model_type": "gemma3",
        "text_config": {"num_hidden_layers": 2, "intermediate_size": [64, 128]},
        "vision_config": {},
    }
    check_config(good, name="good")
    for value in (10**9, True, 1.5, 0, -1, "2"):
        for part in ("text_config", "vision_config"):
            # Gemma 3 makes a list of all its layers.
            with pytest.raises(OptionError, match="num_hidden_layers="):
                ModelSource({**good, part: {"num_hidden_layers": value}}, init="random").config  # noqa: B018
    with pytest.raises(OptionError, match="'evil/kernel'"):
        check_config({**good, "text_config": {"attn_implementation": {"": "evil/kernel"}}}, name="bad")
    check_config({**good, "_attn_implementation": "flash_attention_2"}, name="good")
    with pytest.raises(OptionError, match="names its weight file"):
        check_config({**good, "transformers_weights": "other.safetensors"}, name="bad")


def test_quantised_codes_may_be_whole_numbers(tmp_path):
    from lightning_fastft.hf.loading.safe_files import check_headers

    path = str(tmp_path / "codes.safetensors")
    save_file({"codes": torch.zeros(2, dtype=torch.uint8)}, path)
    check_headers([path], name="good", is_quantised=True)
    with pytest.raises(DataError, match=r"codes \(U8\)"):
        check_headers([path], name="bad", is_quantised=False)


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), list(HOSTILE))
