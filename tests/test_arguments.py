"""The command line: every flag frozen, files, numbers, quotes, errors in one sentence."""

import json
import os
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_lite.arguments.megatron_flags import ACCEPTED, DEFAULTS, RENAMED
from megatron_lite.arguments.parse import build_parser, parse_arguments, parse_or_exit
from megatron_lite.config import CONCERNS, Config, ConfigError
from megatron_lite.config.declare import flag_of
from megatron_lite.distributed.environment import Environment
from tests.pairs import write_documents

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).parent / "golden" / "flags.txt"
BASE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60"""


def config_of(words="", world_size=1, base=BASE):
    words = words.split() if isinstance(words, str) else words
    return parse_arguments([*base.split(), *words], Environment(world_size=world_size))


def error_of(words, world_size=1, base=BASE):
    with pytest.raises(ConfigError) as error:
        config_of(words, world_size, base)
    return str(error.value)


def all_flags():
    """One line a flag: name, type, default; the ones that are no field by what becomes of them."""
    lines = []
    for concern in CONCERNS.values():
        types = typing.get_type_hints(concern)
        for item in fields(concern):
            kind = str(types[item.name]).removeprefix("<class '").removesuffix("'>")
            names = ", ".join((flag_of(item), *item.metadata.get("aliases", ())))
            lines.append(f"{names}  {kind} = {item.default}")
    lines += [f"{name}  {kind}" for kind, table in TABLES.items() for name in table]
    return sorted(lines)


TABLES = {"accepted": ACCEPTED, "renamed": RENAMED | DEFAULTS}


def test_all_flags_are_frozen():
    """A flag that goes, or changes type or default, breaks someone's script: it has to be done on purpose.

    To do so: python -m tests.test_arguments
    """
    assert all_flags() == FROZEN.read_text().splitlines()


def test_help_is_grouped_and_explains_every_flag():
    text = build_parser().format_help()
    headings = [concern.__doc__.strip().rstrip(".") + ":\n" for concern in CONCERNS.values()]
    places = [text.index(heading) for heading in headings]
    assert places == sorted(places)
    for concern, start, end in zip(CONCERNS.values(), places, [*places[1:], len(text)]):
        for item in fields(concern):
            shown = f"\n  {flag_of(item)}" in text[start:end]
            assert shown is not bool(item.metadata.get("no_effect")), item.name
            assert item.metadata["help"] or item.metadata["no_effect"]
    assert "--use-mcore-models" not in text and "--use-flash-attn" not in text


def test_help_goes_to_stdout_with_code_0(capsys):
    with pytest.raises(SystemExit) as leave:
        parse_or_exit(["--no-such-flag", "--help"], Environment())
    assert leave.value.code == 0 and "--num-layers" in capsys.readouterr().out


# --- words ---


def test_flags_from_a_file(tmp_path):
    """Shell words, comments, continued lines, files in files relative to the file; later words win."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "model.args").write_text("--rotary-base 500000 # Llama 3\n")
    (tmp_path / "run.args").write_text(
        "# a run\n--lr 2e-4 \\\n  --min-lr 1e-5\n@inner/model.args\n--split '90, 5, 5'\n"
    )
    config = config_of(f"@{tmp_path / 'run.args'} --lr 5e-4")
    assert (config.optimizer.lr, config.optimizer.min_lr) == (5e-4, 1e-5)
    assert (config.model.rotary_base, config.data.split) == (500000.0, "90,5,5")


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "self.args").write_text("@self.args")
    (tmp_path / "open.args").write_text("--split '1,2")
    (tmp_path / "latin.args").write_bytes(b"--save caf\xe9")
    assert "includes itself" in error_of(f"@{tmp_path}/self.args")
    assert "No closing quotation" in error_of(f"@{tmp_path}/open.args")
    assert "latin.args cannot be read" in error_of(f"@{tmp_path}/latin.args")
    assert "No such file" in error_of(f"@{tmp_path}/none.args")
    assert "Is a directory" in error_of(f"@{tmp_path}")


