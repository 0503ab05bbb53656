"""Text to tokens: data_prep/preprocess_data.py against `tokenizers` alone and against Megatron-LM's way of doing it."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_lite.files.command_line import RunError
from tools.benchmarks.comparison import Options, Row, Table, refuse_different, speed, take_turns

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "data_prep/preprocess_data.py"
EOD = "<|endoftext|>"
MOST_REPEATS = 3  # a turn of all takes minutes
MEMORY_LIMIT = 1e9
HUGE_MEGABYTES = 60  # close to the limit of one document, 64


def run(options: Options) -> list[Table]:
    """Preprocessing against `tokenizers`' encode_batch and Megatron-LM's way, on all cores; memory."""
    megabytes, vocabulary = (0.05, 400) if options.quick else (24, 16384)
    repeats = min(options.repeats, MOST_REPEATS)
    workers = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="benchmark-preprocess-") as name:
        folder = Path(name)
        corpus = make_corpus(folder, megabytes)
        eod = make_tokenizer(folder, corpus, vocabulary)
        digests: dict[str, object] = {}
        turns = {
            "ours": our_turn(folder, corpus, workers, digests),
            "encode_batch": encode_batch_turn(folder, corpus, eod, digests),
            "Megatron's way": megatron_turn(folder, corpus, workers, digests),
        }
        seconds = take_turns(turns, repeats, warm_up=0)
        refuse_different("the sha256 of .bin", digests)
        peak = peak_memory(our_command(folder, corpus, workers))
        huge = make_huge_documents(
            folder, corpus, 0.1 if options.quick else HUGE_MEGABYTES, count=workers + 2
        )
        huge_peak = peak_memory(our_command(folder, huge, workers))
    size = megabytes * 1e6
    rows = [
        speed("ours", seconds, "encode_batch", at_least=0.9, note="whole run against encoding alone"),
        speed("ours", seconds, "Megatron's way", at_least=2.0, note="a reconstruction, see below"),
        memory_row(f"memory, {workers} workers", peak),
        memory_row(f"memory, documents of {HUGE_MEGABYTES} MB", huge_peak),
    ]
    best = ", ".join(f"{name} {size / min(times) / 1e6:.2f}" for name, times in seconds.items())
    facts = [
        f"Fastest, MB of text a second: {best}; tokenizers {tokenizers.__version__}, sha256 of .bin the same of all.",
        "Ours: seconds of the whole process. encode_batch: documents in memory, time inside of it alone, all cores.",
        "Megatron's way: tools/benchmarks/megatron_preprocess.py, a reconstruction from the structure of Megatron-LM's "
        "script (which needs the rest of Megatron-LM to run); its imports are not counted.",
        f"Memory: resident bytes of all processes together, at most, against 1 GB; shared pages count in each. "
        f"{workers + 2} documents of {HUGE_MEGABYTES} MB in the last row.",
    ]
    return [Table(f"preprocess: {megabytes} MB, byte-level BPE of {vocabulary:,}", rows, facts)]


def memory_row(name: str, peak: int) -> Row:
    """Resident bytes against the limit."""
    share = peak / MEMORY_LIMIT
    return Row(name, "1 GB", share, share, share, at_most=1.0)


def make_corpus(folder: Path, megabytes: float) -> Path:
    """The standard library's sources as JSON lines."""
    path = folder / "corpus.jsonl"
    command = [ROOT / "data_prep/sample_corpus.py", "--output", path, "--megabytes", megabytes]
    finish([sys.executable, *map(str, command)])
    return path


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
    with corpus.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for number, line in enumerate(lines) if number % 4 == 0]
    core.train_from_iterator(texts, trainer)
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": EOD, "tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return core.token_to_id(EOD)


def make_huge_documents(folder: Path, corpus: Path, megabytes: float, count: int) -> Path:
    """So many documents of so many megabytes of the same text."""
    text = "".join(json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines())
    text = text.encode()[:10_000_000].decode(errors="ignore")
    line = json.dumps({"text": text * max(1, int(megabytes * 1e6 / len(text.encode())))}, ensure_ascii=False)
    path = folder / "huge.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            file.write(line + "\n")
    return path


def our_command(folder: Path, corpus: Path, workers: int) -> list[str]:
    """The script as a user calls it."""
    words = ["--input", corpus, "--output-prefix", folder / "ours", "--append-eod", "--workers", workers]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    words += ["--log-interval", 1_000_000]
    return [sys.executable, str(SCRIPT), *map(str, words)]


def our_turn(folder: Path, corpus: Path, workers: int, digests: dict[str, object]) -> Callable[[], float]:
    """A whole run of the script."""

    def turn() -> float:
        started = time.perf_counter()
        finish(our_command(folder, corpus, workers))
        seconds = time.perf_counter() - started
        digests["ours"] = sha256_of(folder / "ours_text_document.bin")
        return seconds

    return turn


def encode_batch_turn(
    folder: Path, corpus: Path, eod: int, digests: dict[str, object]
) -> Callable[[], float]:
    """The library alone."""
    script = ROOT / "tools/benchmarks/encode_batch.py"

    def turn() -> float:
        seconds, digests["encode_batch"] = finish(
            [sys.executable, str(script), str(corpus), str(folder), str(eod)]
        ).split()
        return float(seconds)

    return turn


def megatron_turn(
    folder: Path, corpus: Path, workers: int, digests: dict[str, object]
) -> Callable[[], float]:
    """The reconstruction."""
    script, prefix = ROOT / "tools/benchmarks/megatron_preprocess.py", folder / "megatron"

    def turn() -> float:
        seconds = finish(
            [sys.executable, str(script), str(corpus), str(prefix), str(folder), str(workers)]
        ).split()[-1]
        digests["Megatron's way"] = sha256_of(prefix.with_suffix(".bin"))
        return float(seconds)

    return turn


def finish(command: list[str]) -> str:
    """What a program prints.

    Raises:
        RunError: it failed; its own last words.
    """
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise RunError(f"{Path(command[1]).name} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def peak_memory(command: list[str]) -> int:
    """Resident bytes of a program and all its children together, at most, looked at fifty times a second."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # noqa: S603
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, sum(map(_resident, _family(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, errors = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        raise RunError(f"{Path(command[1]).name} failed: {errors.strip()[-500:]}")
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


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
