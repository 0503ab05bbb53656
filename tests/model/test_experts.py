"""Router and experts: Megatron-core's numbers (golden/moe), plain formulas, the edges, and what may only count once."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_lite.config import ModelConfig
from megatron_lite.model.experts import GroupedLinear, Mixture, grouped_product, takes_grouped_mm
from megatron_lite.model.gpt import GPTChunk, load_chunk
from megatron_lite.model.router import largest

GOLDEN = Path(__file__).parent.parent / "golden" / "moe"
CASES = json.loads((GOLDEN / "golden.json").read_text())["cases"]
# Of what flags refuse (tests/test_expert_flags.py) the layer has no counterpart.
REFUSED = ("cap", "on_input", "sinkhorn", "global_aux_loss")
MCORE = {
    name: case
    for name, case in CASES.items()
    if name.startswith("mcore_") and not any(word in str(case["arguments"]) for word in REFUSED)
}
SMALL = ModelConfig(
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=8,
    max_position_embeddings=32,
    vocab_size=60,
    padded_vocab_size=64,
    swiglu=True,
    disable_bias_linear=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    num_experts=8,
    moe_ffn_hidden_size=8,
    moe_router_load_balancing_type=("aux_loss",),
    moe_aux_loss_coeff=(0.01,),
    init_method_std=0.2,
)


def config_of_case(case):
    given, sizes = case["arguments"], case["sizes"]
    act = given.get("act", "swiglu")
    return replace(
        SMALL,
        num_experts=sizes["E"],
        moe_ffn_hidden_size=sizes["moe_ffn"],
        moe_router_topk=given["topk"],
        moe_router_load_balancing_type=(given.get("lb", "none"),),
        moe_aux_loss_coeff=(given.get("aux", 0.0),),
        moe_z_loss_coeff=given.get("z"),
        moe_router_pre_softmax=given.get("pre", False),
        moe_router_score_function=given.get("score", "softmax"),
        moe_router_enable_expert_bias=given.get("bias", False),
        moe_router_topk_scaling_factor=given.get("scale"),
        moe_router_dtype=given.get("router_dtype"),
        disable_bias_linear=not given.get("linear_bias", False),
        swiglu=act == "swiglu",
        squared_relu=act == "squared_relu",
        quick_geglu=act == "quick_geglu",
        activation_func_clamp_value=given.get("clamp"),
        glu_linear_offset=given.get("offset", 0.0),
    )


def mixture_of(config, seed=0, dtype=torch.float32):
    """With weights that keep the router's choices apart."""
    mixture = Mixture(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in mixture.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return mixture


def tokens_of(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def golden_name(name):
    """experts.up_proj.weight -> experts.up_proj."""
    return name.removesuffix(".weight") if name.startswith("experts.") else name


def check_close(got, wanted, tolerance, what):
    assert got.shape == wanted.shape
    assert (got.float() - wanted).abs().max() <= tolerance * wanted.abs().max(), what


@pytest.mark.parametrize("name", MCORE)
def test_megatron_core(name):
    """Routing exactly; weights, outputs, losses and all gradients to 1e-5 of the largest (bf16: 2e-2)."""
    case = MCORE[name]
    data = {key: torch.from_numpy(value) for key, value in np.load(GOLDEN / f"{name}.npz").items()}
    bf16, ties = case["arguments"].get("bf16"), case["arguments"].get("ties")
    dtype, tolerance = (torch.bfloat16, 2e-2) if bf16 else (torch.float32, 1e-5)
    mixture = Mixture(config_of_case(case))
    for key, parameter in mixture.named_parameters():
        parameter.data = data[f"param/{golden_name(key)}"].to(dtype)
    if "param/expert_bias" in data:
        mixture.router.expert_bias.copy_(data["param/expert_bias"])
    for before in ("",) if "x" in data else ("mb0/", "mb1/"):
        x = data[before + "x"].to(dtype).requires_grad_()
        experts, weights = mixture.router.eval()(x)
        chosen = torch.zeros_like(data[before + "probs"], dtype=torch.bool).scatter(-1, experts, True)
        if ties:  # any choice among equals is as good: the scores of the chosen have to be the same
            logits = data["logits"]
            for which in (chosen, data["routing_map"]):
                picked = logits[which].view(*logits.shape[:-1], -1).sort().values
                assert torch.allclose(picked, logits.topk(2).values.sort().values)
            return
        assert torch.equal(chosen, data[before + "routing_map"])
        dense = torch.zeros_like(data[before + "probs"]).scatter(-1, experts, weights.float())
        check_close(dense, data[before + "probs"], tolerance, "weights")
        out = mixture.train()(x)
        check_close(out, data[before + "out"], tolerance, "out")
        out.backward(data[before + "grad_out"].to(dtype))
        check_close(x.grad, data[before + "grad/x"], tolerance, "grad/x")
        tally = mixture.router.take_tally()
        assert torch.equal(tally.tokens, chosen.sum(dim=(0, 1)))
        wanted = case["unscaled_losses"][before.strip("/") or "mb0"]
        assert tally.losses.keys() == wanted.keys()
        for kind, value in wanted.items():
            assert tally.losses[kind].item() == pytest.approx(value, rel=tolerance)
    for key, parameter in mixture.named_parameters():
        check_close(parameter.grad, data[f"grad/{golden_name(key)}"], tolerance, key)


GROUPS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk": 4,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_aux_loss_coeff": (1e-4,),
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_shared_expert_intermediate_size": 24,
    "moe_shared_expert_gate": True,
}
FORMS = {
    "softmax": {},
    "softmax of all": {"moe_router_pre_softmax": True, "moe_router_topk": 3},
    "sigmoid, groups, bias, shared expert": GROUPS,
    "linear biases": {"disable_bias_linear": False, "swiglu": False},
    "both losses": {
        "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
        "moe_aux_loss_coeff": (0.01, 0.02),
        "moe_z_loss_coeff": 1e-3,
    },
    "one expert": {"num_experts": 1, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "all experts": {"num_experts": 4, "moe_router_topk": 4},
}


def plain_choice(config, logits, bias):
    """(experts, weights of all E) of one token, by the words of Megatron's documentation."""
    sigmoid, count = config.moe_router_score_function == "sigmoid", config.moe_router_topk
    scores = logits.sigmoid() if sigmoid else logits.softmax(0)
    ranked = scores + (bias if bias is not None else 0)
    if config.moe_router_num_groups:
        groups = ranked.view(config.moe_router_num_groups, -1)
        sums = groups.topk(count // config.moe_router_group_topk).values.sum(1)
        best = sums.topk(config.moe_router_group_topk).indices
        ranked = torch.full_like(groups, -torch.inf).index_copy(0, best, groups[best]).flatten()
    experts = ranked.topk(count).indices
    weights = scores[experts]
    if (sigmoid and count > 1) or not (sigmoid or config.moe_router_pre_softmax):
        weights = weights / weights.sum()
    return experts, weights * (config.moe_router_topk_scaling_factor or 1)


def plain_mixture(mixture, config, x):
    """The layer's output, token by token and expert by expert, with its attached loss as (output, loss)."""
    out, router = torch.zeros_like(x), mixture.router
    for where in np.ndindex(*x.shape[:2]):
        logits = router.weight @ x[where] + (0 if router.bias is None else router.bias)
        for expert, weight in zip(*plain_choice(config, logits, router.expert_bias)):
            out[where] = out[where] + weight * plain_mlp(mixture.experts, x[where], expert)
        if mixture.shared_expert is not None:
            shared = mixture.shared_expert(x[where])
            if mixture.shared_expert_gate is not None:
                shared = shared * mixture.shared_expert_gate(x[where]).sigmoid()
            out[where] = out[where] + shared
    return out, plain_losses(router, config, x)


def plain_mlp(experts, token, expert):
    def linear(module, row):
        return module.weight[expert] @ row + (0 if module.bias is None else module.bias[expert])

    up = linear(experts.up_proj, token)
    if experts.gate_proj is None:
        return linear(experts.down_proj, torch.nn.functional.gelu(up))
    return linear(experts.down_proj, torch.nn.functional.silu(linear(experts.gate_proj, token)) * up)


def plain_losses(router, config, x):
    logits = torch.nn.functional.linear(x, router.weight, router.bias)
    sigmoid = config.moe_router_score_function == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    scores = scores / scores.sum(-1, keepdim=True)
    experts, count = config.num_experts, config.moe_router_topk
    total = (config.moe_z_loss_coeff or 0) * (logits.logsumexp(-1) ** 2).mean()
    for kind, coefficient in zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff):
        parts = scores if kind == "seq_aux_loss" else scores.flatten(0, 1)[None]
        for part in parts:
            shares = torch.bincount(part.topk(count).indices.flatten(), minlength=experts) / (
                len(part) * count
            )
            total = total + coefficient * experts * (shares * part.mean(0)).sum() / len(parts)
    return total


@pytest.mark.parametrize("name", FORMS)
def test_plain_formulas(name):
    """Outputs and every gradient, the losses' with their factor, against loops over tokens in fp64 and fp32."""
    config = replace(SMALL, **FORMS[name])
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        mixture = mixture_of(config, dtype=dtype)
        if mixture.router.expert_bias is not None:
            mixture.router.expert_bias.copy_(tokens_of(config.num_experts, seed=5) * 0.3)
        mixture.router.loss_factor = 0.25
        x, gradient = tokens_of(2, 5, 16).to(dtype), tokens_of(2, 5, 16, seed=3).to(dtype)
        out, losses = plain_mixture(mixture, config, x)
        wanted = torch.autograd.grad((out * gradient).sum() + 0.25 * losses, list(mixture.parameters()))
        got = mixture(x)
        assert (got - out).abs().max() <= tolerance * out.abs().max()
        got.backward(gradient)
        for (key, parameter), one in zip(mixture.named_parameters(), wanted):
            assert parameter.grad is not None and parameter.grad.shape == one.shape, key
            assert (parameter.grad - one).abs().max() <= tolerance * one.abs().max().clamp(min=1e-3), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_grouped_kernel_and_the_loop_give_the_same_bits(dtype):
    layer = GroupedLinear(4, 16, 24, bias=False)
    layer.weight.data = tokens_of(4, 24, 16).to(dtype)
    rows = tokens_of(9, 16, seed=2).to(dtype).requires_grad_()
    ends = torch.tensor([4, 4, 8, 9], dtype=torch.int32)
    assert takes_grouped_mm(dtype, 24, 16)
    results = []
    for product in (grouped_product, loop_product):
        out = product(rows, layer.weight, ends)
        results.append((out, *torch.autograd.grad(out, (rows, layer.weight), tokens_of(9, 24).to(dtype))))
    for one, other in zip(*results):
        assert torch.equal(one, other)


def loop_product(rows, weight, ends):
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix.T for part, matrix in zip(rows.split(sizes), weight)])


