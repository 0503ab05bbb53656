"""The flags of a mixture of experts: what they become, and each refusal in one sentence before any process group."""

import pytest

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.layer_pattern import parse_layer_pattern
from megatron_lite.config import Config, ConfigError
from megatron_lite.distributed.environment import Environment

DENSE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --train-iters 10 --lr 1e-3 --mock-data --vocab-size 60 --disable-bias-linear --swiglu"""
MIXTURE = DENSE + " --num-experts 8 --moe-ffn-hidden-size 32"


def config_of(words, base=MIXTURE, stored=None):
    return parse_arguments([*base.split(), *words.split()], Environment(), lambda config: stored)


def error_of(words, base=MIXTURE):
    with pytest.raises(ConfigError) as error:
        config_of(words, base)
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ("", (1, 1, 1, 1)),
        ("--moe-layer-freq 2", (1, 0, 1, 0)),
        ("--moe-layer-freq 3", (1, 0, 0, 1)),
        ("--moe-layer-freq ([0]+[1]*3)", (0, 1, 1, 1)),
        ("--moe-layer-freq ([0] + [1]*3)", (0, 1, 1, 1)),
        ("--moe-layer-freq '([0]+[1]*3)'", (0, 1, 1, 1)),
        ("--moe-layer-freq ([1,0]*2)", (1, 0, 1, 0)),
        ("--moe-layer-freq [0,1,1,0]", (0, 1, 1, 0)),
        ("--moe-layer-freq 2*([0]+[1,])", (0, 1, 0, 1)),
        ("--moe-layer-freq (([0]*2+[1])+([0]))", (0, 0, 1, 0)),
    ],
)
def test_layers_with_experts(words, pattern):
    model = config_of(words).model
    assert model.moe_layer_freq == pattern
    assert tuple(int(model.has_experts(layer)) for layer in range(4)) == pattern


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[0]+[1]*2", "list of 3 layers"),
        ("[1]", "list of 1 layers"),
        ("[0]*4", "no layer has experts"),
        ("0", "0th"),
        ("", "expected at least one argument"),
        ("[0,2]", "zeros"),
        ("[]", "zeros"),
        ("[1", "no whole number"),
        ("(1", "not closed"),
        ("1)", "left over"),
        ("[1]+1", "two lists"),
        ("[1]*[1]", "by a number"),
        ("[1]*100000000", "10,000"),
        ("9" * 5000, "no whole number"),
        ("[1]*100*100*100", "10,000"),
        ("1_000", "left over"),
        ("[0]-[1]", "left over"),
        ("__import__('os').abort()", "no whole number"),
        ("(" * 5000, "brackets"),
        ("[x for x in y]", "no whole number"),
    ],
)
def test_a_layer_pattern_is_read_by_a_grammar(text, why):
    assert why in error_of(f"--moe-layer-freq {text}")


def test_a_pattern_as_long_as_the_largest_models():
    assert parse_layer_pattern("([0]*3+[1]*58)") == (0,) * 3 + (1,) * 58
    assert parse_layer_pattern("7") == 7


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--moe-router-topk 9", ["--moe-router-topk 9", "--num-experts 8"]),
        ("--moe-router-topk 1", ["--moe-router-topk 1", "--moe-router-pre-softmax"]),
        ("--moe-router-enable-expert-bias", ["--moe-router-score-function is softmax", "sigmoid"]),
        ("--moe-router-num-groups 4", ["--moe-router-num-groups 4", "--moe-router-group-topk"]),
        ("--moe-router-group-topk 2", ["--moe-router-group-topk 2", "--moe-router-num-groups"]),
        (
            "--moe-router-num-groups 3 --moe-router-group-topk 1",
            ["--num-experts 8", "--moe-router-num-groups 3"],
        ),
        ("--moe-router-num-groups 2 --moe-router-group-topk 4", ["--moe-router-group-topk 4", "2"]),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 4",
            ["--moe-router-topk 2", "--moe-router-group-topk 4"],
        ),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 4",
            ["--moe-router-topk 4", "2 experts"],
        ),
        ("--moe-router-load-balancing-type sinkhorn", ["sinkhorn", "aux_loss or seq_aux_loss or none"]),
        ("--moe-router-load-balancing-type global_aux_loss", ["global_aux_loss", "layouts"]),
        ("--moe-router-load-balancing-type quantile_balancing", ["quantile_balancing"]),
        ("--moe-router-load-balancing-type other", ["other is not supported"]),
        ("--moe-router-load-balancing-type aux_loss seq_aux_loss", ["names 2 losses", "has 1"]),
        (
            "--moe-router-load-balancing-type aux_loss aux_loss --moe-aux-loss-coeff 1 1",
            ["each loss once"],
        ),
        ("--moe-aux-loss-coeff -1", ["--moe-aux-loss-coeff is -1", "at least 0"]),
        ("--moe-aux-loss-coeff x", ["--moe-aux-loss-coeff", "'x' is not a number"]),
        ("--moe-z-loss-coeff -1", ["--moe-z-loss-coeff is -1", "at least 0"]),
        ("--moe-router-score-function tanh", ["--moe-router-score-function", "tanh"]),
        (
            "--moe-shared-expert-intermediate-size 0",
            ["--moe-shared-expert-intermediate-size is 0", "at least 1"],
        ),
        ("--moe-shared-expert-gate", ["--moe-shared-expert-gate", "--moe-shared-expert-intermediate-size"]),
        ("--moe-ffn-hidden-size 30", ["--moe-ffn-hidden-size is 30", "multiple of 4"]),
        ("--moe-ffn-hidden-size 36 --bf16", ["--moe-ffn-hidden-size is 36", "multiple of 8"]),
        ("--hidden-size 68 --kv-channels 16 --fp16", ["--hidden-size is 68", "multiple of 8"]),
        ("--expert-model-parallel-size 3", ["--num-experts 8", "--expert-model-parallel-size 3"]),
        (
            "--expert-model-parallel-size 2",
            ["--expert-model-parallel-size 2 does not divide the 1 ranks"],
        ),
        (
            "--expert-model-parallel-size 4 --world-size 4 --data-parallel-sharding-strategy no_shard --check",
            ["--expert-model-parallel-size 4 does not divide the 1 ranks"],
        ),
        (
            "--expert-model-parallel-size 2 --world-size 2 --bf16 --compile --check",
            ["--compile with --expert-model-parallel-size 2"],
        ),
        (
            "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zbv --world-size 4"
            " --global-batch-size 2 --bf16 --check",
            ["--pipeline-schedule zbv", "a pass of 1 microbatch", "at least 2"],
        ),
        ("--expert-tensor-parallel-size 2", ["--expert-tensor-parallel-size 2", "wanted 1"]),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --world-size 2 --check",
            ["--expert-tensor-parallel-size", "--tensor-model-parallel-size 2 in Megatron"],
        ),
        (
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --world-size 2 --check",
            ["--tensor-model-parallel-size 2", "--num-experts 8", "--sequence-parallel"],
        ),
        ("--compile", ["--compile", "--bf16", "fp32"]),
        ("--moe-expert-capacity-factor 1.0", ["--moe-expert-capacity-factor", "no token is dropped"]),
        ("--moe-pad-expert-input-to-capacity", ["--moe-pad-expert-input-to-capacity"]),
        ("--moe-token-drop-policy position", ["--moe-token-drop-policy"]),
        ("--moe-input-jitter-eps 0.1", ["--moe-input-jitter-eps"]),
        ("--moe-router-force-load-balancing", ["--moe-router-force-load-balancing"]),
        ("--moe-latent-size 16", ["--moe-latent-size"]),
        ("--moe-use-upcycling", ["--moe-use-upcycling"]),
        ("--moe-apply-probs-on-input", ["--moe-apply-probs-on-input"]),
        ("--moe-router-padding-for-fp8", ["--moe-router-padding-for-fp8"]),
        ("--moe-pad-experts-for-cuda-graph-inference", ["--moe-pad-experts-for-cuda-graph-inference"]),
        ("--moe-paged-stash", ["--moe-paged-stash"]),
        ("--quick-geglu", ["--swiglu and --quick-geglu"]),
    ],
)
def test_refusals(words, parts):
    text = error_of(words)
    assert "\n" not in text and all(part in text for part in parts), text


def test_shared_experts_have_no_bias():
    text = error_of("--moe-shared-expert-intermediate-size 32", MIXTURE.replace("--disable-bias-linear", ""))
    assert "--moe-shared-expert-intermediate-size 32" in text and "--disable-bias-linear" in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--moe-ffn-hidden-size 32", "--num-experts"),
        ("--expert-model-parallel-size 2", "--num-experts"),
    ],
)
def test_of_a_dense_model_nothing_is_asked_that_it_cannot_have(words, part):
    assert part in error_of(words, DENSE) and "dense" in error_of(words, DENSE)
    assert part in error_of(words + " --num-experts 0", DENSE)


def test_what_a_dense_model_does_not_read_is_noted():
    words = """--moe-router-topk 4 --moe-aux-loss-coeff 1e-2 --moe-layer-freq 2 --moe-router-pre-softmax
        --moe-token-dispatcher-type alltoall --moe-input-jitter-eps 0.1 --moe-expert-capacity-factor 2.0"""
    config = config_of(words, DENSE)
    notes = "\n".join(config.notes)
    assert all(word in notes for word in words.split() if word.startswith("--"))
    assert "without --num-experts" in notes and "the model is dense" in notes
    assert config.model.num_experts is None and not config.model.has_experts(0)


def test_how_and_not_what_is_accepted():
    """With --num-experts too; a negative capacity factor is none."""
    words = """--moe-grouped-gemm --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep
        --moe-permute-fusion --moe-router-fusion --moe-shared-expert-overlap --moe-enable-deepep --moe-deepep-num-sms 20
        --overlap-moe-expert-parallel-comm --moe-expert-capacity-factor -1.0"""
    config = config_of(words)
    notes = "\n".join(note for note in config.notes if "has no effect" in note)
    assert all(word in notes for word in words.split() if word.startswith("--")) and "dense" not in notes
    assert config.model == config_of("").model


def test_defaults():
    config = config_of("--bf16", DENSE + " --num-experts 8")
    model = config.model
    assert model.moe_ffn_hidden_size == model.ffn_hidden_size == 128
    notes = "\n".join(config.notes)
    assert "--moe-ffn-hidden-size is not given" in notes and "--moe-router-dtype fp32" in notes
    assert "--moe-router-dtype" not in "\n".join(config_of("--bf16 --moe-router-dtype fp32").notes)
    assert (model.moe_router_topk, model.balancing_coefficients) == (2, {})
    several = config_of(
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 2e-3"
    ).model
    assert several.balancing_coefficients == {"aux_loss": 0.01, "seq_aux_loss": 0.002}


def test_recomputation_of_the_experts():
    for words, modules in (
        ("--moe-layer-recompute", ("core_attn", "moe")),
        ("--recompute-granularity selective --recompute-modules moe_act", ("moe_act",)),
        (
            "--recompute-granularity selective --recompute-modules shared_experts moe",
            ("shared_experts", "moe"),
        ),
    ):
        parallel = config_of(words).parallel
        assert (parallel.recompute_granularity, parallel.recompute_modules) == ("selective", modules)


def test_a_checkpoint_stores_the_experts():
    """--use-checkpoint-args takes the form from it; what only says how to train may differ."""
    words = "--moe-layer-freq ([0]+[1]*3) --moe-router-topk 3 --moe-aux-loss-coeff 1e-2"
    stored = config_of(words).to_dict()
    assert Config.from_dict(stored).model == config_of(words).model
    base = "--seq-length 32 --micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data --use-checkpoint-args --load x"
    taken = config_of("--moe-aux-loss-coeff 2e-2", base, stored).model
    assert (taken.num_experts, taken.moe_router_topk, taken.moe_layer_freq) == (8, 3, (0, 1, 1, 1))
    assert taken.moe_aux_loss_coeff == (0.02,)
    with pytest.raises(
        ConfigError, match="--moe-router-topk is 2, the checkpoint of --use-checkpoint-args has 3"
    ):
        config_of("--moe-router-topk 2", base, stored)
    with pytest.raises(ConfigError, match="--moe-input-jitter-eps"):
        config_of("--moe-input-jitter-eps 0.1", base, stored)
    dense = config_of("", DENSE).to_dict()
    with pytest.raises(
        ConfigError, match="--num-experts is 8, the checkpoint of --use-checkpoint-args has None"
    ):
        config_of("--num-experts 8", base, dense)
