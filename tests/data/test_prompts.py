"""Prompt sets: bad rows are named, duplicates and conflicts reported, templates and lengths right."""

import gzip
import json
import math
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.config.data import DataConfig, file_label
from megatron_dapo.data import DataError, arithmetic_tokenizer, load_prompts
from megatron_dapo.data.columns import DAPO_TEMPLATE


@pytest.fixture(scope="module")
def tokenizer():
    return arithmetic_tokenizer()


def write(path, rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def load(path, tokenizer, limit=None, **settings):
    return load_prompts(DataConfig(path=path, **{"template": "plain", **settings}), tokenizer, limit)


def accounted(report):
    return report.kept + report.duplicates + report.in_conflict + len(report.bad) + len(report.too_long) == report.rows


BAD_LINES = [
    {"question": "1+1=", "answer": "2"},
    {"answer": "2"},
    {"question": "  ", "answer": "2"},
    {"question": "2+2=", "answer": None},
    b'{"question": "caf\xff", "answer": "1"}',
    {"question": 7, "answer": "2"},
    {"question": "3+3=", "answer": ["6"]},
    b'{"question": "4+4=", "answer": ',
    [1, 2],
    b"",
    {"question": "5+5=", "answer": "x" + chr(0xD800)},
    {"question": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "answer": "1"},
    {"question": None, "answer": "1"},
    {"question": "6+6=", "answer": True},
    {"question": "7+7=", "answer": " "},
    {"question": "8+8=", "answer": 16},
]


def test_bad_rows_are_counted_and_named_with_their_lines(tmp_path, tokenizer):
    prompts = load(write(tmp_path / "bad.jsonl", BAD_LINES), tokenizer, max_unusable=0.9)
    assert [(p.text, p.answer) for p in prompts] == [("1+1=", "2"), ("8+8=", "16")]
    report = prompts.report
    assert (report.rows, report.kept) == (15, 2)  # the blank line is not a row
    assert dict(report.bad) == {
        2: "no question column (prompt, question, problem, messages); the row has answer",
        3: "question: the prompt is empty",
        4: "answer: the answer is null",
        5: "invalid UTF-8 at byte 17 of the line",
        6: "question: expected text, found int",
        7: "answer: expected text or a number, found list",
        8: "invalid JSON: Expecting value at character 32",
        9: "expected an object, found list",
        11: "answer: invalid Unicode (a lone surrogate) at character 1",
        12: "question: several messages need a chat template; set data.template to chat",
        13: "question: the prompt is null",
        14: "answer: expected text or a number, found bool",
        15: "answer: the answer is empty",
    }
    assert accounted(report)
    assert "line 2: no question column" in report.summary() and "… and 8 more" in report.summary()
    assert report.rows == 15


def test_parquet_rows_with_invalid_utf8_and_nulls(tmp_path, tokenizer):
    questions = pa.array([b"1+1=", b"\xff\xfe", b"2+2=", None], pa.binary()).view(pa.string())
    table = pa.table({"question": questions, "answer": ["2", "0", "4", "5"]})
    pq.write_table(table, tmp_path / "bad.parquet")
    prompts = load(str(tmp_path / "bad.parquet"), tokenizer)
    assert [p.text for p in prompts] == ["1+1=", "2+2="]
    assert prompts.report.bad == [(2, "invalid UTF-8 at byte 0 of a value"), (4, "question: the prompt is null")]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"q": "1", "a": "2"}], {}, "no question column .*the row has a, q.*data.question_column"),
        ([{"question": "1", "a": "2"}], {}, "no answer column"),
        ([{"question": "", "answer": "2"}], {}, "nothing usable is left"),
        ([{"question": "1", "answer": "2"}], {"question_column": "text.raw"}, "no column 'text.raw'"),
        ([], {}, "nothing usable is left"),
    ],
)
def test_nothing_usable_is_an_error(tmp_path, tokenizer, rows, settings, message):
    with pytest.raises(DataError, match=message):
        load(write(tmp_path / "none.jsonl", rows), tokenizer, **settings)


