"""The tokenizer, chat template and processor of the training data go with the model: texts, checkpoints and files."""

import contextlib
import io
import json
import sys

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoProcessor, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from lightning_fastft.cli.command import main
from lightning_fastft.cli.export import WITHOUT_GGUF
from lightning_fastft.cli.trained.opening import Request, open_trained
from lightning_fastft.core.errors import OptionError
from lightning_fastft.monitor.generate_samples import GenerateSamples
from lightning_fastft.packing.tokens.formatter import Formatter
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.samplers import sample_with_model
from tests.support.tiny_models import VOCABULARY, build_tiny
from tests.support.training_parts import quiet_data, quiet_trainer
from tests.support.vision import build_processor, build_vision_model

register_strategies()

OWN = "{% for message in messages %}w1 {{ message.content }} <eos>{% endfor %}"
GIVEN = "{% for message in messages %}w2 {{ message.content }} <eos>{% endfor %}"
CHAT = [{"role": "user", "content": "w5 w6"}]
ROWS = [{"messages": [*CHAT, {"role": "assistant", "content": "w7 w8"}]}] * 4


def build_words(template, *, prefix="w"):
    words = {"<eos>": 0, **{f"{prefix}{index}": index for index in range(1, VOCABULARY)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", chat_template=template)


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    build_tiny("qwen3", eos_token_id=0).save_pretrained(folder)
    build_words(OWN).save_pretrained(folder)
    return folder


def train(tmp_path, base, *, callbacks=(), rows=ROWS, tuner_options=None, **options):
    module = FineTuner(str(base), **{"lora": {"r": 2}, **(tuner_options or {})})
    data = quiet_data(rows, max_tokens=32, num_workers=0, **options)
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=1, callbacks=list(callbacks))
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return module


def prompts_of(module, monkeypatch, **options):
    """Return the token ids that the module generates from."""
    seen = []
    monkeypatch.setattr("lightning_fastft.hf.generation._write_texts", lambda *a, **k: seen.append(a[2]) or [""])
    module.generate([CHAT], **options)
    return seen[0][0]


@pytest.mark.parametrize("way", ["text", "file"])
@pytest.mark.parametrize("tuner_options", [{}, {"lora": None}], ids=["adapters", "whole"])
def test_the_chat_template_of_the_data_is_saved_and_used(way, tuner_options, base, tmp_path, monkeypatch):
    file = tmp_path / "given.jinja"
    file.write_text(GIVEN)
    template = str(file) if way == "file" else GIVEN
    module = train(tmp_path, base, chat_template=template, tuner_options=tuner_options)
    # Its file is read once; a checkpoint has the text.
    file.unlink()
    module.save_pretrained(str(tmp_path / "saved"))
    loaded = FineTuner.load_from_checkpoint(tmp_path / "a.ckpt")
    loaded.configure_model()
    loaded.save_pretrained(str(tmp_path / "loaded"))
    assert main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out")]) == 0
    for name in ("saved", "loaded", "out"):
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template == GIVEN
    assert prompts_of(module, monkeypatch) == prompts_of(loaded, monkeypatch) == [2, 5, 6, 0]
    # The tokenizer that was trained with is not changed: caches of tokens know it by its template.
    assert module.tokenizer.chat_template == OWN


def test_without_a_template_of_the_data_the_tokenizer_keeps_its_own(base, tmp_path, monkeypatch):
    module = train(tmp_path, base)
    assert module.trained_tokenizer is module.tokenizer
    module.save_pretrained(str(tmp_path / "saved"))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == OWN
    assert prompts_of(module, monkeypatch) == [1, 5, 6, 0]


def test_a_tokenizer_of_the_data_is_saved_instead_of_the_models_own(base, tmp_path):
    build_words(OWN, prefix="v").save_pretrained(tmp_path / "other")
    rows = [{"messages": [{"role": "user", "content": "v5"}, {"role": "assistant", "content": "v7"}]}] * 4
    module = train(tmp_path, base, rows=rows, tokenizer=str(tmp_path / "other"))
    module.save_pretrained(str(tmp_path / "saved"))
    assert main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out")]) == 0
    loaded = FineTuner.load_from_checkpoint(tmp_path / "a.ckpt")
    loaded.configure_model()
    loaded.save_pretrained(str(tmp_path / "loaded"))
    for name in ("saved", "out", "loaded"):
        assert AutoTokenizer.from_pretrained(tmp_path / name).convert_ids_to_tokens(5) == "v5"


def test_samples_are_asked_in_the_chat_template_of_the_data(base, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "lightning_fastft.hf.generation.generate_texts",
        lambda model, *, tokenizer, prompts, **options: seen.append(tokenizer.chat_template) or [""],
    )
    train(tmp_path, base, callbacks=[GenerateSamples([CHAT])], chat_template=GIVEN, val_paths=ROWS)
    assert seen == [GIVEN]


MOODY = "{% if mood is defined %}{{ mood }} {% endif %}" + GIVEN


def test_the_variables_of_the_chat_template_of_the_data_are_saved_and_used(base, tmp_path, monkeypatch, capsys):
    module = train(tmp_path, base, chat_template=MOODY, chat_template_kwargs={"mood": "w9"})
    loaded = FineTuner.load_from_checkpoint(tmp_path / "a.ckpt")
    loaded.configure_model()
    assert prompts_of(module, monkeypatch) == prompts_of(loaded, monkeypatch) == [9, 2, 5, 6, 0]
    assert prompts_of(loaded, monkeypatch, chat_template_kwargs={"mood": "w3"}) == [3, 2, 5, 6, 0]
    with pytest.raises(OptionError, match="Did you mean 'mood'"):
        loaded.generate([CHAT], chat_template_kwargs={"moods": "w3"})
    assert torch.load(tmp_path / "a.ckpt", weights_only=False)["datamodule_hyper_parameters"][
        "chat_template_kwargs"
    ] == {"mood": "w9"}
    monkeypatch.undo()
    words = ["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--merge", "--gguf", "f16", "--ollama"]
    monkeypatch.setenv("PATH", "")
    assert main(words) == WITHOUT_GGUF
    assert '{"mood": "w9"}' in capsys.readouterr().out
    assert '`{"mood": "w9"}`' in (tmp_path / "out" / "README.md").read_text()
    assert '"""{{ if not .System }}w9 {{ end }}' in (tmp_path / "out" / "Modelfile").read_text()


def test_samples_get_the_variables_of_the_data(base, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "lightning_fastft.hf.generation._write_texts", lambda *args, **options: seen.append(args[2][0]) or [""]
    )
    options = {"chat_template": MOODY, "chat_template_kwargs": {"mood": "w9"}, "val_paths": ROWS}
    train(tmp_path, base, callbacks=[GenerateSamples([CHAT])], rows=ROWS[:2], **options)
    assert seen == [[9, 2, 5, 6, 0]]


def test_chat_and_eval_give_the_variables_of_the_run_and_their_own(base, tmp_path, monkeypatch, capsys):
    train(tmp_path, base, chat_template=MOODY, chat_template_kwargs={"mood": "w9"})
    seen, checkpoint = [], str(tmp_path / "a.ckpt")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5\n"))
    monkeypatch.setattr(
        "lightning_fastft.hf.generation._write_texts", lambda *args, **options: seen.append(args[2][0]) or [""]
    )
    assert main(["chat", checkpoint, "--device", "cpu"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5\n"))
    assert main(["chat", checkpoint, "--device", "cpu", "--chat-template-kwargs", '{"mood": "w3"}']) == 0
    assert seen == [[9, 2, 5, 0], [3, 2, 5, 0]]
    assert main(["chat", checkpoint, "--device", "cpu", "--plain", "--chat-template-kwargs", '{"mood": "w3"}']) == 1
    assert "--chat-template-kwargs needs a chat template" in capsys.readouterr().err
    # Before the first line.
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", checkpoint, "--device", "cpu", "--chat-template-kwargs", '{"moods": "w3"}']) == 1
    assert "--chat-template-kwargs sets 'moods'" in capsys.readouterr().err
    monkeypatch.setattr(Formatter, "encode", note_tokens(seen := [], Formatter.encode))
    words = ["eval", checkpoint, "--data", str(file), "--device", "cpu", "--json", "--cache-dir", "null"]
    answer = [2, 5, 6, 0, 2, 7, 8, 0]
    assert main(words) == 0
    assert main([*words, "--chat-template-kwargs", '{"mood": "w3"}']) == 0
    assert [ids for ids in seen if len(ids) == 9] == [[9, *answer]] * 4 + [[3, *answer]] * 4


def note_tokens(seen, encode):
    def noted(self, rows, **options):
        found = encode(self, rows, **options)
        seen.extend(example.input_ids.tolist() for example in found)
        return found

    return noted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"mood": "w3"}}, "'w9'} instead of {'mood': 'w3'}"),
        ({"chat_template": GIVEN, "chat_template_kwargs": None}, "another chat_template and"),
        ({"chat_template": None, "chat_template_kwargs": None}, "another chat_template and"),
    ],
)
def test_validation_with_another_chat_template_than_the_training_warns(options, words, base, tmp_path):
    trained = {"chat_template": MOODY, "chat_template_kwargs": {"mood": "w9"}}
    train(tmp_path, base, **trained)
    data = quiet_data(None, val_paths=ROWS, max_tokens=32, num_workers=0, **{**trained, **options})
    module = FineTuner(str(base), lora={"r": 2})
    trainer = quiet_trainer(tmp_path, strategy="fastft")
    check = pytest.warns(UserWarning, match=words) if words else contextlib.nullcontext()
    with check:
        trainer.validate(module, data, ckpt_path=str(tmp_path / "a.ckpt"), verbose=False)