@pytest.mark.parametrize(
    "words",
    [
        ["--split", "949,50,1"],
        ["--split=949,50,1"],
        ["--split", "'949,50,1'"],
        ["--split", '"949,50,1"'],
        ["--split='949,50,1'"],
        ["--split", "949, 50, 1"],
        ["--split", "'949,", "50,", "1'"],
        ["--split", "949", "50", "1"],
        ["--split", "949/50/1"],
    ],
)
def test_a_split_however_the_shell_hands_it_over(words):
    assert config_of(words).data.split == "949,50,1"


def test_quotes_inside_paths_and_schedules(tmp_path):
    prefix = tmp_path / "a_text_document"
    for end in (".idx", ".bin"):
        prefix.with_suffix(end).touch()
    base = BASE.replace("--mock-data", "")
    config = config_of(["--data-path", "0.3", f'"{prefix}"', "0.7", f"'{prefix}'"], base=base)
    assert config.data.data_path == ("0.3", str(prefix), "0.7", str(prefix))
    config = config_of(["--step-batch-size-schedule", "'0:2", "1K:4'"])
    assert config.training.global_batch_size == 4


@pytest.mark.parametrize(
    ("text", "value"),
    [("1000", 1000), ("1e3", 1000), ("1_000", 1000), ("1K", 1000), ("1.5k", 1500), ("200B", 200 * 10**9)]
    + [("2T", 2 * 10**12), ("3m", 3 * 10**6), ("9007199254740993", 9007199254740993)],
)
def test_whole_numbers(text, value):
    config = config_of(f"--train-samples {text}", base=BASE.replace("--train-iters 10", ""))
    assert config.training.train_samples == value


def test_real_numbers():
    assert config_of("--initial-loss-scale 4_294_967_296 --fp16").precision.initial_loss_scale == 2.0**32
    assert config_of("--lr .0003").optimizer.lr == 3e-4
    assert config_of("--lr 3.0e-4 --clip-grad 1").optimizer.lr == 3e-4
    assert config_of("--window-size (16,0)").model.window_size == (16, 0)


# --- errors ---


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("--num-layer 4", "--num-layer (did you mean --num-layers"),
        ("--hidden-sise 4", "--hidden-size"),
        ("--tensor_model_parallel_size 2", "--tensor-model-parallel-size"),
        ("--overlap-grad-reduction", "--overlap-grad-reduce"),
        ("--xyzzy 1", "unknown flag: --xyzzy"),
        ("--lr-dekay-style x --min-lrr 1", "unknown flags: --lr-dekay-style (did you mean --lr-decay-style"),
        ("--moe-use-upcycling --xyzzy", "mixture of experts is not supported"),
    ],
)
def test_unknown_flags(wrong, hint):
    assert hint in error_of(wrong)


ERRORS = [
    ("--num-layers x", "--num-layers: 'x' is not a number"),
    ("--num-layers 2.5", "--num-layers: '2.5' is not a whole number"),
    ("--num-layers", "--num-layers: expected one argument"),
    ("--num-layers 0", "--num-layers is 0, wanted at least 1"),
    ("--num-layers 4 5", "'5' after --num-layers does not belong to any flag"),
    ("--bf16 true", "'true' after --bf16 does not belong to any flag"),
    ("--lr nan", "--lr: 'nan' is not a number"),
    ("--lr 1e999", "--lr: '1e999' is not a finite number"),
    ("--clip-grad -1", "--clip-grad is -1.0, wanted at least 0"),
    ("--hidden-dropout 1.5", "--hidden-dropout is 1.5, wanted at most 1"),
    ("--norm-epsilon 0", "--norm-epsilon is 0.0, wanted more than 0"),
    ("--window-size 16", "--window-size is '16', wanted 2 numbers"),
    ("--lr-decay-style cosin", "--lr-decay-style: invalid choice: 'cosin'"),
    ("--position-embedding-type yarn", "invalid choice: 'yarn'"),
    ("--rampup-batch-size 1 2 10 --global-batch-size 4", "does not divide --global-batch-size 4 - 1 = 3"),
    ("--step-batch-size-schedule 0:2 x:4", "'x:4' is not TOKENS:BATCH"),
    ("--rampup-batch-size 1 1 10 --step-batch-size-schedule 0:2", "both say how the batch grows"),
    ("--split 1,2,3,4", "--split is '1,2,3,4', wanted up to three weights"),
    ("--split 0,0,0", "with a sum above 0"),
    ("--tokenizer-model none.model", "--tokenizer-model: there is no none.model (a local file"),
    ("--ckpt-convert-format torch --load x", "needs --ckpt-convert-save"),
]


