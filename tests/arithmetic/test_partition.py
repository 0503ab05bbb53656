"""The pipeline split: every layer once, in order; balanced; Megatron's flags as Megatron means them; refusals."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.arithmetic.costs import ComponentCost, ModelCosts, model_costs
from megatron_lite.arithmetic.partition import (
    check_split,
    describe,
    plan_from_config,
    plan_stages,
    stage_compute,
    stage_parameters,
    stages_of_rank,
    unit_costs,
)
from megatron_lite.arithmetic.pipeline_layout import parse_layout, write_layout
from megatron_lite.arithmetic.pipeline_schedule import rank_of_stage
from megatron_lite.config import Config, ConfigError, DataConfig, ModelConfig, ParallelConfig

LLAMA_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    group_query_attention=True,
    num_query_groups=8,
    kv_channels=128,
    max_position_embeddings=8192,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    padded_vocab_size=128256,
)


def counts(*args, **kwargs):
    return [len(plan.layers) for plan in plan_stages(*args, **kwargs)]


FLAGS = {
    "first_layers": "decoder_first_pipeline_num_layers",
    "last_layers": "decoder_last_pipeline_num_layers",
    "account_for_embedding": "account_for_embedding_in_pipeline_split",
    "account_for_loss": "account_for_loss_in_pipeline_split",
    "layout": "pipeline_model_parallel_layout",
}


def counts_by_flags(num_layers, pp, chunks=1, schedule="1f1b", **options):
    """As the flags say, the head's cost or not."""
    config = config_of(
        replace(LLAMA_8B, num_layers=num_layers),
        pipeline_model_parallel_size=pp,
        num_virtual_stages_per_pipeline_rank=chunks,
        pipeline_schedule=schedule,
        **{FLAGS[name]: value for name, value in options.items()},
    )
    return [len(plan.layers) for plan in plan_from_config(config)]


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 4), st.sampled_from(["loop", "v"]), st.data())
@settings(max_examples=200)
def test_every_layer_once_in_order_and_no_idle_stage(num_layers, pp, chunks, placement, data):
    ends = data.draw(st.tuples(st.floats(0, 5), st.floats(0, 5)))
    costs = unit_costs(embedding=ends[0], head=ends[1])
    if placement == "v":
        chunks = 2
    if num_layers < pp * chunks:
        with pytest.raises(ConfigError, match=f"--num-layers {num_layers}"):
            plan_stages(num_layers, pp, chunks, placement, costs)
        return
    plans = plan_stages(num_layers, pp, chunks, placement, costs)
    assert list(itertools.chain(*(plan.layers for plan in plans))) == list(range(num_layers))
    assert [plan.stage for plan in plans] == list(range(pp * chunks))
    assert all(plan.layers for plan in plans)
    assert [plan.has_embedding for plan in plans] == [True] + [False] * (len(plans) - 1)
    assert [plan.has_lm_head for plan in plans] == [False] * (len(plans) - 1) + [True]
    for rank in range(pp):
        own = stages_of_rank(plans, rank)
        assert [plan.chunk for plan in own] == list(range(chunks))
        assert all(rank_of_stage(plan.stage, pp, placement) == rank for plan in own)


@given(st.integers(1, 9), st.integers(1, 5), st.floats(0, 4), st.floats(0, 4))
@settings(max_examples=200)
def test_the_largest_stage_is_as_small_as_any_split_allows(num_layers, pp, embedding, head):
    """Against every possible split."""
    if num_layers < pp:
        return

    def largest(split):
        loads = list(split)
        loads[0] += embedding
        loads[-1] += head
        return max(loads)

    best = min(
        largest(b - a for a, b in itertools.pairwise((0, *cuts, num_layers)))
        for cuts in itertools.combinations(range(1, num_layers), pp - 1)
    )
    found = counts(num_layers, pp, costs=unit_costs(embedding=embedding, head=head))
    assert largest(found) == pytest.approx(best)


def uneven(works, embedding, head):
    """Costs of layers that differ, as dense layers and mixtures do."""
    return replace(
        unit_costs(embedding=embedding, head=head), layers=tuple(ComponentCost(1, work) for work in works)
    )


@given(
    st.lists(st.sampled_from([1, 3]), min_size=2, max_size=10),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(0, 6),
)
@settings(max_examples=200)
def test_layers_that_differ_are_weighed_one_by_one(works, pp, embedding, head):
    """Against every possible split: the busiest of the ranks, one stage each, has as little as any split allows."""
    if len(works) < pp:
        return
    costs = uneven(works, embedding, head)

    def largest(split):
        ends = itertools.accumulate(split)
        loads = [sum(works[end - count : end]) for end, count in zip(ends, split)]
        loads[0] += embedding
        loads[-1] += head
        return max(loads)

    every = itertools.combinations(range(1, len(works)), pp - 1)
    best = min(largest([b - a for a, b in itertools.pairwise((0, *cuts, len(works)))]) for cuts in every)
    assert largest(counts(len(works), pp, costs=costs)) == best


