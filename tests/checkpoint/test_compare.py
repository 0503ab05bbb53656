"""What may differ between a checkpoint and the run that loads it."""

import json
from dataclasses import replace

import pytest

from megatron_lite.checkpoint.compare import check_resumable, compare_configs, stored_config
from megatron_lite.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    TrainingConfig,
)
from tests.checkpoint.folders import make_checkpoint

CONFIG = Config(
    model=ModelConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, position_embedding_type="rope", vocab_size=59
    ),
    data=DataConfig(seq_length=16, data_path=("a",)),
    training=TrainingConfig(global_batch_size=8, micro_batch_size=2),
)
STORED = json.loads(json.dumps(CONFIG.to_dict()))
PATH = "/ckpt/iter_0000010"


def changed(concern, **values):
    return replace(CONFIG, **{concern: replace(getattr(CONFIG, concern), **values)})


def test_the_same_configuration_has_no_differences():
    assert compare_configs(STORED, CONFIG) == []
    assert check_resumable(CONFIG, STORED, PATH) == []


@pytest.mark.parametrize(
    "concern, values",
    [
        ("parallel", {"pipeline_model_parallel_size": 2, "world_size": 8}),
        ("training", {"micro_batch_size": 1, "train_iters": 200}),
        ("checkpoint", {"save": "/elsewhere"}),
        ("logging", {"log_interval": 7}),
    ],
)
def test_layout_length_and_places_are_free(concern, values):
    assert check_resumable(changed(concern, **values), STORED, PATH) == []


@pytest.mark.parametrize(
    "concern, values",
    [
        ("model", {"hidden_dropout": 0.0}),
        ("precision", {"bf16": True}),
        ("optimizer", {"lr": 1e-4}),
    ],
)
def test_what_may_change_is_listed(concern, values):
    (field, value), *_ = values.items()
    (line,) = check_resumable(changed(concern, **values), STORED, PATH)
    assert line.startswith(f"differs from the checkpoint: {concern}.{field} was ")
    assert line.endswith(f"is {json.dumps(value)}")


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": 64},
        {"num_layers": 5},
        {"normalization": "RMSNorm"},
        {"vocab_size": 60},
        {"swiglu": True},
    ],
)
def test_a_model_that_differs_is_refused_always(values, weights_only):
    config = changed("data", allow_data_change=True)
    config = replace(config, model=replace(config.model, **values))
    with pytest.raises(
        ConfigError, match=rf"model\.{next(iter(values))} was .*the model has to stay the same"
    ):
        check_resumable(config, STORED, PATH, weights_only=weights_only)


def test_a_longer_context_is_for_new_runs_from_old_weights():
    config = changed("model", rotary_base=500000.0, max_position_embeddings=8192)
    with pytest.raises(ConfigError, match="rotary_base was 10000.0, is 500000.0"):
        check_resumable(config, STORED, PATH)
    assert len(check_resumable(config, STORED, PATH, weights_only=True)) == 2


@pytest.mark.parametrize(
    "concern, values",
    [
        ("data", {"data_path": ("b",)}),
        ("data", {"seq_length": 32}),
        ("data", {"split": "1,0,0"}),
        ("training", {"seed": 1}),
        ("training", {"global_batch_size": 16}),
        ("training", {"rampup_batch_size": (2, 2, 100)}),
    ],
)
def test_data_seed_and_batch_need_a_flag(concern, values):
    config = changed(concern, **values)
    with pytest.raises(ConfigError, match=rf"{concern}\.{next(iter(values))} was .*--allow-data-change"):
        check_resumable(config, STORED, PATH)
    assert check_resumable(config, STORED, PATH, weights_only=True) != []
    allowed = replace(config, data=replace(config.data, allow_data_change=True))
    assert len(check_resumable(allowed, STORED, PATH)) == 1


def test_another_optimizer_needs_its_state_left():
    config = changed("optimizer", optimizer="sgd")
    with pytest.raises(ConfigError, match="optimizer.optimizer was 'adam', is 'sgd' .*--no-load-optim"):
        check_resumable(config, STORED, PATH)
    config = replace(config, checkpoint=CheckpointConfig(no_load_optim=True))
    assert len(check_resumable(config, STORED, PATH)) == 1


def test_every_difference_is_in_the_sentence():
    config = replace(CONFIG, model=replace(CONFIG.model, num_layers=5, hidden_size=64))
    config = replace(config, training=replace(config.training, seed=5))
    with pytest.raises(ConfigError) as caught:
        check_resumable(config, STORED, PATH)
    text = str(caught.value)
    for part in (
        "/ckpt/iter_0000010",
        "num_layers was 4, is 5",
        "hidden_size was 32, is 64",
        "seed was 1234, is 5",
    ):
        assert part in text
    assert "\n" not in text


def test_a_field_of_another_version_is_no_difference():
    stored = json.loads(json.dumps(STORED))
    del stored["model"]["qk_layernorm"]
    stored["model"]["from_the_future"] = 1
    assert check_resumable(CONFIG, stored, PATH) == []


def test_the_stored_configuration_for_use_checkpoint_args(tmp_path):
    save = str(tmp_path)
    assert stored_config(Config(checkpoint=CheckpointConfig(save=save, load=save))) is None
    make_checkpoint(tmp_path, 10)
    assert stored_config(Config(checkpoint=CheckpointConfig(load=save))) == {}


def test_tokenizer_files_are_compared_by_content_where_both_are_there():
    moved = changed("data", tokenizer_model="elsewhere/tokenizer.model")
    stored = json.loads(json.dumps(changed("data", tokenizer_model="tokenizer.model").to_dict()))
    with pytest.raises(ConfigError, match="data.tokenizer_model was 'tokenizer.model', is 'elsewhere"):
        check_resumable(moved, stored, PATH)
    assert check_resumable(moved, stored, PATH, same_tokenizer=True) == []
    same_path = changed("data", tokenizer_model="tokenizer.model")
    with pytest.raises(ConfigError, match="data.tokenizer was 'as in .*/tokenizer', is 'of other content'"):
        check_resumable(same_path, stored, PATH, same_tokenizer=False)
    assert len(check_resumable(same_path, stored, PATH, weights_only=True, same_tokenizer=False)) == 1
    allowed = changed("data", tokenizer_model="tokenizer.model", allow_data_change=True)
    assert len(check_resumable(allowed, stored, PATH, same_tokenizer=False)) == 1
