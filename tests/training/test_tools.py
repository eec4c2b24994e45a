"""Tools in rollouts: calls are read as families write them, answered as TRL answers them, and kept out of the loss."""

import json
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.optimization import get_constant_schedule

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.document import IGNORED_LABEL
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.tokens.formatter import Formatter
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.data.rollouts import make_rollout
from lightning_fastft.training.data.sampled import check_columns, judge
from lightning_fastft.training.data.tools import Tools, check_tool_functions
from lightning_fastft.training.data.turns import sample_turns
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.samplers import Sampled
from tests.support.sizes import tiny_qwen3
from tests.support.tool_templates import ENDS, family_tokenizer
from tests.support.training_parts import quiet_trainer

pytest.importorskip("trl", minversion="1.15")


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def describe(city: str, deep: dict | None = None) -> dict:
    """Describe a city.

    Args:
        city: Its name.
        deep: Options.
    """
    return {"city": city, "deep": deep}


def fail(reason: str) -> str:
    """Fail.

    Args:
        reason: Why.
    """
    raise LookupError(reason)


# A turn that calls a tool as models of a family write it, what it reads as, and a turn that calls none.
WRITTEN = {
    "qwen2_5": (
        'Let me see.\n<tool_call>\n{"name": "describe", "arguments": {"city": "Rome", "deep": {"a": 1}}}\n'
        '</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call><|im_end|>',
        [("describe", {"city": "Rome", "deep": {"a": 1}}), ("add", {"a": 7})],
    ),
    "qwen3": (
        '<think>\nA city.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": -1}}\n</tool_call><|im_end|>',
        [("add", {"a": 7, "b": -1})],
    ),
    "qwen3_5_think": (
        "A city.\n</think>\n\n<tool_call>\n<function=describe>\n<parameter=city>\n75001\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call><|im_end|>",
        [("describe", {"city": "75001"}), ("add", {"a": 7})],
    ),
    "glm4moe": (
        "<think>A city.</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"
        "<|observation|>",
        [("add", {"a": 7})],
    ),
    "llama3_1": (
        '{"name": "describe", "parameters": {"city": "Rome", "deep": {"a": {"b": 1}}}}<|eot_id|>',
        [("describe", {"city": "Rome", "deep": {"a": {"b": 1}}})],
    ),
    "gptoss": (
        "<|channel|>analysis<|message|>A city.<|end|><|start|>assistant to=functions.add<|channel|>commentary "
        'json<|message|>{"a": 7}<|call|>',
        [("add", {"a": 7})],
    ),
}
PLAIN = {
    "gptoss": "<|channel|>final<|message|>No { city.<|return|>",
    "qwen3_5_think": "</think>No { city.<|im_end|>",
}
ROW = {"prompt": [{"role": "user", "content": "two plus two"}]}


def make_tools(family, *functions, tokenizer=None):
    tokenizer = family_tokenizer(family) if tokenizer is None else tokenizer
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ENDS[family]]
    formatter = Formatter(
        tokenizer, options=FormatOptions(max_tokens=4096, format="rollouts"), vocab_size=len(tokenizer), stop_ids=ends
    )
    tools = Tools(
        check_tool_functions(list(functions or (add, describe))), formatter=formatter, tokenizer=tokenizer, end_ids=ends
    )
    return tools, tokenizer, formatter


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt_of(tools, formatter, row=ROW):
    return formatter.encode_prompt(row["prompt"], tools=tools.describe(row)["tools"])


@pytest.mark.parametrize("family", WRITTEN)
def test_calls_are_read_as_a_family_writes_them(family):
    tools, tokenizer, formatter = make_tools(family)
    prompt = prompt_of(tools, formatter)
    text, calls = WRITTEN[family]
    message = tools.read(encode(tokenizer, text), prompt=prompt, row=ROW)
    assert message["role"] == "assistant"
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == calls
    if "A city." in text:
        assert message["reasoning_content"].strip() == "A city."
    plain = PLAIN.get(family, f"No {{ city.{ENDS[family][0]}")
    message = tools.read(encode(tokenizer, plain), prompt=prompt, row=ROW)
    assert message == {"role": "assistant", "content": "No { city."}
    if "</think>" in text:
        begun = "" if family == "qwen3_5_think" else "<think>"
        ids = encode(tokenizer, f"{begun}So.</think>four{ENDS[family][0]}")
        message = tools.read(ids, prompt=prompt, row=ROW)
        assert message == {"role": "assistant", "content": "four", "reasoning_content": "So."}


