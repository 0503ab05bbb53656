#!/usr/bin/env bash
# The one test command: installs what it needs, then lint, format, types on public functions, tests.
#   bash tests/run.sh                   everything
#   bash tests/run.sh --quick           the tests of tests/quick.txt: every room touched, a quarter of the time
#   bash tests/run.sh tests/data        only these, with any flag of pytest
#   bash tests/run.sh --torch 2.11.0    on another torch, in a venv of its own (.venv-torch-2.11.0)
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

if [[ "${1:-}" == --torch ]]; then
    TORCH="${2:?--torch wants a version, for example 2.11.0}"
    shift 2
    OTHER="$HERE/../.venv-torch-$TORCH"
    if [[ ! -x "$OTHER/bin/python" ]]; then
        BASE="${PYTHON:-$(command -v python3.11 || command -v python3)}"
        echo "+ $BASE -m venv .venv-torch-$TORCH; pip install torch==$TORCH"
        "$BASE" -m venv "$OTHER"
        "$OTHER/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$TORCH"
    fi
    source "$OTHER/bin/activate"
fi
source "$HERE/../examples/environment.sh"
cd "$ROOT"
if [[ "${1:-}" == --quick ]]; then
    shift
    mapfile -t QUICK < <(sed -n 's/^[^# ][^ ]*  *//p' tests/quick.txt | awk '!seen[$0]++')
    set -- tests/test_quick.py "${QUICK[@]}" "$@"
fi

echo "+ ruff check ."
python -m ruff check .
echo "+ ruff format --check ."
python -m ruff format --check .
echo "+ pytest ${*:-}   (torch $(python -c 'import torch; print(torch.__version__)'))"
exec python -m pytest --durations=15 "$@"
