"""What --check prints, against numbers worked out by other means."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.distributed.environment import Environment
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.rehearsal.run_report import describe_run

ROOT = Path(__file__).parents[2]
BASE = """--num-layers 8 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 32 --train-iters 100 --lr 1e-3 --mock-data
    --lr-decay-style cosine --lr-warmup-iters 10 --check --world-size 8"""


def report(flags=""):
    return describe_run(parse_arguments(f"{BASE} {flags}".split(), Environment()))


def numbers(pattern, text):
    return [float(group.replace(",", "")) for group in re.search(pattern, text).groups()]


CHOICES = (
    ("", "--normalization RMSNorm"),
    ("", "--qk-layernorm", "--qk-layernorm --qk-layernorm-across-heads"),
    ("", "--disable-bias-linear", "--disable-bias-linear --add-qkv-bias"),
    ("", "--swiglu", "--squared-relu"),
    ("", "--group-query-attention --num-query-groups 2"),
    ("", "--kv-channels 24"),
    ("", "--untie-embeddings-and-output-weights"),
    ("", "--position-embedding-type rope", "--position-embedding-type none"),
)


def test_parameters_equal_a_real_models():
    """The count by formula is the count of the tensors that the model is made of, every two choices together."""
    for flags in pairwise(CHOICES):
        config = parse_arguments(f"{BASE} {flags} --vocab-size 100".split(), Environment())
        sized = with_vocabulary(config, 101)
        with torch.device("meta"):
            whole = GPTChunk(sized.model, range(8))
        counted = sum(parameter.numel() for parameter in whole.parameters())
        assert numbers(r"parameters +([\d,]+) =", describe_run(config)) == [counted]


def pairwise(choices):
    """Flag sets in which every value of every choice meets every value of every other."""
    for (i, first), (j, second) in itertools.combinations(enumerate(choices), 2):
        for a, b in itertools.product(first, second):
            rest = [c[(i + j + n) % len(c)] for n, c in enumerate(choices) if n not in (i, j)]
            yield " ".join([a, b, *rest])


def test_length_and_work():
    text = report("--vocab-size 127")
    assert "100 steps, 3,200 samples, 102,400 tokens" in text
    assert "32 samples = 1,024 tokens a step (2 microbatches of 2 x 8 data-parallel ranks)" in text
    block = 64 * 64 * 4 + 2 * 64 * 96
    flops = 32 * (6 * 32 * (8 * block + 64 * 128) + 6 * 32**2 * 8 * 64)
    assert numbers(r"work +([\d.e+]+) FLOPs \(([\d.e+]+) a step\)", text) == pytest.approx(
        [100 * flops, flops], rel=1e-3
    )


def test_samples_that_do_not_fill_a_step_are_named():
    base = BASE.replace("--train-iters 100", "--train-samples 3205").replace(
        "warmup-iters 10", "warmup-samples 320"
    )
    text = describe_run(parse_arguments([*base.split(), "--vocab-size", "127"], Environment()))
    assert (
        "100 steps, 3,200 samples" in text
        and "the run ends at 3,200, the 5 left over do not fill a step" in text
    )


def test_layout():
    text = report(
        "--vocab-size 127 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2 --num-distributed-optimizer-instances 2"
    )
    assert "pipeline 2 x data 2 (replicas 2 x shards 1) x context 1 x tensor 2" in text
    assert "interleaved-1f1b, 2 chunks a rank, 8 microbatches" in text
    held = [
        int(row[1].replace(",", "")) for row in re.findall(r"^ +\d  +(\d)  .*?  +([\d,]{5,})  ", text, re.M)
    ]
    assert len(held) == 4
    most = numbers(r"about ([\d,]+) parameters at most, ([\d.]+) GiB", text)
    by_rank = [held[0] + held[2], held[1] + held[3]]
    assert most[0] == pytest.approx(max(by_rank) / 2, abs=1)
    assert 0 < numbers(r"bubble +([\d.]+)%", text)[0] < 50


def test_an_unknown_vocabulary_is_said():
    text = report("--tokenizer-type HuggingFaceTokenizer --tokenizer-model somewhere/else")
    assert "set by the tokenizer" in text
    assert "there is no somewhere/else (a local file or folder: nothing is downloaded)" in text


def test_the_curve_shows_the_schedule():
    text = report("--vocab-size 127")
    plot = [line.split("|")[1] for line in text.splitlines() if "|" in line]
    columns = [
        next(row for row in range(10) if plot[row][column : column + 1] == "*") for column in range(64)
    ]
    peak = columns.index(0)
    assert 5 <= peak <= 8  # warm-up ends at a tenth of the run
    assert all(a >= b for a, b in zip(columns[: peak + 1], columns[1 : peak + 1]))  # rows count from the top
    assert all(a <= b for a, b in zip(columns[peak:], columns[peak + 1 :]))
    assert numbers(r"step +11  lr ([\d.e-]+)", text) == [1e-3]


def test_a_run_of_nothing():
    assert "no steps" in report("--vocab-size 127 --train-iters 0 --lr-warmup-iters 0")


def test_the_program_prints_it_and_imports_no_torch():
    program = (
        "import sys, runpy\n"
        f"sys.argv = ['pretrain_gpt.py', *{[*BASE.split(), '--vocab-size', '127']}]\n"
        "try:\n    runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
        "except SystemExit as leave:\n    print('code', leave.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "code 0 False", done.stderr
    assert done.stdout.startswith("Model\n")


def test_a_vocabulary_file_that_is_not_there_is_said_and_one_that_is_is_counted(tmp_path):
    tokenizer = "--tokenizer-type GPT2BPETokenizer --merge-file m"
    text = report(f"{tokenizer} --vocab-file absent.json")
    assert "50,257 tokens (GPT2BPETokenizer's own: assumed, --vocab-file absent.json is not here)" in text
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    assert "2 tokens, padded to" in report(f"{tokenizer} --vocab-file {tmp_path}/vocab.json")


def test_another_learning_rate_of_embedding_and_head_is_shown():
    assert "embedding and head: at most 1.000000e-05, at least 1.000000e-06" in report(
        "--vocab-size 127 --decoupled-lr 1e-5 --decoupled-min-lr 1e-6"
    )
    assert "embedding and head" not in report("--vocab-size 127")