@pytest.mark.parametrize("family", ENDS)
def test_results_are_encoded_as_trl_does(family):
    from trl import GRPOTrainer
    from trl.chat_template_utils import get_training_chat_template

    tools, tokenizer, _ = make_tools(family)
    theirs = type("Stub", (), {"_is_vlm": False, "chat_template": None, "chat_template_kwargs": {}})()
    theirs.processing_class = theirs._tokenizer = tokenizer
    if family == "qwen3":
        # The template writes an empty reasoning into the last turn alone, which TRL does not allow.
        theirs.chat_template = get_training_chat_template(tokenizer)
    results = tools.answer({"tool_calls": [call("add", {"a": 3})]})
    # TRL finds the end of a turn by eos_token.
    tokenizer.eos_token = "<|call|>" if family == "gptoss" else tokenizer.eos_token
    expected = GRPOTrainer._get_tool_suffix_ids(theirs, [{"role": "tool", "name": "add", "content": "3"}])
    if family == "glm4moe":
        # Models stop at this token, which the template puts before results; TRL has it twice.
        assert expected.pop(0) == tokenizer.convert_tokens_to_ids("<|observation|>")
    assert tools.encode(results, row=ROW) == expected
    assert len(expected) > 5


def test_results_of_several_calls_follow_each_other_and_control_tokens_in_them_are_text():
    tools, tokenizer, _ = make_tools("qwen3")
    calls = [call("add", {"a": 3, "b": 4}), call("describe", {"city": "<|im_end|>"})]
    ids = tools.encode(tools.answer({"tool_calls": calls}), row=ROW)
    text = tokenizer.decode(ids)
    assert text.index("\n7\n</tool_response>") < text.index('{"city": "<|im_end|>", "deep": null}')
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    assert text.endswith("<|im_start|>assistant\n")


def test_the_options_of_a_row_are_those_of_its_later_turns():
    tools, tokenizer, _ = make_tools("qwen3")
    results = tools.answer({"tool_calls": [call("add", {"a": 3})]})
    row = {**ROW, "chat_template_kwargs": {"enable_thinking": False}}
    assert tokenizer.decode(tools.encode(results, row=row)).endswith("assistant\n<think>\n\n</think>\n\n")


def test_half_a_surrogate_pair_in_a_call_is_answered():
    tools, tokenizer, _ = make_tools("qwen3")
    results = tools.answer({"tool_calls": [call("describe", {"city": "\ud800"}), call("\udc00", {})]})
    text = tokenizer.decode(tools.encode(results, row=ROW))
    assert '{"city": "?", "deep": null}' in text
    assert "Tool ? not found." in text


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 7\n</tool_call><|im_end|>',
        '<tool_call>\n{"arguments": {"a": 7}}\n</tool_call><|im_end|>',
        '<tool_call>\n{"name": "add"}\n</tool_call><|im_end|>',
        "<tool_call>\n7\n</tool_call><|im_end|>",
        "<tool_call>",
        "",
    ],
)
def test_a_malformed_call_is_text(text):
    tools, tokenizer, formatter = make_tools("qwen3")
    message = tools.read(encode(tokenizer, text), prompt=prompt_of(tools, formatter), row=ROW)
    assert "tool_calls" not in message
    assert message["content"] == tokenizer.decode(encode(tokenizer, text), skip_special_tokens=True)


