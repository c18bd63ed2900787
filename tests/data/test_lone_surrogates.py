"""JSON can spell half a character; no tokenizer can read it."""

import pytest

from gc_dpr.data import read_questions, read_training_examples
from gc_dpr.errors import DataError


@pytest.mark.parametrize("half", ["\\ud800", "\\uDC00 x"])
def test_half_a_character_is_refused_with_its_line(tmp_path, half):
    train = tmp_path / "train.jsonl"
    train.write_text(
        '{"question": "a", "positive_ctxs": [{"text": "b"}]}\n'
        f'{{"question": "{half}", "positive_ctxs": [{{"text": "b"}}]}}\n'
    )
    with pytest.raises(DataError, match=r"train\.jsonl:2: .*half of a character"):
        list(read_training_examples(train))
    questions = tmp_path / "questions.jsonl"
    questions.write_text(f'{{"question": "a"}}\n{{"question": "{half}"}}\n')
    with pytest.raises(DataError, match=r"questions\.jsonl:2: .*half of a character"):
        list(read_questions(questions))


def test_whole_characters_in_two_escapes_are_read(tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "moon \\ud83c\\udf19"}\n')
    assert [question.text for question in read_questions(questions)] == ["moon \U0001f319"]
