"""Answers in a batch's passages: against has_answer pair by pair, in blocks, over processes."""

import hashlib
import json
import pickle
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gc_dpr.data.answer_words import MULTIPLIER, hash_answers, hash_passages, matching_words
from gc_dpr.data.known_answers import (
    KnownAnswers,
    contained_answers,
    either,
    find_answers,
    known_answers,
)
from gc_dpr.distributed import rank
from gc_dpr.evaluation import answer_matching, has_answer
from gc_dpr.losses import in_batch_nll
from tests.helpers.distributed_run import run_distributed

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_ROWS = [
    row
    for row in map(json.loads, (GOLDEN / "answer_match.jsonl").read_text("utf-8").splitlines())
    if row["match_type"] == "string"
]


def integers(values):
    return torch.tensor(values, dtype=torch.int64)


def pairs(answers, texts, min_letters=0):
    rows, passages = contained_answers(
        answers, [("title", text) for text in texts], min_letters=min_letters
    )
    assert rows.dtype == passages.dtype == torch.int64
    return list(zip(rows.tolist(), passages.tolist(), strict=True))


def by_definition(answers, texts):
    return [
        (row, passage)
        for row, accepted in enumerate(answers)
        for passage, text in enumerate(texts)
        if has_answer(accepted, text, empty_answers="ignore")
    ]


@pytest.mark.parametrize("row", GOLDEN_ROWS, ids=lambda row: row["id"])
def test_golden_rows(row):
    """What DPR recorded; but an answer without words, which matches all there, is ignored."""
    found = pairs([row["answers"]], [row["text"]]) == [(0, 0)]
    assert found == has_answer(row["answers"], row["text"], empty_answers="ignore")
    if all(matching_words(answer) for answer in row["answers"]):
        assert found == row["expected"]


def test_golden_rows_in_one_batch():
    """Every question against every passage, also where another question has the same answer."""
    answers = [row["answers"] for row in GOLDEN_ROWS]
    texts = [row["text"] for row in GOLDEN_ROWS]
    wanted = by_definition(answers, texts)
    assert len(wanted) > len(texts) / 2
    assert pairs(answers, texts) == wanted


TEXTS = st.text(
    st.sampled_from("ab Z1.-'\u00c9e\u0301\u03a3\u03c2\u03c3\u4e1c\u20ac\t\x00\ud800")
    | st.characters(),
    max_size=14,
)


@settings(deadline=None)
@given(TEXTS)
def test_words_are_those_of_evaluation(text):
    assert matching_words(text) == answer_matching.matching_words(text)


@settings(deadline=None)
@given(st.lists(st.lists(TEXTS, max_size=3), max_size=4), st.lists(TEXTS, max_size=5))
def test_matches_equal_the_definition(answers, texts):
    assert pairs(answers, texts) == by_definition(answers, texts)


WORDS = st.lists(st.sampled_from("abc"), max_size=9).map(" ".join)


@settings(deadline=None)
@given(st.lists(st.lists(WORDS, max_size=3), max_size=4), st.lists(WORDS, max_size=5))
def test_few_words_in_many_orders(answers, texts):
    assert pairs(answers, texts) == by_definition(answers, texts)


def test_an_answer_does_not_run_into_the_next_passage():
    texts = ["ends with New", "York begins it", "", "New", "", "York", "New York"]
    assert pairs([["New York"], ["York New"]], texts) == [(0, 6)]


def test_titles_are_not_searched():
    rows, passages = contained_answers([["Lisbon"]], [("Lisbon", "A harbour."), ("", "Lisbon")])
    assert (rows.tolist(), passages.tolist()) == ([0], [1])


