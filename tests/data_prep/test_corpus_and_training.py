"""The sample corpus and the tokenizer trained on it: enough, deterministic, exact, in every script."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece

from data_prep import sample_corpus, train_tokenizer
from megatron_lite.config import ConfigError, DataConfig
from megatron_lite.data.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    sample_corpus.main(["--output", str(path)])
    return path


def test_the_corpus_is_the_standard_library(corpus):
    documents = [json.loads(line) for line in corpus.read_text().splitlines()]
    assert sum(len(document["text"].encode()) for document in documents) >= 10_000_000
    by_name = {document["path"]: document["text"] for document in documents}
    assert len(by_name) == len(documents) > 300
    assert by_name["json/decoder.py"] == Path(json.decoder.__file__).read_text()
    assert "Return the number of items in a container." in by_name["builtins (docstrings)"]


def test_the_same_python_gives_the_same_bytes(tmp_path):
    made = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.jsonl"
        command = [sys.executable, "data_prep/sample_corpus.py", "--output", str(path), "--megabytes", "0.5"]
        environment = {"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=60, capture_output=True)
        made.append(path.read_bytes())
    assert made[0] == made[1] and len(made[0]) > 500_000
    assert len(list(tmp_path.iterdir())) == 2


def test_corpus_refusals(tmp_path):
    with pytest.raises(ConfigError, match="wanted --megabytes 2000"):
        sample_corpus.main(["--output", str(tmp_path / "c"), "--megabytes", "2000"])
    with pytest.raises(ConfigError, match="its folder cannot be made"):
        sample_corpus.main(["--output", "/dev/null/c"])
    assert list(tmp_path.iterdir()) == []


def train(source, output, *more):
    train_tokenizer.main(["--input", str(source), "--output", str(output), *map(str, more)])
    return build_tokenizer(DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(output)))


def test_training_is_exact_and_deterministic(corpus, tmp_path):
    words = ["--sample-megabytes", 1, "--vocab-size", 1000, "--special-tokens", "<|user|>"]
    tokenizer = train(corpus, tmp_path / "a.model", *words)
    train(corpus, tmp_path / "b.model", *words)
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    assert tokenizer.vocab_size == 1000
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()[:40]]
    ids = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(item) for item in ids] == texts
    assert sum(map(len, ids)) < 0.5 * sum(map(len, texts)), "two characters a token, even with so few pieces"
    special = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "a.model")).piece_to_id(
        "<|user|>"
    )
    assert special == 3 and special not in tokenizer.encode("<|user|> hello")


def test_more_characters_than_pieces(tmp_path):
    """15,000 different characters and 1,000 pieces: SentencePiece alone refuses; here the rare ones are bytes."""
    rng = random.Random(1)
    texts = ["".join(chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(100)) + " 的" * 50 for _ in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train(tmp_path / "a.jsonl", tmp_path / "t.model", "--vocab-size", 1000)
    assert 259 + 370 <= tokenizer.vocab_size <= 1000
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in [*texts, "שלום 😀 \x00 \u2585"])
    assert len(tokenizer.encode("的")) == 1


def test_small_and_strange_input(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a\tb\u2581c\u2585d\0e " * 10 + "x" * 5000)
    tokenizer = train(tmp_path / "a.txt", tmp_path / "t.model", "--vocab-size", 4096)
    assert tokenizer.vocab_size < 400 and "fewer than --vocab-size 4,096" in capsys.readouterr().err
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ConfigError, match="holds no text"):
        train(tmp_path / "b.jsonl", tmp_path / "u.model")
    (tmp_path / "c.jsonl").write_text('{"text": "fine"}\n{"text": null}\n')
    with pytest.raises(ConfigError, match="c.jsonl:2: has null"):
        train(tmp_path / "c.jsonl", tmp_path / "u.model")
    train(tmp_path / "c.jsonl", tmp_path / "u.model", "--skip-bad-documents")


@pytest.mark.parametrize("kind", ["jsonl", "folder of texts"])
def test_the_sample_is_bounded_and_from_everywhere(tmp_path, kind):
    texts = [f"document {n} " + "word " * 400 for n in range(2000)]
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        for n, text in enumerate(texts[:500]):
            (tmp_path / f"{n:04d}.txt").write_text(text)
        texts = texts[:500]
    sources = [train_tokenizer.identify(path) for path in train_tokenizer.find_files([str(tmp_path)])]
    sample, bad = train_tokenizer.read_sample(sources, ["text"], 300_000, skip_bad=False)
    numbers = [int(text.split()[1]) for text in sample]
    assert bad == 0 and 250_000 < sum(map(len, sample)) < 900_000
    if kind != "jsonl":
        assert min(numbers) < 50 and max(numbers) > 400
    everything, _ = train_tokenizer.read_sample(sources, ["text"], 1 << 30, skip_bad=False)
    assert everything == texts
