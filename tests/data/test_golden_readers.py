"""The readers against what DPR and GC-DPR returned; every wanted difference has a test by name."""

import json
from pathlib import Path

import pytest

from gc_dpr.data import read_passages, read_questions, read_training_examples
from gc_dpr.data.sampling import choose_passages
from gc_dpr.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "readers"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
DPR, GC_DPR = EXPECTED["facebookresearch/DPR"], EXPECTED["luyug/GC-DPR"]


def expected(peer, what, file):
    """The value of the run with default arguments."""
    [case] = [c for c in peer[what] if c["file"] == file and not c.get("args")]
    return case["value"]


def answers_of(case):
    answers = case["answers"]
    return tuple(answers["__tuple__"]) if isinstance(answers, dict) else tuple(answers)


@pytest.mark.parametrize("file", ["qas_basic.csv", "qas_quoted.csv", "qas_crlf.csv"])
def test_questions_equal_gc_dpr(file):
    wanted = [(case["question"], answers_of(case)) for case in expected(GC_DPR, "qas", file)]
    read = list(read_questions(GOLDEN / file))
    assert [(question.text, question.answers) for question in read] == wanted
    assert [question.id for question in read] == [str(i) for i in range(len(wanted))]


@pytest.mark.parametrize("file", ["qas_basic.csv", "qas_quoted.csv", "qas_crlf.csv"])
def test_questions_keep_the_curly_apostrophe_that_dpr_replaces(file):
    read = [question.text.replace("\u2019", "'") for question in read_questions(GOLDEN / file)]
    assert read == [case["question"] for case in expected(DPR, "qas", file)]


def test_jsonl_questions_equal_dpr_but_for_missing_ids_and_the_apostrophe():
    wanted = expected(DPR, "qas", "qas.jsonl")
    read = list(read_questions(GOLDEN / "qas.jsonl"))
    assert [q.text.replace("\u2019", "'") for q in read] == [case["question"] for case in wanted]
    assert [q.answers for q in read] == [tuple(case["answers"]) for case in wanted]
    # DPR: "a1", None, 7, None. Here ids are always strings, the row number where there is none.
    assert [q.id for q in read] == ["a1", "1", "7", "3"]


def test_blank_line_between_questions_is_skipped_where_the_peers_raise(caplog):
    read = [(q.id, q.text) for q in read_questions(GOLDEN / "qas_blank_line.csv")]
    assert read == [("0", "first"), ("1", "second")]
    assert "1 blank lines skipped" in caplog.text


def test_one_column_of_questions_is_accepted_where_the_peers_raise(caplog):
    [question] = read_questions(GOLDEN / "qas_one_col.csv")
    assert (question.text, question.answers) == ("just a question", ())
    assert "1 questions come without answers" in caplog.text


@pytest.mark.parametrize(
    ("file", "line"), [("qas_bad_literal.csv", 1), ("qas_code.csv", 1), ("qas_nonlist.csv", 1)]
)
def test_what_is_not_a_list_of_strings_is_refused_where_the_peers_evaluate_it(file, line):
    with pytest.raises(DataError, match="expected a list of strings") as caught:
        list(read_questions(GOLDEN / file))
    assert (caught.value.path, caught.value.line) == (GOLDEN / file, line)


def test_questions_in_another_column_are_refused_with_the_line():
    with pytest.raises(DataError, match="no Python literal"):
        list(read_questions(GOLDEN / "qas_cols.csv"))


@pytest.mark.parametrize("file", ["psgs_basic.tsv", "psgs_basic.tsv.gz"])
def test_passages_equal_gc_dpr_but_for_rows_it_loses(file):
    wanted = expected(GC_DPR, "psgs", file)
    read = [[p.id, p.text, p.title] for p in read_passages(GOLDEN / file)]
    # GC-DPR drops a passage called "id" and lets a later row replace an earlier one of its id.
    assert ["id", "this row is dropped: its id is the word id", "Dropped"] in read
    first = ["1", "The clock tower of Velmora was built in 1788.", "Velmora"]
    assert read[0] == first
    assert ["1", "second row with id 1 wins", "Duplicate"] in read
    as_gc_dpr = {}
    for row in read:
        if row[0] != "id":
            as_gc_dpr[row[0]] = row
    assert list(as_gc_dpr.values()) == wanted


