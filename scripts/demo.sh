#!/usr/bin/env bash
# The main job on real data: train, embed, index, retrieve, evaluate. Minutes on two CPU cores.
#   bash scripts/demo.sh                     country facts (data/factbook)
#   bash scripts/demo.sh data=squad_sample   human questions on Wikipedia paragraphs
# Other settings go to the training command, e.g. train.epochs=3. A second call skips what is done.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh demo
exec .venv/bin/python scripts/demo.py "$@"
