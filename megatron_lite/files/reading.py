"""Text and JSON that a user names, read with one sentence for what is wrong with the file. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from megatron_lite.config.declare import ConfigError
from megatron_lite.files.foreign_files import foreign_file


def read_text(path: str | Path, name: str) -> str:
    """The text of a file.

    Args:
        name: what an error calls the file, for example a flag with its value.

    Raises:
        ConfigError: it cannot be read, or holds something else than UTF-8 text.
    """
    try:
        text = Path(path).read_bytes()
        what = foreign_file(path) if text else ""
        if what:
            raise ConfigError(f"{name} cannot be read{what}")
        return text.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} cannot be read: it is not UTF-8 text") from None


def parse_object(data: str | bytes) -> dict[str, Any]:
    """The JSON object in the content of a file. Raises ValueError for anything else, or one nested absurdly deep."""
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, wanted an object")
    return content


def read_object(path: str | Path, name: str | None = None) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError as read_text, or when it is not JSON, or no object."""
    name = name or str(path)
    text = read_text(path, name)
    try:
        return parse_object(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON as wanted{foreign_file(path) or f': {error}'}") from None
