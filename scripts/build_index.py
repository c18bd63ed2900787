r"""Build a FAISS index over an embedding folder.

python scripts/build_index.py embeddings_dir=runs/factbook/embeddings \
    output_dir=runs/factbook/index
"""

import sys

from gc_dpr.cli import main

if __name__ == "__main__":
    main(["build_index", *sys.argv[1:]])
