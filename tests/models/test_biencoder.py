import json
import logging
import shutil

import numpy as np
import pytest
import torch
from tiny_encoder import save_tiny_bert, tiny_tokenizer
from transformers import BertConfig, BertModel

from gc_dpr import __version__
from gc_dpr.data.records import Passage
from gc_dpr.errors import ArtifactError, ConfigError
from gc_dpr.models import BiEncoder, TextEncoder

from .conftest import PAIRS, TEXTS


@pytest.fixture
def model(tiny_encoder_dir):
    """Two towers that differ."""
    model = BiEncoder.initialise(tiny_encoder_dir, max_question_length=20, max_passage_length=30)
    with torch.no_grad():
        model.passage_encoder.transformer.embeddings.word_embeddings.weight.mul_(1.1)
    return model


def weight(encoder):
    return encoder.transformer.embeddings.word_embeddings.weight


def test_initialise_shared(tiny_encoder_dir):
    model = BiEncoder.initialise(tiny_encoder_dir, shared=True)
    assert model.shared
    assert model.question_encoder is model.passage_encoder
    single = sum(p.numel() for p in model.question_encoder.parameters())
    assert sum(p.numel() for p in model.parameters()) == single
    assert model.title_format == "pair"
    assert (model.max_question_length, model.max_passage_length) == (64, 64)


def test_initialise_separate_starts_equal_and_is_independent(tiny_encoder_dir):
    model = BiEncoder.initialise(tiny_encoder_dir, pooling="mean", dropout=0.0, num_layers=1)
    assert not model.shared
    assert model.question_encoder.digest() == model.passage_encoder.digest()
    with torch.no_grad():
        weight(model.question_encoder).add_(1)
    assert not torch.equal(weight(model.question_encoder), weight(model.passage_encoder))
    for encoder in (model.question_encoder, model.passage_encoder):
        assert encoder.pooling == "mean"
        assert encoder.transformer.config.num_hidden_layers == 1


def test_initialise_from_two_models(tiny_encoder_dir, tmp_path):
    save_tiny_bert(tmp_path / "other", seed=5)
    model = BiEncoder.initialise(tiny_encoder_dir, passage_name_or_path=tmp_path / "other")
    assert (
        model.passage_encoder.digest() == TextEncoder.from_pretrained(tmp_path / "other").digest()
    )
    with pytest.raises(ConfigError, match="two models are given"):
        BiEncoder.initialise(tiny_encoder_dir, passage_name_or_path=tmp_path / "other", shared=True)


def test_initialise_from_a_checkpoint(model, tmp_path):
    model.save_pretrained(tmp_path)
    again = BiEncoder.initialise(tmp_path, dropout=0.0)
    assert again.fingerprint() == model.fingerprint()
    with pytest.raises(ConfigError, match="two models are given"):
        BiEncoder.initialise(tmp_path, shared=True)


def test_different_dimensions(tiny_encoder_dir, tmp_path):
    config = BertConfig(vocab_size=187, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    BertModel(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has 32 dimensions, the passage encoder 16"):
        BiEncoder.initialise(tiny_encoder_dir, passage_name_or_path=tmp_path)


def test_lengths_are_checked(tiny_encoder_dir):
    with pytest.raises(ConfigError, match="max_passage_length=65 is more than the 64"):
        BiEncoder.initialise(tiny_encoder_dir, max_passage_length=65)
    with pytest.raises(ConfigError, match="max_length=0 leaves no room"):
        BiEncoder.initialise(tiny_encoder_dir, max_question_length=0)


@pytest.mark.parametrize("shared", [False, True])
def test_save_and_load(tiny_encoder_dir, tmp_path, shared):
    model = BiEncoder.initialise(
        tiny_encoder_dir,
        shared=shared,
        pooling="mean",
        normalize=True,
        title_format="space",
        max_question_length=10,
        max_passage_length=30,
    )
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "biencoder_config.json").read_text()) == {
        "format_version": 1,
        "gc_dpr_version": __version__,
        "shared": shared,
        "title_format": "space",
        "max_question_length": 10,
        "max_passage_length": 30,
    }
    again = BiEncoder.from_pretrained(tmp_path)
    assert not again.training
    assert again.shared == shared
    assert (again.title_format, again.max_question_length) == ("space", 10)
    assert again.max_passage_length == 30
    assert again.fingerprint() == model.fingerprint()
    np.testing.assert_array_equal(again.encode_questions(TEXTS), model.encode_questions(TEXTS))
    np.testing.assert_array_equal(again.encode_passages(PAIRS), model.encode_passages(PAIRS))


