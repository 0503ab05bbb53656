"""How a flag is declared, and the error that a wrong one raises."""

import math
import re
from dataclasses import Field, field
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

Words = tuple[str, ...]
Numbers = tuple[int, ...]

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


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
    spelling and aliases where the name alone does not give the flag; synonyms
    {other word: the choice it stands for}; join (several words are one text); layer_pattern (of
    arithmetic/layer_pattern.py); no_effect (why it does nothing here).
    """
    return field(default=default, metadata={"help": text, **options})


def flag_of(item: Field) -> str:
    """The command-line spelling of a config field."""
    return item.metadata.get("spelling", flag_name(item.name))


def flag_name(name: str) -> str:
    """'--num-layers' of 'num_layers'."""
    return "--" + name.replace("_", "-")


def in_words(value: Any) -> str:
    """A flag's value as one would write it on the command line."""
    if isinstance(value, tuple):
        return " ".join(map(in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def finite_number(text: str) -> float:
    """A finite number: 3e-4, 4_294_967_296, 200B. Raises ValueError."""
    match = re.fullmatch(r"(.*?\d.*?)([kmbt]?)", text.strip(), re.IGNORECASE)
    try:
        value = float(match[1]) * _SUFFIXES[match[2].lower()]
    except (TypeError, ValueError):
        raise ValueError(f"'{text}' is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"'{text}' is not a finite number")
    return value


def whole_number(text: str) -> int:
    """A whole number: 1024, 1_000_000, 1e9, 200B, 1.5K. Raises ValueError."""
    if re.fullmatch(r"[-+]?\d+", text.strip()):
        return int(text)
    value = finite_number(text)
    if value != int(value):
        raise ValueError(f"'{text}' is not a whole number")
    return int(value)


def broken_limit(number: float, item: Field) -> str | None:
    """'at least 1': what the flag's limits want of a number that is outside of them; None for one within."""
    limits = item.metadata
    above, least, most = limits.get("above"), limits.get("minimum", 0), limits.get("maximum")
    if above is not None and number <= above:
        return f"more than {above}"
    if least is not None and number < least:
        return f"at least {least}"
    if most is not None and number > most:
        return f"at most {most}"
    return None


def check_stored(name: str, value: Any, item: Field, annotation: Any) -> None:
    """Raise ConfigError for a value that was read from a file and that the flag cannot have: by type, choice, limit."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    fits = is_of_kind(value, annotation) and all(
        math.isfinite(number) and broken_limit(number, item) is None for number in numbers
    )
    choices = item.metadata.get("choices")
    if not fits or (choices is not None and any(v is not None and v not in choices for v in values)):
        raise ConfigError(f"{name} is {str(value)[:80]!r}, wanted {wanted_of(item, annotation)}")


def wanted_of(item: Field, annotation: Any) -> str:
    """In words, what a flag takes: its choices, or its kind and limits."""
    limits, words = item.metadata, {"above": "above", "minimum": "at least", "maximum": "at most"}
    if "choices" in limits:
        return " or ".join(map(str, limits["choices"]))
    bounds = [f"{word} {limits[name]}" for name, word in words.items() if limits.get(name) is not None]
    kind, null, _ = kind_in_words(annotation).partition(" or null")
    return " ".join([kind, *bounds]) + null


def kind_in_words(annotation: Any) -> str:
    """'a whole number', 'a list of text or nothing': an annotation for people."""
    if isinstance(annotation, UnionType):
        return " or ".join(map(kind_in_words, get_args(annotation)))
    if get_origin(annotation) in (tuple, list):
        return f"a list of {kind_in_words(get_args(annotation)[0])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return words.get(get_origin(annotation) or annotation, "an object")


def is_of_kind(value: Any, annotation: Any) -> bool:
    """Whether a value of JSON (its lists may be tuples) is of an annotation such as `tuple[int, ...] | None`.

    Of a dict only that it is one.
    """
    if isinstance(annotation, UnionType):
        return any(is_of_kind(value, kind) for kind in get_args(annotation))
    if get_origin(annotation) is tuple:
        kind = get_args(annotation)[0]
        return isinstance(value, (list, tuple)) and all(is_of_kind(part, kind) for part in value)
    if isinstance(value, bool):
        return annotation is bool
    return isinstance(value, (int, float) if annotation is float else get_origin(annotation) or annotation)
