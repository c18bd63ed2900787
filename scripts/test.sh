#!/usr/bin/env bash
# Everything that must hold before a change lands: lint, format, types, import layers, tests.
#   bash scripts/test.sh            all of it, as continuous integration runs it
#   bash scripts/test.sh tests/data what pytest is given instead of all tests
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh dev
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/pytest "$@"