def test_mistakes_of_the_model_are_answered_and_failures_of_a_tool_are_warned_of_once():
    tools, _, _ = make_tools("qwen3", add, fail)
    wrong = [call("subtract", {}), call("add", {}), call("add", [1]), call("add", {"a": 1, "c": 1})]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        contents = [json.loads(result["content"])["error"] for result in tools.answer({"tool_calls": wrong})]
    assert contents == [
        "Tool subtract not found.",
        "add() missing a required argument: 'a'",
        "add() takes an object with its arguments",
        "add() got an unexpected keyword argument 'c'",
    ]
    with pytest.warns(UserWarning, match="The tool fail raised LookupError: no") as seen:
        results = [tools.answer({"tool_calls": [call("fail", {"reason": "no"})]}) for _ in range(2)]
    assert len(seen) == 1
    assert [json.loads(message["content"]) for (message,) in results] == [{"error": "no"}] * 2


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'


class Script:
    """A sampler that writes given texts, turn after turn, with log-probabilities that name their turn."""

    def __init__(self, tokenizer, *turns, has_log_probs=True):
        self.turns, self.asked, self.tokenizer, self.has_log_probs = list(turns), [], tokenizer, has_log_probs
        self.vocab_size = len(tokenizer)

    def __call__(self, tuner, prompts, *, num_completions, max_new_tokens, temperature, seed):
        self.asked.append((prompts, num_completions, max_new_tokens, seed))
        written = [encode(self.tokenizer, text)[:max_new_tokens] for text in self.turns.pop(0)]
        assert len(written) == len(prompts) * num_completions
        known = [[-float(len(self.asked))] * len(ids) if self.has_log_probs else None for ids in written]
        sampled = [Sampled(ids, values) for ids, values in zip(written, known)]
        return [sampled[begin : begin + num_completions] for begin in range(0, len(sampled), num_completions)]


def sample(script, tools, prompt, *, max_new_tokens=400, max_tool_turns=None, num_completions=2):
    return sample_turns(
        script, script, [prompt], [ROW], tools=tools, max_tool_turns=max_tool_turns, num_completions=num_completions,
        max_new_tokens=max_new_tokens, temperature=1.0, seed=5,
    )  # fmt: skip


def test_a_completion_goes_on_behind_the_results_of_its_calls():
    tools, tokenizer, formatter = make_tools("qwen3")
    prompt = prompt_of(tools, formatter)
    script = Script(tokenizer, ["four<|im_end|>", CALL], [CALL], ["seven<|im_end|>"])
    ((short, long),), ((few, many),) = sample(script, tools, prompt)
    assert short.input_ids == encode(tokenizer, "four<|im_end|>")
    assert short.is_trained == [True] * len(short.input_ids)
    assert few == [{"role": "assistant", "content": "four"}]
    results = tools.encode(tools.answer({"tool_calls": [call("add", {"a": 3, "b": 4})]}), row=ROW)
    own, last = encode(tokenizer, CALL), encode(tokenizer, "seven<|im_end|>")
    assert long.input_ids == own + results + own + results + last
    sizes = [len(own), len(results), len(own), len(results), len(last)]
    assert long.is_trained == np.repeat([True, False, True, False, True], sizes).tolist()
    assert long.log_probs == np.repeat([-1.0, 0.0, -2.0, 0.0, -3.0], sizes).tolist()
    assert [message["role"] for message in many] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["content"] for message in many if message["role"] == "tool"] == ["7", "7"]
    (_, first, second) = script.asked
    assert first[0] == [prompt + own + results]
    assert second[0] == [prompt + own + results + own + results]
    assert first[1:3] == (1, 400 - len(own) - len(results))
    assert len({seed for *_, seed in script.asked}) == 3


def test_the_first_turn_draws_from_the_seed_and_log_probs_are_all_or_none():
    tools, tokenizer, formatter = make_tools("qwen3")
    script = Script(tokenizer, [CALL], ["seven<|im_end|>"], has_log_probs=False)
    ((sampled,),), _ = sample(script, tools, prompt_of(tools, formatter), num_completions=1)
    assert script.asked[0][-1] == 5
    assert sampled.log_probs is None
    assert len(sampled.is_trained) == len(sampled.input_ids)