@pytest.mark.parametrize(
    ("answer", "usable"),
    [
        ("7", False),
        ("US", False),
        ("U.S.", False),
        ("1987", True),
        ("100", True),
        ("The", False),
        ("to be", False),
        ("Yes", False),
        ("of 12", False),
        ("the sun", True),
        ("\u00c9ze", True),
        ("e\u0301\u0302z", False),  # two letters, two accents
        ("\u4e1c", False),
        ("\u5317\u4eac", True),
        ("?!...", False),
        (" ", False),
        ("", False),
    ],
)
def test_answers_that_match_by_chance_are_ignored(answer, usable):
    hashed = hash_answers([[answer]])
    assert (len(hashed.answers), hashed.ignored) == (usable, not usable)
    assert hashed.questions_without == (not usable)
    assert len(hash_answers([[answer]], min_letters=0).answers) == bool(matching_words(answer))


def test_what_is_ignored_is_counted():
    hashed = hash_answers(
        [["New York", "new york", "NEW  YORK", "NY", "NY"], [], ["7", "8"], ["Lisbon", "Lisboa"]]
    )
    assert hashed.answers[:, :2].tolist() == [[0, 2], [3, 1], [3, 1]]
    assert (hashed.ignored, hashed.questions_without) == (3, 2)
    longer = hash_answers([["Lisbon", "Lisboans"]], min_letters=7)
    assert (longer.answers[:, 1].tolist(), longer.ignored) == ([1], 1)


def test_hashes_are_the_same_on_every_machine():
    """Processes compare them; by the formula, and once computed."""
    new, york = (
        int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "big", signed=True)
        for word in (b"new", b"york")
    )
    assert hash_passages(["New York"]).words.tolist() == [new, york]
    joined = hash_answers([["New York"]]).answers.tolist()
    assert joined == [[0, 2, -6098508383648550362, new]]
    assert joined[0][2] % 2**64 == (new * MULTIPLIER + york) % 2**64


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"answers\[1\] is the string 'Ulm'"):
        contained_answers([["Ulm"], "Ulm"], [])
    with pytest.raises(ValueError, match="min_letters=-1"):
        contained_answers([], [], min_letters=-1)
    with pytest.raises(ValueError, match="add up to the 2 words, found 3"):
        find_answers(integers([]).view(0, 4), integers([1, 2]), integers([3]))
    with pytest.raises(ValueError, match="same length"):
        KnownAnswers(integers([1]), integers([]), integers([0]), width=1)
    with pytest.raises(ValueError, match=r"columns must lie in 0..1, found values from 0 to 2"):
        KnownAnswers(integers([0, 0]), integers([0, 2]), integers([0]), width=2)


@settings(deadline=None)
@given(data=st.data())
def test_blocks_equal_the_definition(data):
    width = data.draw(st.integers(1, 9))
    height = data.draw(st.integers(0, 6))
    labels = [data.draw(st.integers(0, width - 1)) for _ in range(height)]
    places = st.tuples(st.integers(0, height - 1), st.integers(0, width - 1))
    matches = data.draw(st.lists(places, max_size=20)) if height else []
    excluded = KnownAnswers(
        integers([row for row, _ in matches]),
        integers([column for _, column in matches]),
        integers(labels),
        width=width,
    )
    expected = torch.zeros(height, width, dtype=torch.bool)
    for row, column in matches:
        expected[row, column] = column != labels[row]
    assert excluded.count == expected.sum()
    whole = slice(None)
    assert torch.equal(excluded(whole, whole), expected)
    for size in (1, 2, 4, 100):
        for r in range(0, height + 1, size):
            for c in range(0, width + 1, size):
                block = slice(r, r + size), slice(c, c + size)
                assert torch.equal(excluded(*block), expected[block])


def batch_of(questions, first=0):
    """(answers, candidates) per question to what a process holds of it; passages stand once."""
    candidates = [text for _, texts in questions for text in texts]
    distinct = list(dict.fromkeys(candidates))
    starts = [sum(len(texts) for _, texts in questions[:i]) for i in range(len(questions))]
    hashed = hash_passages(distinct)
    return {
        "answers": hash_answers([answers for answers, _ in questions]).answers,
        "words": hashed.words,
        "word_counts": hashed.counts,
        "passage_rows": integers([distinct.index(text) for text in candidates]),
        "positive_index": integers(starts),
    }


