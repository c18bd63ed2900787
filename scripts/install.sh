#!/usr/bin/env bash
# Makes .venv and installs the toolkit with the given extra; a second call finds it done.
#   bash scripts/install.sh demo|dev
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:?usage: scripts/install.sh demo|dev}
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  echo "Python 3.10 or newer is needed; found: $("$python" --version 2>&1). Set PYTHON=/path/to/python3" >&2
  exit 1
fi
# What is installed is known by the files that decide it.
stamp=.venv/.installed-$extra
wanted=$(cat pyproject.toml requirements.lock gc_dpr/__init__.py | cksum)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "installing gc-dpr[$extra] into .venv (once; some minutes)" >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable ".[$extra]"
echo "$wanted" > "$stamp"
