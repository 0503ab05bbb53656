"""Public scripts' flags: they parse, resolve and --check, and describe the model that was published."""

import re

import pytest

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.batch_size import BatchSchedule
from megatron_lite.distributed.environment import Environment
from megatron_lite.rehearsal.run_report import describe_run
from tests.launch_scripts import PUBLISHED, SCRIPTS


def config_of(name):
    world_size, text = SCRIPTS[name]
    return parse_arguments([*text.split(), "--check", "--world-size", str(world_size)], Environment())


@pytest.mark.parametrize("name", SCRIPTS)
def test_checks(name):
    config = config_of(name)
    report = describe_run(config)
    batches = BatchSchedule.from_config(config)
    for word in ("Model", "Layout of", "Run", "Learning rate", "a rank holds about"):
        assert word in report
    assert f"{batches.total_iterations:,} steps" in report and batches.total_iterations > 0
    assert "'" not in "".join(config.data.data_path or ()) + (config.data.tokenizer_model or "")
    assert config.data.split is None or all(float(w) >= 0 for w in config.data.split.split(","))


def test_there_are_enough():
    assert len(SCRIPTS) >= 40 and set(PUBLISHED) <= set(SCRIPTS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_models(name):
    config = config_of(name)
    total = re.search(r"parameters +([\d,]+) (?:=|\()", describe_run(config))[1]
    padding = config.model.make_vocab_size_divisible_by
    vocabulary = config.model.vocab_size
    end = config.data.tokenizer_type == "NullTokenizer"  # has a token more, the end of document
    rows = 0 if vocabulary is None else end + -(vocabulary + end) % padding
    copies = 2 if config.model.untie_embeddings_and_output_weights else 1
    assert int(total.replace(",", "")) == PUBLISHED[name] + copies * rows * config.model.hidden_size


def test_what_some_of_them_mean():
    gpt = config_of("gpt3_175b_2021")
    assert (gpt.parallel.data_parallel_size, gpt.data.tokenizer_type) == (8, "GPT2BPETokenizer")
    assert gpt.parallel.recompute_granularity == "full" and gpt.parallel.recompute_num_layers == 1
    interleaved = config_of("gpt3_175b_interleaved").parallel
    assert interleaved.num_virtual_stages_per_pipeline_rank == 6
    assert interleaved.pipeline_schedule == "interleaved-1f1b"
    nemotron = config_of("nemotron_8b_wsd_step_batch")
    assert BatchSchedule.from_config(nemotron).steps[1] == (250_000_000_000 // 8192, 1536)
    assert config_of("llama3_8b").data.split == "99,1,0"
    mixtral = describe_run(config_of("mixtral_8x7b"))
    assert "pipeline 4 x data 16 (replicas 1 x shards 16) x context 1 x tensor 1, experts over 8\n" in mixtral
    glm = config_of("glm4.5_air").model
    assert not glm.has_experts(0) and glm.has_experts(45) and glm.moe_router_enable_expert_bias
    assert config_of("neox_style_20b").model.position_embedding_type == "rope"
    assert config_of("bloom_style_1b7").model.padded_vocab_size == 250880