@pytest.mark.parametrize("most", [1, 2])
def test_calls_behind_the_last_turn_are_not_answered(most):
    tools, tokenizer, formatter = make_tools("qwen3")
    script = Script(tokenizer, *[[CALL]] * (most + 1))
    ((sampled,),), ((messages,),) = sample(
        script, tools, prompt_of(tools, formatter), max_tool_turns=most, num_completions=1
    )
    assert len(script.asked) == most + 1
    assert messages[-1]["tool_calls"]
    assert sampled.is_trained[-1]


def test_results_that_leave_no_room_are_left_out_and_a_last_turn_is_cut():
    tools, tokenizer, formatter = make_tools("qwen3")
    prompt, own = prompt_of(tools, formatter), encode(tokenizer, CALL)
    results = tools.encode(tools.answer({"tool_calls": [call("add", {"a": 3, "b": 4})]}), row=ROW)
    size = len(own) + len(results)
    ((sampled,),), ((messages,),) = sample(
        Script(tokenizer, [CALL]), tools, prompt, max_new_tokens=size, num_completions=1
    )
    assert sampled.input_ids == own
    assert [message["role"] for message in messages] == ["assistant"]
    # The turns of one request have the room of the shortest completion, and are cut at their own.
    longer = f"two {CALL}"
    room, last = 4, encode(tokenizer, "seven<|im_end|>")
    length = len(encode(tokenizer, longer)) + len(results) + room
    script = Script(tokenizer, [CALL, longer], ["seven<|im_end|>"] * 2)
    ((short, cut),), ((_, messages),) = sample(script, tools, prompt, max_new_tokens=length)
    assert script.asked[1][2] == length - size > room
    assert short.input_ids == own + results + last[: length - size]
    assert cut.input_ids == encode(tokenizer, longer) + results + last[:room]
    assert len(cut.log_probs) == len(cut.is_trained) == length
    assert messages[-1]["content"] == tokenizer.decode(last[:room])


def test_what_a_sampler_says_of_its_tokens_stays():
    tools, tokenizer, formatter = make_tools("qwen3")
    firsts = [encode(tokenizer, text) for text in (CALL, f"two {CALL}")]
    last = encode(tokenizer, "seven<|im_end|>")
    results = tools.encode(tools.answer({"tool_calls": [call("add", {"a": 3, "b": 4})]}), row=ROW)

    def sampler(tuner, prompts, *, max_new_tokens, num_completions, **options):
        if num_completions == 2:
            return [[Sampled(ids, None, [False] + [True] * (len(ids) - 1)) for ids in firsts]]
        ids = last[:max_new_tokens]
        return [[Sampled(ids, [-1.0] * len(ids), [False, False] + [True] * (len(ids) - 2))] for _ in prompts]

    length = len(firsts[1]) + len(results) + 3
    ((_, sampled),), _ = sample_turns(
        sampler, Script(tokenizer), [prompt_of(tools, formatter)], [ROW], tools=tools, max_tool_turns=None,
        num_completions=2, max_new_tokens=length, seed=5,
    )  # fmt: skip
    assert len(sampled.input_ids) == length
    # The last turn is cut.
    assert sampled.is_trained == [False] + [True] * (len(firsts[1]) - 1) + [False] * (len(results) + 2) + [True]
    # The log-probabilities of the first turn are not known.
    assert sampled.log_probs is None


def test_descriptions_of_a_row_are_shown_in_place_of_the_functions():
    tools, tokenizer, _ = make_tools("qwen3")
    other = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}]
    assert tools.describe({**ROW, "tools": other})["tools"] == other
    assert [tool["function"]["name"] for tool in tools.describe({**ROW, "tools": None})["tools"]] == ["add", "describe"]
    ids = tools.encode(tools.answer({"tool_calls": [call("add", {"a": 1})] * 2}), row={**ROW, "tools": other})
    assert tokenizer.decode(ids).count("<tool_response>") == 2
    assert [result["tool_call_id"] for result in tools.answer({"tool_calls": [call("add", {"a": 1})] * 2})] == [
        "call00000",
        "call00001",
    ]


