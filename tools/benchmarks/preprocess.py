"""Text to tokens: data_prep/preprocess_data.py against `tokenizers`' encode_batch alone, on documents in memory."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_lite.files.command_line import RunError
from tools.benchmarks.comparison import Options, Table, fastest, refuse_unlike, row_of, speed, take_turns

ROOT = Path(__file__).resolve().parents[2]
EOD = "<|endoftext|>"
MOST_REPEATS = 3  # a turn of all takes minutes
HUGE_MEGABYTES = 60  # close to the limit of one document, 64
DOCUMENTS_A_CALL = 256  # thousands at once would need gigabytes: it keeps the place of each token


def run(options: Options) -> list[Table]:
    """Preprocessing against `tokenizers`' encode_batch, on all cores; memory."""
    megabytes, vocabulary, huge = (0.05, 400, 0.1) if options.quick else (24, 16384, HUGE_MEGABYTES)
    workers = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="benchmark-preprocess-") as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        finish(program("sample_corpus", "--output", corpus, "--megabytes", megabytes))
        eod = make_tokenizer(folder, corpus, vocabulary)
        ours = our_command(folder, corpus, workers)
        digests: dict[str, object] = {}

        def our_turn() -> float:
            started = time.perf_counter()
            finish(ours)
            seconds = time.perf_counter() - started
            with (folder / "ours_text_document.bin").open("rb") as file:
                digests["ours"] = hashlib.file_digest(file, "sha256").hexdigest()
            return seconds

        def library_turn() -> float:
            seconds, digests["encode_batch"] = encode(corpus, folder, eod)
            return seconds

        turns = {"ours": our_turn, "encode_batch": library_turn}
        seconds = take_turns(turns, min(options.repeats, MOST_REPEATS), warm_up=0)
        refuse_unlike("the sha256 of .bin", digests)
        peak = peak_memory(ours)
        documents = make_huge_documents(folder, corpus, huge, count=workers + 2)
        huge_peak = peak_memory(our_command(folder, documents, workers))
    rows = [speed("ours", seconds, "encode_batch", at_least=0.9, note="whole run against encoding alone")]
    peaks = {f"memory, {workers} workers": peak, f"memory, documents of {HUGE_MEGABYTES} MB": huge_peak}
    rows += [row_of(name, "1 GB", [size / 1e9], at_most=1.0) for name, size in peaks.items()]
    facts = [
        f"Fastest, s: {fastest(seconds)}; tokenizers {tokenizers.__version__}, sha256 of .bin the same of all.",
        "Ours: seconds of the whole process. encode_batch: documents in memory, time inside of it alone, all cores.",
        f"Memory: resident bytes of all processes together, at most, against 1 GB; shared pages count in each. "
        f"{workers + 2} documents of {HUGE_MEGABYTES} MB in the last row.",
    ]
    return [Table(f"preprocess: {megabytes} MB, byte-level BPE of {vocabulary:,}", rows, facts)]


def texts_of(corpus: Path) -> list[str]:
    """The documents of a file of JSON lines."""
    return [json.loads(line)["text"] for line in corpus.open(encoding="utf-8")]


def make_tokenizer(folder: Path, corpus: Path, vocabulary: int) -> int:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE trained on every fourth document; its eod."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts_of(corpus)[::4], trainer)
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": EOD, "tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return core.token_to_id(EOD)


def make_huge_documents(folder: Path, corpus: Path, megabytes: float, count: int) -> Path:
    """So many documents of so many megabytes of the same text."""
    text = "".join(texts_of(corpus)).encode()[:10_000_000].decode(errors="ignore")
    line = json.dumps({"text": text * max(1, int(megabytes * 1e6 / len(text.encode())))}, ensure_ascii=False)
    path = folder / "huge.jsonl"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for _ in range(count))
    return path


def program(name: str, *words: object) -> list[str]:
    """A program of data_prep as a user calls it."""
    return [sys.executable, str(ROOT / f"data_prep/{name}.py"), *map(str, words)]


def our_command(folder: Path, corpus: Path, workers: int) -> list[str]:
    """Preprocessing of the corpus with the tokenizer in the folder."""
    words = ["--input", corpus, "--output-prefix", folder / "ours", "--append-eod", "--workers", workers]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    return program("preprocess_data", *words, "--log-interval", 1_000_000)


def peak_memory(command: list[str]) -> int:
    """Resident bytes of a program and its children, at most, each 20 ms. Raises RunError where it fails."""
    return finish(command, lambda pid: sum(map(_resident, _family(pid))))


def finish(command: list[str], measure: Callable[[int], int] = lambda pid: 0) -> int:
    """Run a program; the most that `measure` gave of its process. Raises RunError as peak_memory does."""
    peak = 0
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)  # noqa: S603
        while process.poll() is None:
            peak = max(peak, measure(process.pid))
            time.sleep(0.02)
        errors.seek(0)
        if process.returncode:
            raise RunError(f"{Path(command[1]).name} failed: {errors.read().strip()[-500:]}")
    return peak


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *(one for child in children for one in _family(int(child)))]


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def encode(corpus: Path, folder: Path, eod: int) -> tuple[float, str]:
    """Seconds inside of encode_batch, on all cores; sha256 of the ids as uint16, each document ended by eod."""
    core = Tokenizer.from_file(f"{folder}/tokenizer.json")
    core.encode_special_tokens = True
    texts, digest, seconds = texts_of(corpus), hashlib.sha256(), 0.0
    for first in range(0, len(texts), DOCUMENTS_A_CALL):
        started = time.perf_counter()
        encoded = core.encode_batch(texts[first : first + DOCUMENTS_A_CALL], add_special_tokens=False)
        seconds += time.perf_counter() - started
        for document in encoded:
            digest.update(np.array([*document.ids, eod] if document.ids else [], np.uint16).tobytes())
    return seconds, digest.hexdigest()
