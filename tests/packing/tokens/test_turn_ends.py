"""Answers end with a token at which generation stops, also if the chat template writes none."""

import json

import pytest
import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.tokens.formatter import Formatter
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.preference import PreferenceTuner
from lightning_fastft.training.reward import RewardTuner
from tests.packing.conftest import MARKED, UNMARKED, build_tokenizer
from tests.packing.tokens.test_chat import NO_PROMPT, OPENED, STRICT, THINKING, TURNS, conversation
from tests.support.sizes import sizes
from tests.support.training_parts import quiet_data, quiet_trainer

# The habits of GLM-4: a token where a turn begins, none where it ends. Earlier thoughts are left out.
GLM = (
    "{%- set ns = namespace(last=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "<s>{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}<|assistant|>"
    "{%- if message.reasoning_content and loop.index0 > ns.last %}"
    "{{- '\n<think>' + message.reasoning_content + '</think>' }}{%- endif %}"
    "{{- '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name }}"
    "{{- call.function.arguments | tojson + '</tool_call>' }}{%- endfor %}"
    "{%- elif message.role == 'tool' %}{{- '<|observation|>\n' + message.content }}"
    "{%- else %}{{- '<|' + message.role + '|>\n' + message.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)
STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
ASK, ANSWER = {"role": "user", "content": "two"}, {"role": "assistant", "content": "four"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def build_glm(template=GLM):
    tokenizer = build_tokenizer(chat_template=template)
    roles = ("<|user|>", "<|assistant|>", "<|observation|>")
    tokenizer.add_tokens([AddedToken(role, special=True) for role in roles], special_tokens=True)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


def encode(tokenizer, row, *, format="messages", stops=STOPS, **options):
    """Return the example of a row, its whole text, and the trained pieces of it."""
    stop_ids = stops if stops is None else tuple(tokenizer.convert_tokens_to_ids(list(stops)))
    formatter = Formatter(tokenizer, options=FormatOptions(max_tokens=512, **options), stop_ids=stop_ids)
    (example,) = formatter.encode([row], format=format)
    ids, is_trained = example.input_ids.tolist(), example.is_trained.tolist()
    runs = [[]]
    for token, is_wanted in zip(ids, is_trained):
        runs = [*runs[:-1], [*runs[-1], token]] if is_wanted else [*runs, []]
    return example, tokenizer.decode(ids), [tokenizer.decode(run) for run in runs if run]


def test_each_answer_is_trained_with_the_token_of_the_next_turn():
    tokenizer = build_glm()
    messages = conversation(*TURNS)
    example, text, trained = encode(tokenizer, {"messages": messages})
    assert text == tokenizer.apply_chat_template(messages, tokenize=False) + "<|user|>"
    assert trained == ["\nfour<|user|>", "\nfive<|user|>"]
    assert any("<|user|>" in note for note in example.notes)


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_a_line_break_behind_the_last_turn_is_no_missing_end_where_all_is_trained(template):
    tokenizer, messages = build_tokenizer(chat_template=template), conversation(*TURNS)
    example, text, trained = encode(tokenizer, {"messages": messages}, loss_on="all")
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)
    assert trained == [text]
    assert text.endswith("<|im_end|>\n")
    assert not example.notes


def test_call_is_trained_with_the_token_of_its_result():
    tokenizer = build_glm()
    call = '\n<tool_call>f{"a": 1}</tool_call>'
    _, _, trained = encode(tokenizer, {"messages": [ASK, CALLING]})
    assert trained == [call + "<|observation|>"]
    result = {"role": "tool", "content": "3"}
    _, _, trained = encode(tokenizer, {"messages": [ASK, CALLING, result, ANSWER]})
    assert trained == [call + "<|observation|>", "\nfour<|user|>"]


def test_answer_with_a_thought_ends_too():
    # If another turn followed, the template would drop the thought.
    _, _, trained = encode(build_glm(), {"messages": [ASK, ANSWER | {"reasoning_content": "hm"}]})
    assert trained == ["\n<think>hm</think>\nfour<|user|>"]


def test_control_token_in_a_question_changes_no_end():
    tokenizer = build_glm()
    messages = [{"role": "user", "content": "<|user|> two"}, ANSWER, ASK, ANSWER]
    example, _, trained = encode(tokenizer, {"messages": messages})
    assert trained == ["\nfour<|user|>"] * 2
    assert example.input_ids.tolist().count(tokenizer.convert_tokens_to_ids("<|user|>")) == 3


def test_only_an_answer_that_is_trained_gets_an_end():
    tokenizer = build_glm()
    messages = [ASK, ANSWER, ASK, ANSWER | {"weight": 0}]
    plain = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    _, text, trained = encode(tokenizer, {"messages": messages})
    assert text == tokenizer.apply_chat_template(plain, tokenize=False)
    assert trained == ["\nfour<|user|>"]
    _, text, _ = encode(tokenizer, {"messages": [ASK, ANSWER, ASK]})
    assert text.endswith("two")


def test_every_token_of_a_conversation_includes_its_end():
    example, text, _ = encode(build_glm(), {"messages": [ASK, ANSWER]}, loss_on="all")
    assert text.endswith("\nfour<|user|>")
    assert example.is_trained.all()


def test_completions_of_a_row_end_too():
    row = {"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "five"}]}
    _, _, trained = encode(build_glm(), row, format="preference")
    assert trained == ["\nfour<|user|>\nfive<|user|>"]


def test_template_of_plain_words_gets_the_end_of_sequence_token():
    tokenizer = build_tokenizer(chat_template=OPENED)
    _, text, trained = encode(tokenizer, {"messages": conversation(*TURNS)}, stops=())
    assert text == tokenizer.apply_chat_template(conversation(*TURNS), tokenize=False) + "<|endoftext|>"
    assert trained == ["four\n", "five\n<|endoftext|>"]


@pytest.mark.parametrize("template", [MARKED, UNMARKED, STRICT, THINKING, NO_PROMPT])
@pytest.mark.parametrize("stops", [(), ("<|im_end|>",), ("<|endoftext|>", "<|im_start|>")])
def test_template_that_ends_its_turns_is_left_as_it_is(template, stops):
    tokenizer = build_tokenizer(chat_template=template)
    row = {"messages": conversation(*TURNS)}
    example, text, trained = encode(tokenizer, row, stops=stops)
    assert text == tokenizer.apply_chat_template(conversation(*TURNS), tokenize=False)
    assert all(piece.endswith("<|im_end|>") for piece in trained)
    assert not example.notes


@pytest.mark.parametrize("options", [{"stops": None}, {"add_eos": False}])
def test_conversation_can_be_left_as_the_template_writes_it(options):
    tokenizer = build_glm()
    _, text, trained = encode(tokenizer, {"messages": [ASK, ANSWER]}, **options)
    assert text == tokenizer.apply_chat_template([ASK, ANSWER], tokenize=False)
    assert trained == ["\nfour"]


@pytest.fixture
def glm_folder(tmp_path):
    """A model whose generation_config.json, and nothing else, says where generation stops."""
    tokenizer = build_glm()
    shape = sizes(vocab=len(tokenizer), width=32, inner=48, layers=1, heads=2, key_heads=2, positions=64)
    model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.3))
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(STOPS))
    model.save_pretrained(tmp_path / "glm")
    tokenizer.save_pretrained(tmp_path / "glm")
    assert "eos_token_id" in json.loads((tmp_path / "glm/generation_config.json").read_text())
    return str(tmp_path / "glm")


