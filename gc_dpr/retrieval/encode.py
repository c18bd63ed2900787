"""From a stream of passages to one embedding shard, in memory that does not grow.

A window of passages is tokenised while the one before it is encoded, so that a GPU need not wait.
Sorting by length and padding happen inside a window (`encode` does it); rows are written in the
order of the corpus.

Letters: N rows of a window, D dims.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gc_dpr.data.records import Passage
from gc_dpr.errors import ArtifactError
from gc_dpr.ragged import RaggedTokens, length_sorted_chunks
from gc_dpr.retrieval.progress import Progress
from gc_dpr.retrieval.shard_writer import ShardWriter

if TYPE_CHECKING:
    from torch import Tensor

    from gc_dpr.models import TokenizedTexts

logger = logging.getLogger(__name__)


class EncodeTokens(Protocol):
    """Encodes ragged tokens in length-sorted chunks; rows come back in the order given."""

    def __call__(self, tokens: RaggedTokens, /, *, batch_tokens: int) -> NDArray[Any] | Tensor:
        """(N, D) embeddings of N texts in main memory; a chunk pads to ``batch_tokens`` at most."""
        ...


@dataclass(slots=True)
class EncodeCounts:
    """What encoding one shard came to.

    Attributes:
        passages: Rows of the shard.
        truncated: Passages that were cut to the maximum length.
        tokens: Tokens of all passages, special tokens included.
        padded_tokens: The same with the padding that the encoder saw.
        seconds: Wall time, tokenising and writing included.
    """

    passages: int = 0
    truncated: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    seconds: float = 0.0

    @property
    def padding_share(self) -> float:
        """Share of padding in what the encoder saw, between 0 and 1."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    def add(self, texts: TokenizedTexts, *, batch_tokens: int) -> None:
        """Count one window."""
        lengths = texts.tokens.lengths
        chunks = length_sorted_chunks(lengths, max_tokens=batch_tokens)
        self.passages += len(texts.tokens)
        self.truncated += texts.truncated
        self.tokens += int(lengths.sum())
        self.padded_tokens += sum(len(rows) * int(lengths[rows].max()) for rows in chunks)


def encode_passages_to_shard(
    passages: Iterable[Passage],
    *,
    tokenize: Callable[[Sequence[Passage]], TokenizedTexts],
    encode: EncodeTokens,
    writer: ShardWriter,
    batch_tokens: int = 16384,
    window: int = 8192,
    progress: bool = False,
) -> EncodeCounts:
    """Encode the passages of one shard and write them.

    Each process streams the whole corpus and skips the rows of other shards.

    Args:
        passages: The whole corpus, in the order in which it was counted.
        tokenize: Turns passages into tokens; ``BiEncoder.tokenize_passages`` is one.
        encode: Turns tokens into embeddings;
            ``functools.partial(gc_dpr.models.encode_tokens, model.passage_encoder)`` is one.
        writer: An open shard; it knows which rows are wanted.
        batch_tokens: Padded tokens that ``encode`` holds at a time.
        window: Passages tokenised and sorted by length together. Two windows are in memory.
        progress: Report progress; on the main process only.

    Returns:
        Counts of this shard.

    Raises:
        ArtifactError: The corpus has more or fewer passages than were counted, or an embedding
            is not finite.
    """
    if window < 1:
        raise ValueError(f"window={window}; expected at least 1 passage")
    started = time.perf_counter()
    counts = EncodeCounts()
    stream = iter(passages)
    own = islice(stream, writer.first_row, writer.end_row)
    rows = writer.end_row - writer.first_row
    with Progress(rows, what="encoding", unit="passages", enabled=progress) as bar:
        for ids, texts in _tokenized_ahead(own, tokenize, window=window):
            embeddings = encode(texts.tokens, batch_tokens=batch_tokens)  # (N, D)
            writer.write(np.asarray(embeddings), ids)
            counts.add(texts, batch_tokens=batch_tokens)
            bar.update(len(ids))
    if writer.end_row == writer.corpus_rows and next(stream, None) is not None:
        raise ArtifactError(
            f"the corpus has more than the {writer.corpus_rows} passages that were counted; it "
            "has grown meanwhile: start again"
        )
    counts.seconds = time.perf_counter() - started
    logger.info(
        "encoded %s passages in %.1f s (%.0f a second); %s tokens, %.1f %% padding, %s passages "
        "cut to the maximum length",
        f"{counts.passages:,}",
        counts.seconds,
        counts.passages / counts.seconds,
        f"{counts.tokens:,}",
        100 * counts.padding_share,
        f"{counts.truncated:,}",
    )
    return counts


def _tokenized_ahead(
    passages: Iterator[Passage],
    tokenize: Callable[[Sequence[Passage]], TokenizedTexts],
    *,
    window: int,
) -> Iterator[tuple[list[str], TokenizedTexts]]:
    """Ids and tokens of one window after the other; the next is made in a thread meanwhile.

    A thread is enough: fast tokenizers and the waiting for a GPU both let Python go on.
    """

    def next_window() -> tuple[list[str], TokenizedTexts] | None:
        part = list(islice(passages, window))
        return ([passage.id for passage in part], tokenize(part)) if part else None

    with ThreadPoolExecutor(max_workers=1) as ahead:
        coming = ahead.submit(next_window)
        while (made := coming.result()) is not None:
            coming = ahead.submit(next_window)
            yield made
