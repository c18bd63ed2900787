"""The passages of an example: pure draws, ragged numbers (TRAPS B7), no positive as negative."""

from collections import Counter

import pytest

from gc_dpr.data import Passage, TrainingExample
from gc_dpr.data.identity import normalized_text, passage_key
from gc_dpr.data.sampling import choose_passages


def passages(kind, count):
    return tuple(Passage(f"{kind}{i}", f"title {kind}", f"text {kind} {i}") for i in range(count))


def example(example_id="q", positives=3, hard=5, other=4):
    return TrainingExample(
        example_id, "?", (), passages("p", positives), passages("h", hard), passages("r", other)
    )


def ids(chosen):
    return [chosen.positive.id, *(passage.id for passage in chosen.negatives)]


def test_first_takes_the_order_of_the_file_in_every_epoch():
    for epoch in range(3):
        chosen = choose_passages(
            example(), seed=1, epoch=epoch, hard_negatives=2, random_negatives=1
        )
        assert ids(chosen) == ["p0", "h0", "h1", "r0"]
        assert chosen.passed_over == 0


def random_ids(seed=1, epoch=0, hard=2, other=1, example_id="q"):
    chosen = choose_passages(
        example(example_id),
        seed=seed,
        epoch=epoch,
        hard_negatives=hard,
        random_negatives=other,
        positive_choice="random",
        negative_choice="random",
    )
    return ids(chosen)


def test_random_draws_depend_on_seed_epoch_and_example_only():
    first = random_ids()
    random_ids(seed=9)  # another draw in between changes nothing
    assert random_ids() == first
    assert len({tuple(random_ids(epoch=epoch)) for epoch in range(20)}) > 10
    assert len({tuple(random_ids(seed=seed)) for seed in range(20)}) > 10
    assert len({tuple(random_ids(example_id=str(i))) for i in range(20)}) > 10


def test_random_draws_are_the_same_on_every_machine():
    """Computed once; a change here would change every run that is resumed."""
    assert [random_ids(epoch=epoch) for epoch in range(3)] == [
        ["p1", "h0", "h3", "r3"],
        ["p2", "h2", "h0", "r0"],
        ["p2", "h3", "h2", "r2"],
    ]


def test_random_draws_are_uniform():
    counts = Counter(name for epoch in range(2000) for name in random_ids(epoch=epoch, hard=1)[:2])
    for kind, number in (("p", 3), ("h", 5)):
        for i in range(number):
            assert abs(counts[f"{kind}{i}"] - 2000 / number) < 5 * (2000 / number) ** 0.5


def test_asking_for_more_keeps_the_others():
    for epoch in range(10):
        few, more = random_ids(epoch=epoch, hard=1, other=0), random_ids(epoch=epoch, hard=3)
        assert more[:2] == few
        assert len(set(more)) == 5


def test_fewer_negatives_than_asked_give_fewer():
    chosen = choose_passages(
        example(hard=1, other=0), seed=0, epoch=0, hard_negatives=3, random_negatives=2
    )
    assert ids(chosen) == ["p0", "h0"]


def test_random_negatives_do_not_stand_in_for_hard_ones():
    chosen = choose_passages(example(hard=0), seed=0, epoch=0, hard_negatives=2)
    assert ids(chosen) == ["p0"]


def rotated(subject, epoch, hard, other=0, fill=False, seed=0):
    return choose_passages(
        subject,
        seed=seed,
        epoch=epoch,
        hard_negatives=hard,
        random_negatives=other,
        negative_choice="rotate",
        fill_with_random=fill,
    )


def test_rotate_goes_on_where_the_last_epoch_ended():
    chosen = [ids(rotated(example(), epoch, 2, 3)) for epoch in range(4)]
    assert chosen == [
        ["p0", "h0", "h1", "r0", "r1", "r2"],
        ["p0", "h2", "h3", "r3", "r0", "r1"],
        ["p0", "h4", "h0", "r2", "r3", "r0"],
        ["p0", "h1", "h2", "r1", "r2", "r3"],
    ]


@pytest.mark.parametrize("available", range(1, 8))
@pytest.mark.parametrize("asked", range(1, 9))
def test_rotate_uses_all_evenly_and_none_twice_at_once(available, asked):
    counts = Counter()
    for epoch in range(available):
        chosen = rotated(example(hard=available), epoch, asked).negatives
        assert len({passage.id for passage in chosen}) == len(chosen) == min(asked, available)
        counts.update(passage.id for passage in chosen)
    assert counts == {f"h{i}": min(asked, available) for i in range(available)}


def test_rotate_depends_on_the_epoch_only():
    """Not on the seed, on the id of the example, or on which epochs were asked for before."""
    chosen = ids(rotated(example(), 1000, 2))
    assert chosen == ids(rotated(example(), 1000, 2, seed=7))
    assert chosen == ids(rotated(example("other"), 1000, 2)) == ["p0", "h0", "h1"]


