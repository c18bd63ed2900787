r"""Measure top-k accuracy of one or several runs.

python scripts/evaluate_retrieval.py runs=runs/factbook/run/run.json \
    output_dir=runs/factbook/evaluation
"""

import sys

from gc_dpr.cli import main

if __name__ == "__main__":
    main(["evaluate_retrieval", *sys.argv[1:]])
