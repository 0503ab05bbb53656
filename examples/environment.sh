# Sourced by the scripts: a Python environment with this package and requirements.txt in it.
# Uses the active virtual environment, else makes .venv at the top of the repository. PYTHON=... chooses another Python.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [[ -z "${VIRTUAL_ENV:-}" ]]; then
    if [[ ! -x "$ROOT/.venv/bin/python" ]]; then
        BASE="${PYTHON:-$(command -v python3.11 || command -v python3)}"
        echo "+ $BASE -m venv .venv"
        "$BASE" -m venv "$ROOT/.venv"
    fi
    source "$ROOT/.venv/bin/activate"
fi

# Installed once for this folder, pyproject.toml and requirements.txt: the package, editable, and what it needs.
WANTED="$(cat "$ROOT/pyproject.toml" "$ROOT/requirements.txt" | cksum) $ROOT"
STAMP="$VIRTUAL_ENV/.megatron_lite_installed"
if [[ "$(cat "$STAMP" 2>/dev/null)" != "$WANTED" ]]; then
    echo "+ pip install -e .   (into $VIRTUAL_ENV)"
    python -m pip install --quiet --disable-pip-version-check --editable "$ROOT"
    echo "$WANTED" > "$STAMP"
fi
