"""Rows with messages, tools and environments: what the template sees and what a rollout function finds."""

import datetime
import json
import math
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_prompts import accounted, load, write

from megatron_dapo.checkpoints.folder import state_files
from megatron_dapo.config.data import PromptFileConfig
from megatron_dapo.data import DataError, arithmetic_tokenizer
from megatron_dapo.data.columns import DAPO_TEMPLATE, read_problem

TURNS = [
    {"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="},
]  # fmt: skip
TEXT = (
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
)
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer():
    return arithmetic_tokenizer()


def one(tmp_path, tokenizer, row, **settings):
    (prompt,) = load(write(tmp_path / "rows.jsonl", [row]), tokenizer, **{"template": "chat", **settings})
    return prompt


def test_several_turns_are_rendered_as_they_are(tmp_path, tokenizer):
    for messages in (TURNS, json.dumps(TURNS)):
        prompt = one(tmp_path, tokenizer, {"messages": messages, "answer": 4})
        assert prompt.text == tokenizer.decode(prompt.tokens) == TEXT
        assert (prompt.answer, prompt.meta["question"], prompt.meta["messages"]) == ("4", "2+2=", TURNS)


TEXTS = ['[{"role": "user"}] What is this?', "[1, 2]", "[]", '[{"role":' + "[" * 100_000]


@pytest.mark.parametrize("text", TEXTS, ids=["more", "numbers", "empty", "deep"])
def test_text_that_only_begins_like_messages_is_a_question(text, tmp_path):
    assert read_problem({"prompt": text, "answer": "4"}, PromptFileConfig()).question == text


def test_the_text_of_a_template_replaces_the_last_question_only(tmp_path, tokenizer):
    prompt = one(tmp_path, tokenizer, {"messages": TURNS, "answer": 4}, template="so {question}?+chat", system="hello")
    assert prompt.text == TEXT.replace("2+2=", "so 2+2=?").replace("be brief", "hello")
    assert prompt.meta["messages"][0] == {"role": "system", "content": "hello"}
    assert prompt.meta["messages"][-1] == {"role": "user", "content": "so 2+2=?"}


def test_the_last_of_several_questions_gets_no_template_twice(tmp_path, tokenizer):
    wrapped = [*TURNS[:3], {"role": "user", "content": DAPO_TEMPLATE.replace("{question}", "2+2=")}]
    row = {"messages": wrapped, "answer": 4}
    assert one(tmp_path, tokenizer, row, template="dapo+chat").text.count("Remember to put your answer") == 1
    prompt = one(tmp_path, tokenizer, row, template="so {question}?+chat")
    assert prompt.text == TEXT.replace("2+2=", "so 2+2=?") and prompt.question == "2+2="


def test_a_single_question_keeps_its_id_and_needs_no_copy_of_its_messages(tmp_path, tokenizer):
    listed = one(tmp_path, tokenizer, {"messages": [{"role": "user", "content": "1+1="}], "answer": 2})
    plain = one(tmp_path, tokenizer, {"question": "1+1=", "answer": 2})
    assert (listed.id, listed.text) == (plain.id, plain.text)
    assert set(plain.meta) == set(listed.meta) == {"question", "line"}
    with_system = one(tmp_path, tokenizer, {"question": "1+1=", "answer": 2}, system="be brief")
    assert with_system.meta["messages"] == [TURNS[0], {"role": "user", "content": "1+1="}]
    assert "messages" not in one(tmp_path, tokenizer, {"question": "1+1=", "answer": 2}, template="plain").meta


def test_tools_reach_the_template_and_the_rollout_function(tmp_path, tokenizer):
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + tokenizer.chat_template
    for tools in ([TOOL], json.dumps([TOOL])):
        prompt = one(tmp_path, tokenizer, {"question": "1+1=", "answer": 2, "tools": tools})
        assert prompt.text.startswith("[calculator]<|im_start|>user") and prompt.meta["tools"] == [TOOL]
    for nothing in (None, [], ""):
        assert "tools" not in one(tmp_path, tokenizer, {"question": "1+1=", "answer": 2, "tools": nothing}).meta
    named = one(tmp_path, tokenizer, {"question": "1+1=", "answer": 2, "x": {"y": [TOOL]}}, tools_column="x.y")
    assert named.meta["tools"] == [TOOL]


@pytest.mark.parametrize(
    ("column", "found"),
    [
        ("game", {"name": "game", "arguments": {}}),
        ({"name": "game", "arguments": {"secret": 7}}, {"name": "game", "arguments": {"secret": 7}}),
        ('{"name": "game", "arguments": "{\\"secret\\": 7}"}', {"name": "game", "arguments": {"secret": 7}}),
    ],
)
def test_an_environment_has_a_name_and_arguments(tmp_path, tokenizer, column, found):
    assert one(tmp_path, tokenizer, {"question": "1", "environment": column}).meta["environment"] == found


