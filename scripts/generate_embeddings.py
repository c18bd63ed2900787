r"""Embed every passage of a corpus.

python scripts/generate_embeddings.py checkpoint=runs/factbook/checkpoint data=factbook \
    output_dir=runs/factbook/embeddings
"""

import sys

from gc_dpr.cli import main

if __name__ == "__main__":
    main(["generate_embeddings", *sys.argv[1:]])
