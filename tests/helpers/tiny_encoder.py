"""Tiny random encoders, made in place so that no weights are shipped."""

import string

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = (
    "the a of in to and is was who what when where which how many built wrote clock tower bridge "
    "salt works river city capital country year people passage question title text first second "
    "mountain lake island king queen song book moon star ship stone old new"
).split()


def tiny_tokenizer():
    """A WordPiece tokenizer that spells unknown words letter by letter."""
    letters = list(string.ascii_lowercase + string.digits + string.punctuation)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    pieces += [letter for letter in letters if letter not in pieces]
    pieces += [f"##{letter}" for letter in letters]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
    )


def save_tiny_bert(folder, *, seed=0, layers=2, dropout=0.1):
    """Write a loadable model folder and return its path."""
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        # the default 0.02 makes all vectors of a random model nearly equal
        initializer_range=0.3,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
