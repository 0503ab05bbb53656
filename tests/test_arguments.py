"""The command line: every way to write a flag, what is derived, what is refused, and how fast."""

import re
import resource
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_lite.arguments import flag_of, parse_arguments, parse_or_exit, with_checkpoint_config
from megatron_lite.config import CONCERNS, ConfigError
from megatron_lite.environment import Environment

ROOT = Path(__file__).parents[1]
BASE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --train-iters 10 --lr 1e-3 --mock-data --vocab-size 60"""

SHORT = "--seq-length 32 --micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data --load x --use-checkpoint-args"


def config_of(flags="", base=BASE, world_size=1, **environment):
    words = flags.split() if isinstance(flags, str) else flags
    return parse_arguments([*base.split(), *words], Environment(world_size=world_size, **environment))


def refusal(flags, **options):
    with pytest.raises(ConfigError) as error:
        config_of(flags, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


# ---- ways to write


def test_both_forms_and_the_last_one_wins():
    assert config_of("--lr 3e-4").optimizer.lr == config_of("--lr=3e-4").optimizer.lr == 3e-4
    assert config_of("--lr 1 --lr=2").optimizer.lr == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [("1000", 1000), ("1_000", 1000), ("1e3", 1000), ("1K", 1000), ("1.5k", 1500), ("2M", 2 * 10**6)],
)
def test_whole_numbers(text, value):
    assert config_of(f"--train-iters {text}").training.train_iters == value


def test_samples_of_a_trillion():
    base = BASE.replace("--train-iters 10", "")
    assert config_of("--train-samples 200B", base=base).training.train_samples == 200 * 10**9
    assert config_of("--train-samples 1e12", base=base).training.train_samples == 10**12


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--train-iters 1.5", "--train-iters: '1.5' is not a whole number"),
        ("--train-iters x", "--train-iters: 'x' is not a number"),
        ("--train-iters ''", "--train-iters: '' is not a number"),
        ("--lr nan", "--lr: 'nan' is not a number"),
        ("--lr 1e999", "--lr: '1e999' is not a finite number"),
        ("--seed -1", "--seed is -1, wanted at least 0"),
        ("--micro-batch-size 0", "--micro-batch-size is 0, wanted at least 1"),
        ("--hidden-dropout 1.5", "--hidden-dropout is 1.5, wanted at most 1"),
        ("--rotary-percent 0", "--rotary-percent is 0.0, wanted more than 0"),
        ("--rampup-batch-size 2 2", "--rampup-batch-size: expected 3 arguments"),
        ("--lr", "--lr: expected one argument"),
        ("--position-embedding-type yarn", "invalid choice: 'yarn'"),
        ("--window-size 4096", "'4096' is not LEFT,RIGHT"),
        ("--bf16=true", "--bf16: ignored explicit argument 'true'"),
    ],
)
def test_values_that_are_none(flags, says):
    assert says in refusal(flags)


def test_window():
    for text in ("4096,0", "(4096,0)", "(4096, 0)"):
        assert config_of(["--window-size", text]).model.window_size == (4096, 0)


@pytest.mark.parametrize(
    "words",
    [
        ["--split", "949,50,1"],
        ["--split", "949, 50, 1"],
        ["--split", "'949,50,1'"],
        ["--split='949,50,1'"],
        ["--split", '"949,50,1"'],
        ["--split", "'949,", "50,", "1'"],
        ["--split", "949/50/1"],
    ],
)
def test_split_with_literal_quotes_and_spaces(words):
    assert config_of([*words, "--num-workers", "1"]).data.split == "949,50,1"


@pytest.mark.parametrize("text", ["1,2,3,4", "-1,1,1", "0,0,0", "a,b,c", "", "inf,1,1", "nan"])
def test_splits_that_are_none(text):
    assert refusal([f"--split={text}"]).startswith("--split is '")


def test_split_defaults():
    assert config_of().data.split == "969,30,1"
    assert config_of("--split 99.5,0.5").data.split == "99.5,0.5,0"


def test_an_unbalanced_quote_stays():
    assert config_of("--wandb-project x --wandb-exp-name 'tis").logging.wandb_exp_name == "'tis"


# ---- files of flags


def test_files_of_flags(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "more.args").write_text("--seed 7 # a comment\n--split '90, 5,5'\n")
    (tmp_path / "run.args").write_text("--lr 2e-3 \\\n  --bf16\n# nothing\n@inner/more.args\n")
    config = config_of(f"@{tmp_path / 'run.args'} --lr 3e-3")
    assert (config.optimizer.lr, config.precision.bf16, config.training.seed) == (3e-3, True, 7)
    assert config.data.split == "90,5,5"


def test_files_of_flags_that_cannot_be_read(tmp_path):
    assert "@nowhere.args cannot be read: No such file" in refusal("@nowhere.args")
    assert "cannot be read" in refusal(f"@{tmp_path}")
    circle = tmp_path / "circle.args"
    circle.write_text("@circle.args")
    assert "includes itself" in refusal(f"@{circle}")
    circle.write_text("--split '1")
    assert "No closing quotation" in refusal(f"@{circle}")
    circle.write_bytes(b"--lr \xff")
    assert "cannot be read" in refusal(f"@{circle}")


# ---- names


def test_every_field_is_a_flag_of_its_name_and_the_list_is_frozen():
    flags = []
    for concern in CONCERNS.values():
        for item in fields(concern):
            flags += [flag_of(item), *item.metadata.get("aliases", ())]
            assert re.fullmatch(r"--[a-z0-9]+([-_][a-z0-9]+)*", flag_of(item))
    assert len(flags) == len(set(flags))
    frozen = (ROOT / "tests" / "flags.txt").read_text().split()
    assert sorted(flags) == frozen, "a flag came or went: if that is meant, write it into tests/flags.txt"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--num-layer", "--num-layers"),
        ("--tensor_model_parallel_size", "--tensor-model-parallel-size"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--micro-batchsize", "--micro-batch-size"),
        ("--use-flash-attention", "--use-flash-attn"),
    ],
)
def test_unknown_flags_are_given_a_hint(wrong, right):
    text = refusal(f"{wrong} 2")
    assert text.startswith(f"unknown flag: {wrong} (did you mean ") and right in text


def test_several_unknown_flags_at_once_and_words_that_belong_nowhere():
    text = refusal("--xyzzyx 1 --plughp 2")
    assert text == "unknown flags: --xyzzyx, --plughp"
    assert "'stray'" in refusal("--bf16 stray")


def test_no_abbreviations():
    assert refusal("--num-lay 4").startswith("unknown flag: --num-lay")


# ---- program: help, errors, speed


def run(*words, **variables):
    return subprocess.run(
        [sys.executable, "pretrain_gpt.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **{k: str(v) for k, v in variables.items()}},
    )


def test_help_is_grouped():
    done = run("--help")
    assert done.returncode == 0 and done.stderr == ""
    for concern in CONCERNS.values():
        assert concern.__doc__.strip().rstrip(".") + ":" in done.stdout
    assert "--num-layers" in done.stdout and "(default 0.999)" in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["--nope"], ["--num-layers", "4"]])
def test_answers_within_half_a_second(words):
    """Processor time, since the machine may be busy; the quickest of three."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(*words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5


