"""The configuration: plain data there and back, Megatron's defaults in the open, one sentence a contradiction."""

import json
from dataclasses import fields

import pytest

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arguments.refusals import check_ranges
from megatron_lite.config import CONCERNS, Config, ConfigError
from megatron_lite.distributed.environment import Environment

BASE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --train-iters 10 --lr 1e-3 --mock-data --vocab-size 60"""


def config_of(flags="", world_size=1, base=BASE):
    return parse_arguments([*base.split(), *flags.split()], Environment(world_size=world_size))


def test_there_and_back_through_json():
    config = config_of(
        "--window-size 8,0 --recompute-modules core_attn mlp --iterations-to-skip 3 4 --lr 0.1"
    )
    stored = json.loads(json.dumps(config.to_dict()))
    assert Config.from_dict(stored).to_dict() == config.to_dict()
    assert Config.from_dict(stored).model.window_size == (8, 0)
    assert Config.from_dict({}) == Config()


def test_unknown_keys_are_named():
    with pytest.raises(ConfigError, match=r"flavour, model\.experts"):
        Config.from_dict({"model": {"experts": 8}, "flavour": {}})


def test_frozen():
    with pytest.raises(AttributeError):
        config_of().model.num_layers = 5


def test_defaults_are_within_their_own_limits_and_choices():
    check_ranges(Config())
    for concern in CONCERNS.values():
        for item in fields(concern):
            choices = item.metadata.get("choices")
            values = item.default if isinstance(item.default, tuple) else (item.default,)
            assert choices is None or all(value is None or value in choices for value in values)
            assert item.metadata["help"] or item.metadata.get("no_effect")


# ---- derived values


@pytest.mark.parametrize(
    ("flags", "world_size", "wanted"),
    [
        ("", 1, {"model.ffn_hidden_size": 256, "model.kv_channels": 16, "model.num_query_groups": 4}),
        ("--swiglu", 1, {"model.ffn_hidden_size": 128}),  # int(4 * 64 * 2 / 3 / 64) * 64
        ("--swiglu --hidden-size 4096 --num-attention-heads 32", 1, {"model.ffn_hidden_size": 10880}),
        ("--num-query-groups 2", 1, {"model.num_query_groups": 4}),
        ("--group-query-attention", 1, {"model.num_query_groups": 1}),
        (
            "",
            4,
            {
                "training.global_batch_size": 4,
                "parallel.world_size": 4,
                "evaluation.eval_global_batch_size": 4,
            },
        ),
        ("--sequence-parallel", 1, {"parallel.sequence_parallel": False}),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4",
            2,
            {
                "parallel.num_virtual_stages_per_pipeline_rank": 2,
                "parallel.pipeline_schedule": "interleaved-1f1b",
            },
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --global-batch-size 4",
            2,
            {"parallel.num_virtual_stages_per_pipeline_rank": 2},
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|tL --global-batch-size 4",
            2,
            {"parallel.num_virtual_stages_per_pipeline_rank": 2},
        ),
        ("--recompute-activations", 1, {"parallel.recompute_granularity": "selective"}),
        (
            "--recompute-activations --recompute-granularity full --recompute-method uniform",
            1,
            {"parallel.recompute_granularity": "selective", "parallel.recompute_method": None},
        ),
        ("--vocab-file v --merge-file m --check", 1, {"data.tokenizer_type": "GPT2BPETokenizer"}),
        ("", 1, {"data.tokenizer_type": "NullTokenizer", "data.dataloader_type": "single"}),
    ],
)
def test_derived(flags, world_size, wanted):
    got = config_of(flags, world_size).to_dict()
    for name, value in wanted.items():
        concern, field = name.split(".")
        assert got[concern][field] == value, name


def test_only_evaluating_needs_no_length_and_no_learning_rate():
    base = BASE.replace("--train-iters 10 --lr 1e-3", "--skip-train")
    config = config_of(base=base)
    assert (config.training.train_iters, config.optimizer.lr) == (0, 0.0)


# ---- contradictions: (flags, processes, words of the sentence)

CONTRADICTIONS = [
    ("--num-attention-heads 5", 1, ["--hidden-size 64", "--num-attention-heads 5", "--kv-channels"]),
    ("--group-query-attention --num-query-groups 3", 1, ["--num-attention-heads 4", "--num-query-groups 3"]),
    ("--max-position-embeddings 16", 1, ["--seq-length 32", "--max-position-embeddings 16"]),
    ("--swiglu --squared-relu", 1, ["--swiglu and --squared-relu"]),
    ("--swiglu --hidden-size 16", 1, ["swiglu", "--hidden-size 16", "--ffn-hidden-size"]),
    (
        "--position-embedding-type rope --rotary-percent 0.2",
        1,
        ["--rotary-percent 0.2", "--kv-channels 16", "is 3"],
    ),
    (
        "--qk-layernorm-across-heads",
        1,
        ["--qk-layernorm-across-heads", "--qk-layernorm normalises", "not given"],
    ),
    (
        "--qk-layernorm --qk-layernorm-across-heads --tensor-model-parallel-size 2",
        2,
        ["--qk-layernorm-across-heads with --tensor-model-parallel-size 2", "wanted 1"],
    ),
    ("--attention-backend flash", 1, ["--attention-backend flash", "--bf16 or --fp16", "auto"]),
    ("--attention-backend flash --bf16 --kv-channels 264", 1, ["--kv-channels is 264", "at most 256"]),
    ("--attention-backend flash --bf16 --reset-attention-mask", 1, ["flash", "--reset-attention-mask"]),
    ("--use-rope-scaling --rope-scaling-low-freq-factor 4", 1, ["--rope-scaling-high-freq-factor 4"]),
    ("--padded-vocab-size 32", 1, ["--padded-vocab-size 32", "--vocab-size 60"]),
    ("", 0, ["at least 1"]),
    ("--tensor-model-parallel-size 2", 3, ["3 processes", "--tensor-model-parallel-size 2", "= 2"]),
    ("--tensor-model-parallel-size 8", 1, ["1 processes", "torchrun"]),
    ("--num-distributed-optimizer-instances 3", 4, ["--num-distributed-optimizer-instances 3", "size 4"]),
    (
        "--num-distributed-optimizer-instances 2 --data-parallel-sharding-strategy no_shard",
        4,
        ["--num-distributed-optimizer-instances 2", "no_shard"],
    ),
    (
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2",
        4,
        ["--num-query-groups 2", "--tensor-model-parallel-size 4"],
    ),
    ("--tensor-model-parallel-size 4 --ffn-hidden-size 130", 4, ["--ffn-hidden-size 130"]),
    ("--context-parallel-size 3", 3, ["--seq-length 32", "--context-parallel-size 3 = 6"]),
    (
        "--tensor-model-parallel-size 4 --context-parallel-size 2 --sequence-parallel --seq-length 12",
        8,
        ["--sequence-parallel", "--seq-length 12", "--tensor-model-parallel-size 4"],
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a --group-query-attention --num-query-groups 2",
        4,
        ["--cp-comm-type a2a", "--num-query-groups 2"],
    ),
    ("--recompute-granularity full", 1, ["--recompute-method"]),
    ("--recompute-granularity selective --recompute-method block", 1, ["--recompute-method block"]),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
        1,
        ["--recompute-num-layers 5", "--num-layers 4"],
    ),
    ("--fp16 --bf16", 1, ["--fp16 and --bf16"]),
    ("--fp16 --initial-loss-scale 2 --min-loss-scale 4", 1, ["--min-loss-scale 4", "--initial-loss-scale 2"]),
    ("--train-samples 5", 1, ["--train-iters", "--train-samples"]),
    ("--lr-decay-samples 5", 1, ["--train-iters and --lr-decay-samples"]),
    ("--lr-warmup-samples 5", 1, ["--train-iters and --lr-warmup-samples"]),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", 1, ["--lr-warmup-fraction", "--lr-warmup-iters"]),
    ("--lr-warmup-iters 10", 1, ["--lr-warmup-iters 10", "10 samples"]),
    ("--lr-warmup-fraction 1", 1, ["--lr-warmup-fraction 1"]),
    ("--min-lr 0.01", 1, ["--min-lr 0.01", "--lr 0.001"]),
    ("--decoupled-lr 1e-5 --decoupled-min-lr 1e-4", 1, ["--decoupled-min-lr 0.0001", "--decoupled-lr 1e-05"]),
    ("--lr-warmup-init 0.1", 1, ["--lr-warmup-init 0.1", "--lr 0.001"]),
    ("--lr-decay-style WSD", 1, ["WSD", "--lr-wsd-decay-iters"]),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", 1, ["--lr-wsd-decay-iters", "11", "10"]),
    ("--start-weight-decay 0.1", 1, ["--start-weight-decay", "--weight-decay-incr-style"]),
    ("--weight-decay-incr-style linear", 1, ["--start-weight-decay, --end-weight-decay"]),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
        1,
        ["--end-weight-decay 0.1", "--start-weight-decay 0.2"],
    ),
    ("--global-batch-size 6", 4, ["--global-batch-size 6", "--micro-batch-size 1", "size 4 = 4"]),
    ("--num-virtual-stages-per-pipeline-rank 2", 1, ["--pipeline-model-parallel-size", "it is 1"]),
    ("--pipeline-schedule zbv", 1, ["--pipeline-schedule zbv", "--pipeline-model-parallel-size"]),
    ("--pipeline-model-parallel-size 5", 5, ["--pipeline-model-parallel-size 5", "--num-layers 4"]),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--num-virtual-stages-per-pipeline-rank 4",
        2,
        ["--num-layers-per-virtual-pipeline-stage 1", "--num-virtual-stages-per-pipeline-rank is 4"],
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        2,
        ["--num-layers 4", "--num-layers-per-virtual-pipeline-stage 3"],
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 5",
        2,
        ["5 microbatches", "nearest it can run: 4 or 6"],
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4 "
        "--microbatch-group-size-per-virtual-pipeline-stage 1",
        2,
        ["is more than --microbatch-group-size-per-virtual-pipeline-stage 1"],
    ),
    (
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4 --global-batch-size 2",
        2,
        ["--decoder-first/last-pipeline-num-layers 4", "--num-layers 4"],
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|L --global-batch-size 2",
        2,
        ["3 decoder layers", "--num-layers is 4"],
    ),
    ("--data-path x", 1, ["--data-path and --mock-data"]),
    ("--split 0,1,0", 1, ["--split 0,1,0 gives training nothing", "--skip-train"]),
    ("--train-data-path x --valid-data-path y", 1, ["--mock-data and --train-data-path/--valid-data-path"]),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file v", 1, ["GPT2BPETokenizer needs --merge-file"]),
    ("--tokenizer-type HuggingFaceTokenizer", 1, ["HuggingFaceTokenizer needs --tokenizer-model"]),
    ("--ckpt-step 5", 1, ["--ckpt-step 5 needs --load"]),
    ("--save s --save-interval 10 --save-retain-interval 15", 1, ["--save-retain-interval 15", "is 10"]),
    (
        "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        1,
        ["--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler"],
    ),
    ("--load=", 1, ["--load is empty"]),
    ("--tokenizer-type Llama2Tokenizer --tokenizer-model=", 1, ["--tokenizer-model is empty"]),
    (
        "--compile --pipeline-model-parallel-size 2 --pipeline-schedule zbv --global-batch-size 16",
        4,
        ["--compile", "--pipeline-schedule zbv", "1f1b"],
    ),
    (
        "--recompute-granularity full --recompute-method uniform --pipeline-model-parallel-size 2 "
        "--pipeline-schedule zbv --global-batch-size 16",
        4,
        ["--recompute-granularity full", "--pipeline-schedule zbv", "selective"],
    ),
    (
        "--profile --profile-step-start 9 --profile-step-end 9",
        1,
        ["--profile-step-end 9", "--profile-step-start 9"],
    ),
    ("--profile --profile-ranks 4", 2, ["--profile-ranks 4", "2 processes"]),
    ("--world-size 8", 2, ["--world-size 8 only plans", "2 processes"]),
    ("--check --world-size 4 --rank 4", 1, ["--rank 4", "0 to 3"]),
]


@pytest.mark.parametrize(
    ("flags", "world_size", "parts"), CONTRADICTIONS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_contradictions(flags, world_size, parts):
    if world_size == 0:
        flags, world_size = "--check --world-size 0", 1
    with pytest.raises(ConfigError) as error:
        config_of(flags, world_size)
    text = str(error.value)
    assert all(part in text for part in parts), text
    assert "\n" not in text and len(text) < 400


@pytest.mark.parametrize(
    "gone",
    [
        "--num-layers 4",
        "--hidden-size 64",
        "--seq-length 32",
        "--micro-batch-size 1",
        "--train-iters 10",
        "--lr 1e-3",
    ],
)
def test_what_is_needed_is_named(gone):
    with pytest.raises(ConfigError) as error:
        config_of(base=BASE.replace(gone, ""))
    assert gone.split()[0] in str(error.value)


def test_no_data_is_an_error_but_not_for_a_check():
    base = BASE.replace("--mock-data ", "")
    with pytest.raises(ConfigError, match="--data-path is needed"):
        config_of(base=base)
    assert config_of("--check", base=base).command.check


# ---- files


def test_missing_files_are_named_with_their_flag(tmp_path):
    here = tmp_path / "here"
    here.with_suffix(".idx").touch()
    here.with_suffix(".bin").touch()
    base = BASE.replace("--mock-data", f"--data-path 0.5 {here} 0.5 {tmp_path}/gone")
    with pytest.raises(ConfigError) as error:
        config_of(base=base)
    text = f"--data-path: there is no {tmp_path}/gone.idx and {tmp_path}/gone.bin"
    assert str(error.value) == text
    assert f"not on this machine: {text}" in config_of("--check", base=base).notes
    with pytest.raises(ConfigError, match="leave out the ending .bin"):
        config_of(base=BASE.replace("--mock-data", f"--data-path {here}.bin"))
    with pytest.raises(ConfigError, match="--tokenizer-model: there is no nowhere"):
        config_of("--tokenizer-type Llama2Tokenizer --tokenizer-model nowhere")
    assert config_of(
        base=BASE.replace("--mock-data", f"--data-path {here} s3://bucket/prefix")
    ).data.data_path


# ---- notes


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--save-interval 5 --async-save", "--save-interval, --async-save do nothing without --save"),
        ("--no-load-rng", "--no-load-rng does nothing without --load"),
        ("--split 1,0,0 --eval-interval 2", "--eval-interval does nothing without data for validation"),
        ("--split 1,0,0 --eval-iters 2", "--eval-iters does nothing without data for validation or test"),
        ("--finetune", "--finetune does nothing without --load"),
        (
            "--microbatch-group-size-per-virtual-pipeline-stage 4",
            "--microbatch-group-size-per-virtual-pipeline-stage 4 does nothing: torch's",
        ),
        ("--rotary-base 5e5", "--rotary-base does nothing without --position-embedding-type rope"),
        ("--loss-scale 8", "--loss-scale does nothing without --fp16"),
        ("--num-query-groups 2", "--num-query-groups 2 is not read without --group-query-attention"),
        ("--sequence-parallel", "--sequence-parallel has no effect: --tensor-model-parallel-size is 1"),
        ("--tokenizer-metadata x", "--tokenizer-metadata has no effect: the tokenizer files say all"),
        (
            "--compile --reset-attention-mask --attention-dropout 0.1",
            "--compile leaves core attention out of its graphs: --attention-dropout 0.1 with --reset",
        ),
        ("--use-flash-attn", "--use-flash-attn has no effect: attention, softmax"),
    ],
)
def test_flags_that_do_nothing_are_said(flags, note):
    assert any(text.startswith(note) for text in config_of(flags).notes)
    assert not any(text.startswith(note) for text in config_of().notes)


def test_a_refusal_names_the_flag_that_was_given():
    """Without flags of their own embedding and head have --lr and --min-lr."""
    base = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
        --train-iters 10 --mock-data --vocab-size 60 --lr 1e-3"""
    for words, says in (
        ("--min-lr 1e-4 --decoupled-lr 1e-5", "--min-lr 0.0001 is more than --decoupled-lr 1e-05"),
        ("--decoupled-min-lr 1e-2", "--decoupled-min-lr 0.01 is more than --lr 0.001"),
        ("--min-lr 1e-2", "--min-lr 0.01 is more than --lr 0.001"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse_arguments([*base.split(), *words.split()], Environment())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--data-path 0 a 1 b", "--data-path: the weight of a is 0, wanted a number above 0"),
        ("--data-path 0.3 a 0.7", "--data-path ends with the weight 0.7, wanted a prefix"),
        (
            "--valid-data-path a",
            "--valid-data-path gives training nothing, wanted data to train on, or --skip-train",
        ),
        ("--per-split-data-args-path {}", "valid is 3, wanted words"),
        ("--data-args-path /nowhere", None),  # a plan is made where the data need not be
    ],
)
def test_check_refuses_the_data_that_a_run_refuses(tmp_path, flags, says):
    (tmp_path / "p.json").write_text('{"train": ["a"], "valid": 3}')
    words = BASE.replace("--mock-data", flags.format(tmp_path / "p.json")).split()
    if says is None:
        assert parse_arguments([*words, "--check"], Environment()).data.data_args_path == "/nowhere"
        return
    with pytest.raises(ConfigError) as error:
        parse_arguments([*words, "--check"], Environment())
    assert says in str(error.value)
