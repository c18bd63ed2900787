"""Tiny models of other families, and the reference ways of computing an embedding."""

import pytest
import torch
from tiny_encoder import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    DistilBertConfig,
    DistilBertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

TEXTS = [
    "who built the clock tower",
    "",
    "[PAD] salt [PAD] works",
    "a",
    "the capital city of the old country " * 5,
]
PAIRS = [
    ("clock tower", "the old clock tower of the city"),
    ("a very long title " * 12, "the text"),
    ("bridge", "many words of a very long text " * 9),
    ("book", ""),
]


def embed_with_sentence_transformers(folder, texts):
    """Encode with SentenceTransformer; the reference for a saved folder."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    return torch.from_numpy(model.encode(list(texts), batch_size=2, show_progress_bar=False))


def embed_with_transformers(folder, texts, *, pooling, normalize, **tokenizer_options):
    """Encode with AutoModel and AutoTokenizer, one text at a time, pooling by hand."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    rows = []
    for text in texts:
        pieces = text if isinstance(text, tuple) else (text,)
        inputs = tokenizer(*pieces, return_tensors="pt", truncation=True, **tokenizer_options)
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state[0]
        row = hidden[0] if pooling == "first_token" else hidden.mean(0)
        rows.append(row / row.norm() if normalize else row)
    return torch.stack(rows)


@pytest.fixture(scope="session")
def tiny_roberta_dir(tmp_path_factory):
    """Byte-level BPE with <s>=0, <pad>=1, </s>=2: 18 positions hold 16 tokens."""
    folder = tmp_path_factory.mktemp("tiny_roberta")
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate(specials + letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
    ).save_pretrained(folder)
    torch.manual_seed(1)
    config = RobertaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=18,
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        initializer_range=0.3,
    )
    RobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_distilbert_dir(tmp_path_factory):
    """A model without token types and without the add_pooling_layer argument."""
    folder = tmp_path_factory.mktemp("tiny_distilbert")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(2)
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        dim=32,
        n_layers=3,
        n_heads=2,
        hidden_dim=64,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    DistilBertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
