"""Merging against preprocessing in one go and against plain arrays; inspecting against counts made by hand."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_prep import inspect_data, merge_datasets, preprocess_data
from megatron_lite.config import ConfigError
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.preprocessing import journal
from tests.local_tokenizers import TEXT, write_sentencepiece
from tests.pairs import write_documents


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "t.model"))


def write(prefix, documents, dtype=np.uint16):
    """A pair whose documents are lists of sequences (lists of tokens)."""
    write_documents(prefix, documents, dtype, nested=True)


def pair(prefix):
    return [Path(f"{prefix}.{ending}").read_bytes() for ending in ("bin", "idx")]


def preprocess(folder, name, texts, model, *more):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]
    words = ["--input", str(path), "--output-prefix", str(folder / name), "--workers", "0", *tokenizer, *more]
    preprocess_data.main(words)
    return str(folder / f"{name}_text_document")


def test_merged_parts_are_the_whole(tmp_path, model):
    texts = [f"{n} {TEXT[n % len(TEXT)]}" if n % 7 else "" for n in range(300)]
    cuts = [0, 1, 120, 300]
    parts = [
        preprocess(tmp_path, f"part{n}", texts[a:b] or [""], model, "--append-eod", "--num-shards", "1")
        for n, (a, b) in enumerate(zip(cuts[1:], cuts[2:]))
    ]
    whole = preprocess(tmp_path, "whole", texts[1:], model, "--append-eod")
    merge_datasets.main(["--input", *parts, "--output-prefix", str(tmp_path / "merged")])
    assert pair(tmp_path / "merged") == pair(whole)
    assert Path(f"{whole}.json").read_bytes() == (tmp_path / "merged.json").read_bytes()


def test_documents_of_several_sequences_and_none(tmp_path, monkeypatch):
    monkeypatch.setattr(merge_datasets, "PIECE", 2)
    parts = {
        "a": [[[1, 2], [3]], [], [[4]]],
        "b": [],
        "c": [[[5], [6, 7], [8]], [[9]], []],
    }
    (tmp_path / "parts").mkdir()
    for name, documents in parts.items():
        write(tmp_path / "parts" / name, documents)
    write(tmp_path / "whole", [document for documents in parts.values() for document in documents])
    merge_datasets.main(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "merged")])
    assert pair(tmp_path / "merged") == pair(tmp_path / "whole")
    names = [str(tmp_path / "parts" / name) for name in ("c.idx", "a.bin", "b")]
    merge_datasets.main(["--input", *names, "--output-prefix", str(tmp_path / "other.bin")])
    assert np.fromfile(tmp_path / "other.bin", np.uint16).tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    pattern = str(tmp_path / "parts" / "[ac].*")
    merge_datasets.main(["--input", pattern, "--output-prefix", str(tmp_path / "other")])
    assert pair(tmp_path / "other") == pair(tmp_path / "whole")


def test_a_journal_writes_what_is_written_in_one_go(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_PIECE", 3)
    lengths = [3, 0, 1, 0, 0, 5, 2]
    made = journal.Journal(str(tmp_path / "j"), [str(tmp_path / "j_text")], "int32", {}, resume=False)
    for first in (0, 4):
        piece = np.array(lengths[first : first + 4], np.int32)
        made.append(0, np.arange(piece.sum()) + 10 * first, piece)
    made.commit({}, complete=True)
    made.publish([{}])
    tokens = iter([0, 1, 2, 3, *range(40, 47)])
    write(tmp_path / "b", [[[next(tokens) for _ in range(n)]] if n else [] for n in lengths], np.int32)
    assert pair(tmp_path / "j_text") == pair(tmp_path / "b") and not (tmp_path / "j.partial").exists()


def test_merge_refusals(tmp_path, model):
    write(tmp_path / "a", [[[1]]])
    write(tmp_path / "b", [[[1]]], np.int32)
    other = write_sentencepiece(tmp_path / "other.model", 419)
    made = [
        preprocess(tmp_path, "x", ["a b"], model, "--append-eod"),
        preprocess(tmp_path, "y", ["a b"], str(other), "--append-eod"),
        preprocess(tmp_path, "z", ["a b"], model),
    ]
    (tmp_path / "cut.bin").write_bytes(b"")
    (tmp_path / "cut.idx").write_bytes((tmp_path / "a.idx").read_bytes())
    a, b, cut, nowhere = (str(tmp_path / name) for name in ("a", "b", "cut", "nowhere"))
    for words, sentence in [
        ([a, b], "b.idx: dtype is int32, wanted uint16 as in"),
        (made[:2], "y_text_document.json: tokenizer fingerprint is"),
        ([made[0], made[2]], "z_text_document.json: append eod is False"),
        ([a, a], "2 times, wanted each dataset once"),
        ([a, cut], "cut.bin: file size is 0 bytes, wanted 2"),
        ([nowhere], "nowhere.bin: cannot be opened"),
        ([a, str(tmp_path / "out")], "is one of the inputs"),
    ]:
        with pytest.raises(ConfigError) as caught:
            merge_datasets.main(["--input", *words, "--output-prefix", str(tmp_path / "out")])
        assert sentence in str(caught.value)
        assert not list(tmp_path.glob("out*"))


def test_inspect_counts(tmp_path, model, capsys):
    texts = [" ".join([TEXT[n % len(TEXT)]] * (n % 4)) for n in range(100)]
    prefix = preprocess(tmp_path, "c", texts, model, "--append-eod")
    tokens = np.fromfile(f"{prefix}.bin", np.uint16)
    capsys.readouterr()
    words = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model, "--unigram-loss"]
    words += ["--split", "50,50", "--png", str(tmp_path / "h.png"), "--json", str(tmp_path / "h.json")]
    inspect_data.main([prefix, *words])
    text = capsys.readouterr().out
    facts = json.loads((tmp_path / "h.json").read_text())[0]
    assert facts["documents"] == 100 and facts["empty_documents"] == 25 and facts["sequences"] == 75
    assert facts["tokens"] == len(tokens) and facts["max_token_id"] == tokens.max()
    assert facts["documents_ended_by_eod"] == 75 and facts["eod_inside_documents"] == 0
    assert (tmp_path / "h.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert TEXT[1] in text and "                        0          25 #" in text
    # the unigram loss by hand: sequences 0..37 train, 38..74 valid (round half to even), add-one smoothing
    data = IndexedDataset(prefix)
    parts = [[token for s in range(*span) for token in data.get(s).tolist()] for span in ((0, 38), (38, 75))]
    counts, size = Counter(parts[0]), 420
    loss = -sum(math.log((counts[t] + 1) / (len(parts[0]) + size)) for t in parts[1]) / len(parts[1])
    assert f"unigram loss          {loss:.4f} nats a token on the valid part" in text


def test_inspect_finds_every_wrong_token(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_data, "PIECE", 4)
    write(tmp_path / "a", [[[1, 2, 3]], [], [[4, 5], [6, 90, 8]], [[9]]])
    with pytest.raises(ConfigError, match=r"a.bin: document 2, token 3 is 90, wanted 0 to 49, the ids"):
        inspect_data.main([str(tmp_path / "a"), "--vocab-size", "50"])
    write(tmp_path / "b", [[[1]], [[2, -3]]], np.int32)
    with pytest.raises(ConfigError, match=r"b.bin: document 1, token 1 is -3, wanted 0"):
        inspect_data.main([str(tmp_path / "b")])


def test_inspect_a_blend(tmp_path, capsys):
    write(tmp_path / "a", [[[1, 2, 3]]])
    write(tmp_path / "b", [[[1]]])
    inspect_data.main(["0.2", str(tmp_path / "a"), "0.8", str(tmp_path / "b.bin")])
    text = capsys.readouterr().out
    assert f"3  75.00%  0.2000 {tmp_path / 'a'}" in text and f"1  25.00%  0.8000 {tmp_path / 'b'}" in text
    write(tmp_path / "empty", [])
    inspect_data.main([str(tmp_path / "empty")])
    assert "tokens                0 of uint16, highest id none" in capsys.readouterr().out


def test_length_classes():
    starts, counts = inspect_data.histogram(np.array([0, 0, 1, 2, 3, 4, 7, 8, 1000]))
    assert dict(zip(starts.tolist(), counts.tolist())) == {
        **{0: 2, 1: 1, 2: 2, 4: 2, 8: 1, 512: 1},
        **dict.fromkeys((16, 32, 64, 128, 256), 0),
    }
