"""A real corpus that every Python machine has: the standard library's own sources and docstrings, as JSON lines.

    python data_prep/sample_corpus.py --output corpus.jsonl

One document a file: {"text": ..., "path": "json/decoder.py"}; one more for each built-in module, made of its
docstrings. The order is that of a hash of the name, so that any cut (a validation split, a first half) is a fair
sample; the same Python gives the same bytes.
"""

import hashlib
import importlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_lite.config import ConfigError
from megatron_lite.files.command_line import Parser, make_folder_of, number, run
from megatron_lite.files.writing import opened_aside

TEST_FOLDERS = {"test", "tests", "idle_test"}
NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}


def docstrings(module_name: str) -> str:
    """The docstrings of a built-in module and of what it holds, in the order of the names."""
    module = importlib.import_module(module_name)
    texts = []
    for name in ["", *sorted(vars(module))]:
        item = vars(module)[name] if name else module
        text = inspect.getdoc(item) if not name or callable(item) else None
        if text:
            texts.append(f"{module_name}.{name}\n\n{text}" if name else f"{module_name}\n\n{text}")
    return "\n\n\n".join(texts)


def documents(library: Path, goal: int) -> Iterator[tuple[str, str]]:
    """(name, text) of each document: modules, then the tests of the library only until `goal` bytes are reached."""
    written = 0
    for name in sorted(sys.builtin_module_names):
        if text := docstrings(name):
            written += len(text.encode())
            yield f"{name} (docstrings)", text
    sources = []
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        if path.is_file() and not NOT_STANDARD & set(name.parts):
            sources.append((bool(TEST_FOLDERS & set(name.parts)), digest(name.as_posix()), path))
    for is_test, _, path in sorted(sources):
        if written >= goal and is_test:
            return
        with suppress(UnicodeDecodeError):  # a few of the tests are no UTF-8
            text = path.read_bytes().decode("utf-8")
            if text.strip():
                written += len(text.encode())
                yield path.relative_to(library).as_posix(), text


def digest(name: str) -> bytes:
    """What the documents are ordered by."""
    return hashlib.sha256(name.encode()).digest()


def write_corpus(output: Path, library: Path, goal: int, limit: int | None) -> tuple[int, int]:
    """Write the corpus; returns (documents, bytes of text).

    Args:
        goal: bytes of text to reach, by the library's tests where its own modules do not suffice.
        limit: stop after the document that reaches so many bytes; None = no limit.

    Raises:
        ConfigError: the library does not hold `goal` bytes.
    """
    count = size = 0
    with opened_aside(output, "w", encoding="utf-8", newline="\n") as file:
        for name, text in sorted(documents(library, goal), key=lambda document: digest(document[0])):
            file.write(json.dumps({"text": text, "path": name}, ensure_ascii=False) + "\n")
            count, size = count + 1, size + len(text.encode())
            if limit is not None and size >= limit:
                break
        if size < min(goal, limit or goal):
            raise ConfigError(
                f"the standard library in '{library}' holds {size / 1e6:.1f} MB of text, "
                f"wanted --megabytes {goal / 1e6:g}; give a smaller number"
            )
    return count, size


def main(argv: Sequence[str]) -> None:
    """Parse `argv`, write the corpus, say what was written."""
    parser = Parser("Write the standard library's own sources as a corpus of JSON lines.")
    parser.add_argument("--output", required=True, type=Path, help="the .jsonl file to write")
    parser.add_argument(
        "--megabytes",
        type=number(0.001, float, 1e9),
        help="stop at the document that reaches so much text; without it everything, at least 10 MB",
    )
    arguments = parser.parse_args(argv)
    limit = None if arguments.megabytes is None else int(arguments.megabytes * 1e6)
    make_folder_of(arguments.output, "--output")
    library = Path(sysconfig.get_paths()["stdlib"])
    count, size = write_corpus(arguments.output, library, limit or 10_000_000, limit)
    print(f"{arguments.output}: {count:,} documents, {size / 1e6:.2f} MB of text, from {library}")


if __name__ == "__main__":
    run(main)