def test_a_turn_that_was_cut_off_calls_nothing():
    tools, tokenizer, formatter = make_tools("qwen3")
    cut = CALL.removesuffix("<|im_end|>")
    script = Script(tokenizer, [cut])
    ((sampled,),), ((messages,),) = sample(script, tools, prompt_of(tools, formatter), num_completions=1)
    assert sampled.input_ids == encode(tokenizer, cut)
    assert len(messages) == 1


def test_tokens_that_another_wrote_have_no_labels():
    group = [Sampled([5, 6, 7], None, [True, False, True]), Sampled([8, 9], None, None)]
    labels = [IGNORED_LABEL, 5, IGNORED_LABEL, 7, 8, 9]
    assert make_rollout([4], group, (0.0, 1.0)).labels.tolist() == labels
    # The first was cut off: nothing of it is trained.
    masked = make_rollout([4], group, (0.0, 1.0), end_ids=[9]).labels.tolist()
    assert masked == [IGNORED_LABEL] * 4 + labels[4:]
    with pytest.raises(DataError, match=r"2 flags in is_trained for the 3 tokens of completion 0"):
        make_rollout([4], [Sampled([5, 6, 7], None, [True, False])], (0.0,))


def test_a_column_with_the_name_of_the_turns_is_refused():
    with pytest.raises(DataError, match="the column 'completion_messages'"):
        check_columns(["answer", "completion_messages"])


def test_rewards_get_the_turns_of_a_completion():
    tokenizer = family_tokenizer("qwen3")
    turns = [{"role": "assistant", "content": "four"}]
    seen = []

    def score(*, completions, completion_messages, **columns):
        seen.append((completions, completion_messages))
        return [0.0] * len(completions)

    groups = [[Sampled(encode(tokenizer, "four"))]]
    judge([ROW], groups, rewards=[score], columns=[], tokenizer=tokenizer, messages=[[turns]])
    assert seen == [(["four"], [turns])]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (3, "tools must be a function"),
        ([add, "add"], "tools must be a function"),
        ([add, add], "Two tools have the name add"),
        (lambda a: a, "docstring"),
        ([len], "type"),
    ],
)
def test_what_is_no_tool_is_refused(tools, message):
    with pytest.raises(OptionError, match=message):
        check_tool_functions(tools)


def test_turns_without_tools_are_refused():
    with pytest.raises(OptionError, match="max_tool_turns=2 has no effect without tools"):
        RolloutDataModule(ROWS, rewards=score, max_tool_turns=2)


def test_a_coroutine_function_is_refused():
    async def wait(a: int) -> int:
        """Wait.

        Args:
            a: Seconds.
        """
        return a

    with pytest.raises(OptionError, match="wait is a coroutine function"):
        check_tool_functions([wait])


def test_calls_that_cannot_be_read_are_refused_before_anything_is_sampled():
    tokenizer = family_tokenizer("qwen3")
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", "<|fim_prefix|>")
    with pytest.raises(OptionError, match=r"no known syntax reads the call '<\|fim_prefix\|>"):
        make_tools("qwen3", tokenizer=tokenizer)
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<|fim_prefix|>", "close": "</tool_call>", "content": "json", "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<|im_end|>", "content": "text"},
        },
    }  # fmt: skip
    tools, _, formatter = make_tools("qwen3", tokenizer=tokenizer)
    ids = encode(tokenizer, CALL.replace("<tool_call>", "<|fim_prefix|>"))
    assert tools.read(ids, prompt=prompt_of(tools, formatter), row=ROW)["tool_calls"]
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(OptionError, match="The chat template cannot render a call"):
        make_tools("qwen3", tokenizer=tokenizer)


# Of a turn with a call, one without, and one whose last turn is cut off by the length of a completion.
LONGEST = 110
ROWS = [{"prompt": [{"role": "user", "content": text}]} for text in ("two plus two", "what is two")]


def long_texts(place):
    return {0: "four<|im_end|>", 1: CALL, 2: f"two {CALL}", 3: CALL.replace("4", "5")}[place % 4]


def score(*, completions, **columns):
    # TRL gives messages.
    texts = [turns if isinstance(turns, str) else turns[-1].get("content", "") for turns in completions]
    return [float(number % 4) for number, _ in enumerate(texts)]