@pytest.mark.parametrize("file", ["psgs_crlf.tsv", "psgs_noheader.tsv"])
def test_other_passage_files_equal_gc_dpr(file):
    wanted = expected(GC_DPR, "psgs", file)
    assert [[p.id, p.text, p.title] for p in read_passages(GOLDEN / file)] == wanted


def test_quotes_at_the_ends_of_a_text_are_kept_where_dpr_strips_them():
    read = [p.text.strip('"') for p in read_passages(GOLDEN / "psgs_noheader.tsv")]
    assert read == [text for _, text, _ in expected(DPR, "psgs", "psgs_noheader.tsv")]
    assert [p.text for p in read_passages(GOLDEN / "psgs_noheader.tsv")][1] == '""fully""'


def test_fourth_column_is_ignored_and_counted(caplog):
    assert "11" in [p.id for p in read_passages(GOLDEN / "psgs_basic.tsv")]
    assert "1 rows have more columns" in caplog.text


def test_blank_line_between_passages_is_skipped_where_the_peers_raise(caplog):
    assert [p.id for p in read_passages(GOLDEN / "psgs_blank_line.tsv")] == ["1", "2"]
    assert "1 blank lines skipped" in caplog.text


def test_missing_title_column_names_the_line():
    with pytest.raises(DataError, match="found 2 tab-separated columns, expected 3") as caught:
        list(read_passages(GOLDEN / "psgs_two_cols.tsv"))
    assert caught.value.line == 3


def test_unbalanced_quote_is_refused_where_the_peers_swallow_rows():
    with pytest.raises(DataError, match=r"data\.passages_quoting=none") as caught:
        list(read_passages(GOLDEN / "psgs_unbalanced.tsv"))
    assert caught.value.line == 2
    plain = list(read_passages(GOLDEN / "psgs_unbalanced.tsv", quoting="none"))
    assert [p.text for p in plain] == [
        '"opens a quote and never closes it',
        "second",
        'third "mid" quote',
    ]


def as_dpr(example):
    def pairs(passages):
        return [[p.text, p.title] for p in passages]

    return {
        "query": example.question.replace("\u2019", "'"),  # DPR replaces it, we do not
        "positive_passages": pairs(example.positives),
        "negative_passages": pairs(example.random_negatives),
        "hard_negative_passages": pairs(example.hard_negatives),
    }


def test_training_json_equals_dpr_but_for_the_example_without_positives():
    read = list(read_training_examples(GOLDEN / "train.json"))
    assert [e.question for e in read if not e.positives] == ["dropped: no positives"]
    kept = [as_dpr(example) for example in read if example.positives]
    assert kept == expected(DPR, "train", "train.json")["samples"]


def test_training_jsonl_equals_dpr():
    read = [as_dpr(example) for example in read_training_examples(GOLDEN / "train.jsonl")]
    assert read == expected(DPR, "train", "train.jsonl")["samples"]


def test_missing_and_null_titles_are_empty_strings_where_dpr_has_none():
    read = [as_dpr(example) for example in read_training_examples(GOLDEN / "train_loose.json")]
    wanted = expected(DPR, "train", "train_loose.json")["samples"]
    text = json.dumps(wanted).replace("null]", '""]')
    assert read == json.loads(text)


def test_missing_positive_ctxs_means_no_positives_where_the_peers_raise():
    [example] = read_training_examples(GOLDEN / "train_nopos_key.json")
    assert (example.question, example.positives) == ("q", ())


BATCHES = [
    case
    for case in GC_DPR["batches"]
    if case["ok"] and not case["args"].get("shuffle") and case["args"].get("insert_title", True)
]


@pytest.mark.parametrize("case", BATCHES, ids=lambda case: f"{case['file']} {case['args']}")
def test_passages_of_a_batch_equal_gc_dpr(case):
    """GC-DPR's order is positive, other, hard; here it is positive, hard, other."""
    examples = [e for e in read_training_examples(GOLDEN / case["file"]) if e.positives]
    wanted = case["value"]["contexts"]
    starts = [*case["value"]["is_positive"], len(wanted)]
    for i, example in enumerate(examples):
        chosen = choose_passages(
            example,
            seed=0,
            epoch=0,
            hard_negatives=case["args"]["nh"],
            random_negatives=case["args"]["no"],
        )
        group = wanted[starts[i] : starts[i + 1]]
        ours = [[p.text, p.title] for p in (chosen.positive, *chosen.negatives)]
        assert ours[0] == group[0]
        assert sorted(ours) == sorted(group)
    assert len(examples) == len(starts) - 1
