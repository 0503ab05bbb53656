"""The library itself as a baseline: `tokenizers`' encode_batch on documents in memory, on all cores.

    python tools/benchmarks/encode_batch.py INPUT TOKENIZER_FOLDER EOD

Prints the seconds inside of encode_batch, and a sha256 of the ids as uint16, each document ended by EOD.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import tokenizers

DOCUMENTS_A_CALL = 256  # thousands at once would need gigabytes: it keeps the place of each token


def encode(path: str, folder: str, eod: int) -> tuple[float, str]:
    """Seconds and digest."""
    core = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    core.encode_special_tokens = True
    with Path(path).open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    digest, seconds = hashlib.sha256(), 0.0
    for first in range(0, len(texts), DOCUMENTS_A_CALL):
        started = time.perf_counter()
        encoded = core.encode_batch(texts[first : first + DOCUMENTS_A_CALL], add_special_tokens=False)
        seconds += time.perf_counter() - started
        for document in encoded:
            digest.update(np.array([*document.ids, eod] if document.ids else [], np.uint16).tobytes())
    return seconds, digest.hexdigest()


if __name__ == "__main__":
    print(*encode(sys.argv[1], sys.argv[2], int(sys.argv[3])))
