"""The two forms in which vocabularies for tiktoken come."""

import base64
import json
from pathlib import Path

from megatron_lite.config.declare import ConfigError
from megatron_lite.files.foreign_files import foreign_content


def read_tiktoken(path: Path, content: bytes) -> list[bytes]:
    """The tokens of a vocabulary file, by rank: Megatron's JSON list, or tiktoken's own lines "BASE64 RANK".

    Args:
        path: for messages. content: of the file.

    Raises:
        ConfigError: it is neither, or its ranks are not 0, 1, 2 ... each once with another token.
    """
    try:
        if content.lstrip()[:1] == b"[":
            pairs = [(row["rank"], base64.b64decode(row["token_bytes"])) for row in json.loads(content)]
        else:
            words = [line.split() for line in content.splitlines() if line]
            pairs = [(int(rank), base64.b64decode(token, validate=True)) for token, rank in words]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--tokenizer-model '{path}' is no tiktoken vocabulary, wanted a JSON list of rank and token_bytes, or "
            f"lines 'BASE64 RANK'{foreign_content(content[:512])}"
        ) from None
    ranks = [rank for rank, _ in pairs]
    tokens = [token for _, token in sorted(pairs)]
    if not pairs or sorted(ranks) != list(range(len(pairs))) or len(set(tokens)) != len(tokens):
        raise ConfigError(
            f"--tokenizer-model '{path}' has {len(pairs):,} ranks, wanted each of 0, 1, 2 ... once, "
            f"each with another token{foreign_content(content[:512])}"
        )
    return tokens
