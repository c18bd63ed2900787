"""From texts to token ids: light objects without weights, for the encoders and for data workers.

Conventions, the same in training, encoding and search:

* The model's own tokenizer adds its special tokens. A literal ``[SEP]`` or ``<s>`` inside a text
  becomes that special token, as in DPR and in Hugging Face's tokenizers.
* Nothing is padded here and no mask is made: masks come from the lengths
  (:class:`~gc_dpr.grad_cache.chunking.RaggedTokens`), so a pad token inside a text stays visible.
* Segment ids are all zero, also for (title, text) pairs, as in DPR; they are not produced at all.
* A text that is too long is cut at the end, a pair at the end of whichever part is longer
  (``longest_first``: a long title is cut as well as the text).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tokenizers import Tokenizer

from gc_dpr.errors import ConfigError
from gc_dpr.ragged import RaggedTokens

if TYPE_CHECKING:
    from gc_dpr.data.records import Passage

TITLE_FORMATS: Final = ("pair", "space")

# What tokenizers treat differently: letter case, accents, composed forms, CJK, spaces, digits.
_PROBES: Final = ("Ünï Éa e\u0301 ABC-12,3", " x\ty\u00a0 漢字 \u2019s", "")


class TokenizedTexts(NamedTuple):
    """Token ids of some texts.

    Attributes:
        tokens: The ids, unpadded, in the order of the texts.
        truncated_rows: Which of the texts were cut to the maximum length.
    """

    tokens: RaggedTokens
    truncated_rows: tuple[int, ...] = ()

    @property
    def truncated(self) -> int:
        """How many of the texts were cut."""
        return len(self.truncated_rows)


class TextTokenizer:
    """A tokenizer with a maximum length; picklable, without the model.

    Args:
        tokenizer: A fast Hugging Face tokenizer (``PreTrainedTokenizerFast``); it is copied.
        max_length: Longest result in tokens, special tokens included.

    Raises:
        ConfigError: The tokenizer is not a fast one, or ``max_length`` leaves no room for text.
    """

    def __init__(self, tokenizer: Any, *, max_length: int) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(
                f"the model's tokenizer is a {type(tokenizer).__name__}, which has no fast (Rust) "
                "implementation; choose a model whose folder holds a tokenizer.json"
            )
        self._tokenizer = Tokenizer.from_str(backend.to_str())
        # A stored tokenizer may pad by itself; here lengths alone decide.
        self._tokenizer.no_padding()
        special = self._tokenizer.num_special_tokens_to_add(True)
        if max_length <= special:
            raise ConfigError(
                f"max_length={max_length} leaves no room for text: "
                f"a pair takes {special} special tokens; choose at least {special + 1}"
            )
        self.max_length = max_length
        self._tokenizer.enable_truncation(
            max_length,
            stride=0,
            strategy="longest_first",
            direction=getattr(tokenizer, "truncation_side", "right"),
        )

    def __call__(self, texts: Sequence[str | tuple[str, str]]) -> TokenizedTexts:
        """Tokenise texts, or pairs of texts, as they are; empty strings are legal.

        Raises:
            TypeError: Something that is neither a string nor a pair of strings.
        """
        if isinstance(texts, str):
            raise TypeError("expected a sequence of texts, found one str; write [text]")
        for text in texts:
            if not isinstance(text, str) and not _is_pair(text):
                raise TypeError(f"expected a str or a (str, str) tuple, found {text!r}")
        encodings = self._tokenizer.encode_batch_fast(list(texts)) if texts else []
        rows = [encoding.ids for encoding in encodings]
        # Only a text that fills the whole length can have been cut; the other half of the test
        # builds Python objects.
        truncated = tuple(
            number
            for number, (row, encoding) in enumerate(zip(rows, encodings, strict=True))
            if len(row) == self.max_length and encoding.overflowing
        )
        return TokenizedTexts(RaggedTokens.from_lists(rows), truncated)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and [*map(type, value)] == [str, str]


class QuestionTokenizer:
    """Turns questions into token ids; white space around a question is stripped, as in DPR.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        max_length: Longest result in tokens, special tokens included.
    """

    def __init__(self, tokenizer: Any, *, max_length: int) -> None:
        self._tokenize = TextTokenizer(tokenizer, max_length=max_length)
        self.max_length = max_length

    def __call__(self, texts: Sequence[str]) -> TokenizedTexts:
        """Tokenise questions."""
        if isinstance(texts, str):
            raise TypeError("expected a sequence of questions, found one str; write [question]")
        return self._tokenize([text.strip() for text in texts])


class PassageTokenizer:
    """Turns passages into token ids.

    As in DPR, white space around the text is stripped, the title is kept as it is, and a passage
    with an empty title is its text alone.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        max_length: Longest result in tokens, special tokens included.
        title_format: ``"pair"``: title and text are the two halves of the tokenizer's pair (DPR).
            ``"space"``: one text, title + space + text (Tevatron, BEIR).

    Raises:
        ConfigError: Unknown ``title_format``.
    """

    def __init__(self, tokenizer: Any, *, max_length: int, title_format: str) -> None:
        if title_format not in TITLE_FORMATS:
            raise ConfigError(
                f"title_format must be one of {', '.join(TITLE_FORMATS)}; found {title_format!r}"
            )
        self._tokenize = TextTokenizer(tokenizer, max_length=max_length)
        self.max_length = max_length
        self.title_format = title_format

    def __call__(self, passages: Sequence[Passage | tuple[str, str] | str]) -> TokenizedTexts:
        """Tokenise passages: records, (title, text) tuples, or texts without a title."""
        if isinstance(passages, str):
            raise TypeError("expected a sequence of passages, found one str; write [passage]")
        return self._tokenize([self._join(passage) for passage in passages])

    def _join(self, passage: Passage | tuple[str, str] | str) -> str | tuple[str, str]:
        if isinstance(passage, str):
            return passage.strip()
        title, text = passage if isinstance(passage, tuple) else (passage.title, passage.text)
        text = text.strip()
        if not title:
            return text
        return (title, text) if self.title_format == "pair" else f"{title} {text}"


def tokenizer_digest(tokenizer: Any) -> str:
    """Fingerprint of what a tokenizer does: its vocabulary, and the ids of a few telling texts.

    Its stored form is not hashed: that differs between versions of the libraries.

    Returns:
        64 hexadecimal digits (SHA-256).
    """
    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
    singles = [copy.encode(probe).ids for probe in _PROBES]
    pairs = [copy.encode(probe, probe).ids for probe in _PROBES]
    content = [sorted(copy.get_vocab(with_added_tokens=True).items()), singles, pairs]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