def test_a_run_with_the_tokenizers_own_template_is_validated_without_a_warning(base, tmp_path):
    train(tmp_path, base)
    data = quiet_data(None, val_paths=ROWS, max_tokens=32, num_workers=0, chat_template=OWN)
    trainer = quiet_trainer(tmp_path, strategy="fastft")
    trainer.validate(FineTuner(str(base), lora={"r": 2}), data, ckpt_path=str(tmp_path / "a.ckpt"), verbose=False)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("tuner_options", [{}, {"lora": None}], ids=["adapters", "whole"])
def test_the_processor_of_images_goes_with_the_model(tuner_options, is_old, tmp_path, monkeypatch):
    processor = build_processor("llava")
    template = processor.chat_template
    base = tmp_path / "base"
    build_vision_model("llava", processor.tokenizer).save_pretrained(base)
    processor.save_pretrained(base)
    if is_old:
        (base / "chat_template.jinja").unlink()
        (base / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    rows = [{"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "two"}]}] * 4
    module = train(tmp_path, base, rows=rows, tuner_options=tuner_options)
    # Rows without images need no processor.
    with monkeypatch.context() as patch:
        patch.setattr(AutoProcessor, "from_pretrained", None)
        module.save_pretrained(str(tmp_path / "saved"))
        assert main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out")]) == 0
        names = ["saved", "out"]
        if not tuner_options:
            assert main(["export", str(tmp_path / "out"), str(tmp_path / "merged"), "--merge"]) == 0
            names.append("merged")
    if not tuner_options:
        assert open_trained(Request(tmp_path / "out", torch.device("cpu"))).module.image_encoder is not None
    for name in names:
        assert (tmp_path / name / "processor_config.json").read_bytes() == (base / "processor_config.json").read_bytes()
        stock = AutoProcessor.from_pretrained(tmp_path / name)
        assert stock.chat_template == template
        assert stock.image_processor.to_dict() == processor.image_processor.to_dict()


def test_a_processor_that_was_given_to_the_data_goes_with_the_model(tmp_path):
    processor = build_processor("llava")
    base = tmp_path / "base"
    build_vision_model("llava", processor.tokenizer).save_pretrained(base)
    rows = [{"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "two"}]}] * 4
    module = train(tmp_path, base, rows=rows, tokenizer=processor)
    module.save_pretrained(str(tmp_path / "saved"))
    assert AutoProcessor.from_pretrained(tmp_path / "saved").patch_size == processor.patch_size


def test_a_tokenizer_of_the_data_that_has_moved_is_named_on_the_command_line(base, tmp_path, capsys):
    # With other ids, so that it is not taken for that of the base.
    build_words(OWN, prefix="v").save_pretrained(tmp_path / "tokens")
    rows = [{"messages": [{"role": "user", "content": "v5"}, {"role": "assistant", "content": "v6"}]}] * 4
    train(tmp_path, base, rows=rows, tokenizer=str(tmp_path / "tokens"))
    (tmp_path / "tokens").rename(tmp_path / "moved")
    checkpoint, out = str(tmp_path / "a.ckpt"), str(tmp_path / "out")
    assert main(["export", checkpoint, out]) == 1
    assert "--tokenizer" in capsys.readouterr().err
    moved = ["--tokenizer", str(tmp_path / "moved")]
    assert main(["export", checkpoint, out, *moved]) == 0
    assert main(["export", out, str(tmp_path / "again"), "--merge", "--tokenizer", str(base)]) == 0
    assert AutoTokenizer.from_pretrained(out).convert_tokens_to_ids("v5") == 5
    assert AutoTokenizer.from_pretrained(tmp_path / "again").convert_tokens_to_ids("w5") == 5
    loaded = open_trained(Request(tmp_path / "a.ckpt", torch.device("cpu"), tokenizer=moved[1]))
    assert loaded.module.trained_tokenizer.convert_tokens_to_ids("v5") == 5
    base.rename(tmp_path / "elsewhere")
    assert main(["export", checkpoint, str(tmp_path / "x"), *moved]) == 1
    assert "add --base" in capsys.readouterr().err
    there = ["--base", str(tmp_path / "elsewhere"), "--tokenizer", str(tmp_path / "nothing")]
    assert main(["export", checkpoint, str(tmp_path / "x"), *there]) == 1
    text = capsys.readouterr().err.strip()
    assert "OptionError: --tokenizer: " in text
    assert text.endswith("Correct --tokenizer.")


BASE_TEMPLATE = "{% for message in messages %}w1 {{ message.content }} <end>{% endfor %}"


@pytest.fixture
def chatty(tmp_path):
    """A base whose template ends answers with a control token at which its generation does not stop."""
    folder = tmp_path / "base"
    build_tiny("qwen3", eos_token_id=0).save_pretrained(folder)
    # As many published ones, with a temperature that is not used.
    generation = {"do_sample": False, "temperature": 0.6, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = build_words(BASE_TEMPLATE)
    tokenizer.add_tokens([AddedToken("w96", special=True)])
    tokenizer.chat_template = BASE_TEMPLATE.replace("<end>", "w96")
    tokenizer.save_pretrained(folder)
    return folder


def stops_of(folder):
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.temperature == 0.6
    return generation.eos_token_id


@pytest.mark.parametrize("tuner_options", [{}, {"lora": None}], ids=["adapters", "whole"])
def test_generation_stops_where_trained_answers_end(tuner_options, chatty, tmp_path, monkeypatch):
    module = train(tmp_path, chatty, tuner_options=tuner_options)
    assert module.answer_end == 96
    assert module.model.generation_config.eos_token_id == 0
    module.save_pretrained(str(tmp_path / "saved"))
    loaded = FineTuner.load_from_checkpoint(tmp_path / "a.ckpt")
    loaded.configure_model()
    loaded.save_pretrained(str(tmp_path / "loaded"))
    assert main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out")]) == 0
    names = ["saved", "loaded", "out"]
    if not tuner_options:
        assert main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "merged"), "--merge"]) == 0
        assert main(["export", str(tmp_path / "out"), str(tmp_path / "again")]) == 0
        assert main(["export", str(tmp_path / "again"), str(tmp_path / "merged again"), "--merge"]) == 0
        names += ["merged", "again", "merged again"]
    assert [stops_of(tmp_path / name) for name in names] == [[0, 96]] * len(names)
    seen = []
    for each in (module, loaded):
        monkeypatch.setattr(each.model, "generate", lambda **options: seen.append(options) or options["input_ids"])
        each.generate([CHAT])
    assert [options["eos_token_id"] for options in seen] == [[0, 96]] * 2


@pytest.mark.parametrize("chosen", ["other", None])
def test_generation_stops_where_a_template_of_several_ends_answers(chosen, chatty, tmp_path):
    template = BASE_TEMPLATE.replace("<end>", "w95")
    tokenizer = build_words({"default": template, "other": template})
    tokenizer.add_tokens([AddedToken("w95", special=True)])
    assert train(tmp_path, chatty, tokenizer=tokenizer, chat_template=chosen).answer_end == 95


def test_samples_stop_where_trained_answers_end(chatty, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "lightning_fastft.hf.generation.generate_texts", lambda model, **options: seen.append(options) or [""]
    )
    train(tmp_path, chatty, callbacks=[GenerateSamples([CHAT])], val_paths=ROWS)
    assert [options["eos_token_id"] for options in seen] == [[0, 96]]


@pytest.mark.parametrize(("prompt", "end"), [(CHAT, 96), ("w5 w6", None)], ids=["chat", "text"])
@pytest.mark.parametrize("tuner_class", [PolicyTuner, DistillationTuner])
def test_rollouts_stop_where_answers_end(tuner_class, prompt, end, chatty, tmp_path):
    found = []

    def sampler(*args, **options):
        groups = sample_with_model(*args, **options)
        found.extend(sampled.input_ids for group in groups for sampled in group)
        return groups

    is_policy = tuner_class is PolicyTuner
    module = tuner_class(str(chatty), lora={"r": 2}, **({} if is_policy else {"teacher": build_tiny("qwen3")}))
    rewards = {"rewards": lambda completions, **columns: [float(len(text)) for text in completions]}
    data = RolloutDataModule(
        [{"prompt": prompt}] * 4, sampler=sampler, prompts_per_round=4, max_new_tokens=40, max_tokens=512,
        **(rewards if is_policy else {}),
    )  # fmt: skip
    quiet_trainer(tmp_path, strategy="fastft", max_steps=1).fit(module, data)
    assert module.answer_end == end
    assert any(96 in ids for ids in found)
    assert any(96 in ids[:-1] for ids in found) is (end is None)


@pytest.mark.parametrize("rows", [[{"text": "w5 w6"}] * 4, [{"prompt": "w5 ", "completion": "w6 w7"}] * 4])
def test_plain_text_leaves_the_stops_of_generation(rows, chatty, tmp_path):
    module = train(tmp_path, chatty, rows=rows)
    assert module.answer_end is None
    module.save_pretrained(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "generation_config.json").exists()


TEXTS = [{"text": "w5 w6"}] * 4
PAIRS = [{"prompt": "w5 ", "completion": "w6 w7"}] * 4
INSTRUCTIONS = [{"instruction": "w5", "output": "w6 w7"}] * 4


@pytest.mark.parametrize(("has_template", "is_streamed"), [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("rows", [TEXTS, PAIRS, INSTRUCTIONS], ids=["text", "pairs", "instructions"])
def test_generation_stops_where_trained_texts_end(rows, is_streamed, has_template, chatty, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    tokenizer.eos_token = "w95"
    if not has_template:
        tokenizer.chat_template = None
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        (chatty / name).unlink()
    tokenizer.save_pretrained(chatty)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    module = train(tmp_path, chatty, rows=str(file), streaming=is_streamed)
    assert module.answer_end == 95
    module.save_pretrained(str(tmp_path / "saved"))
    assert stops_of(tmp_path / "saved") == [0, 95]
    assert train(tmp_path, chatty, rows=rows, add_eos=False).answer_end is None


def test_ids_leave_the_stops_of_generation(chatty, tmp_path):
    tokenizer = build_words(None)
    tokenizer.eos_token = "w95"
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 4
    assert train(tmp_path, chatty, rows=rows, tokenizer=tokenizer).answer_end is None


def test_a_template_that_ends_answers_where_generation_stops_changes_nothing(base, tmp_path):
    assert train(tmp_path, base).answer_end is None


def test_a_word_that_ends_an_answer_is_no_control_token(base, tmp_path):
    assert train(tmp_path, base, chat_template=OWN.replace("<eos>", "w9"), add_eos=False).answer_end is None


def test_a_tokenizer_of_the_data_that_has_moved_is_named_as_the_tokenizer(chatty, tmp_path):
    own = tmp_path / "own"
    build_words(BASE_TEMPLATE).save_pretrained(own)
    train(tmp_path, chatty, tokenizer=str(own))
    own.rename(tmp_path / "moved")
    loaded = FineTuner.load_from_checkpoint(tmp_path / "a.ckpt")
    loaded.configure_model()
    with pytest.raises(OptionError, match="Correct tokenizer"):
        loaded.generate(["w5"])
