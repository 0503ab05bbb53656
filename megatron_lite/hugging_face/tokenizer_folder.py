"""A tokenizer of ours as files that transformers' AutoTokenizer loads with equal ids."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_lite.config.declare import ConfigError
from megatron_lite.data.tokenizer import (
    FastTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TikTokenTokenizer,
)
from megatron_lite.data.tokenizer import Tokenizer as OurTokenizer
from megatron_lite.hugging_face.sentencepiece_conversion import convert_sentencepiece

# Scripts, spaces, newlines, bytes that are no character, words that look like special tokens.
PROBE_TEXTS = (
    "The quick brown fox jumps over the lazy dog, twice: 1234567890 = 0x499602D2.",
    "  two leading spaces,  two inside, two at the end  ",
    "def f(x):\n\tif x > 1:\n\t\treturn f(x - 1)\n\n\n    return 'done'\r\n",
    "Zażółć gęślą jaźń. Съешь ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "我能吞下玻璃而不伤身体。 私はガラスを食べられます。 나는 유리를 먹을 수 있어요.",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني. मैं काँच खा सकता हूँ।",
    "👩‍👩‍👧‍👦 naïve café — “quotes” … ½ ﬁ ™ \u00a0\u200b\ufeff end",
    "</s> <s> <unk> <pad> <|endoftext|> <|im_end|> [EOS] <0x0A> ▁ ▁▁",
    "\x00\x01\x7f\u0085\u2028",
    " ",
    "a",
    "",
)


def write_tokenizer(
    tokenizer: OurTokenizer, folder: Path, max_length: int, fields: Mapping[str, Any] | None = None
) -> bool:
    """Write the tokenizer's files into a folder; `fields` go into a tokenizer_config.json that is written anew.

    Returns False for a NullTokenizer, which has none.

    Raises:
        ConfigError: for a SentencePiece model that has no counterpart.
    """
    if isinstance(tokenizer, NullTokenizer):
        return False
    for file in tokenizer.files():
        shutil.copyfile(file, folder / file.name)
    if (folder / "tokenizer.json").exists():  # a Hugging Face folder: copied as it is
        if not (folder / "tokenizer_config.json").exists():
            _write_settings(tokenizer, folder, max_length, split_special=False)
        return True
    if isinstance(tokenizer, SentencePieceTokenizer):
        model = tokenizer.files()[0]
        if model.name != "tokenizer.model":
            (folder / model.name).rename(folder / "tokenizer.model")
        core = convert_sentencepiece((folder / "tokenizer.model").read_bytes(), str(model))
    elif isinstance(tokenizer, TikTokenTokenizer):
        core = _convert_tiktoken(tokenizer)
    else:
        assert isinstance(tokenizer, FastTokenizer), tokenizer
        core = Tokenizer.from_str(tokenizer.core.to_str())
        end = core.id_to_token(tokenizer.eod)
        core.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    core.save(str(folder / "tokenizer.json"))
    _write_settings(tokenizer, folder, max_length, True, fields)
    return True


def check_tokenizer(tokenizer: OurTokenizer, folder: Path, texts: Sequence[str] = PROBE_TEXTS) -> int:
    """Load the folder as a user would and compare the ids of texts; returns the number of ids compared.

    Raises:
        ConfigError: naming the first text whose ids differ.
    """
    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    count = 0
    for text in (*texts, *_around_special(tokenizer, loaded, texts[0])):
        ours = tokenizer.encode(text)
        # A folder of Hugging Face's may read special tokens in a text; training data never did.
        theirs = loaded.encode(text, add_special_tokens=False, split_special_tokens=True)
        if ours != theirs:
            at = next(
                (i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]),
                min(len(ours), len(theirs)),
            )
            raise ConfigError(
                f"transformers' {type(loaded).__name__} gives other ids than {tokenizer.name} for {text[:40]!r}: "
                f"from token {at} on {theirs[at : at + 4]} instead of {ours[at : at + 4]} "
                f"(--no-tokenizer leaves the tokenizer out)"
            )
        count += len(ours)
    end = loaded.eos_token_id
    if end is not None and end != tokenizer.eod:
        raise ConfigError(
            f"transformers ends a text with token {end}, {tokenizer.name} ends a document with {tokenizer.eod}"
        )
    return count


def _around_special(tokenizer: OurTokenizer, loaded: Any, text: str) -> Iterator[str]:
    """Texts that spell the special and added tokens, alone and between words."""
    names = dict.fromkeys([*loaded.all_special_tokens, *loaded.get_added_vocab()])
    for name in list(names)[:64]:
        yield f"{text} {name}{name} {text}"


def _write_settings(
    tokenizer: OurTokenizer,
    folder: Path,
    max_length: int,
    split_special: bool,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """tokenizer_config.json: no bos or eos is added, as in training."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 adds token types otherwise
        "add_bos_token": False,
        "add_eos_token": False,
        "split_special_tokens": split_special,
    }
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    numbers = tokenizer.special_ids | {"eos": tokenizer.eod}
    settings |= {f"{name}_token": core.id_to_token(number) for name, number in numbers.items()}
    settings |= fields or {}
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _convert_tiktoken(tokenizer: TikTokenTokenizer) -> Tokenizer:
    """Byte-level BPE whose merges are recovered from the ranks: each token is the union of the two parts that
    the tokens of lower rank leave of it."""
    encoding = tokenizer.encoding
    letters = bytes_to_unicode()  # byte-level BPE's table: byte -> the character that stands for it
    ranks = {
        encoding.decode_single_token_bytes(i): i for i in range(tokenizer.num_special, tokenizer.vocab_size)
    }
    vocabulary = {encoding.decode([i]): i for i in range(tokenizer.num_special)}
    vocabulary |= {"".join(letters[b] for b in token): i for token, i in ranks.items()}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = _parts(token, ranks, rank)
        if len(parts) == 2:
            merges.append(tuple("".join(letters[b] for b in part) for part in parts))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(tokenizer.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    special = [encoding.decode([i]) for i in range(tokenizer.num_special)]
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return core


def _parts(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """What byte pair encoding with the tokens below `limit` makes of a token."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        best, at = min((ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1))
        if best >= limit:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