def random_questions(count, seed=0):
    generator = random.Random(seed)
    names = ["Ulm", "New York", "York", "Lisbon", "new york city", "Rio", "N'Djamena"]

    def text():
        return " ".join(generator.choices([*names, "harbour", "and", "1987"], k=6))

    shared = [text() for _ in range(6)]  # positives and negatives that several questions have
    return [
        (
            generator.sample(names, generator.randint(0, 2)),
            [generator.choice([*shared, text(), text()]) for _ in range(generator.randint(1, 3))],
        )
        for _ in range(count)
    ]


def mask_by_definition(questions):
    columns = [(q, text) for q, (_, texts) in enumerate(questions) for text in texts]
    labels = [
        next(c for c, (owner, _) in enumerate(columns) if owner == q) for q in range(len(questions))
    ]
    return torch.tensor(
        [
            [
                has_answer(answers, text) and column != label
                for column, (_, text) in enumerate(columns)
            ]
            for (answers, _), label in zip(questions, labels, strict=True)
        ]
    )


def test_whole_batch_on_one_process():
    questions = random_questions(17)
    excluded = known_answers(**batch_of(questions))
    mask = mask_by_definition(questions)
    assert torch.equal(excluded(slice(None), slice(None)), mask)
    assert excluded.count == mask.sum() > 20


def test_batch_without_rows_without_answers_without_passages():
    assert known_answers(**batch_of([]))(slice(None), slice(None)).shape == (0, 0)
    silent = known_answers(**batch_of([([], ["Ulm", "Rio"]), ([], ["Ulm"])]))
    assert (silent.count, silent(slice(None), slice(None)).shape) == (0, (2, 3))
    blank = known_answers(**batch_of([(["Ulm"], ["", "", "Ulm"])]))
    assert blank(slice(None), slice(None)).tolist() == [[False, False, True]]


def own_rows(questions, shares):
    begin = sum(shares[: rank()])
    excluded = known_answers(**batch_of(questions[begin : begin + shares[rank()]]))
    return excluded(slice(None), slice(None))


@pytest.mark.parametrize("shares", [(9, 8), (17, 0), (0, 17)])
def test_processes_do_not_change_the_mask(shares):
    """Shares of unequal size, also an empty one; a passage of several processes' batches."""
    questions = random_questions(17)
    rows = run_distributed(own_rows, 2, questions, shares)
    assert torch.equal(torch.cat(rows), mask_by_definition(questions))


def test_either_joins_and_the_loss_takes_it():
    questions = random_questions(12)
    by_answer = known_answers(**batch_of(questions))
    width = len(mask_by_definition(questions)[0])
    other = KnownAnswers(
        integers([0, 3]), integers([4, 5]), batch_of(questions)["positive_index"], width=width
    )
    joined = either(by_answer, None, other)
    wanted = mask_by_definition(questions)
    wanted[0, 4] = wanted[3, 5] = True
    assert torch.equal(joined(slice(None), slice(None)), wanted)
    assert torch.equal(
        pickle.loads(pickle.dumps(joined))(slice(2, 5), slice(3, 9)), wanted[2:5, 3:9]
    )
    assert either(by_answer) is by_answer
    assert either(None, None) is None

    reps = torch.randn(12, 4), torch.randn(width, 4)
    labels = batch_of(questions)["positive_index"]
    losses = [
        in_batch_nll(*reps, labels, excluded=excluded).loss.item() for excluded in (joined, wanted)
    ]
    scores = (reps[0] @ reps[1].T).masked_fill(wanted, -torch.inf)
    losses.append(torch.nn.functional.cross_entropy(scores, labels).item())
    assert losses == pytest.approx([losses[0]] * 3)


def test_what_is_held_grows_with_the_matches():
    questions = [(["Ulm"] if q == 0 else ["Rio"], [f"Ulm {q}"]) for q in range(1500)]
    excluded = known_answers(**batch_of(questions))
    assert excluded.count == 1499
    assert len(pickle.dumps(excluded)) < 20_000