def test_numbers_may_come_in_one_word_and_in_brackets():
    """As a launcher passes on a list of a YAML file."""
    base = [word for word in BASE.split() if word not in ("--train-iters", "10")]
    for given in (["2", "2", "12"], ["[2 2 12]"], ["[2,", "2,", "12]"], ["2,2,12"]):
        words = [*base, "--train-samples", "40", "--global-batch-size", "8", "--rampup-batch-size", *given]
        assert parse_arguments(words, Environment()).training.rampup_batch_size == (2, 2, 12)
    for given in (["2", "2"], ["2 2 x"]):
        with pytest.raises(ConfigError, match="--rampup-batch-size"):
            parse_arguments([*base, "--rampup-batch-size", *given], Environment())


@pytest.mark.parametrize(("words", "text"), ERRORS)
def test_an_error_is_one_sentence_with_the_flag(words, text):
    message = error_of(words)
    assert text in message and "\n" not in message and len(message) < 300


LAYOUT_ERRORS = [
    (8, "--tensor-model-parallel-size 3", "8 processes do not divide by --tensor-model-parallel-size 3 x "),
    (2, "--tensor-model-parallel-size 2 --num-attention-heads 5 --hidden-size 40", "--num-attention-heads 5"),
    (2, "--tensor-model-parallel-size 2 --ffn-hidden-size 31", "--ffn-hidden-size 31 does not divide"),
    (
        4,
        "--tensor-model-parallel-size 4 --padded-vocab-size 62",
        "--padded-vocab-size 62 does not divide by --tensor-model-parallel-size 4",
    ),
    (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipev --global-batch-size 4 "
        "--eval-global-batch-size 2",
        "--eval-global-batch-size 2: ",
    ),
    (2, "--context-parallel-size 2 --seq-length 30", "twice --context-parallel-size 2 = 4"),
    (2, "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipev --global-batch-size 2", "can run: 4"),
]


@pytest.mark.parametrize(("world_size", "words", "text"), LAYOUT_ERRORS)
def test_layout_errors(world_size, words, text):
    message = error_of(words, world_size)
    assert text in message and "\n" not in message


def test_paths_that_are_not_there(tmp_path):
    base = BASE.replace("--mock-data", "")
    for end in (".idx", ".bin"):
        (tmp_path / f"whole_text_document{end}").touch()
    whole = tmp_path / "whole_text_document"
    assert config_of(f"--data-path {whole}", base=base).data.split == "969,30,1"
    message = error_of(f"--data-path 0.5 {whole} 0.5 {tmp_path}/gone", base=base)
    assert f"--data-path: there is no {tmp_path}/gone.idx and {tmp_path}/gone.bin" in message
    assert "leave out the ending .bin" in error_of(f"--data-path {whole}.bin", base=base)
    assert "--data-path is needed" in error_of("", base=base)
    assert "--train-data-path is empty" in error_of("--train-data-path", base=base)
    many = error_of("--data-path a b c d e", base=base)
    assert many.endswith("and 2 more")
    planned = config_of(f"--check --data-path {tmp_path}/gone", base=base)
    assert any(f"{tmp_path}/gone.idx" in note for note in planned.notes)


def test_check_finds_data_that_was_cut(tmp_path, capsys):
    prefix = write_documents(tmp_path / "cut", [[1, 2, 3]] * 4)
    argv = [*BASE.replace("--mock-data", "").split(), "--check", "--data-path", prefix]
    with pytest.raises(SystemExit) as leave:
        parse_or_exit(argv, Environment(), describe=lambda config: "as wanted")
    assert leave.value.code == 0 and capsys.readouterr().out == "as wanted\n"
    for end, wrong in (
        (".idx", "file size is 114 bytes, wanted 122"),
        (".bin", "file size is 20 bytes, wanted 24"),
    ):
        whole = Path(prefix + end).read_bytes()
        Path(prefix + end).write_bytes(whole[: -8 if end == ".idx" else -4])
        with pytest.raises(SystemExit) as leave:
            parse_or_exit(argv, Environment(), describe=lambda config: "as wanted")
        error = capsys.readouterr().err
        assert leave.value.code == 2 and f"{prefix}{end}: {wrong}" in error and error.count("\n") == 1, error
        Path(prefix + end).write_bytes(whole)


