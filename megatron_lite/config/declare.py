"""How a flag is declared, and the error that a wrong one raises."""

from dataclasses import field
from typing import Any

Words = tuple[str, ...]
Numbers = tuple[int, ...]


class ConfigError(ValueError):
    """What a user can cause: one sentence with the flag or file, the value seen and the value wanted."""


def refuse_together(*flags: str | None, because: str) -> None:
    """Raise ConfigError when more than one of the flags (None: not given) is there."""
    given = [flag for flag in flags if flag]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} cannot be given together: {because}")


def flag(default: Any, text: str, **options: Any) -> Any:
    """A field that is a flag.

    Options: choices; nargs; minimum (default 0; None = any), maximum, above (exclusive minimum);
    spelling and aliases where the name alone does not give the flag; parse (a named parser of
    megatron_lite.arguments) for values that are neither a word nor a number; no_effect (why it does nothing here).
    """
    return field(default=default, metadata={"help": text, **options})
