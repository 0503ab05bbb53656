"""A SentencePiece model as a pipeline of the `tokenizers` library that gives the same ids.

What decides the ids there, and the same in the tokenizers library:

    normalisation (charsmap, spaces)     normalizers
    dummy prefix, spaces as "▁"          normalizers
    BPE: the pair whose union scores     merges, ranked by the score of the union
      best is merged first
    unigram: the best path               Unigram with the same scores
    byte fallback                        byte_fallback
    control pieces never come from text  special tokens, and split_special_tokens in tokenizer_config.json
    user-defined pieces always do        added tokens
"""

import re
from collections.abc import Iterator

from sentencepiece import sentencepiece_model_pb2 as schema
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megatron_lite.config.declare import ConfigError

SPACE = "▁"
# Piece kinds of SentencePiece's schema.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE, UNUSED = 1, 2, 3, 4, 6, 5
UNIGRAM, BPE = 1, 2
# Far below every real path: a control or byte piece must never be read from text that spells its name.
NEVER = 1000.0
# The tokenizers library looks "\r\n" up as one sign, and drops the second when only the first is in the charsmap. A
# control character that the charsmap deletes keeps them apart.
DELETED = "\x01"


def convert_sentencepiece(content: bytes, name: str) -> Tokenizer:
    """The tokenizer of a SentencePiece .model file.

    Raises:
        ConfigError: for a kind of model or a setting that the `tokenizers` library cannot follow.
    """
    model = schema.ModelProto()
    model.ParseFromString(content)
    _check(model, name)
    core = Tokenizer(_bpe(model) if model.trainer_spec.model_type == BPE else _unigram(model))
    core.normalizer = _normalizer(model)
    cuts = _cuts(model) if model.trainer_spec.model_type == UNIGRAM else []
    if cuts:
        core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(cuts)), behavior="isolated")
    core.decoder = _decoder(model)
    added = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    for piece in model.pieces:
        if piece.type in added:
            text = piece.piece if added[piece.type] else piece.piece.replace(SPACE, " ")
            core.add_tokens([AddedToken(text, special=added[piece.type], normalized=False)])
    return core


def _check(model: schema.ModelProto, name: str) -> None:
    kinds = {UNIGRAM: "unigram", BPE: "bpe"}
    kind = model.trainer_spec.model_type
    if kind not in kinds:
        raise ConfigError(f"{name} is a SentencePiece model of type {kind}, wanted unigram or bpe")
    if model.trainer_spec.treat_whitespace_as_suffix:
        raise ConfigError(f"{name} puts spaces after words, which the tokenizers library cannot")
    if kind == BPE and any(piece.type == UNUSED for piece in model.pieces):
        raise ConfigError(f"{name} has unused pieces, which the tokenizers library cannot follow")
    texts = [piece.piece for piece in model.pieces]
    if len(set(texts)) != len(texts):
        raise ConfigError(f"{name} has the same piece twice")


def _bpe(model: schema.ModelProto) -> models.BPE:
    vocabulary = {piece.piece: number for number, piece in enumerate(model.pieces)}
    ranked = sorted(_merges(model))
    return models.BPE(
        vocab=vocabulary,
        merges=[(left, right) for _, _, left, right in ranked],
        unk_token=_unknown(model),
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _merges(model: schema.ModelProto) -> Iterator[tuple[float, int, str, str]]:
    """(minus the score of the union, length of the left part, left, right) of every pair that can merge."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
    for text, score in scores.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in scores and right in scores:
                yield -score, cut, left, right


def _unigram(model: schema.ModelProto) -> models.Unigram:
    lowest = min((piece.score for piece in model.pieces if piece.type == NORMAL), default=0.0)
    pieces = [
        (piece.piece, piece.score if piece.type == NORMAL else lowest - NEVER) for piece in model.pieces
    ]
    unknown = next((number for number, piece in enumerate(model.pieces) if piece.type == UNKNOWN), None)
    return models.Unigram(pieces, unknown, model.trainer_spec.byte_fallback)


def _cuts(model: schema.ModelProto) -> list[str]:
    """Where a text that spells a control or byte piece is cut, so that the name is not read as the piece: NEVER is not
    enough where the other way has characters that are unknown. Between two characters that no piece joins, so that
    nothing else changes.
    """
    texts = [piece.piece for piece in model.pieces if piece.type in (NORMAL, USER_DEFINED)]
    known = set("".join(texts))
    joined = {text[i : i + 2] for text in texts for i in range(len(text) - 1)}
    cuts = []
    for piece in model.pieces:
        name = piece.piece
        if piece.type in (NORMAL, USER_DEFINED) or set(name) <= known:
            continue
        for i in range(1, len(name)):
            # Two unknown characters are one token, if they are not cut.
            if name[i - 1 : i + 1] not in joined and {name[i - 1], name[i]} & known:
                cuts.append(f"(?<={re.escape(name[:i])})(?={re.escape(name[i:])})")
                break
    return cuts


def _unknown(model: schema.ModelProto) -> str | None:
    return next((piece.piece for piece in model.pieces if piece.type == UNKNOWN), None)


def _normalizer(model: schema.ModelProto) -> normalizers.Normalizer:
    spec = model.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        charsmap = normalizers.Precompiled(spec.precompiled_charsmap)
        if charsmap.normalize_str(DELETED) == "":
            steps.append(normalizers.Replace("\r\n", f"\r{DELETED}\n"))
        steps.append(charsmap)
    if spec.remove_extra_whitespaces:
        # ^ and $ are the ends of lines there. SentencePiece trims what stands for a space at the end, too.
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _decoder(model: schema.ModelProto) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    unknown = _unknown(model)
    if unknown is not None:
        steps.insert(0, decoders.Replace(unknown, model.trainer_spec.unk_surface))
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
