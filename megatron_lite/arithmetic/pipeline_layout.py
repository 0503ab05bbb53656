"""Megatron's way to write a pipeline out: --pipeline-model-parallel-layout "Et*3|(tt|)*29,L". Imports no torch.

E embedding, t one decoder layer, L loss (final norm and head), | end of a stage, (...)*n or x*n repetition; commas and
spaces only please the eye. Stages are in pipeline order. m (multi-token prediction) is Megatron's, and refused here.
"""

import re
from collections.abc import Sequence
from itertools import groupby

from megatron_lite.config.declare import ConfigError

_FLAG = "--pipeline-model-parallel-layout"
_LONGEST = 100_000
_STAR = "* wants one sign or bracket before it and one number of at most six digits behind it"
# (...)*n, x*n, or brackets alone.
_REPETITION = re.compile(
    r"(\((?P<group>[EtLm|]*)\)|(?P<one>[EtLm|]))\*(?P<repeats>\d{1,6})(?!\d)|\((?P<plain>[EtLm|]*)\)(?!\*)"
)


def parse_layout(layout: str) -> list[int]:
    """Decoder layers of each stage of a layout; stage 0 holds the embedding, the last stage the head.

    Raises:
        ConfigError: the text cannot be read, or E or L is missing, doubled or out of place, or a stage is empty.
    """
    stages = _unroll(layout).split("|")
    if "m" in "".join(stages):
        raise ConfigError(f"{_FLAG} '{layout}': m (multi-token prediction) has no place here, take it out")
    if "".join(stages).count("E") != 1 or not stages[0].startswith("E"):
        raise ConfigError(f"{_FLAG} '{layout}': one E (embedding) has to start the first stage, and no other")
    if "".join(stages).count("L") != 1 or not stages[-1].endswith("L"):
        raise ConfigError(f"{_FLAG} '{layout}': one L (loss) has to end the last stage, and no other")
    for index, stage in enumerate(stages):
        if not stage:
            raise ConfigError(f"{_FLAG} '{layout}': stage {index} is empty, give it a t or leave out one |")
    return [stage.count("t") for stage in stages]


def write_layout(counts: Sequence[int]) -> str:
    """The shortest plain layout with `counts` decoder layers per stage: [2, 3, 3, 1] -> 'Ett|ttt|ttt|tL'."""
    stages = ["t" * count for count in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    middle = [(stage, len(list(same))) for stage, same in groupby(stages[1:-1])]
    if len(stages) == 1:
        return stages[0]
    text = stages[0] + "|"
    for stage, repeats in middle:
        text += f"({stage}|)*{repeats}" if repeats > 2 else f"{stage}|" * repeats
    return text + stages[-1]


def _unroll(layout: str) -> str:
    """The layout without brackets and numbers: the innermost repetition is written out until none is left."""
    text = re.sub(r"[, \t\n'\"]", "", layout)
    while (match := _REPETITION.search(text)) and not re.search(r"\*\d+\*", text):
        item, repeats = match["group"] or match["one"] or match["plain"] or "", int(match["repeats"] or 1)
        if len(text) + len(item) * repeats > _LONGEST:
            raise ConfigError(f"{_FLAG} '{layout}' unrolls to more than {_LONGEST:,} signs")
        text = text[: match.start()] + item * repeats + text[match.end() :]
    left = sorted((sign for sign in text if sign not in "EtLm|"), key=lambda sign: sign in "()")
    if left:
        reasons = {"(": "( without )", ")": ") without (", "*": _STAR}
        reason = reasons.get(left[0], f"'{left[0]}' is none of E t L m | ( ) *n")
        raise ConfigError(f"{_FLAG} '{layout}': {reason}")
    return text