def test_rotate_is_even_where_the_file_repeats_itself():
    """The neighbours of what is passed over get no second turn; its copies get none."""
    positive = Passage("p", "", "positive")
    a, b, c, d = (Passage(name, "", name) for name in "abcd")
    subject = TrainingExample("q", "?", (), (positive,), (a, positive, b, a, c), (b, d, d))
    counts = Counter()
    for epoch in range(3):
        chosen = rotated(subject, epoch, 1, 1)
        assert chosen.passed_over == 4
        counts.update(passage.id for passage in chosen.negatives)
    assert counts == {"a": 1, "b": 1, "c": 1, "d": 3}
    assert [ids(rotated(subject, epoch, 0, 1))[1] for epoch in range(2)] == ["b", "d"]


def filled(subject, hard, other=0, **options):
    return choose_passages(
        subject,
        seed=0,
        hard_negatives=hard,
        random_negatives=other,
        fill_with_random=True,
        **{"epoch": 0, **options},
    )


@pytest.mark.parametrize(
    ("hard", "other", "wanted", "number"),
    [
        (0, 4, ["r0", "r1", "r2"], 2),  # two for the missing hard ones, after the one asked for
        (1, 4, ["h0", "r0", "r1"], 1),
        (5, 4, ["h0", "h1", "r0"], 0),
        (0, 1, ["r0"], 0),  # the one asked for anyway stands in for nothing
        (0, 0, [], 0),
        (1, 0, ["h0"], 0),
    ],
)
def test_random_negatives_fill_up_on_demand(hard, other, wanted, number):
    chosen = filled(example(hard=hard, other=other), 2, 1)
    assert [passage.id for passage in chosen.negatives] == wanted
    assert chosen.filled == number


def test_filling_takes_the_drawn_order_and_keeps_the_others():
    for epoch in range(5):
        options = {"epoch": epoch, "negative_choice": "random"}
        chosen = filled(example(hard=1), 3, 1, **options)
        without = choose_passages(
            example(hard=1), seed=0, hard_negatives=3, random_negatives=1, **options
        )
        assert ids(chosen)[:3] == ids(without)
        assert (chosen.filled, without.filled, len(ids(chosen))) == (2, 0, 5)


def test_filling_rotates_too():
    counts = Counter()
    for epoch in range(4):
        chosen = rotated(example(hard=1), epoch, 2, 1, fill=True)
        assert chosen.filled == 1
        counts.update(passage.id for passage in chosen.negatives)
    assert counts == {"h0": 4, "r0": 2, "r1": 2, "r2": 2, "r3": 2}


def test_filling_never_takes_a_positive_or_a_hard_negative_again():
    a, b = Passage("a", "", "a"), Passage("b", "", "b")
    subject = TrainingExample("q", "?", (), passages("p", 1), (a,), (a, passages("p", 1)[0], b))
    chosen = filled(subject, 3)
    assert (chosen.negatives, chosen.filled, chosen.passed_over) == ((a, b), 1, 2)


def test_no_negative_is_a_positive_or_a_repetition():
    positives = (
        Passage("1", "A", "the text"),
        Passage("", "B", "other  words"),
        Passage("", "C", ""),
    )
    hard = (
        Passage("1", "X", "same id"),
        Passage("2", "Redirect", " the\ntext "),
        Passage("", "B", "other words"),
        Passage("", "C", " "),
        Passage("", "D", ""),
        Passage("", "D", ""),
        Passage("5", "A", "The text"),
        Passage("5", "A", "same id again"),
    )
    subject = TrainingExample("q", "?", (), positives, hard, (hard[6], Passage("9", "", "new")))
    chosen = choose_passages(subject, seed=0, epoch=0, hard_negatives=9, random_negatives=9)
    assert chosen.negatives == (hard[4], hard[6], Passage("9", "", "new"))
    assert chosen.passed_over == 7
    assert choose_passages(subject, seed=0, epoch=0, hard_negatives=0).negatives == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hard_negatives": -1}, "hard_negatives=-1"),
        ({"hard_negatives": 1, "positive_choice": "all"}, "positive_choice='all'"),
        ({"hard_negatives": 1, "positive_choice": "rotate"}, "positive_choice='rotate'"),
        ({"hard_negatives": 1, "negative_choice": "best"}, "negative_choice='best'.*'rotate'"),
        ({"hard_negatives": 0, "random_negatives": 2, "fill_with_random": True}, "no effect"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        choose_passages(example(), seed=0, epoch=0, **options)


def test_example_without_positive_is_refused():
    with pytest.raises(ValueError, match="'q' has no positive"):
        choose_passages(example(positives=0), seed=0, epoch=0, hard_negatives=0)


def test_passage_keys_go_by_title_and_text():
    assert normalized_text("e\u0301 \u00a0 x\n") == "\u00e9 x"
    key = passage_key(Passage("1", "T", "caf\u00e9 au lait"))
    assert key == passage_key(Passage("2", " T ", "cafe\u0301\tau  lait"))
    assert 0 <= key < 2**63
    others = [("t", "caf\u00e9 au lait"), ("T", "Caf\u00e9 au lait"), ("T caf\u00e9", "au lait")]
    assert key not in {passage_key(Passage("1", title, text)) for title, text in others}
    assert passage_key(Passage("", "a", "b")) == 6032278102983363503
