import json
import re

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_fastft.core.errors import OptionError
from lightning_fastft.demo.files import write_demo_files
from lightning_fastft.demo.generator import final_answer, generate_rows

SUM = re.compile(r"(\d+) ([-+x]) (\d+) = (\d+)")


@pytest.fixture(scope="module")
def rows():
    return generate_rows()


def test_the_same_seed_gives_the_same_rows_and_another_seed_others():
    small = {"num_train": 50, "num_validation": 5}
    assert generate_rows(**small) == generate_rows(**small)
    assert generate_rows(**small) != generate_rows(**small, seed=12)


def test_there_are_enough_rows_and_no_held_out_question_is_trained(rows):
    train, validation = rows
    assert len(train) >= 4000
    trained = {row["messages"][0]["content"] for row in train}
    held_out = {row["messages"][0]["content"] for row in validation}
    assert len(held_out) == len(validation)
    assert not trained & held_out


def test_every_worked_step_is_right_and_leads_to_the_answer(rows):
    operations = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}
    for row in rows[0][:2000]:
        for message in row["messages"][1::2]:
            steps = SUM.findall(message["content"])
            for left, sign, right, result in steps:
                assert operations[sign](int(left), int(right)) == int(result)
            assert final_answer(message["content"]) == steps[-1][3]


def test_chats_alternate_and_begin_with_a_question(rows):
    for row in rows[0]:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert max(len(row["messages"]) for row in rows[0]) == 8


def test_rows_have_very_different_lengths_and_fit_the_packs_of_the_config(rows, tmp_path):
    files = write_demo_files(rows, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in (*rows[0], *rows[1])]
    length_N = np.array([len(ids) for ids in tokenizer(texts)["input_ids"]])
    assert length_N.max() <= 512
    assert length_N.max() > 12 * length_N.min()
    assert np.percentile(length_N, 95) > 4 * np.percentile(length_N, 10)


def test_files_are_read_by_plain_transformers(tmp_path):
    train, validation = generate_rows(num_train=200, num_validation=3)
    files = write_demo_files((train, validation), tmp_path / "new", vocab_size=400)
    assert [json.loads(line) for line in files.validation.read_text().splitlines()] == validation
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(files.model))
    assert len(tokenizer) == model.get_input_embeddings().num_embeddings
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (model.config.pad_token_id, model.config.eos_token_id)

    messages = train[0]["messages"]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    trained = [token for token, is_trained in zip(encoded["input_ids"], encoded["assistant_masks"]) if is_trained]
    spoken = "".join(message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant")
    assert tokenizer.decode(trained) == spoken
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(prompt)


def test_digits_are_tokens_of_their_own(tmp_path):
    files = write_demo_files(generate_rows(num_train=200, num_validation=3), tmp_path, vocab_size=400)
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    assert [token for token in tokenizer.tokenize("12 + 345") if token.isdigit()] == list("12345")


def test_impossible_sizes_are_refused(tmp_path):
    with pytest.raises(OptionError, match="num_train"):
        generate_rows(num_train=0)
    with pytest.raises(OptionError, match="vocab_size"):
        write_demo_files(generate_rows(num_train=2, num_validation=1), tmp_path, vocab_size=100)