def test_settings_can_be_overridden(model, tmp_path, caplog):
    model.save_pretrained(tmp_path)
    changed = BiEncoder.from_pretrained(
        tmp_path, title_format="space", max_question_length=12, max_passage_length=40
    )
    assert (changed.title_format, changed.max_question_length) == ("space", 12)
    assert changed.max_passage_length == 40
    assert "title_format=space instead of the checkpoint's" in caplog.text
    assert changed.fingerprint() != model.fingerprint()


def test_foreign_models_encode_both_sides(tiny_encoder_dir, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "gc_dpr"):
        plain = BiEncoder.from_pretrained(tiny_encoder_dir)
    assert "a shared encoder, title_format=pair" in caplog.text
    TextEncoder.from_pretrained(tiny_encoder_dir).save_pretrained(tmp_path)
    theirs = BiEncoder.from_pretrained(tmp_path)
    assert (plain.title_format, theirs.title_format) == ("pair", "space")
    assert plain.shared
    assert theirs.shared
    assert BiEncoder.from_pretrained(tmp_path, title_format="pair").title_format == "pair"


def test_wrong_folders(model, tmp_path):
    model.save_pretrained(tmp_path / "run" / "checkpoint")
    with pytest.raises(ArtifactError, match=r"run is not a model.*did you mean .*run/checkpoint\?"):
        BiEncoder.from_pretrained(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"neither biencoder_config\.json.*it is empty"):
        BiEncoder.from_pretrained(tmp_path / "empty")
    with pytest.raises(ArtifactError, match="does not exist"):
        BiEncoder.from_pretrained(tmp_path / "nothing")
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "passage_encoder")
    with pytest.raises(ArtifactError, match="passage_encoder does not exist"):
        BiEncoder.from_pretrained(tmp_path / "run" / "checkpoint")


def test_damaged_settings(model, tmp_path):
    model.save_pretrained(tmp_path)
    path = tmp_path / "biencoder_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"format_version": 2}))
    with pytest.raises(ArtifactError, match="format_version 2"):
        BiEncoder.from_pretrained(tmp_path)
    del config["shared"]
    path.write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="lacks 'shared'"):
        BiEncoder.from_pretrained(tmp_path)


def test_encoding_uses_each_sides_encoder_and_keeps_the_order(model):
    questions = model.encode_questions(TEXTS, batch_tokens=20)
    passages = model.encode_passages([Passage("1", *PAIRS[0]), PAIRS[1], "a text"], progress=True)
    assert questions.dtype == passages.dtype == np.float32
    for encoder, rows, texts in (
        (model.question_encoder, questions, TEXTS[:3]),
        (model.passage_encoder, passages, [PAIRS[0]]),
    ):
        for row, text in zip(rows, texts, strict=False):
            pieces = text if isinstance(text, tuple) else (text,)
            ids = tiny_tokenizer()(*pieces, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                expected = encoder(ids, torch.ones_like(ids))[0]
            np.testing.assert_allclose(row, expected.numpy(), atol=2e-6)
    assert model.encode_questions([]).shape == (0, 32)
    assert model.encode_passages([]).shape == (0, 32)


def test_cut_texts_are_reported(model, caplog):
    model.encode_questions(TEXTS)
    model.encode_passages(PAIRS)
    assert "1 of 5 questions were cut to 20 tokens" in caplog.text
    assert "2 of 4 passages were cut to 30 tokens" in caplog.text
    assert model.tokenize_questions(TEXTS).truncated == 1
    assert model.tokenize_passages(PAIRS).truncated == 2


def test_fingerprint_sees_every_setting_and_weight(tiny_encoder_dir):
    def fingerprint(change=None, **settings):
        model = BiEncoder.initialise(tiny_encoder_dir, **settings)
        if change:
            with torch.no_grad():
                weight(getattr(model, change))[5, 3] += 1e-4
        return model.fingerprint()

    plain = fingerprint()
    assert len(plain) == 64
    assert set(plain) <= set("0123456789abcdef")
    assert fingerprint() == fingerprint(shared=True) == fingerprint(dropout=0.3) == plain
    others = [
        fingerprint("question_encoder"),
        fingerprint("passage_encoder"),
        fingerprint(pooling="mean"),
        fingerprint(normalize=True),
        fingerprint(num_layers=1),
        fingerprint(title_format="space"),
        fingerprint(max_question_length=20),
        fingerprint(max_passage_length=20),
    ]
    assert len({plain, *others}) == 9