def test_the_same_question_in_another_environment_is_another_problem(tmp_path, tokenizer):
    rows = [{"question": "guess", "environment": {"name": "game", "arguments": {"secret": i % 3}}} for i in range(6)]
    prompts = load(write(tmp_path / "rows.jsonl", rows), tokenizer)
    assert [p.meta["environment"]["arguments"]["secret"] for p in prompts] == [0, 1, 2]
    assert len({p.id for p in prompts}) == 3 and prompts.report.duplicates == 3 and accounted(prompts.report)
    assert all(p.answer == "" for p in prompts)


def test_nulls_that_parquet_adds_are_removed(tmp_path, tokenizer):
    messages = [*TURNS[1:3], {"role": "tool", "content": "ok", "name": "calculator"}, TURNS[3]]
    rows = {"messages": [messages], "answer": ["4"], "environment": [{"name": "a", "arguments": {"b": None, "c": 1}}]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    (prompt,) = load(str(tmp_path / "rows.parquet"), tokenizer, template="chat")
    assert prompt.meta["messages"] == messages
    assert prompt.meta["environment"]["arguments"] == {"c": 1}


def test_dates_decimals_and_missing_numbers_of_parquet_become_json_values(tmp_path, tokenizer):
    day, price, count = datetime.date(2026, 1, 2), Decimal("0.50"), Decimal(2**80)
    arguments = {"day": day, "at": datetime.datetime(2026, 1, 2, 3), "price": price, "count": count, "limit": math.nan}
    rows = [{"name": "a", "arguments": arguments}, {"name": "b", "arguments": {"days": [day, None]}}]
    for i, row in enumerate(rows):
        pq.write_table(pa.table({"question": [f"q{i}"], "environment": [row]}), tmp_path / f"{i}.parquet")
    first, second = load(str(tmp_path / "*.parquet"), tokenizer)
    assert first.meta["environment"]["arguments"] == {
        "day": "2026-01-02", "at": "2026-01-02T03:00:00", "price": 0.5, "count": 2**80,
    }  # fmt: skip
    assert second.meta["environment"]["arguments"] == {"days": ["2026-01-02", None]}
    state_files(first.to_state())


BAD = {
    "several messages need a chat template": {"messages": TURNS, "answer": 1},
    "nothing to generate": {"messages": TURNS[:3], "answer": 1},
    "no message is the user's": {"messages": [TURNS[2], {"role": "tool", "content": ""}], "answer": 1},
    "expected messages with role and content": {"messages": [*TURNS, {"role": "user", "content": 3}], "answer": 1},
    "expected a list of tools": {"question": "1", "answer": 1, "tools": {"name": "x"}},
    "tools: expected JSON": {"question": "1", "answer": 1, "tools": "[calculator]"},
    "expected a name": {"question": "1", "answer": 1, "environment": {"arguments": {}}},
    "environment.arguments: expected an object": {"question": "1", "environment": {"name": "a", "arguments": "[1]"}},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_row_is_named(tmp_path, tokenizer, message):
    template = "{question} in a chat" if "chat template" in message else "chat"
    rows = [{"question": "5", "answer": 5}, BAD[message]]
    prompts = load(write(tmp_path / "rows.jsonl", rows), tokenizer, template=template)
    ((line, found),) = prompts.report.bad
    assert line == 2 and message in found, found


def test_bytes_cannot_be_an_argument(tmp_path, tokenizer):
    rows = [{"name": "a", "arguments": {"image": b"x"}}, {"name": "a", "arguments": {"image": None}}]
    pq.write_table(pa.table({"question": ["1", "2"], "environment": rows}), tmp_path / "rows.parquet")
    prompts = load(str(tmp_path / "rows.parquet"), tokenizer)
    assert prompts.report.bad == [(1, "environment: expected JSON values, found b'x'")] and len(prompts) == 1


def test_a_named_column_must_be_there(tmp_path, tokenizer):
    with pytest.raises(DataError, match="no column 'game'"):
        one(tmp_path, tokenizer, {"question": "1", "answer": 1}, environment_column="game")


def test_a_template_that_fails_on_a_row_is_named(tmp_path, tokenizer):
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"chat template failed on '2\+2='.*roles must alternate"):
        one(tmp_path, tokenizer, {"messages": TURNS, "answer": 4})


def test_a_column_without_a_name_is_not_demanded():
    config = PromptFileConfig(tools_column="", environment_column="")
    assert read_problem({"question": "1+1=", "answer": "2"}, config).answer == "2"
