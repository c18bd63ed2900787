"""gc-dpr generate_embeddings: passages and a checkpoint → embedding shards."""

from __future__ import annotations

import functools

from gc_dpr.artifacts import write_json
from gc_dpr.cli.console import say, say_read, say_read_all, say_wrote
from gc_dpr.cli.models import apply_threads, describe, load_bi_encoder
from gc_dpr.cli.output import claim_output
from gc_dpr.config import GenerateEmbeddingsConfig
from gc_dpr.data import read_passages, scan_corpus
from gc_dpr.distributed import (
    barrier,
    gather_integers,
    is_main,
    process_group,
    rank,
    world_size,
)
from gc_dpr.models import BiEncoder, encode_tokens
from gc_dpr.retrieval import (
    EMBEDDING_FILES,
    EncodeCounts,
    ShardWriter,
    encode_passages_to_shard,
    finish_embeddings,
)


def run(settings: GenerateEmbeddingsConfig) -> None:
    """Every process encodes one contiguous share of the corpus; rank 0 checks the whole."""
    with process_group(settings.hardware.device) as device:
        apply_threads(settings.hardware)
        folder = claim_output(
            settings,
            owned=(*EMBEDDING_FILES, "metrics.json"),
            inputs=[settings.checkpoint, settings.data.passages_file],
            device=device,
        )
        model = load_bi_encoder(str(settings.checkpoint), device)
        say_read(str(settings.checkpoint), describe(model))
        quoting = settings.data.passages_quoting
        corpus = scan_corpus(settings.data.passages_file, quoting=quoting)  # type: ignore[arg-type]
        say_read_all(corpus.paths, f"{corpus.rows} passages")

        output = folder.clear()
        with ShardWriter.open(
            output,
            shard=rank(),
            num_shards=world_size(),
            corpus_rows=corpus.rows,
            dim=model.embedding_dim,
            dtype=settings.dtype,
            model_fingerprint=model.fingerprint(),
            corpus_hash=corpus.content_hash,
        ) as writer:
            counts = encode_share(settings, model, writer)
        totals = sum_counts(counts, device)
        if is_main():
            store = finish_embeddings(output, num_shards=world_size())
            say_wrote(
                output, f"{store.rows} embeddings of {store.dim} dimensions, {settings.dtype}"
            )
            say_wrote(
                write_json(
                    output / "metrics.json",
                    {
                        "passages": store.rows,
                        "truncated_passages": totals["truncated"],
                        "tokens": totals["tokens"],
                        "padding_share": 1 - totals["tokens"] / max(totals["padded_tokens"], 1),
                        "passages_per_second": store.rows / max(counts.seconds, 1e-9),
                    },
                )
            )
            if totals["truncated"]:
                say(
                    f"note   {totals['truncated']} of {store.rows} passages were cut to "
                    f"{model.max_passage_length} tokens"
                )
        barrier()


def encode_share(
    settings: GenerateEmbeddingsConfig, model: BiEncoder, writer: ShardWriter
) -> EncodeCounts:
    """Stream the corpus through the passage encoder into this process's shard."""
    hardware = settings.hardware
    return encode_passages_to_shard(
        read_passages(
            settings.data.passages_file,
            quoting=settings.data.passages_quoting,  # type: ignore[arg-type]
        ),
        tokenize=model.tokenize_passages,
        encode=functools.partial(
            encode_tokens,
            model.passage_encoder,
            precision=hardware.precision,
        ),
        writer=writer,
        batch_tokens=hardware.encode_batch_tokens,
        progress=is_main(),
    )


def sum_counts(counts: EncodeCounts, device: object) -> dict[str, int]:
    """Add up what the processes counted."""
    names = ("truncated", "tokens", "padded_tokens")
    rows = gather_integers([getattr(counts, name) for name in names], str(device))
    return {name: sum(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