def test_an_error_leaves_with_code_2_and_is_printed_once(capsys, monkeypatch):
    """By rank 0; the others wait, for torchrun stops all at the first that leaves."""
    waited = []
    monkeypatch.setattr("megatron_lite.arguments.parse.time.sleep", waited.append)
    for rank in (0, 1):
        with pytest.raises(SystemExit) as leave:
            parse_or_exit(["--no-such-flag"], Environment(rank=rank, world_size=2))
        assert leave.value.code == 2
    printed = capsys.readouterr()
    assert printed.err == "error: unknown flag: --no-such-flag\n" and printed.out == ""
    assert len(waited) == 1


def test_the_program_says_it_too():
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *BASE.split(), "--hidden-size", "65"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: --hidden-size 65 does not divide")
    assert "Traceback" not in done.stderr


# --- what is filled in ---


def test_derived_values():
    config = config_of("--swiglu --hidden-size 4096 --num-attention-heads 32", world_size=4)
    model = config.model
    assert model.ffn_hidden_size == int(4 * 4096 * 2 / 3 / 64) * 64 == 10880
    assert (model.kv_channels, model.num_query_groups, model.max_position_embeddings) == (128, 32, 32)
    assert config_of("--hidden-size 64").model.ffn_hidden_size == 256
    assert config.training.global_batch_size == config.evaluation.eval_global_batch_size == 4
    assert config.parallel.world_size == 4 and config.parallel.data_parallel_size == 4
    assert config.parallel.pipeline_schedule == "1f1b" and config.data.dataloader_type == "single"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--recompute-activations", ("selective", None, None)),
        ("--recompute-granularity full --recompute-method uniform", ("full", "uniform", 1)),
        (
            "--recompute-activations --recompute-granularity full --recompute-method block "
            "--recompute-num-layers 2",
            ("selective", None, None),
        ),
    ],
)
def test_recompute(words, wanted):
    parallel = config_of(words).parallel
    assert wanted == (
        parallel.recompute_granularity,
        parallel.recompute_method,
        parallel.recompute_num_layers,
    )


def test_a_step_schedule_wins_over_the_batch_size():
    config = config_of("--global-batch-size 16 --step-batch-size-schedule 0:2 1K:4")
    assert config.training.global_batch_size == 4
    assert "--step-batch-size-schedule wins over --global-batch-size 16" in config.notes


def test_test_mode_turns_every_check_on():
    def checks(words):
        config = config_of(words)
        interval = config.training.check_weight_hash_across_dp_replicas_interval
        return interval, config.checkpoint.verify_integrity, config.checkpoint.exit_on_save_failure

    assert checks("") == (None, False, False)
    assert checks("--test-mode") == (1, True, True)
    assert checks("--test-mode --check-weight-hash-across-dp-replicas-interval 5") == (5, True, True)


def test_idle_flags_are_noted():
    notes = config_of(
        "--save-interval 5 --wandb-exp-name x --loss-scale 8 --sequence-parallel --use-cpu-initialization"
    ).notes
    for text in (
        "--save-interval does nothing without --save",
        "--wandb-exp-name does nothing without --wandb-project",
        "--loss-scale does nothing without --fp16",
        "--sequence-parallel has no effect: --tensor-model-parallel-size is 1",
        "--use-cpu-initialization changes nothing: initial weights are drawn on the CPU, the same in every layout",
    ):
        assert text in notes


def test_a_config_goes_through_json_and_back():
    config = config_of(
        "--rampup-batch-size 2 2 8 --global-batch-size 6 --window-size 16,0 --profile-ranks 0 "
        "--position-embedding-type rope --untie-embeddings-and-output-weights"
    )
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.to_dict() == config.to_dict()
    assert again.model == config.model and again.training == config.training
    with pytest.raises(ConfigError, match="no_such"):
        Config.from_dict({"model": {"no_such": 1}})


if __name__ == "__main__":
    FROZEN.write_text("\n".join(all_flags()) + "\n")
