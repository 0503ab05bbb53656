"""Parameters and FLOPs of mixtures: against the tensors of the model, published figures and torch's own count."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.costs import block_matrix_parameters, model_costs
from megatron_lite.arithmetic.flops import flops_per_step
from megatron_lite.arithmetic.partition import plan_from_config
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.distributed.environment import Environment
from megatron_lite.model.gpt import GPTChunk, parameter_shapes
from megatron_lite.rehearsal.run_report import describe_run, start_banner

RUN = "--check --world-size 1 --micro-batch-size 2 --train-iters 1 --lr 1e-3 --mock-data --max-position-embeddings 4096"
LLAMA = """--disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope
    --group-query-attention --untie-embeddings-and-output-weights"""
SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --vocab-size 100"
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 32"


def config_of(flags, seq_length=64):
    words = f"{RUN} --seq-length {seq_length} {flags}".split()
    config = parse_arguments(words, Environment())
    return with_vocabulary(config, config.model.vocab_size)


def counted(model):
    """(all, active) parameters by the shapes of the tensors: of each expert's weight K of E are active."""
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(model).items()}
    share = model.moe_router_topk / model.num_experts
    active = sum(size * share if ".experts." in name else size for name, size in sizes.items())
    return sum(sizes.values()), active


# Published in billions: (all, active), as the makers' model cards have it, cut or rounded.
PUBLISHED = {
    "Mixtral-8x7B": (
        f"{LLAMA} --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --num-experts 8 "
        "--ffn-hidden-size 14336 --vocab-size 32000",
        (46.7, 12.9),
    ),
    "OLMoE-1B-7B": (
        f"{LLAMA} --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --num-query-groups 16 --num-experts 64 "
        "--moe-router-topk 8 --ffn-hidden-size 1024 --vocab-size 50304 --qk-layernorm "
        "--qk-layernorm-across-heads",
        (6.9, 1.3),
    ),
    "Qwen3-30B-A3B": (
        f"{LLAMA} --num-layers 48 --hidden-size 2048 --num-attention-heads 32 --kv-channels 128 --num-query-groups 4 "
        "--ffn-hidden-size 6144 --moe-ffn-hidden-size 768 --num-experts 128 --moe-router-topk 8 --vocab-size 151936 "
        "--qk-layernorm",
        (30.5, 3.3),
    ),
    # Without the two vocabulary matrices.
    "GLM-4.5-Air": (
        f"{LLAMA} --num-layers 46 --hidden-size 4096 --num-attention-heads 96 --kv-channels 128 --num-query-groups 8 "
        "--ffn-hidden-size 10944 --moe-ffn-hidden-size 1408 --num-experts 128 --moe-router-topk 8 --vocab-size 151552 "
        "--moe-layer-freq ([0]+[1]*45) --moe-shared-expert-intermediate-size 1408 --add-qkv-bias",
        (106, 12),
    ),
}
MEASURED = {
    "Mixtral-8x7B": (46_702_792_704, 12_879_925_248),
    "OLMoE-1B-7B": (6_919_161_856, 1_282_017_280),
    "Qwen3-30B-A3B": (30_532_122_624, 3_353_032_704),
    "GLM-4.5-Air": (106_852_245_504, 13_424_123_904),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    flags, published = PUBLISHED[name]
    config = config_of(flags)
    costs = model_costs(config.model, 64)
    assert (costs.parameters, costs.active) == counted(config.model) == MEASURED[name]
    vocabulary = 2 * config.model.padded_vocab_size * config.model.hidden_size if name == "GLM-4.5-Air" else 0
    for count, billions in zip(MEASURED[name], published, strict=True):
        assert (count - vocabulary) / 1e9 == pytest.approx(billions, abs=0.4 if vocabulary else 0.06)


@pytest.mark.parametrize(
    "flags",
    [
        EXPERTS,
        f"{EXPERTS} --moe-layer-freq 2",
        f"{LLAMA} {EXPERTS} --num-query-groups 2 --moe-layer-freq [1,0,0,1] --add-qkv-bias "
        "--moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate",
        f"{EXPERTS} --qk-layernorm --moe-router-topk 8 --squared-relu",
        f"{LLAMA} --num-query-groups 4 --num-experts 1 --moe-router-topk 1 --moe-router-pre-softmax",
    ],
)
def test_each_layer_has_the_parameters_of_its_tensors(flags):
    model = config_of(f"{SMALL} {flags}").model
    shapes = parameter_shapes(model)
    for number, cost in enumerate(model_costs(model, 64).layers):
        sizes = {n: math.prod(s) for n, s in shapes.items() if n.startswith(f"layers.{number}.")}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        assert bool(experts) == model.has_experts(number)
        assert (cost.parameters, cost.experts) == (sum(sizes.values()), experts)
        assert cost.idle == experts * (model.num_experts - model.moe_router_topk) / model.num_experts


@pytest.mark.parametrize(
    "flags",
    [
        EXPERTS,
        f"{EXPERTS} --moe-layer-freq 2 --moe-router-topk 3",
        f"{LLAMA} {EXPERTS} --num-query-groups 2 --moe-layer-freq ([0]+[1]*3) "
        "--moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate",
    ],
)
def test_flops_are_those_that_torch_counts(flags):
    """In fp64 experts are computed one by one, so that torch counts them: all matrix products, the router's too.

    As in Megatron the figure leaves out the router and the shared expert's gate, and half of attention.
    """
    config = config_of(f"{SMALL} {flags} --hidden-dropout 0 --attention-dropout 0")
    model, tokens = config.model, 2 * 64
    chunk = GPTChunk(model, range(4)).double()
    for parameter in chunk.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.arange(tokens).view(2, 64) % 100
    counter = FlopCounterMode(display=False)
    with counter:
        chunk(ids, labels=ids).backward()
    products = sum(
        flops
        for operator, flops in counter.get_flop_counts()["Global"].items()
        if str(operator) in ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
    )
    mixtures = sum(map(model.has_experts, range(4)))
    routers = 6 * tokens * 64 * (8 + model.moe_shared_expert_gate) * mixtures
    attention = 4 * 6 * 64**2 * 64
    assert products == flops_per_step(config, 2) - 2 * attention + routers
    matrices = mixtures * block_matrix_parameters(model, mixture=True, active=True)
    matrices += (4 - mixtures) * block_matrix_parameters(model) + 64 * 128
    assert products - routers == 6 * tokens * matrices


def test_check_and_the_start_of_a_run_print_all_and_active_parameters():
    config = config_of(PUBLISHED["GLM-4.5-Air"][0].replace("151552", "151551"))  # one is the end of text
    text = describe_run(config)
    assert "MLP 10944 (swiglu), 128 experts of 1408 (swiglu), 8 a token, shared expert of 1408" in text
    assert (
        "106,852,245,504 (13,424,123,904 active) = embedding 620,756,992 + dense blocks 1 x 243,554,304"
        in text
    )
    assert "+ mixtures 45 x 2,341,492,736 (265,312,256 active) + final norm 4,096" in text
    banner = start_banner(config, plan_from_config(config))
    assert banner.startswith("model: 106,852,245,504 parameters (13,424,123,904 active), 46 layers")
    dense = describe_run(config_of(SMALL))
    assert "MLP 96 (gelu)" in dense and "+ blocks 4 x " in dense and "active" not in dense