def test_a_stage_of_dense_layers_takes_more_of_them():
    """By hand: three dense layers of a third of a mixture's work, as in DeepSeek-V3, count as one."""
    costs = uneven([1] * 3 + [3] * 15, 0, 0)
    assert counts(18, 4, costs=costs) == [6, 4, 4, 4]
    assert sorted(counts(18, 4, costs=uneven([3, 1] * 9, 0, 0))) == [4, 4, 5, 5]
    # Two chunks a rank: 48 units over four ranks, 12 on each.
    plans = plan_stages(18, 4, 2, costs=costs)
    loads = [sum(stage_compute(plan, costs) for plan in stages_of_rank(plans, rank)) for rank in range(4)]
    assert loads == [12] * 4


def test_rank_placement():
    assert [rank_of_stage(stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [rank_of_stage(stage, 3, "v") for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    for rank in range(4):
        owned = [p.stage for p in stages_of_rank(plan_stages(8, 4, 2, "v"), rank)]
        assert owned == [rank, 2 * 4 - 1 - rank]


def test_even_when_ends_are_cheap_and_uneven_counts_train():
    assert counts(32, 4, costs=unit_costs(head=0.9)) == [8, 8, 8, 8]
    assert counts(30, 4) == [8, 8, 7, 7]
    # The embedding's memory decides between equals: the middle takes the extra layers.
    ends = ComponentCost(parameters=1, flops=0)
    assert counts(30, 4, costs=ModelCosts(ends, unit_costs().layers, ends)) == [7, 8, 8, 7]
    assert counts(30, 4, costs=unit_costs(head=2.4)) == [8, 8, 8, 6]
    # Extra layers of several chunks go to different ranks.
    per_rank = [sum(len(p.layers) for p in stages_of_rank(plan_stages(19, 4, 4), rank)) for rank in range(4)]
    assert sorted(per_rank) == [4, 5, 5, 5]


def test_account_flags_are_megatrons():
    """Embedding and loss count as a layer each; where the sum divides evenly this is Megatron's split."""
    both = {"account_for_embedding": True, "account_for_loss": True}
    assert counts_by_flags(30, 4, **both) == [7, 8, 8, 7]
    assert counts_by_flags(14, 4, 2, **both) == [1, 2, 2, 2, 2, 2, 2, 1]
    assert counts_by_flags(31, 4, account_for_loss=True) == [8, 8, 8, 7]
    assert counts_by_flags(31, 4, account_for_embedding=True) == [7, 8, 8, 8]
    assert counts_by_flags(6, 8, **both) == [0, 1, 1, 1, 1, 1, 1, 0]


def test_first_and_last_flags_are_megatrons():
    """The number is of the rank, divided over its chunks; the rest is shared evenly."""
    assert counts_by_flags(32, 4, first_layers=5, last_layers=7) == [5, 10, 10, 7]
    assert counts_by_flags(32, 4, first_layers=2) == [2, 10, 10, 10]
    assert counts_by_flags(24, 4, 2, first_layers=4, last_layers=4) == [2, 4, 4, 2, 2, 4, 4, 2]
    assert counts_by_flags(24, 4, 2, "zbv", first_layers=4, last_layers=8) == [2, 3, 3, 4, 4, 3, 3, 2]
    assert counts_by_flags(6, 2, first_layers=2, last_layers=4) == [2, 4]


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((3, 4), {}, ["--num-layers 3", "--pipeline-model-parallel-size 4"]),
        ((8, 4, 2), {"first_layers": 3}, ["--decoder-first-pipeline-num-layers 3", "2 stages"]),
        ((8, 4), {"last_layers": 0}, ["--decoder-last-pipeline-num-layers 0"]),
        ((8, 4), {"first_layers": 7}, ["7/none", "leave 1 of --num-layers 8", "at least 3"]),
        ((8, 2), {"first_layers": 3, "last_layers": 3}, ["3/3", "leave 2 of --num-layers 8"]),
        ((8, 1), {"first_layers": 3}, ["--decoder-first-pipeline-num-layers 3", "at least 2"]),
        ((8, 4), {"first_layers": 2, "account_for_loss": True}, ["--account-for", "--decoder-first"]),
        ((8, 4), {"layout": "Ett|tt|tt|ttL", "account_for_loss": True}, ["--pipeline-model-parallel-layout"]),
        ((8, 4), {"layout": "Ett|tt|ttttL"}, ["3 stages", "wanted 4"]),
        ((8, 4), {"layout": "Ett|tt|tt|tL"}, ["7 decoder layers", "--num-layers is 8"]),
        ((2, 8), {"account_for_embedding": True}, ["--num-layers 2", "7 of them"]),
    ],
)
def test_refusals_name_flags_and_numbers(arguments, options, words):
    with pytest.raises(ConfigError) as error:
        counts_by_flags(*arguments, **options)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_layouts():
    assert parse_layout("Et*3|(tt|)*29,L") == [3] + [2] * 29 + [0]
    assert parse_layout("'E|tt|t*0t|tL'") == [0, 2, 1, 1]
    assert parse_layout("E(t|(tt|)*2)*3tL") == [1, 2, 2, 1, 2, 2, 1, 2, 2, 1]
    assert parse_layout("Et*4L") == [4]
    assert counts_by_flags(5, 2, 2, layout="E|ttt|t|tL") == [0, 3, 1, 1]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("Et|m|tL", "m (multi-token prediction)"),
        ("tE|tL", "one E (embedding) has to start the first stage"),
        ("t|EtL", "one E"),
        ("Et|Lt", "one L (loss) has to end the last stage"),
        ("EtL|t", "one L"),
        ("EEt|tL", "one E"),
        ("Et||tL", "stage 1 is empty"),
        ("Et|(t|tL", "( without )"),
        ("Et|t)|tL", ") without ("),
        ("Et*|tL", "one number of"),
        ("Et*9999999|tL", "at most six digits"),
        ("Et*99999*9|tL", "one number"),
        ("E(t*99999)*9|tL", "more than 100,000"),
        ("(" * 5000 + "t", "( without )"),
        ("Ed|tL", "'d' is none of"),
        ("", "one E"),
    ],
)
def test_layouts_that_cannot_be_read(layout, words):
    with pytest.raises(ConfigError) as error:
        parse_layout(layout)
    assert words in str(error.value)
    assert "--pipeline-model-parallel-layout" in str(error.value)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_written_layouts_read_back(layers):
    assert parse_layout(write_layout(layers)) == layers


