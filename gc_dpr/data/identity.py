"""When two passages are the same passage.

Ids cannot tell: they may be missing, and the same text has other ids in other files. So the words
decide: title and text in Unicode form NFC, every run of white space as one space. Case is kept: an
encoder may tell "US" from "us".
"""

from __future__ import annotations

import hashlib
import unicodedata

from gc_dpr.data.records import Passage


def normalized_text(text: str) -> str:
    r"""NFC, with every run of white space as one space and none at the ends.

    Example:
        >>> normalized_text(" Cafe\u0301\n in\tUlm ") == "Caf\u00e9 in Ulm"
        True
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def passage_key(passage: Passage) -> int:
    """A number that stands for a passage: a stable 63-bit hash of its title and text.

    The same on every platform and in every process, whatever the passage's id. Among a million
    different passages the chance that any two share a key is 5e-8.

    Example:
        >>> key = passage_key(Passage("1", "Ulm", "A city."))
        >>> key == passage_key(Passage("", "Ulm", "A  city. "))
        True
        >>> key == passage_key(Passage("1", "", "A city."))
        False
    """
    # Normalised text holds no line break, so the pair cannot be cut in another place.
    words = f"{normalized_text(passage.title)}\n{normalized_text(passage.text)}"
    digest = hashlib.blake2b(words.encode("utf-8", errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def marks(passage: Passage) -> frozenset[tuple[str, str]]:
    """What gives a passage away inside one example: its id, and its text whatever the title.

    Two passages that share a mark must not be told apart by training: one is a copy of the other,
    perhaps under the title of a redirect. A passage with an empty text is known by its title.
    """
    text = normalized_text(passage.text)
    words = ("text", text) if text else ("title", normalized_text(passage.title))
    return frozenset({words, ("id", passage.id)} if passage.id else {words})
