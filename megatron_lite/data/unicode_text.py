"""What is asked of a text before it is encoded, without a copy of a long one."""

from megatron_lite.config.declare import ConfigError

_PIECE = 1 << 20  # characters of a long text looked at at a time


def check_unicode(text: str) -> None:
    """Raise ConfigError if `text` holds half of a surrogate pair, which no UTF-8 text can."""
    if text.isascii():
        return
    for first in range(0, len(text), _PIECE):
        try:
            text[first : first + _PIECE].encode("utf-8")
        except UnicodeEncodeError as error:
            place = first + error.start
            raise ConfigError(
                f"the text holds a lone surrogate \\u{ord(text[place]):04x} at character {place:,}, "
                "wanted valid Unicode"
            ) from None


def utf8_size(text: str) -> int:
    """Bytes of `text` in UTF-8, without a copy of a long one."""
    if text.isascii():
        return len(text)
    return sum(len(text[first : first + _PIECE].encode()) for first in range(0, len(text), _PIECE))