def labelled_texts(tuner, rows, **options):
    data = quiet_data(rows, max_tokens=128, tokenizer=options.pop("tokenizer", None))
    trainer = quiet_trainer(**options)
    trainer.strategy.connect(tuner)
    data.trainer = trainer
    data.setup("fit")
    documents = data.subset("train").documents
    tokenizer = data.tokenizer
    return [tokenizer.decode(document.labels[document.labels != -100].tolist()) for document in documents]


def test_run_learns_to_stop_where_generation_of_its_model_stops(glm_folder):
    rows = [{"messages": [ASK, ANSWER]}]
    assert labelled_texts(FineTuner(glm_folder), rows) == ["\nfour<|user|>"]
    tuner = FineTuner(glm_folder, learning_rate=1e-2, dtype="float32")
    torch.manual_seed(0)
    quiet_trainer(max_steps=40, strategy="fastft").fit(tuner, quiet_data(rows, max_tokens=128))
    assert tuner.generate([[ASK]], max_new_tokens=20, do_sample=False) == ["\nfour"]


def test_model_in_memory_says_where_it_stops(glm_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tuner = FineTuner(
        AutoModelForCausalLM.from_pretrained(glm_folder), tokenizer=AutoTokenizer.from_pretrained(glm_folder)
    )
    assert labelled_texts(tuner, [{"messages": [ASK, ANSWER]}]) == ["\nfour<|user|>"]


def test_reward_model_scores_what_the_template_writes(glm_folder):
    row = {"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "five"}]}
    assert labelled_texts(RewardTuner(glm_folder), [row]) == ["\nfour\nfive"]
    assert labelled_texts(PreferenceTuner(glm_folder, lora={}), [row]) == ["\nfour<|user|>\nfive<|user|>"]
