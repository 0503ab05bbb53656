"""--moe-layer-freq: a number, or a list of zeros and ones written with + and *, read by a small grammar.

    sum     = product ("+" product)*
    product = part ("*" part)*
    part    = number | "[" [number ("," number)* [","]] "]" | "(" sum ")"

as in "([0]+[1]*23)" or "([1,1,0]*4)". Nothing is evaluated as code.
"""

import re

from megatron_lite.config.declare import ConfigError

Pattern = int | tuple[int, ...]
_LONGEST = 10_000  # layers: a repetition by mistake must not fill memory


def parse_layer_pattern(text: str) -> Pattern:
    """The number, or the list as a tuple.

    Raises:
        ConfigError: the text is neither.
    """
    words = re.findall(r"\[[^][]*\]|\d+|\S", text)
    try:
        if text.count("(") > 100:
            raise ValueError("more than 100 brackets")
        value, rest = _sum(words)
        if rest:
            raise ValueError(f"'{rest[0]}' is left over")
        if value == 0:
            raise ValueError("every 0th layer is none")
        if isinstance(value, list) and (not value or set(value) - {0, 1}):
            raise ValueError("a list has zeros (dense layers) and ones (layers with experts)")
    except ValueError as error:
        raise ConfigError(
            f"--moe-layer-freq is '{text[:80]}', wanted a number of layers or a list such as ([0]+[1]*23): {error}"
        ) from None
    return value if isinstance(value, int) else tuple(value)


def pattern_of_layers(pattern: Pattern, num_layers: int) -> tuple[int, ...]:
    """A parsed --moe-layer-freq as one 0 (dense) or 1 (experts) for each layer.

    Raises:
        ConfigError: a list of another length than --num-layers.
    """
    if isinstance(pattern, int):
        return tuple(int(layer % pattern == 0) for layer in range(num_layers))
    if len(pattern) != num_layers:
        raise ConfigError(
            f"--moe-layer-freq is a list of {len(pattern)} layers, wanted one entry for each of --num-layers "
            f"{num_layers}"
        )
    return pattern


def _sum(words: list[str]) -> tuple[int | list[int], list[str]]:
    value, rest = _product(words)
    while rest[:1] == ["+"]:
        other, rest = _product(rest[1:])
        if type(value) is not type(other):
            raise ValueError("+ adds two lists or two numbers")
        value = _bounded(value + other)
    return value, rest


def _product(words: list[str]) -> tuple[int | list[int], list[str]]:
    value, rest = _part(words)
    while rest[:1] == ["*"]:
        other, rest = _part(rest[1:])
        if isinstance(value, list) and isinstance(other, list):
            raise ValueError("* repeats a list by a number")
        numbers = [factor for factor in (value, other) if isinstance(factor, int)]
        length = max((len(factor) for factor in (value, other) if isinstance(factor, list)), default=1)
        if numbers[0] * length > _LONGEST:
            raise ValueError(f"more than {_LONGEST:,} layers")
        value = _bounded(value * other)
    return value, rest


def _part(words: list[str]) -> tuple[int | list[int], list[str]]:
    if not words:
        raise ValueError("it ends too early")
    first, *rest = words
    if first == "(":
        value, rest = _sum(rest)
        if rest[:1] != [")"]:
            raise ValueError("a bracket is not closed")
        return value, rest[1:]
    if first[0] == "[" and first[-1] == "]":
        numbers = [number.strip() for number in first[1:-1].split(",")]
        if numbers[-1] == "":  # an empty list, or a comma at its end
            numbers.pop()
        return [_number(number) for number in numbers], rest
    return _number(first), rest


def _number(word: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", word):
        raise ValueError(f"'{word[:20]}' is no whole number")
    return int(word)


def _bounded(value: int | list[int]) -> int | list[int]:
    if (len(value) if isinstance(value, list) else value) > _LONGEST:
        raise ValueError(f"more than {_LONGEST:,} layers")
    return value
