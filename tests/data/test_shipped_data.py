"""The data sets in data/ are what data/README.md says."""

from pathlib import Path

import pytest

from gc_dpr.data import load_training_set, passages_by_id, read_questions, scan_corpus

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize(
    ("name", "passages", "train", "dev", "dev_questions", "test_questions"),
    [("factbook", 2025, 900, 136, 136, 331), ("squad_sample", 1574, 600, 100, 100, 400)],
)
def test_numbers(name, passages, train, dev, dev_questions, test_questions):
    folder = DATA / name
    assert scan_corpus(folder / "passages.tsv").rows == passages
    for file, count in (("train.json", train), ("dev.json", dev)):
        found = load_training_set(folder / file)
        assert (found.read, len(found), found.repeated_ids) == (count, count, 0)
        assert found.hard_negatives_available == (1, 1, 1)
    for file, count in (("qas-dev.csv", dev_questions), ("qas-test.csv", test_questions)):
        questions = list(read_questions(folder / file))
        assert len(questions) == count
        assert all(question.answers for question in questions)


@pytest.mark.parametrize("name", ["factbook", "squad_sample"])
def test_training_passages_are_those_of_the_corpus(name):
    examples = load_training_set(DATA / name / "train.json").examples
    used = {p.id: p for e in examples for p in (*e.positives, *e.hard_negatives)}
    assert passages_by_id(DATA / name / "passages.tsv", used) == used


def test_no_factbook_test_passage_is_trained_on():
    rows = (DATA / "factbook" / "qrels.tsv").read_text(encoding="utf-8").splitlines()[1:]
    test_ids = {row.split("\t")[1] for row in rows}
    examples = load_training_set(DATA / "factbook" / "train.json").examples
    trained = {p.id for e in examples for p in (*e.positives, *e.hard_negatives)}
    assert len(rows) == 331
    assert not test_ids & trained
