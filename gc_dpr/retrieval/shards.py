"""One shard of an embedding folder: its rows, its files and what is said about them.

A shard is three files, published in this order, each under its final name only when whole:

    ids-00003-of-00008.txt          one passage id per line
    embeddings-00003-of-00008.npy   (N, D) float32 or float16, loads with numpy.load
    shard-00003-of-00008.json       `ShardInfo`: its presence says that the other two are whole

Letters: N rows of the shard, D dims.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gc_dpr.artifacts import read_json
from gc_dpr.errors import ArtifactError

META_NAME = "meta.json"
EMBEDDING_FILES = ("ids-*-of-*.txt", "embeddings-*-of-*.npy", "shard-*-of-*.json", META_NAME)
"""What generate_embeddings writes: pass it to `prepare_output_dir` as ``owned``."""

DTYPES = ("float32", "float16")
_INFO_NAME = re.compile(r"shard-(\d{5})-of-(\d{5})\.json")


def shard_bounds(rows: int, *, num_shards: int, shard: int) -> tuple[int, int]:
    """First row and end (exclusive) of one shard; sizes differ by at most one.

    Together the shards cover every row once, whatever the counts: the remainder of the division
    goes to the first shards, and with more shards than rows the last ones are empty.

    Example:
        >>> [shard_bounds(8, num_shards=3, shard=shard) for shard in range(3)]
        [(0, 3), (3, 6), (6, 8)]
    """
    if rows < 0 or not 0 <= shard < num_shards:
        raise ValueError(f"shard {shard} of {num_shards} over {rows} rows does not exist")
    size, longer = divmod(rows, num_shards)
    first = shard * size + min(shard, longer)
    return first, first + size + (shard < longer)


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What ``shard-*.json`` says.

    Attributes:
        shard: Its number, from 0.
        num_shards: How many there are together.
        corpus_rows: Passages of the whole corpus.
        first_row: The corpus row of its first embedding, from 0.
        end_row: One past the corpus row of its last embedding.
        dim: D.
        dtype: ``"float32"`` or ``"float16"``.
        zero_rows: Embeddings that are all zeros.
        embeddings_sha256: Checksum of the ``.npy`` file.
        ids_sha256: Checksum of the ids.
        model_fingerprint: Which encoder made the embeddings.
        corpus_hash: Which passages were encoded; empty when the writer did not say.
    """

    shard: int
    num_shards: int
    corpus_rows: int
    first_row: int
    end_row: int
    dim: int
    dtype: str
    zero_rows: int
    embeddings_sha256: str
    ids_sha256: str
    model_fingerprint: str
    corpus_hash: str

    @property
    def rows(self) -> int:
        """N."""
        return self.end_row - self.first_row

    def file(self, folder: Path, kind: str) -> Path:
        """The path of its ``"ids"``, ``"embeddings"`` or ``"shard"`` file."""
        return shard_file(folder, kind, shard=self.shard, num_shards=self.num_shards)

    @classmethod
    def from_dict(cls, value: Any, *, path: Path) -> ShardInfo:
        """Check and convert what was read from JSON.

        Raises:
            ArtifactError: A field is missing or has another type.
        """
        for field in fields(cls):
            expected = int if field.type == "int" else str
            found = value.get(field.name) if isinstance(value, dict) else None
            if type(found) is not expected:
                raise ArtifactError(
                    f"{path.absolute()} is damaged: {field.name} is {found!r}, expected a value "
                    f"of type {expected.__name__}; run generate_embeddings again with "
                    "overwrite=true"
                )
        return cls(**{field.name: value[field.name] for field in fields(cls)})

    @classmethod
    def read(cls, folder: Path, *, shard: int, num_shards: int) -> ShardInfo:
        """Read one shard's file.

        Raises:
            ArtifactError: It is missing ("shard 1 of 3 is missing") or damaged.
        """
        path = shard_file(folder, "shard", shard=shard, num_shards=num_shards)
        if not path.exists():
            raise ArtifactError(
                f"{folder.absolute()}: shard {shard} of {num_shards} is missing (shards count "
                f"from 0; expected the file {path.name}): the process that encodes it has not "
                "finished; run generate_embeddings again with overwrite=true"
            )
        return cls.from_dict(read_json(path, what="the description of a shard"), path=path)


def shard_file(folder: Path, kind: str, *, shard: int, num_shards: int) -> Path:
    """The path of a shard's ``"ids"``, ``"embeddings"`` or ``"shard"`` file."""
    suffix = {"ids": "txt", "embeddings": "npy", "shard": "json"}[kind]
    return folder / f"{kind}-{shard:05d}-of-{num_shards:05d}.{suffix}"


def finished_shards(folder: Path) -> set[tuple[int, int]]:
    """``(shard, num_shards)`` of every described shard; files of any other name are not ours."""
    matches = (_INFO_NAME.fullmatch(entry.name) for entry in folder.iterdir())
    return {(int(match[1]), int(match[2])) for match in matches if match}
