"""A result that is whole under its name or not there: made aside, renamed at the end."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lite.config.declare import ConfigError
from megatron_lite.files.writing import aside_of, sync_folder


def check_free(path: Path, flag: str) -> None:
    """Refuse a result that would overwrite something.

    Raises:
        ConfigError: naming the flag.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{flag} '{path}' exists and is not an empty folder, wanted a new name")


@contextmanager
def made_aside(path: Path, flag: str) -> Iterator[Path]:
    """A folder beside `path` to work in; it takes the name when the block ends well and is removed when it does not.

    Raises:
        ConfigError: when `path` is taken or cannot be made.
    """
    check_free(path, flag)
    path = path.absolute()
    aside = aside_of(path)
    try:
        try:
            aside.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"{flag} '{path}' cannot be made: {error.strerror}") from None
        yield aside
        sync_folder(aside)
        aside.rename(path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
