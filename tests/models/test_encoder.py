import json
import re
import shutil

import pytest
import torch
from tiny_encoder import save_tiny_bert, tiny_tokenizer
from torch import nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForMaskedLM, BertModel

from gc_dpr.artifacts import file_checksum
from gc_dpr.errors import ArtifactError, ConfigError
from gc_dpr.models import TextEncoder, encode_tokens

from .conftest import PAIRS, TEXTS


def embed(encoder, texts, **options):
    return encode_tokens(encoder, encoder.tokenize(texts).tokens, **options)


def dropouts(encoder):
    return {m.p for m in encoder.modules() if isinstance(m, nn.Dropout)}


def test_defaults_of_a_plain_model(tiny_encoder_dir):
    encoder = TextEncoder.from_pretrained(tiny_encoder_dir)
    assert (encoder.pooling, encoder.normalize) == ("first_token", False)
    assert (encoder.embedding_dim, encoder.pad_token_id) == (32, 0)
    assert encoder.max_length == 64  # the model's positions; fewer than 256
    assert not encoder.training
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}


def test_representation_is_the_first_hidden_state_without_pooler(tiny_encoder_dir):
    """B14."""
    encoder = TextEncoder.from_pretrained(tiny_encoder_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_encoder_dir)
    batch = tokenizer(["who built it"], return_tensors="pt")
    reference = BertModel.from_pretrained(tiny_encoder_dir, add_pooling_layer=False).eval()
    with torch.no_grad():
        expected = reference(**batch).last_hidden_state[:, 0]
        found = encoder(batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(found, expected)
    assert not [name for name in encoder.state_dict() if "pooler" in name]


def test_every_parameter_gets_a_gradient(tiny_encoder_dir, tiny_distilbert_dir, tiny_roberta_dir):
    """B38: no parameter exists that the forward pass does not use."""
    for folder in (tiny_encoder_dir, tiny_distilbert_dir, tiny_roberta_dir):
        encoder = TextEncoder.from_pretrained(folder)
        tokens = encoder.tokenize(["a b"]).tokens
        encoder(**tokens.pad(torch.tensor([0]), pad_token_id=encoder.pad_token_id)).sum().backward()
        unused = [name for name, p in encoder.named_parameters() if p.grad is None]
        assert unused == []


def test_segment_ids_are_zero_for_pairs(tiny_encoder_dir):
    """B13: zeros everywhere; 0/1 would give another vector."""
    encoder = TextEncoder.from_pretrained(tiny_encoder_dir)
    reference = BertModel.from_pretrained(tiny_encoder_dir, add_pooling_layer=False).eval()
    ids = tiny_tokenizer()("a", "b c", return_tensors="pt")["input_ids"]
    zeros = torch.zeros_like(ids)
    ones = zeros.clone()
    ones[:, 3:] = 1
    with torch.no_grad():
        as_zeros = reference(ids, token_type_ids=zeros).last_hidden_state[:, 0]
        as_ones = reference(ids, token_type_ids=ones).last_hidden_state[:, 0]
    found = embed(encoder, [("a", "b c")])
    torch.testing.assert_close(found, as_zeros, atol=1e-6, rtol=0)
    assert (found - as_ones).abs().max() > 1e-3


@pytest.mark.parametrize("pooling", ["first_token", "mean"])
def test_embedding_does_not_depend_on_the_batch(tiny_encoder_dir, pooling):
    """B16."""
    encoder = TextEncoder.from_pretrained(tiny_encoder_dir, pooling=pooling)
    texts = ["a", "", "who built the tower", "song " * 20, "river " * 40]
    alone = torch.cat([embed(encoder, [text]) for text in texts])
    for batch_tokens in (1, 90, 10_000):  # chunks of 1, of 2 and of 5 rows
        together = embed(encoder, texts, batch_tokens=batch_tokens)
        assert (together - alone).abs().max() < 2e-6
    shuffled = embed(encoder, [texts[i] for i in (3, 0, 4, 2, 1)])
    assert (shuffled - alone[[3, 0, 4, 2, 1]]).abs().max() < 2e-6


def test_normalize_and_precision(tiny_encoder_dir):
    encoder = TextEncoder.from_pretrained(tiny_encoder_dir, normalize=True)
    torch.testing.assert_close(embed(encoder, TEXTS).norm(dim=1), torch.ones(5))
    chunk = encoder.tokenize(["a b"]).tokens.pad(torch.tensor([0]), pad_token_id=0)
    assert encoder.double()(**chunk).dtype == torch.float64
    encoder.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert encoder(**chunk).dtype == torch.float32


def test_encode_tokens_restores_modes_and_handles_nothing(tiny_encoder_dir):
    encoder = TextEncoder.from_pretrained(tiny_encoder_dir, dropout=0.5)
    encoder.train()
    encoder.transformer.embeddings.eval()
    first, second = embed(encoder, TEXTS), embed(encoder, TEXTS)
    assert torch.equal(first, second)  # dropout is off
    assert not first.requires_grad
    assert encoder.training
    assert encoder.transformer.encoder.training
    assert not encoder.transformer.embeddings.training
    assert embed(encoder, []).shape == (0, 32)
    low = embed(encoder, TEXTS, precision="bf16")
    assert low.dtype == torch.float32
    assert 0 < (low - first).abs().max() < 0.2


@pytest.mark.parametrize("dropout", [0, 0.3])
def test_dropout_reaches_all_modules(tiny_encoder_dir, tiny_distilbert_dir, dropout):
    """SURPRISES B13: 0 is a value."""
    for folder in (tiny_encoder_dir, tiny_distilbert_dir):
        encoder = TextEncoder.from_pretrained(folder, dropout=dropout)
        assert dropouts(encoder) == {dropout}
        encoder.train()
        chunk = encoder.tokenize(["a b"]).tokens.pad(torch.tensor([0]), pad_token_id=0)
        assert torch.equal(encoder(**chunk), encoder(**chunk)) == (dropout == 0)
        assert dropouts(TextEncoder.from_pretrained(folder)) == {0.1}


def test_dropout_that_cannot_be_set(tiny_encoder_dir, monkeypatch):
    with pytest.raises(ConfigError, match="dropout=2 must be"):
        TextEncoder.from_pretrained(tiny_encoder_dir, dropout=2)
    name = "gc_dpr.models.pretrained._DROPOUT_NAME"
    monkeypatch.setattr(name, re.compile("hidden_dropout_prob"))
    with pytest.raises(ConfigError, match=r"does not reach .*self\.dropout, which has 0\.1"):
        TextEncoder.from_pretrained(tiny_encoder_dir, dropout=0.3)
    monkeypatch.setattr(name, re.compile("no such setting"))
    with pytest.raises(ConfigError, match="a bert model has no dropout"):
        TextEncoder.from_pretrained(tiny_encoder_dir, dropout=0.3)


def test_first_layers(tiny_encoder_dir, tiny_distilbert_dir, tmp_path):
    encoder = TextEncoder.from_pretrained(tiny_encoder_dir, num_layers=1)
    reference = BertModel.from_pretrained(tiny_encoder_dir).eval()
    ids = tiny_tokenizer()("a b", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = reference(ids, output_hidden_states=True).hidden_states[1][:, 0]
    torch.testing.assert_close(embed(encoder, ["a b"]), expected, atol=1e-6, rtol=0)
    encoder.save_pretrained(tmp_path / "one")
    assert json.loads((tmp_path / "one/config.json").read_text())["num_hidden_layers"] == 1
    again = TextEncoder.from_pretrained(tmp_path / "one")
    assert again.digest() == encoder.digest()
    short = TextEncoder.from_pretrained(tiny_distilbert_dir, num_layers=2)
    assert len(short.transformer.transformer.layer) == 2
    for count in (0, 3):
        with pytest.raises(
            ConfigError, match=f"num_layers={count} must be from 1 to the model's 2"
        ):
            TextEncoder.from_pretrained(tiny_encoder_dir, num_layers=count)


def test_expected_sha256(tiny_encoder_dir):
    found = file_checksum(tiny_encoder_dir / "model.safetensors")
    for expected in (found, found[:12], found.upper()):
        TextEncoder.from_pretrained(tiny_encoder_dir, expected_sha256=expected)
    wrong = "0" * 12 if found[0] != "0" else "1" * 12
    with pytest.raises(ArtifactError, match=f"has SHA-256 {found}, expected {wrong}"):
        TextEncoder.from_pretrained(tiny_encoder_dir, expected_sha256=wrong)
    with pytest.raises(ConfigError, match="is not a SHA-256"):
        TextEncoder.from_pretrained(tiny_encoder_dir, expected_sha256="abc")


def test_lengths(tiny_encoder_dir, tiny_roberta_dir):
    assert TextEncoder.from_pretrained(tiny_encoder_dir, max_length=9).max_length == 9
    with pytest.raises(ConfigError, match="max_length=65 is more than the 64 tokens"):
        TextEncoder.from_pretrained(tiny_encoder_dir, max_length=65)
    roberta = TextEncoder.from_pretrained(tiny_roberta_dir)
    assert roberta.max_length == 16  # 18 positions, the first after the pad token's id
    assert embed(roberta, ["x" * 100]).isfinite().all()
    with pytest.raises(ConfigError, match="max_length=17 is more than the 16 tokens"):
        roberta.tokenize(["a"], max_length=17)
    assert roberta.tokenize(["abcdef"], max_length=6).truncated == 1


def test_roberta_pad_in_the_text(tiny_roberta_dir):
    encoder = TextEncoder.from_pretrained(tiny_roberta_dir, pooling="mean")
    alone, padded = embed(encoder, ["ab"]), embed(encoder, ["ab", "abc <pad> de"])
    torch.testing.assert_close(alone[0], padded[0], atol=2e-6, rtol=0)


def test_missing_models_give_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    cases = {
        "./nothing": "does not exist",
        str(tmp_path / "nothing"): "does not exist",
        "a/b/c": "does not exist",
        "file": "is a file",
        "some/name": r"neither a folder .*/some/name nor a model 'some/name'.*HF_HUB_OFFLINE",
        "bad name": "not a legal hub name",
        "run": r"no config\.json \(it holds checkpoint\); did you mean .*run/checkpoint",
    }
    for name, match in cases.items():
        with pytest.raises(ArtifactError, match=match) as caught:
            TextEncoder.from_pretrained(name)
        assert "\n" not in str(caught.value)


def test_hub_name_is_found_in_the_local_cache(tiny_encoder_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--some--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123abc")
    shutil.copytree(tiny_encoder_dir, cached / "snapshots" / "0123abc")
    assert TextEncoder.from_pretrained("some/tiny").embedding_dim == 32


def test_damaged_folders(tiny_encoder_dir, tmp_path):
    def broken(name, change):
        folder = tmp_path / name
        shutil.copytree(tiny_encoder_dir, folder)
        change(folder)
        return folder

    no_weights = broken("a", lambda f: (f / "model.safetensors").unlink())
    with pytest.raises(ArtifactError, match=r"model in .* cannot be loaded"):
        TextEncoder.from_pretrained(no_weights)
    with pytest.raises(ArtifactError, match="expected_sha256 is checked"):
        TextEncoder.from_pretrained(no_weights, expected_sha256="0" * 64)
    no_tokenizer = broken("b", lambda f: (f / "tokenizer.json").unlink())
    with pytest.raises(ArtifactError, match=r"tokenizer in .* cannot be loaded"):
        TextEncoder.from_pretrained(no_tokenizer)

    def more_layers(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))

    with pytest.raises(ArtifactError, match=r"lack 16 tensors of a BertModel \(encoder\.layer\.2"):
        TextEncoder.from_pretrained(broken("c", more_layers))

    def no_pad(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.pad_token = None
        tokenizer.save_pretrained(folder)

    with pytest.raises(ConfigError, match="has no pad token; set one"):
        TextEncoder.from_pretrained(broken("d", no_pad))

    def more_words(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(["zebra"])
        tokenizer.save_pretrained(folder)

    with pytest.raises(ArtifactError, match="token id 187, the model only 187"):
        TextEncoder.from_pretrained(broken("e", more_words))


def test_unknown_pooling(tiny_encoder_dir):
    with pytest.raises(ConfigError, match="first_token, mean; found 'cls'"):
        TextEncoder.from_pretrained(tiny_encoder_dir, pooling="cls")


def test_weights_of_a_masked_language_model(tmp_path):
    """Its head is ignored, its encoder is complete."""
    config = BertConfig(
        vocab_size=187,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    model = BertForMaskedLM(config)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    encoder = TextEncoder.from_pretrained(tmp_path)
    assert torch.equal(
        encoder.transformer.embeddings.word_embeddings.weight,
        model.bert.embeddings.word_embeddings.weight,
    )


def test_half_precision_weights_are_loaded_as_float32(tmp_path):
    save_tiny_bert(tmp_path)
    AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    encoder = TextEncoder.from_pretrained(tmp_path)
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}


def test_pairs_can_be_encoded(tiny_encoder_dir):
    assert embed(TextEncoder.from_pretrained(tiny_encoder_dir), PAIRS).shape == (4, 32)
