"""Any JSON: the readers built on fields give records or a fault with its place."""

import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gc_dpr.data.readers.fields import numbered_fields
from gc_dpr.data.readers.flag_embedding_jsonl import numbered_flag_embedding
from gc_dpr.data.readers.squad_json import numbered_squad
from gc_dpr.data.readers.tevatron_jsonl import numbered_tevatron
from gc_dpr.errors import DataError

KEYS = (
    "query query_id positive_passages negative_passages docid title text answers pos neg pos_id "
    "neg_scores prompt id data paragraphs context qas question is_impossible other"
).split()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("a\u00e9", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=12,
)
PASSAGE = {"docid": "1", "title": "t", "text": "x"}
QUESTION = {"id": "q", "question": "who?", "answers": [{"text": "x"}]}
GOOD = {
    numbered_tevatron: {
        "query_id": "q",
        "query": "who?",
        "positive_passages": [PASSAGE],
        "negative_passages": [PASSAGE],
    },
    numbered_flag_embedding: {"query": "who?", "pos": ["x"], "neg": ["x"], "pos_id": ["1"]},
    numbered_squad: {"data": [{"title": "t", "paragraphs": [{"context": "x", "qas": [QUESTION]}]}]},
}


def places(value):
    """Every (container, key or index) inside a JSON value."""
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    for step, inner in list(steps):
        yield value, step
        if isinstance(inner, dict | list):
            yield from places(inner)


def outcome(reader, path):
    """The records, or what was refused; any other exception is the reader's fault."""
    try:
        return list(reader(path)), None
    except DataError as error:
        return [], error


@pytest.mark.parametrize("reader", GOOD, ids=lambda reader: reader.__name__)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(data=st.data())
def test_any_change_is_read_or_refused_with_its_place(reader, data, tmp_path):
    record = json.loads(json.dumps(GOOD[reader]))
    holder, step = data.draw(st.sampled_from(list(places(record))))
    holder[step] = data.draw(VALUES)
    path = tmp_path / "file.json"
    path.write_text("\n" + json.dumps(record), encoding="utf-8")
    read, error = outcome(reader, path)
    if error:
        assert (error.path, error.line) == (path, 2)
        assert "expected" in str(error)
    else:
        assert all(line == 2 for line, _ in read)
        assert len(read) == 1 or reader is numbered_squad


@pytest.mark.parametrize("reader", GOOD, ids=lambda reader: reader.__name__)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(record=st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_object_is_read_or_refused_with_its_place(reader, record, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    _, error = outcome(reader, path)
    assert error is None or (error.path, error.line) == (path, 1)


def test_unknown_keys_are_counted_without_growing_without_end(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "file.jsonl"
    path.write_text("".join(f'{{"key{i}": 1}}\n' for i in range(1000)), encoding="utf-8")
    for _, record in numbered_fields(path):
        record.count_others(frozenset({"key0"}))
    assert "further keys (969)" in caplog.text
    assert caplog.text.count("(1)") == 30


def test_what_was_counted_is_logged_when_reading_stops_early(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "file.jsonl"
    path.write_text('{"a": 1}\n{"b": 1}\n', encoding="utf-8")
    records = numbered_fields(path)
    next(records)[1].count_others(frozenset())
    records.close()
    assert "not kept: a (1)" in caplog.text