def test_costs_of_llama_8b():
    """The published size of Llama 3 8B, and the FLOPs of Megatron's formula (6 per weight; causal attention)."""
    costs = model_costs(LLAMA_8B, 8192)
    assert costs.parameters == 8_030_261_248
    assert 128 * costs.flops == pytest.approx(5.397062776101274e16)


def test_costs_of_gpt2():
    """The published size of GPT-2 (124M), with its biases and learned positions, tied."""
    gpt2 = ModelConfig(
        num_layers=12,
        hidden_size=768,
        ffn_hidden_size=3072,
        num_attention_heads=12,
        num_query_groups=12,
        kv_channels=64,
        max_position_embeddings=1024,
        padded_vocab_size=50257,
    )
    costs = model_costs(gpt2, 1024)
    assert costs.parameters == 124_439_808
    assert costs.shared_parameters == 50257 * 768


def config_of(model=LLAMA_8B, **parallel):
    parallel = {"pipeline_schedule": "1f1b", "num_virtual_stages_per_pipeline_rank": 1, **parallel}
    return Config(model=model, parallel=ParallelConfig(**parallel), data=DataConfig(seq_length=8192))


def test_plan_from_config_balances_by_cost():
    """Llama 8B's head costs 2.3 blocks: the last stage gets fewer layers."""
    plans = plan_from_config(config_of(pipeline_model_parallel_size=4))
    assert [len(plan.layers) for plan in plans] == [8, 9, 9, 6]
    costs = model_costs(LLAMA_8B, 8192)
    assert sum(stage_compute(plan, costs) for plan in plans) == costs.flops
    assert sum(stage_parameters(plan, costs) for plan in plans) == costs.parameters
    table = describe(plans, costs)
    assert "embedding, layers 0-7" in table
    assert "layers 26-31, head" in table
    assert "1,963,008,000" in table
    assert "most compute: rank 1, 1.06 times the mean" in table


def test_megatrons_per_virtual_stage_number_is_kept():
    """--num-layers-per-virtual-pipeline-stage says how many layers each stage has, whatever the head costs."""
    config = config_of(
        pipeline_model_parallel_size=4,
        pipeline_schedule="interleaved-1f1b",
        num_virtual_stages_per_pipeline_rank=2,
        num_layers_per_virtual_pipeline_stage=4,
    )
    assert [len(plan.layers) for plan in plan_from_config(config)] == [4] * 8


def test_tied_head_is_counted_once_and_its_copy_shown():
    tied = ModelConfig(**{**vars(LLAMA_8B), "untie_embeddings_and_output_weights": False})
    costs = model_costs(tied, 8192)
    plans = plan_from_config(config_of(tied, pipeline_model_parallel_size=2))
    stored = sum(stage_parameters(plan, costs) for plan in plans)
    assert stored == costs.parameters + 128256 * 4096
    assert "head (copy of the embedding)" in describe(plans, costs)
    alone = plan_from_config(config_of(tied))
    assert stage_parameters(alone[0], costs) == costs.parameters


def test_check_split_needs_no_vocabulary():
    unknown = ModelConfig(**{**vars(LLAMA_8B), "padded_vocab_size": None})
    check_split(config_of(unknown, pipeline_model_parallel_size=4))
    with pytest.raises(ConfigError, match="--num-layers 32"):
        check_split(config_of(unknown, pipeline_model_parallel_size=64))
