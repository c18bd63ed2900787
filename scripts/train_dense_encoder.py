"""Train a question and a passage encoder with the gradient cache.

python scripts/train_dense_encoder.py experiment=factbook_cpu output_dir=runs/factbook
torchrun --nproc-per-node 8 scripts/train_dense_encoder.py experiment=nq_8x32gb output_dir=runs/nq
"""

import sys

from gc_dpr.cli import main

if __name__ == "__main__":
    main(["train_dense_encoder", *sys.argv[1:]])
