#!/usr/bin/env bash
# The one test command: installs what it needs, then lint, format, types on public functions, tests.
#   bash tests/run.sh              everything
#   bash tests/run.sh tests/data   only these, with any flag of pytest
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../examples/environment.sh"
cd "$ROOT"

echo "+ ruff check ."
python -m ruff check .
echo "+ ruff format --check ."
python -m ruff format --check .
echo "+ pytest ${*:-}"
exec python -m pytest --durations=15 "$@"
