"""What the data_prep scripts share at their edge: one sentence and exit code 2 for what a user can cause."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megatron_lite.config.declare import ConfigError, finite_number, whole_number


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of printing its usage, and takes no abbreviated flags."""

    def __init__(self, description: str, **options: Any) -> None:
        super().__init__(description=description, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


class RunError(RuntimeError):
    """What went wrong though the input was right: a full disk, a killed worker. One sentence, exit code 1."""


Result = TypeVar("Result")


def run(main: Callable[[Sequence[str]], None]) -> NoReturn:
    """Call `main(argv)` and leave: 0, or 2 for a ConfigError, 1 for a RunError or a failing disk, 130 for Ctrl-C."""
    guarded(lambda: main(sys.argv[1:]))
    sys.exit(0)


def guarded(call: Callable[[], Result]) -> Result:
    """The call's result; where it raises, one sentence and the exit code that `run` promises."""
    try:
        try:
            return call()
        finally:
            sys.stdout.flush()  # what --help printed too, so that a broken pipe shows itself here
    except ConfigError as error:
        _leave(f"error: {error}", 2)
    except RunError as error:
        _leave(f"error: {error}", 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has seen enough
        _leave("", 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _leave(f"error: {where}{error.strerror or error}", 1)
    except KeyboardInterrupt as error:
        _leave(f"interrupted{': ' + str(error) if str(error) else ''}", 130)


def _leave(sentence: str, code: int) -> NoReturn:
    if sentence:
        print(sentence, file=sys.stderr, flush=True)
    sys.exit(code)


def number(minimum: float, kind: type = int, maximum: float | None = None) -> Callable[[str], Any]:
    """An argparse type: a number from `minimum` to `maximum` (to the largest of 64 bits), else a sentence about it.

    Written as pretrain_gpt.py's flags take it: 1_000_000, 1e9, 1.5K.
    """
    limits = f"from {minimum:,} to {maximum:,}" if maximum is not None else f"of at least {minimum:,}"
    highest = maximum if maximum is not None else 2**63 - 1 if kind is int else sys.float_info.max

    def convert(text: str) -> Any:
        try:
            value = whole_number(text) if kind is int else finite_number(text)
        except ValueError:
            value = None
        if value is None or not minimum <= value <= highest:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"is '{text}', wanted {what} {limits}")
        return value

    return convert


def make_folder_of(path: Path, flag: str) -> None:
    """Make the folder that `path` will lie in. Raises ConfigError when that fails or `path` is a folder itself."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} '{path}': its folder cannot be made: {error.strerror}") from None
    if path.is_dir():
        raise ConfigError(f"{flag} '{path}' is a folder, wanted a file to write")
