"""Every row of the frozen table of Megatron's flags: implemented with its default, accepted with a reason, refused."""

import csv
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_lite.arguments.megatron_flags import ACCEPTED, DEFAULTS, REFUSED, RENAMED
from megatron_lite.arguments.megatron_flags import ROWS as TABLE
from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.config import CONCERNS, ConfigError
from megatron_lite.config.declare import flag_of
from megatron_lite.distributed.environment import Environment

with (Path(__file__).parent / "golden" / "megatron_flags.tsv").open() as table:
    ROWS = {row["flag"]: row for row in csv.DictReader(table, delimiter="\t")}
FIELDS = {
    name: item
    for concern in CONCERNS.values()
    for item in fields(concern)
    for name in (flag_of(item), *item.metadata.get("aliases", ()))
}
BASE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --train-iters 10 --lr 1e-3 --mock-data --vocab-size 60"""


def config_of(*words):
    return parse_arguments([*BASE.split(), *words], Environment())


def rows(here):
    return [name for name, row in ROWS.items() if row["here"] == here]


def test_the_table_is_whole():
    assert len(ROWS) == 248 and all(rows(kind) for kind in ("implement", "accept", "refuse"))


@pytest.mark.parametrize("name", rows("implement"))
def test_implemented_with_megatrons_default(name):
    if name in RENAMED:
        return
    default, kind = FIELDS[name].default, ROWS[name]["type"]
    given = ROWS[name]["default"]
    if kind.startswith("switch"):  # Megatron's --no-x clears x, our field is no_x: given or not given
        assert default is False
    elif isinstance(default, float):
        assert default == float(given)
    elif isinstance(default, tuple):
        assert list(default) == [word.strip("' ") for word in given.strip("[]").split(",") if word]
    elif name == "--rotary-base":
        assert default == float(given)
    else:
        assert str(default) == given.removeprefix("AttnBackend.")


@pytest.mark.parametrize("name", rows("accept"))
def test_accepted_with_a_note(name):
    """It parses with a value as Megatron gives it, changes nothing, and says why."""
    kind = ROWS[name]["type"]
    if name in FIELDS:  # a field although it need not be one
        assert str(FIELDS[name].default) == ROWS[name]["default"]
        return
    accepted = ACCEPTED[name]
    value = accepted.choices[0] if accepted.choices else "1"
    words = [value] * {"": 0, "+": 2}.get(accepted.value, 1)
    if kind != "-":
        assert bool(words) != kind.startswith("switch")
    config, plain = config_of(name, *words), config_of()
    assert config.to_dict() == plain.to_dict()
    notes = [note for note in config.notes if note.startswith(f"{name} has no effect: ")]
    assert len(notes) == 1 and len(notes[0]) > len(name) + 20


@pytest.mark.parametrize("name", rows("refuse"))
def test_refused_in_one_sentence(name):
    with pytest.raises(ConfigError) as error:
        config_of(name, "1")
    assert str(error.value).startswith(f"{name}: ") and len(str(error.value)) > len(name) + 15


def test_no_flag_means_two_things():
    names = [*FIELDS, *(row.flag for row in TABLE)]
    assert len(names) == len(set(names))
    assert {row.flag for row in TABLE} == {*ACCEPTED, *REFUSED, *RENAMED, *DEFAULTS}
    assert all(row.text and "\t" not in row.text for row in TABLE)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("--moe-use-upcycling", "mixture of experts"),
        ("--optimizer-cuda-graph", "CUDA graphs"),
        ("--logits-load-dir x", "distillation"),
        ("--dataloader-inter-document-masking", "--reset-attention-mask"),
        ("--expert-model-parallel-size 8", "the model is dense"),
        ("--multi-latent-attention", "multi-latent attention"),
        ("--spec megatron.core.models.gpt layer_spec", "layer spec"),
        ("--img-h 336 --vision-model-type clip", "multimodal"),
        ("--rl-prompts-per-step 32 --grpo-kl-beta 0.1", "reinforcement learning"),
        ("--inference-max-requests 8", "inference"),
        ("--fp8-amax-history-len 1024", "FP8"),
        ("--fp4-format e2m1", "FP4"),
        ("--mamba-state-dim 128", "state-space"),
        ("--mtp-num-layers 1", "multi-token prediction"),
        ("--retro-project-dir x", "decoder-only"),
        ("--bert-no-binary-head", "decoder-only"),
        ("--deepspeed --zero-stage 1", "--data-parallel-sharding-strategy"),
        ("--optimizer-cpu-offload", "--fsdp-cpu-offload"),
        ("--decrease-batch-size-if-needed", "--global-batch-size"),
    ],
)
def test_whole_kinds_are_refused_in_one_sentence(flags, kind):
    with pytest.raises(ConfigError) as error:
        config_of(*flags.split())
    text = str(error.value)
    assert kind in text and "\n" not in text
    if text.startswith("--"):
        assert all(word in text for word in flags.split() if word.startswith("--"))


OLD = {
    "--use-flash-attn": {},
    "--data-impl mmap": {},
    "--DDP-impl local": {},
    "--local_rank=3": {},
    "--local-rank 3": {},
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion": {},
    "--accumulate-allreduce-grads-in-fp32": {},
    "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1": {
        "parallel.expert_tensor_parallel_size": 1
    },
    "--num-experts 0 --moe-expert-capacity-factor 2.0": {},
    "--checkpoint-activations": {
        "parallel.recompute_granularity": "full",
        "parallel.recompute_method": "uniform",
        "parallel.recompute_num_layers": 1,
    },
    "--activations-checkpoint-method block --activations-checkpoint-num-layers 2": {
        "parallel.recompute_granularity": "full",
        "parallel.recompute_method": "block",
        "parallel.recompute_num_layers": 2,
    },
    "--activations-checkpoint-method=uniform": {
        "parallel.recompute_granularity": "full",
        "parallel.recompute_method": "uniform",
        "parallel.recompute_num_layers": 1,
    },
    "--recompute-activations": {
        "parallel.recompute_granularity": "selective",
        "parallel.recompute_activations": True,
    },
    "--use-rotary-position-embeddings": {"model.position_embedding_type": "rope"},
    "--use-rotary-position-embeddings --no-position-embedding": {"model.position_embedding_type": "rope"},
    "--position-embedding-type rope --no-position-embedding": {"model.position_embedding_type": "rope"},
    "--no-position-embedding --position-embedding-type rope": {"model.position_embedding_type": "rope"},
    "--no-position-embedding": {"model.position_embedding_type": "none"},
    "--num-workers 5": {"data.num_workers": 5},
    "--layernorm-epsilon 1e-6": {"model.norm_epsilon": 1e-6},
    "--warmup 0.1": {"optimizer.lr_warmup_fraction": 0.1},
    "--batch-size 2": {
        "training.micro_batch_size": 2,
        "training.global_batch_size": 2,
        "evaluation.eval_global_batch_size": 2,
    },
    "--optimizer dist_muon": {"optimizer.optimizer": "muon"},
    "--override-opt-param-scheduler": {"optimizer.override_opt_param_scheduler": True},
    "--exit-interval 0": {"training.exit_interval": 0},
    "--eval-interval 0": {"evaluation.eval_interval": 0},
    "--save s --save-interval 0": {"checkpoint.save": "s", "checkpoint.save_interval": 0},
    "--eval-iters -1": {"evaluation.eval_iters": 0},
    "--distributed-backend nccl2 --megatron-fsdp-version 2 --use-contiguous-parameters-in-local-ddp": {},
    "--tokenizer-library null": {},
    "--iterations-to-skip [3,4]": {"training.iterations_to_skip": [3, 4]},
    "--moe-router-topk-limited-devices 2 --moe-single-grouped-weight": {},
    "--moe-layer-recompute": {
        "parallel.recompute_granularity": "selective",
        "parallel.recompute_modules": ["core_attn", "moe"],
    },
    "--megatron-fsdp-main-grads-dtype bf16 --megatron-fsdp-main-params-dtype fp16": {},
    "--yarn-beta-fast 32.0 --lion-beta1 0.9 --eval-micro-batch-size 4": {},
    "--cp-comm-type a2a+p2p": {"parallel.cp_comm_type": ["a2a+p2p"]},
}


@pytest.mark.parametrize("words", OLD)
def test_old_spellings(words):
    """Each sets what it always meant, and nothing else."""
    got, plain = config_of(*words.split()).to_dict(), config_of().to_dict()
    changed = {
        f"{concern}.{name}": value
        for concern, values in got.items()
        for name, value in values.items()
        if value != plain[concern][name]
    }
    assert changed == OLD[words]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("--tokenizer-library sentencepiece", "GPTSentencePieceTokenizer"),
        ("--tokenizer-library huggingface", "HuggingFaceTokenizer"),
        ("--tokenizer-type Llama3Tokenizer", "HuggingFaceTokenizer"),
        ("--tokenizer-type PretrainedFromHF", "HuggingFaceTokenizer"),
    ],
)
def test_other_names_of_a_tokenizer(words, kind):
    data = config_of(*words.split(), "--tokenizer-name-or-path", "m", "--check").data
    assert (data.tokenizer_type, data.tokenizer_model) == (kind, "m")


def test_accepted_values_that_would_change_something_are_refused():
    for words, wanted in (
        ("--expert-model-parallel-size 4", "the model is dense"),
        ("--distributed-backend mpi", "nccl, nccl2, gloo"),
        ("--exp-avg-dtype int8", "only fp32, fp16, bf16, fp8"),
        ("--tensor-parallel-num-weight-shards 2", "--tensor-model-parallel-size 1"),
    ):
        with pytest.raises(ConfigError) as error:
            config_of(*words.split())
        assert wanted in str(error.value)


def test_what_only_experts_or_latent_attention_read_is_accepted_in_a_dense_model():
    words = """--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-topk 2 --moe-aux-loss-coeff 1e-2
        --moe-router-load-balancing-type aux_loss --rotary-scaling-factor 1 --original-max-position-embeddings 8192
        --kv-lora-rank 512 --use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype fp16
        --exp-avg-dtype bf16 --log-progress"""
    notes = "\n".join(config_of(*words.split()).notes)
    for word in words.split():
        assert not word.startswith("--") or word in notes