def test_an_error_is_one_line_on_rank_0_and_code_2():
    done = run("--nope")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: unknown flag: --nope\n" or done.stderr.startswith(
        "error: unknown flag: --nope (did"
    )
    assert done.stderr.count("\n") == 1


def test_an_error_is_silent_on_the_other_ranks():
    started = time.monotonic()
    done = run("--nope", RANK=1, WORLD_SIZE=2)
    seconds = time.monotonic() - started
    assert done.returncode == 2 and done.stdout == done.stderr == "" and seconds >= 5


def test_a_bad_environment_is_one_line():
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'many', wanted a whole number"):
        Environment.read({"WORLD_SIZE": "many"})


def test_parse_or_exit_asks_for_the_checkpoints_config(capsys):
    stored = config_of("--swiglu").to_dict()
    config = parse_or_exit(
        SHORT.split(),
        Environment(),
        lambda seen: stored if seen.checkpoint.load == "x" else None,
    )
    assert config.model.swiglu and config.model.num_layers == 4
    assert config.data.tokenizer_type == "NullTokenizer"
    with pytest.raises(SystemExit) as leave:
        parse_or_exit(["--num-layers", "4"], Environment())
    assert leave.value.code == 2 and capsys.readouterr().err.startswith("error: --")


# ---- --use-checkpoint-args


def merged(flags, stored_flags=""):
    config = parse_arguments([*SHORT.split(), *flags.split()], Environment())
    return with_checkpoint_config(config, config_of(stored_flags).to_dict())


def test_model_flags_come_from_the_checkpoint():
    config = merged(
        "--hidden-dropout 0", "--swiglu --group-query-attention --num-query-groups 2 --rotary-base 5e5"
    )
    assert config.model.swiglu and config.model.num_query_groups == 2 and config.model.rotary_base == 5e5
    assert config.model.hidden_dropout == 0.0, "what only changes the training is the command line's"


def test_a_contradiction_names_flag_and_both_values():
    with pytest.raises(ConfigError, match=r"--num-layers is 6, the checkpoint .* has 4: leave it out"):
        merged("--num-layers 6")
    assert merged("--num-layers 4").model.num_layers == 4


def test_without_a_checkpoint_the_command_line_says_all():
    config = parse_arguments(SHORT.split(), Environment())
    with pytest.raises(ConfigError, match="--num-layers, --hidden-size, --num-attention-heads are needed"):
        with_checkpoint_config(config, None)


def test_a_null_tokenizer_does_not_grow_with_each_resume():
    stored = config_of().to_dict()
    stored["model"]["vocab_size"] = 61  # as a run stores it: with its end of document
    config = with_checkpoint_config(parse_arguments(SHORT.split(), Environment()), stored)
    assert (config.data.tokenizer_type, config.model.vocab_size) == ("NullTokenizer", 60)