def test_widths_that_the_kernel_cannot_take_are_computed_expert_by_expert():
    assert not takes_grouped_mm(torch.float32, 16, 6) and not takes_grouped_mm(torch.bfloat16, 16, 12)
    config = replace(SMALL, moe_ffn_hidden_size=6)
    mixture = mixture_of(config)
    x = tokens_of(1, 7, 16)
    assert torch.allclose(mixture(x), plain_mixture(mixture, config, x)[0], rtol=1e-4, atol=1e-4)


def test_of_equal_scores_the_lowest_number_is_chosen():
    values = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0], [0.0] * 6, [float("nan")] + [1.0] * 5])
    assert largest(values, 4).tolist() == [[1, 2, 4, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    many = torch.zeros(1000, 64)
    assert torch.equal(largest(many, 8), torch.arange(8).expand(1000, 8))
    mixture = mixture_of(SMALL)
    mixture.router.weight.data[4] = mixture.router.weight.data[2]
    x = mixture.router.weight.data[2].expand(1, 3, 16)
    assert mixture.router(x).experts[..., :2].tolist() == [[[2, 4]] * 3]


def test_rows_of_an_expert_stand_in_the_order_of_the_tokens():
    """A stable sort: whoever sorts the same choices, on one rank or on several, gets the same rows."""
    mixture = mixture_of(replace(SMALL, moe_router_topk=1, moe_router_pre_softmax=True))
    seen = []
    mixture.experts.forward = lambda rows, weights, experts, ends: seen.append((rows, experts, ends)) or rows
    x = tokens_of(2, 20, 16)
    choice = mixture.router(x).experts.flatten()
    out = mixture(x)
    (rows, experts, ends), flat = seen[0], x.flatten(0, 1)
    wanted = torch.cat([flat[choice == expert] for expert in range(8)])
    assert torch.equal(rows, wanted) and torch.equal(out, x)
    assert torch.equal(ends, torch.bincount(choice, minlength=8).cumsum(0).int())
    assert torch.equal(experts, choice.sort().values.int())


def test_a_starved_expert_has_a_zero_gradient():
    mixture = mixture_of(SMALL)
    mixture.router.weight.data[3] = 0
    mixture.router.weight.data[3, 0] = -1e3
    x = tokens_of(2, 6, 16)
    x[..., 0] = x[..., 0].abs() + 1
    mixture(x).square().mean().backward()
    assert mixture.router.tally.tokens[3] == 0 and mixture.router.tally.tokens.sum() == 24
    for module in (mixture.experts.gate_proj, mixture.experts.up_proj, mixture.experts.down_proj):
        assert not module.weight.grad[3].any() and module.weight.grad[0].any()


def test_one_token_and_one_position_at_a_time():
    """Generation's shapes; a token's output does not depend on the others."""
    mixture = mixture_of(SMALL).eval()
    x = tokens_of(3, 5, 16)
    whole = mixture(x)
    for b, s in np.ndindex(3, 5):
        assert torch.allclose(mixture(x[b : b + 1, s : s + 1])[0, 0], whole[b, s], rtol=1e-4, atol=1e-5)


def test_the_losses_are_attached_to_weights_that_are_no_view():
    """A schedule that splits the backward detaches outputs in place; the factor reaches the gradient once."""
    mixture = mixture_of(replace(SMALL, moe_z_loss_coeff=1e-3), dtype=torch.float64)
    x = tokens_of(2, 6, 16).double()
    weights = mixture.router(x).weights
    weights.detach_()  # fails for a view
    gradients = []
    for factor in (0.0, 1.0, 0.125):
        mixture.router.loss_factor = factor
        mixture.zero_grad()
        mixture(x).square().mean().backward()
        gradients.append(mixture.router.weight.grad.clone())
    plain, whole, eighth = gradients
    assert (whole - plain).norm() > 1e-4
    assert torch.allclose((whole - plain) / 8, eighth - plain, rtol=1e-9)


def test_evaluation_counts_nothing_and_attaches_nothing():
    mixture = mixture_of(SMALL)
    x = tokens_of(2, 6, 16)
    with torch.no_grad():
        mixture(x)
    mixture.eval()
    mixture.router.loss_factor = 1e6
    mixture(x).square().mean().backward()
    with_factor = mixture.router.weight.grad.clone()
    mixture.router.loss_factor = 0.0
    mixture.zero_grad()
    mixture(x).square().mean().backward()
    assert torch.equal(mixture.router.weight.grad, with_factor)
    assert mixture.router.tally.tokens is None and not mixture.router.tally.losses


def test_recomputation_counts_once():
    """Loads, losses and gradients are those without it."""
    results = []
    for recompute in (False, True):
        mixture = mixture_of(SMALL)
        for seed in (1, 2):
            x = tokens_of(2, 6, 16, seed=seed).requires_grad_()
            out = checkpoint(mixture, x, use_reentrant=False) if recompute else mixture(x)
            out.square().mean().backward()
        results.append((mixture.router.take_tally(), [p.grad for p in mixture.parameters()], x.grad))
    (tally, gradients, last), (tally_again, gradients_again, last_again) = results
    assert torch.equal(tally.tokens, tally_again.tokens) and tally.tokens.sum() == 2 * 24
    assert torch.equal(tally.losses["load_balancing_loss"], tally_again.losses["load_balancing_loss"])
    assert all(torch.equal(*pair) for pair in zip(gradients, gradients_again)) and torch.equal(
        last, last_again
    )
    assert mixture.router.take_tally().tokens is None


def test_a_sequence_on_several_ranks_gives_the_same_losses_in_parts():
    """f of all ranks' tokens, P of a rank's own: the parts add up to the whole's losses and gradients."""
    config = replace(SMALL, **FORMS["both losses"], moe_router_topk=3)
    whole, parts = mixture_of(config), [mixture_of(config), mixture_of(config)]
    x = tokens_of(2, 12, 16)
    halves = x.chunk(2, dim=1)
    whole(x).sum().mul(0).backward()
    for part in parts:
        part.router.sequence_ranks = 2
    counts = {}

    def remember(number):
        def keep(tensor):
            counts.setdefault(number, []).append(tensor)
            return tensor

        return keep

    for number, (part, half) in enumerate(zip(parts, halves)):
        part.router.sum_over_sequence = remember(number)
        part(half)  # what an all-reduce would add
    for part, half in zip(parts, halves):
        sums = iter([sum(pair) for pair in zip(*counts.values())])
        part.router.sum_over_sequence = lambda tensor, sums=sums: next(sums)
        part(half).sum().mul(0).backward()
    tallies = [part.router.take_tally() for part in parts]
    for name, value in whole.router.take_tally().losses.items():
        assert sum(tally.losses[name] for tally in tallies).item() == pytest.approx(value.item(), rel=1e-6)
    total = sum(part.router.weight.grad for part in parts)
    assert torch.allclose(total, whole.router.weight.grad, rtol=1e-4, atol=1e-8)


def test_the_sequence_loss_does_not_depend_on_the_micro_batch():
    """The mean over microbatches of one is the microbatch of two; the loss over a microbatch is another."""
    x = tokens_of(2, 6, 16)
    values = {}
    for kind in ("aux_loss", "seq_aux_loss"):
        mixture = mixture_of(replace(SMALL, moe_router_load_balancing_type=(kind,)))
        mixture(x).sum().backward()
        (together,) = mixture.router.take_tally().losses.values()
        for sample in x.split(1):
            mixture(sample).sum().backward()
        (apart,) = mixture.router.take_tally().losses.values()
        values[kind] = (together.item(), apart.item() / 2)
    assert values["seq_aux_loss"][0] == pytest.approx(values["seq_aux_loss"][1], rel=1e-6)
    assert abs(values["aux_loss"][0] - values["aux_loss"][1]) > 1e-3


def test_which_layers_have_experts_and_how_their_weights_are_called():
    config = replace(SMALL, moe_layer_freq=(0, 1, 0, 1), **GROUPS)
    with torch.device("meta"):
        chunk = GPTChunk(config, range(4))
    assert list(chunk.mixtures) == [1, 3]
    shapes = {name: tuple(p.shape) for name, p in chunk.named_global_parameters() if ".3.mlp." in name}
    assert shapes == {
        "layers.3.mlp.router.weight": (8, 16),
        "layers.3.mlp.experts.gate_proj.weight": (8, 8, 16),
        "layers.3.mlp.experts.up_proj.weight": (8, 8, 16),
        "layers.3.mlp.experts.down_proj.weight": (8, 16, 8),
        "layers.3.mlp.shared_expert.gate_proj.weight": (24, 16),
        "layers.3.mlp.shared_expert.up_proj.weight": (24, 16),
        "layers.3.mlp.shared_expert.down_proj.weight": (16, 24),
        "layers.3.mlp.shared_expert_gate.weight": (1, 16),
    }
    buffers = {name: (tuple(b.shape), b.dtype) for name, b in chunk.named_global_buffers()}
    assert buffers == {f"layers.{n}.mlp.router.expert_bias": ((8,), torch.float32) for n in (1, 3)}
    assert list(GPTChunk(replace(SMALL, moe_layer_freq=3), [2, 3]).mixtures) == [3]
    assert not GPTChunk(replace(SMALL, num_experts=None), [0, 1]).mixtures


def test_initial_weights_by_name_and_row():
    """Output projections of experts are scaled as a dense layer's; a row of a shard is the whole's row."""
    with torch.device("meta"):
        chunk = GPTChunk(SMALL, [0])
    shape, rows = (8, 16, 8), torch.arange(8)
    name = "layers.0.mlp.experts.down_proj.weight"
    whole = chunk.initial_rows(name, shape, rows, seed=7)
    assert torch.equal(chunk.initial_rows(name, shape, rows[2:5], seed=7), whole[2:5])
    assert whole.std().item() == pytest.approx(0.2 / 8**0.5, rel=0.1)
    router = chunk.initial_rows("layers.0.mlp.router.weight", (8, 16), rows, seed=7)
    assert router.std().item() == pytest.approx(0.2, rel=0.2)
    assert not chunk.initial_rows("layers.0.mlp.experts.up_proj.bias", (8, 8), rows, seed=7).any()


def test_a_loaded_model_keeps_the_expert_bias_in_fp32():
    config = replace(SMALL, **GROUPS)
    with torch.device("meta"):
        named = dict(GPTChunk(config, [0]).named_parameters())
    stored = {name: tokens_of(*parameter.shape) for name, parameter in named.items()}
    stored["layers.0.mlp.router.expert_bias"] = torch.full((8,), 1.001)
    chunk = load_chunk(config, [0], stored.__getitem__, torch.bfloat16)
    assert chunk.layers["0"].mlp.experts.up_proj.weight.dtype == torch.bfloat16
    assert torch.equal(chunk.mixtures[0].router.expert_bias, stored["layers.0.mlp.router.expert_bias"])
