"""--use-checkpoint-args: the model's flags come from the checkpoint, and may not contradict it."""

import json

import pytest

from megatron_lite.arguments.parse import parse_arguments, parse_or_exit
from megatron_lite.arithmetic.vocabulary import known_vocabulary, with_vocabulary
from megatron_lite.config import ConfigError
from megatron_lite.distributed.environment import Environment

BASE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 """


def config_of(words, stored=None, world_size=1):
    return parse_arguments(words.split(), Environment(world_size=world_size), lambda config: stored)


STORED = config_of(
    BASE
    + "--num-layers 6 --hidden-size 96 --num-attention-heads 6 --group-query-attention --num-query-groups 2 "
    "--swiglu --position-embedding-type rope --rotary-base 5e5 --hidden-dropout 0.1 --untie-embeddings-and-output-"
    "weights --lr 7e-4",
).to_dict()
FEW = """--load somewhere --use-checkpoint-args --seq-length 32 --micro-batch-size 1 --train-iters 10 --lr 1e-3
    --mock-data"""


def test_the_model_comes_from_the_checkpoint():
    """Its form and its tokenizer, not how it is trained; what is derived from it is derived again."""
    config = config_of(f"{FEW} --hidden-dropout 0", STORED)
    model = config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (6, 96, 6)
    assert (model.num_query_groups, model.ffn_hidden_size, model.rotary_base) == (2, 256, 5e5)
    assert model.swiglu and model.untie_embeddings_and_output_weights and model.hidden_dropout == 0.0
    assert config.optimizer.lr == 1e-3 and config.data.mock_data
    assert config.data.tokenizer_type == "NullTokenizer"


def test_a_flag_may_repeat_the_checkpoint_but_not_contradict_it():
    same = config_of(f"{FEW} --num-layers 6 --swiglu --hidden-size 96", STORED)
    assert same.model.num_layers == 6
    for words, text in (
        ("--num-layers 4", "--num-layers is 4, the checkpoint of --use-checkpoint-args has 6"),
        (
            "--rotary-base 10000",
            "--rotary-base is 10000.0, the checkpoint of --use-checkpoint-args has 500000.0",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            config_of(f"{FEW} {words}", STORED)
        assert text in str(error.value)


def test_the_same_command_again_is_no_contradiction():
    """A NullTokenizer's --vocab-size leaves out the end of document that the stored size counts."""
    stored = json.loads(json.dumps(STORED))
    stored["model"]["vocab_size"] = 61
    assert config_of(f"{FEW} --vocab-size 60", stored).model.vocab_size == 60
    assert config_of(FEW, stored).model.vocab_size == 60
    with pytest.raises(
        ConfigError, match="--num-layers is 4, .* has 6; --vocab-size is 61, .* leave them out"
    ):
        config_of(f"{FEW} --vocab-size 61 --num-layers 4", stored)


def test_what_the_checkpoint_does_not_say_the_command_line_may():
    stored = json.loads(json.dumps(STORED))
    del stored["model"]["num_layers"]
    assert config_of(f"{FEW} --num-layers 4", stored).model.num_layers == 4
    with pytest.raises(ConfigError, match="--num-layers is needed"):
        config_of(FEW, stored)


def test_without_a_checkpoint_the_command_line_has_to_say_all():
    with pytest.raises(ConfigError, match="--num-layers, --hidden-size, --num-attention-heads are needed"):
        config_of(FEW)


def test_parse_or_exit_asks_for_the_stored_config():
    asked = []

    def read_stored(config):
        asked.append(config.checkpoint.load)
        return STORED

    config = parse_or_exit(FEW.split(), Environment(), read_stored)
    assert asked == ["somewhere"] and config.model.num_layers == 6
    assert parse_or_exit(BASE.split(), Environment(), read_stored).model.num_layers == 4
    assert asked == ["somewhere"]


def test_a_model_that_came_without_a_tokenizer_goes_on():
    """Imported weights have a size and no tokenizer: the NullTokenizer made for them has that size."""
    stored = json.loads(json.dumps(STORED))
    stored["model"] |= {"vocab_size": 301, "padded_vocab_size": 301}
    stored["data"]["tokenizer_type"] = None
    config = config_of(FEW, stored)
    assert config.data.tokenizer_type == "NullTokenizer" and known_vocabulary(config) == 301
    assert with_vocabulary(config, 301).model.vocab_size == 301


def test_the_padding_follows_the_ranks_at_hand():
    stored = json.loads(json.dumps(STORED))
    stored["model"] |= {"vocab_size": 61, "padded_vocab_size": 61, "make_vocab_size_divisible_by": 1}
    config = config_of(f"{FEW} --tensor-model-parallel-size 2", stored, world_size=2)
    assert with_vocabulary(config, 61).model.padded_vocab_size == 62