def test_all_too_long_is_an_error(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"nothing usable is left.*1 too long"):
        load(write(tmp_path / "long.jsonl", [{"question": "123456", "answer": "1"}]), tokenizer, limit=5)


def test_a_file_that_is_mostly_unusable_is_an_error(tmp_path, tokenizer):
    """Repeated questions count neither as usable nor as unusable."""
    good = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(5)]
    rows = [*good, *good, *[{"question": f"{i}-1="} for i in range(5)]]
    assert len(load(write(tmp_path / "half.jsonl", rows), tokenizer)) == 5
    path = write(tmp_path / "more.jsonl", [*rows, {"question": "123456", "answer": "1"}])
    with pytest.raises(DataError) as error:
        load(path, tokenizer, limit=5)
    assert f"{path}: 6 of 11 rows are unusable (5 bad, first line 11: no answer column" in str(error.value)
    assert "1 too long, first line 16: 6 tokens" in str(error.value) and "data.max_unusable (0.5)" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(load(path, tokenizer, limit=5, max_unusable=0.6)) == 5


def test_a_question_without_tokens_is_a_bad_row(tmp_path, tokenizer):
    rows = [{"question": "日本", "answer": "1"}, {"question": "1+1=", "answer": "2"}]
    prompts = load(write(tmp_path / "q.jsonl", rows), tokenizer)
    assert prompts.report.bad == [(1, "the tokenizer makes no tokens of it")] and accounted(prompts.report)


@pytest.mark.parametrize("path", ["", "missing.jsonl", "a/b/c", "./x"])
def test_a_path_that_is_not_a_file_is_an_error(tokenizer, path):
    with pytest.raises(DataError, match=r"data\.path"):
        load(path, tokenizer)


