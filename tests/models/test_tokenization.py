import pickle

import pytest
from tiny_encoder import tiny_tokenizer

from gc_dpr.data.records import Passage
from gc_dpr.errors import ConfigError
from gc_dpr.models import PassageTokenizer, QuestionTokenizer, TextEncoder
from gc_dpr.models.tokenization import TextTokenizer, tokenizer_digest

from .conftest import PAIRS, TEXTS


def ids(tokenized):
    return [row.tolist() for row in tokenized.tokens.ids.split(tokenized.tokens.lengths.tolist())]


@pytest.mark.parametrize("max_length", [8, 15, 20, 64])
def test_same_ids_as_the_hugging_face_call(max_length):
    reference = tiny_tokenizer()
    tokenized = TextTokenizer(tiny_tokenizer(), max_length=max_length)([*TEXTS, *PAIRS])
    expected, cut = [], 0
    for batch in ([TEXTS], [*zip(*PAIRS, strict=True)]):
        batch = [list(part) for part in batch]
        expected += reference(*batch, truncation=True, max_length=max_length)["input_ids"]
        cut += sum(len(row) > max_length for row in reference(*batch, verbose=False)["input_ids"])
    assert ids(tokenized) == expected
    assert tokenized.truncated == cut
    if max_length < 64:
        assert cut > 0


def test_exactly_full_is_not_cut():
    tokenize = TextTokenizer(tiny_tokenizer(), max_length=5)
    assert tokenize(["a the of"]).truncated == 0
    assert tokenize(["a the of to"]).truncated == 1


def test_stored_padding_and_truncation_are_ignored():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_padding(length=30)
    tokenizer.backend_tokenizer.enable_truncation(4)
    assert TextTokenizer(tokenizer, max_length=10)(["a the of to in"]).tokens.lengths.tolist() == [
        7
    ]
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 4  # the caller's is untouched


def test_empty_input_and_empty_strings():
    tokenize = TextTokenizer(tiny_tokenizer(), max_length=10)
    assert len(tokenize([]).tokens) == 0
    assert ids(tokenize([""])) == [[2, 3]]


def test_pad_token_in_the_text_stays_visible():
    """B15: the mask comes from the lengths."""
    tokens = TextTokenizer(tiny_tokenizer(), max_length=10)(["a [PAD] the", "a"]).tokens
    chunk = tokens.pad(tokens.lengths.argsort(descending=True), pad_token_id=0)
    assert chunk["input_ids"][0, 2] == 0
    assert chunk["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]


def test_roberta_vocabulary(tiny_roberta_dir):
    """B15: pad=1 and cls=0; the first token must be visible."""
    encoder = TextEncoder.from_pretrained(tiny_roberta_dir)
    tokens = encoder.tokenize(["ab", "abc <pad> d"]).tokens
    chunk = tokens.pad(tokens.lengths.new_tensor([0, 1]), pad_token_id=encoder.pad_token_id)
    assert encoder.pad_token_id == 1
    assert chunk["input_ids"][:, 0].tolist() == [0, 0]
    assert chunk["input_ids"][0, 4:].unique().tolist() == [1]
    assert chunk["attention_mask"].sum(1).tolist() == tokens.lengths.tolist()
    assert chunk["attention_mask"][:, 0].tolist() == [1, 1]


def test_questions_are_stripped():
    tokenize = QuestionTokenizer(tiny_tokenizer(), max_length=10)
    tokenizer = tiny_tokenizer()
    assert ids(tokenize(["  who\n", "who"])) == [tokenizer("who")["input_ids"]] * 2


def test_pair_is_title_then_text():
    tokenizer = tiny_tokenizer()
    tokenize = PassageTokenizer(tokenizer, max_length=20, title_format="pair")
    passages = [
        Passage("7", "bridge", " a stone "),
        ("bridge", "a stone"),
        ("", "a stone"),
        "a stone",
    ]
    pair, single = tokenizer("bridge", "a stone")["input_ids"], tokenizer("a stone")["input_ids"]
    assert ids(tokenize(passages)) == [pair, pair, single, single]


def test_space_joins_title_and_text():
    tokenizer = tiny_tokenizer()
    tokenize = PassageTokenizer(tokenizer, max_length=20, title_format="space")
    expected = [tokenizer("bridge a stone")["input_ids"], tokenizer("a stone")["input_ids"]]
    assert ids(tokenize([("bridge", " a stone"), ("", "a stone")])) == expected


def test_tokenizers_are_light_and_picklable():
    tokenize = PassageTokenizer(tiny_tokenizer(), max_length=9, title_format="pair")
    copy = pickle.loads(pickle.dumps(tokenize))
    assert ids(copy(PAIRS)) == ids(tokenize(PAIRS))
    assert (copy.max_length, copy.title_format) == (9, "pair")


@pytest.mark.parametrize(
    ("texts", "match"),
    [("one text", r"write \[text\]"), ([None], "found None"), ([("a", "b", "c")], "found")],
)
def test_wrong_inputs(texts, match):
    with pytest.raises(TypeError, match=match):
        TextTokenizer(tiny_tokenizer(), max_length=9)(texts)


def test_single_strings_are_refused():
    with pytest.raises(TypeError, match="sequence of questions"):
        QuestionTokenizer(tiny_tokenizer(), max_length=9)("who")
    with pytest.raises(TypeError, match="sequence of passages"):
        PassageTokenizer(tiny_tokenizer(), max_length=9, title_format="pair")("who")


def test_wrong_settings():
    with pytest.raises(ConfigError, match="at least 4"):
        TextTokenizer(tiny_tokenizer(), max_length=3)
    with pytest.raises(ConfigError, match="pair, space; found 'tab'"):
        PassageTokenizer(tiny_tokenizer(), max_length=9, title_format="tab")
    with pytest.raises(ConfigError, match="has no fast"):
        TextTokenizer(object(), max_length=9)


def test_digest_sees_vocabulary_and_behaviour():
    from tokenizers import normalizers, processors

    digest = tokenizer_digest(tiny_tokenizer())
    assert digest == tokenizer_digest(tiny_tokenizer())
    padded = tiny_tokenizer()
    padded.backend_tokenizer.enable_padding(length=30)
    padded.backend_tokenizer.enable_truncation(4)
    assert tokenizer_digest(padded) == digest
    cased, grown, other_template = tiny_tokenizer(), tiny_tokenizer(), tiny_tokenizer()
    cased.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    grown.add_tokens(["zebra"])
    other_template.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A $B", special_tokens=[("[CLS]", 2)]
    )
    assert len({digest, *map(tokenizer_digest, (cased, grown, other_template))}) == 4
