"""The training set: examples without positives (TRAPS B1), ids, counts (B8)."""

import json
import logging

import pytest

from gc_dpr.data import load_training_set
from gc_dpr.data.training_set import Available
from gc_dpr.errors import DataError


def record(question, positives=1, hard=0, other=0, **more):
    def passages(kind, count):
        return [{"title": kind, "text": f"{question} {kind} {i}"} for i in range(count)]

    return {
        "question": question,
        "answers": [],
        "positive_ctxs": passages("positive", positives),
        "hard_negative_ctxs": passages("hard", hard),
        "negative_ctxs": passages("other", other),
        **more,
    }


def write(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(records, indent=0), encoding="utf-8")
    return path


def test_example_without_positives_is_dropped_and_counted(tmp_path, caplog):
    """B1: three records, the middle one without positives."""
    path = write(tmp_path / "train.json", [record("a"), record("b", positives=0), record("c")])
    found = load_training_set(path)
    assert [example.id for example in found.examples] == ["train.json#0", "train.json#2"]
    assert (len(found), found.read, found.without_positives, found.paths) == (2, 3, 1, [path])
    [line] = [entry for entry in caplog.records if "training examples" in entry.message]
    assert line.levelno == logging.WARNING
    assert "3 read, 2 kept, 1 dropped without a positive passage" in line.message


def test_example_without_positives_can_be_an_error(tmp_path):
    text = "\n".join(json.dumps(r) for r in (record("a"), record("b", positives=0)))
    path = tmp_path / "train.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(
        DataError, match=r"no positive passage .*on_missing_positives=skip"
    ) as caught:
        load_training_set(path, on_missing_positives="error")
    assert (caught.value.path, caught.value.line) == (path, 2)


@pytest.mark.parametrize(("records", "count"), [([], 0), ([record("a", positives=0)] * 3, 3)])
def test_nothing_left_to_train_on(tmp_path, records, count):
    path = write(tmp_path / "train.json", records)
    with pytest.raises(DataError, match=f"no training example left: {count} read.*{count} of them"):
        load_training_set(path)


def test_available_negatives(tmp_path):
    """B8: what the trainer prints at the start."""
    records = [record("a", hard=10), record("b", hard=1, other=2), record("c", hard=2)]
    records.append(record("dropped", positives=0, hard=99))
    found = load_training_set(write(tmp_path / "t.json", records))
    assert found.hard_negatives_available == Available(min=1, median=2.0, max=10)
    assert found.random_negatives_available == Available(min=0, median=0.0, max=2)


def test_max_examples_counts_kept_examples(tmp_path):
    records = [record("a", positives=0), record("b"), record("c"), record("d")]
    found = load_training_set(write(tmp_path / "t.json", records), max_examples=2)
    assert [example.question for example in found.examples] == ["b", "c"]
    assert (found.read, found.without_positives) == (3, 1)
    with pytest.raises(ValueError, match="at least 1"):
        load_training_set(tmp_path / "t.json", max_examples=0)
    with pytest.raises(ValueError, match="expected skip or error"):
        load_training_set(tmp_path / "t.json", on_missing_positives="drop")


def test_repeated_ids_become_unique_and_do_not_depend_on_what_is_dropped(tmp_path, caplog):
    write(tmp_path / "x" / "t.json", [record("a"), record("b", id="q~2"), record("c", id="q")])
    write(tmp_path / "y" / "t.json", [record("d"), record("e", 0, id="q"), record("f", id="q")])
    paths = [tmp_path / "x" / "t.json", tmp_path / "y" / "t.json"]
    found = load_training_set(paths)
    ids = {example.question: example.id for example in found.examples}
    assert ids == {"a": "t.json#0", "b": "q~2", "c": "q", "d": "t.json#0~2", "f": "q~4"}
    assert found.repeated_ids == 3
    assert "3 examples repeat an id" in caplog.text
    write(paths[1], [record("d"), record("e", 1, id="q"), record("f", id="q")])
    again = {example.question: example.id for example in load_training_set(paths).examples}
    assert again == {**ids, "e": "q~3"}