def test_a_file_that_is_neither_jsonl_nor_parquet_is_an_error(tmp_path, tokenizer):
    (tmp_path / "rows.txt").write_text("question,answer\n1,2\n")
    with pytest.raises(DataError, match=r"ends in '\.txt'; expected one of"):
        load(str(tmp_path / "rows.txt"), tokenizer)
    (tmp_path / "rows.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load(str(tmp_path / "rows.parquet"), tokenizer)


DUPLICATES = [
    {"question": "1+1=", "answer": "2"},
    {"question": " 1+1=\n", "answer": "02"},  # the same, written otherwise
    {"question": "2+2=", "answer": "4"},
    {"question": "2+2=", "answer": "5"},
    {"question": "2+2=", "answer": "5"},
    {"question": "3+3=", "answer": "6"},
]


def test_duplicates_and_conflicting_answers(tmp_path, tokenizer):
    prompts = load(write(tmp_path / "twice.jsonl", DUPLICATES), tokenizer)
    assert [p.answer for p in prompts] == ["2", "6"]
    assert len({p.id for p in prompts}) == len(prompts)
    assert prompts.report.duplicates == 3
    assert list(prompts.report.conflicts.values()) == [("2+2=", {"4": [3], "5": [4, 5]})]
    assert accounted(prompts.report)


def test_a_row_cannot_control_the_terminal(tmp_path, tokenizer):
    clear = {"question": "2+2=", "answer": "4\x1b[2J"}
    prompts = load(write(tmp_path / "rows.jsonl", [*DUPLICATES, clear, {"\x1b]0;owned\x07": "1"}]), tokenizer)
    shown = prompts.report.summary()
    assert "4\\x1b[2J (line 7)" in shown and "\\x1b]0;owned\\x07" in shown and "\x1b" not in shown


def test_ids_do_not_depend_on_file_order_or_template(tmp_path, tokenizer):
    one = load(write(tmp_path / "a.jsonl", DUPLICATES), tokenizer)
    other = load(write(tmp_path / "b.jsonl", DUPLICATES[::-1]), tokenizer, template="dapo")
    assert {p.id: p.answer for p in one} == {p.id: p.answer.lstrip("0") for p in other}


def test_too_long_prompts_are_dropped_or_cut_from_the_left(tmp_path, tokenizer):
    path = write(tmp_path / "long.jsonl", [{"question": "12+34=", "answer": "46"}, {"question": "1+1=", "answer": "2"}])
    dropped = load(path, tokenizer, limit=5)
    assert [p.text for p in dropped] == ["1+1="] and dropped.report.too_long == [(1, 6)] and accounted(dropped.report)
    cut = load(path, tokenizer, limit=5, too_long="cut-left")
    assert [p.text for p in cut] == ["2+34=", "1+1="] and cut.report.cut == 1
    assert [len(p.tokens) for p in cut] == [5, 4]
    assert [p.text for p in load(path, tokenizer, limit=6)] == ["12+34=", "1+1="]


@pytest.fixture(scope="module")
def llama():
    """A tokenizer that, like Llama's, begins a text with a token; with `add_eos_token` it would also end it."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = arithmetic_tokenizer()
    begin, end = "<|im_start|>", "<|im_end|>"
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (begin, end)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin} $A {end}", None, special)
    return tokenizer


@pytest.mark.parametrize("template", ["plain", "{question}", "<|im_start|>{question}"])
def test_without_a_chat_template_a_prompt_begins_with_the_tokenizers_own_token(tmp_path, tokenizer, llama, template):
    path = write(tmp_path / "q.jsonl", [{"question": "12+34=", "answer": "46"}])
    (prompt,) = load(path, llama, template=template)
    assert tokenizer.decode(prompt.tokens) == "<|im_start|>12+34="
    (cut,) = load(path, llama, 5, template=template, too_long="cut-left")
    assert tokenizer.decode(cut.tokens) == "<|im_start|>+34=" and len(cut.tokens) == 5
    (chat,) = load(path, llama, template="chat")
    assert tokenizer.decode(chat.tokens) == chat.text == TURN.format("12+34=")
    (cut,) = load(path, llama, 5, template="chat", too_long="cut-left")
    assert tokenizer.decode(cut.tokens).startswith("<|im_start|>") and len(cut.tokens) == 5


LATEX = r"What is {x} of \frac{1}{2}?"
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("plain", LATEX),
        ("dapo", DAPO_TEMPLATE.replace("{question}", LATEX)),
        ("chat", TURN.format(LATEX)),
        ("dapo+chat", TURN.format(DAPO_TEMPLATE.replace("{question}", LATEX))),
        ("Q: {question}\nA:", f"Q: {LATEX}\nA:"),
        ("Q: {question}+chat", TURN.format(f"Q: {LATEX}")),
    ],
)
def test_templates_give_the_expected_text(tmp_path, tokenizer, template, text):
    path = write(tmp_path / "q.jsonl", [{"question": LATEX, "answer": "1"}])
    (prompt,) = load(path, tokenizer, template=template)
    assert prompt.text == text
    assert tokenizer.decode(prompt.tokens) == text
    assert prompt.meta["question"] == LATEX


def test_the_dapo_template_is_not_applied_twice(tmp_path, tokenizer):
    wrapped = DAPO_TEMPLATE.replace("{question}", "1+1=")
    path = write(tmp_path / "q.jsonl", [{"prompt": [{"role": "user", "content": wrapped}], "answer": "2"}])
    (prompt,) = load(path, tokenizer, template="dapo")
    assert prompt.text == wrapped and prompt.meta["question"] == "1+1="


@pytest.mark.parametrize(("template", "text"), [("plain", "{}"), ("chat", TURN), ("{question} =", "1+1= =")])
def test_only_a_template_with_a_text_replaces_the_dapo_text_of_the_rows(tmp_path, tokenizer, template, text):
    """As verl, which puts the messages into the chat template as they are."""
    wrapped = DAPO_TEMPLATE.replace("{question}", "1+1=")
    path = write(tmp_path / "q.jsonl", [{"prompt": [{"role": "user", "content": wrapped}], "answer": "2"}])
    (prompt,) = load(path, tokenizer, template=template)
    assert prompt.text == text.format(wrapped)


def test_system_messages(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]
    path = write(tmp_path / "q.jsonl", [{"prompt": messages, "answer": "2"}])
    (own,) = load(path, tokenizer, template="chat")
    assert own.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1=")
    (configured,) = load(path, tokenizer, template="chat", system="Think.")
    assert configured.text.startswith("<|im_start|>system\nThink.<|im_end|>")


def test_chat_without_a_chat_template_is_an_error(tmp_path):
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"no chat template: use 'dapo'"):
        load(write(tmp_path / "q.jsonl", DUPLICATES), tokenizer, template="dapo+chat")


def test_columns_by_dotted_path_and_the_answer_marker(tmp_path, tokenizer):
    row = {"x": {"text": "1+1="}, "y": [1], "z": "so 1+1 #### 2 #### 3"}
    path = write(tmp_path / "q.jsonl", [row])
    (prompt,) = load(path, tokenizer, question_column="x.text", answer_column="z")
    assert (prompt.text, prompt.answer) == ("1+1=", "3")
    (prompt,) = load(path, tokenizer, question_column="x.text", answer_column="z", answer_marker="")
    assert prompt.answer == "so 1+1 #### 2 #### 3"
    path = write(tmp_path / "flat.jsonl", [{"x.text": "1+1=", "reward_model.ground_truth": 2}])
    (prompt,) = load(path, tokenizer, question_column="x.text")
    assert (prompt.text, prompt.answer) == ("1+1=", "2")


def test_numbers_are_written_as_a_response_would(tmp_path, tokenizer):
    """A column of floats holds integers, too: to `dapo` 1e+20 is no number, and 42.0 is not 42."""
    answers = {42.0: "42", -3.0: "-3", 0.5: "0.5", 1e20: "1" + 20 * "0", 1e-07: "0.0000001", 10**30: "1" + 30 * "0"}
    rows = [{"question": f"{i}+{i}=", "answer": answer} for i, answer in enumerate([*answers, math.nan, -math.inf])]
    prompts = load(write(tmp_path / "n.jsonl", rows), tokenizer)
    assert [p.answer for p in prompts] == [*answers.values()]
    assert dict(prompts.report.bad) == {7: "answer: the answer is nan", 8: "answer: the answer is -inf"}


def test_numbers_of_a_parquet_column_are_the_shortest_text_of_their_own_type(tmp_path, tokenizer):
    """A float32 0.1 is 0.10000000149011612 as a float64, which no response would match."""
    for kind, value in {pa.float32(): 0.1, pa.float64(): 0.1, pa.decimal128(38, 30): Decimal("0.10")}.items():
        answers = pa.array([value, 42, -3, None], kind)
        pq.write_table(pa.table({"question": ["1", "2", "3", "4"], "answer": answers}), tmp_path / "n.parquet")
        assert [p.answer for p in load(str(tmp_path / "n.parquet"), tokenizer)] == ["0.1", "42", "-3"], kind
    large = Decimal("123456789012345678901234567890.12")
    for answers, text in ((pa.array([1e20], pa.float32()), "1" + 20 * "0"), (pa.array([large]), str(large))):
        pq.write_table(pa.table({"question": ["1"], "answer": answers}), tmp_path / "n.parquet")
        assert [p.answer for p in load(str(tmp_path / "n.parquet"), tokenizer)] == [text]


def test_a_huge_field_of_a_table_is_a_prompt_that_is_too_long(tmp_path, tokenizer):
    (tmp_path / "rows.csv").write_text(f"question,answer\n{'1+' * 100_000},2\n1+1=,2\n")
    prompts = load(str(tmp_path / "rows.csv"), tokenizer, limit=100)
    assert [p.text for p in prompts] == ["1+1="] and prompts.report.too_long == [(1, 200_000)]


def test_a_table_with_an_unquoted_comma_does_not_lose_the_end_of_the_answer(tmp_path, tokenizer):
    """Without this 1,234 was read as 1. An empty last field and a column without a name are harmless."""
    rows = ",question,answer\n0,1+1=,1,234\n1,2+2=,4,\n2,3+3=,6\n"
    (tmp_path / "rows.csv").write_text(rows)
    prompts = load(str(tmp_path / "rows.csv"), tokenizer, max_unusable=0.5)
    assert [(p.text, p.answer) for p in prompts] == [("2+2=", "4"), ("3+3=", "6")]
    assert prompts.report.bad == [(1, "more values than columns: put a value with the separator in quotes")]


def test_a_number_with_too_many_digits_is_a_bad_row(tmp_path, tokenizer):
    """Python reads integers of at most 4300 digits."""
    rows = [b'{"question": "1+1=", "answer": ' + b"9" * 5000 + b"}", {"question": "2+2=", "answer": "4"}]
    prompts = load(write(tmp_path / "n.jsonl", rows), tokenizer, max_unusable=0.5)
    assert [p.text for p in prompts] == ["2+2="]
    assert prompts.report.bad == [(1, "invalid JSON: nested too deeply, or a number with too many digits")]


def test_a_template_without_the_question_is_refused():
    with pytest.raises(ConfigError, match=r"data.template: 'Solve this' is neither one of dapo, plain, chat"):
        parse_config({"data": {"template": "Solve this"}})


def test_a_hub_name_without_a_network_says_what_to_do(tokenizer, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    def refuse(*args, **kwargs):
        raise OfflineModeIsEnabled("Cannot reach the hub: offline mode is enabled.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(DataError, match=r"'someone/DAPO-Math' is not a file.*offline mode.*download the parquet file"):
        load("someone/DAPO-Math", tokenizer)


def test_a_hub_dataset_is_read_from_its_parquet_files(tmp_path, tokenizer, monkeypatch):
    import huggingface_hub

    (tmp_path / "data").mkdir()
    for name, question in (("train-0", "1+1="), ("train-1", "2+2="), ("test-0", "3+3=")):
        pq.write_table(pa.table({"question": [question], "answer": ["0"]}), tmp_path / "data" / f"{name}.parquet")
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **kwargs: asked.append((name, kwargs)) or str(tmp_path)
    )
    prompts = load("someone/sums", tokenizer)
    assert [(p.text, p.meta["line"]) for p in prompts] == [("1+1=", 1), ("2+2=", 2)]
    assert asked[0][0] == "someone/sums" and asked[0][1]["repo_type"] == "dataset"
    assert [p.text for p in load("someone/sums", tokenizer, split="test")] == ["3+3="]
    with pytest.raises(DataError, match=r"no file of split 'validation'; it has data/test-0\.parquet"):
        load("someone/sums", tokenizer, split="validation")


def test_a_hub_dataset_may_have_a_dot_in_its_name_a_revision_and_text_files(tmp_path, tokenizer, monkeypatch):
    import huggingface_hub

    (tmp_path / "dataset_infos.json").write_text("{\n}")
    write(tmp_path / "rows.jsonl", [{"question": "1+1=", "answer": "2"}])
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **kwargs: asked.append((name, kwargs)) or str(tmp_path)
    )
    for name, revision in (("AI-MO/NuminaMath-1.5", None), ("simplescaling/s1K-1.1@v2", "v2")):
        assert [(p.text, p.source) for p in load(name, tokenizer)] == [("1+1=", name.rpartition("/")[2])]
        assert asked[-1][0] == name.partition("@")[0] and asked[-1][1]["revision"] == revision
    assert {"*.jsonl", "*.json", "*.csv", "*.jsonl.gz"} <= set(asked[-1][1]["allow_patterns"])
    assert "*.parquet" in asked[0][1]["allow_patterns"] and "*.json" not in asked[0][1]["allow_patterns"]
    del asked[:]
    names = {"a/NuminaMath-1.5": "NuminaMath-1.5", "a/b.jsonl": "b", "a/b v1.0.parquet": "b_v1.0"}
    assert {path: file_label(path) for path in names} == names
    for path in ("data/train.jsonl", "data/train.jsonl.gz", "data/train.parquet"):
        with pytest.raises(DataError, match=f"no file '{path}'"):
            load(path, tokenizer)
    assert not asked


def parquet(path, question):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"question": [question], "answer": ["0"]}), path)


def test_one_configuration_of_a_hub_dataset_is_read(tmp_path, tokenizer, monkeypatch):
    """As openai/gsm8k, whose two configurations have files of the same names."""
    import huggingface_hub

    for name, question in (("main/train-0", "1+1="), ("main/test-0", "3+3="), ("socratic/train-0", "2+2=")):
        parquet(tmp_path / f"{name}.parquet", question)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kwargs: str(tmp_path))
    prompts = load("openai/gsm8k", tokenizer, configuration="main")
    assert [p.text for p in prompts] == ["1+1="]
    assert f"read: {tmp_path}/main/train-0.parquet" in prompts.report.summary()
    assert [p.text for p in load("openai/gsm8k", tokenizer, split="test")] == ["3+3="]  # only main has it
    with pytest.raises(DataError, match=r"data\.configuration: .* several configurations \(main, socratic\)"):
        load("openai/gsm8k", tokenizer)
    with pytest.raises(DataError, match=r"no configuration 'other'; it has main, socratic"):
        load("openai/gsm8k", tokenizer, configuration="other")


ROWS = [{"question": "1+1=", "answer": "2"}, {"question": "2+2=", "answer": "4"}]
CSV = "question,answer\r\n1+1=,2\r\n2+2=,4\r\n"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rows.json", json.dumps(ROWS, indent=1).encode()),
        ("rows.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("rows.jsonl", b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, ROWS)).encode()),
        ("rows.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        ("rows.jsonl.gz", gzip.compress("\n".join(map(json.dumps, ROWS)).encode())),
        ("rows.csv", b"\xef\xbb\xbf" + CSV.encode()),
        ("rows.csv.gz", gzip.compress(CSV.encode())),
        ("rows.tsv", CSV.replace(",", "\t").encode()),
    ],
)
def test_arrays_tables_and_compressed_files(tmp_path, tokenizer, name, data):
    (tmp_path / name).write_bytes(data)
    prompts = load(str(tmp_path / name), tokenizer)
    assert [(p.text, p.answer, p.meta["line"]) for p in prompts] == [("1+1=", "2", 1), ("2+2=", "4", 2)]


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.json", b'[{"a": 1}'), ("a.jsonl.gz", b"no gzip"), ("a.csv", b"question,answer\n\xff,1\n"),
     ("a.csv.gz", gzip.compress(CSV.encode())[:-9])],
)  # fmt: skip
def test_damaged_files_are_named(tmp_path, tokenizer, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name} (cannot be read|begins like a JSON array)"):
        load(str(tmp_path / name), tokenizer)


def test_folders_and_patterns(tmp_path, tokenizer):
    """All files of a folder without splits, one split of a folder that has them; rows are counted on."""
    for name, question in (("shards/b", "2+2="), ("shards/a", "1+1="), ("set/train-0", "3+3="), ("set/test-0", "4+4=")):
        parquet(tmp_path / f"{name}.parquet", question)
    (tmp_path / "shards/notes.txt").write_text("not a row")
    for path in (tmp_path / "shards", tmp_path / "shards/*.parquet"):
        prompts = load(str(path), tokenizer)
        assert [(p.text, p.meta["line"]) for p in prompts] == [("1+1=", 1), ("2+2=", 2)]
        assert prompts.report.files == [str(tmp_path / "shards" / name) for name in ("a.parquet", "b.parquet")]
    assert [p.text for p in load(str(tmp_path / "set"), tokenizer, split="test")] == ["4+4="]
    parquet(tmp_path / "set/.ipynb_checkpoints/train-0.parquet", "5+5=")
    assert [p.text for p in load(str(tmp_path / "set"), tokenizer)] == ["3+3="]
    parquet(tmp_path / "set/more/train-0.parquet", "6+6=")
    with pytest.raises(DataError, match=r"several configurations \(more, \.\)"):
        load(str(tmp_path / "set"), tokenizer)
    assert [p.text for p in load(str(tmp_path / "set"), tokenizer, configuration=".")] == ["3+3="]
    with pytest.raises(DataError, match="no file matches"):
        load(str(tmp_path / "none*.jsonl"), tokenizer)
