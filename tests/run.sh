#!/usr/bin/env bash
# The one test command: installs what it needs, then lint, format, types on public functions, tests.
#   bash tests/run.sh                   everything
#   bash tests/run.sh --quick           the tests of tests/quick.txt: every room touched, a quarter of the time
#   bash tests/run.sh tests/data        only these, with any flag of pytest
#   bash tests/run.sh --torch 2.11.0    on another torch, in a venv of its own (.venv-torch-2.11.0)
# WORKERS=1 runs one process; by default one a core, up to 4.
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
# A test mostly has one process that computes, or ranks that wait for one another: it leaves cores idle.
WORKERS="${WORKERS:-$(python -c 'import os; print(min(4, len(os.sched_getaffinity(0))))')}"
SHARE="$(mktemp -d)"
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$SHARE"' EXIT
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
echo "+ $WORKERS x pytest ${*:-}   (torch $(python -c 'import torch; print(torch.__version__)'))"
for ((number = 1; number < WORKERS; number++)); do
    python -m pytest --durations=15 --share="$SHARE" "$@" >"$SHARE/$number.log" 2>&1 &
done
FAILED=0
python -m pytest --durations=15 --share="$SHARE" "$@" || FAILED=$?
for job in $(jobs -p); do
    wait "$job" || FAILED=$?
done
cat "$SHARE"/*.log 2>/dev/null || true
exit "$FAILED"
