"""gc-dpr build_index: embedding shards → a FAISS index."""

from __future__ import annotations

from gc_dpr.cli.console import say_read, say_wrote
from gc_dpr.cli.output import claim_output
from gc_dpr.config import BuildIndexConfig
from gc_dpr.retrieval import INDEX_FILES, DenseIndex, EmbeddingStore


def run(settings: BuildIndexConfig) -> None:
    """Read, add block by block, write."""
    folder = claim_output(settings, owned=INDEX_FILES, inputs=[settings.embeddings_dir])
    store = EmbeddingStore.open(str(settings.embeddings_dir), verify=settings.verify_checksums)
    say_read(store.folder, f"{store.rows} embeddings of {store.dim} dimensions")
    index = DenseIndex.build(store, factory=settings.index.factory, progress=True)
    output = folder.clear()
    index.save(output)
    size = sum(file.stat().st_size for file in output.iterdir()) / 1e6
    say_wrote(
        output, f"{settings.index.factory}, inner product, {len(index)} passages, {size:.1f} MB"
    )