def make_model(tokenizer):
    torch.manual_seed(0)
    config = tiny_qwen3(vocab=len(tokenizer), inner=64, head_width=8, positions=2048, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if ".ref." not in name}


def run_ours(folder, tokenizer, **options):
    model = make_model(tokenizer)
    tuner = PolicyTuner(
        model, tokenizer=tokenizer, dtype="float32", scheduler=get_constant_schedule,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), loss="dapo", **options,
    )  # fmt: skip
    asked = []

    def sampler(tuner, prompts, *, num_completions, max_new_tokens, temperature, seed):
        first = num_completions > 1
        asked.append([list(prompt) for prompt in prompts])
        texts = [
            long_texts(place) if first else "seven four<|im_end|>" for place in range(len(prompts) * num_completions)
        ]
        sampled = [Sampled(encode(tokenizer, text)[:max_new_tokens]) for text in texts]
        return [sampled[begin : begin + num_completions] for begin in range(0, len(sampled), num_completions)]

    data = RolloutDataModule(
        ROWS, rewards=score, tools=[add, describe], sampler=sampler, num_completions=4, prompts_per_round=2,
        max_new_tokens=LONGEST, max_tokens=8192,
    )  # fmt: skip
    quiet_trainer(folder, max_steps=1, strategy=FastFTStrategy()).fit(tuner, data)
    return weights_of(tuner.model), asked


def test_descriptions_of_a_row_as_json_text_give_arguments_their_types():
    tools, tokenizer, _ = make_tools("qwen3_5_think")
    row = {**ROW, "tools": json.dumps(tools.schemas)}
    text, calls = WRITTEN["qwen3_5_think"]
    message = tools.read(encode(tokenizer, f"<think>{text}"), prompt=[], row=row)
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == calls


def test_a_run_answers_at_most_max_tool_turns(tmp_path):
    tokenizer = family_tokenizer("qwen3")
    script = Script(tokenizer, [CALL] * 4, [CALL] * 4, [CALL] * 4)
    tuner = PolicyTuner(make_model(tokenizer), tokenizer=tokenizer, dtype="float32")
    data = RolloutDataModule(
        ROWS, rewards=score, tools=add, max_tool_turns=1, sampler=script, num_completions=2, prompts_per_round=2,
        max_new_tokens=400, max_tokens=8192,
    )  # fmt: skip
    quiet_trainer(tmp_path, max_steps=1, strategy=FastFTStrategy()).fit(tuner, data)
    assert len(script.asked) == 2


def test_a_step_with_tools_is_trls(tmp_path, monkeypatch):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import utils

    from tests.training.test_trl_loop import PlainHead

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", PlainHead)
    tokenizer = family_tokenizer("qwen3")
    ours, asked = run_ours(tmp_path / "ours", tokenizer)
    config = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=LONGEST, learning_rate=0.1, max_steps=1, lr_scheduler_type="constant", max_grad_norm=0.0,
        shuffle_dataset=False, report_to=[], save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
        loss_type="dapo", beta=0.0,
    )  # fmt: skip
    model = make_model(tokenizer)
    start = weights_of(model)
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=score, args=config, train_dataset=Dataset.from_list(ROWS),
        tools=[add, describe],
    )  # fmt: skip
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    theirs = []

    def generate(prompt_ids, images, fields, num_generations, *args, **options):
        theirs.append([list(ids) for ids in prompt_ids])
        first = num_generations > 1
        texts = [long_texts(place) if first else "seven four<|im_end|>" for place in range(len(prompt_ids))]
        return [encode(tokenizer, text)[:LONGEST] for text in texts], None

    monkeypatch.setattr(trainer, "_generate_single_turn", generate)
    trainer.train()
    assert sorted(theirs[0][::4]) == sorted(asked[0])
    assert sorted(theirs[1]) == sorted(asked[1])
    assert len(theirs) == len(asked) == 2
    expected = weights_of(trainer.model)
    moved = max(float((expected[name] - start[name]).abs().max()) for name in start)
    assert moved > 1e-3
    for name, value in expected.items():
        assert torch.allclose(ours[name], value, rtol=0, atol=1e-6), name
