"""What a folder says beside the maths comes back from an import and an export, field by field."""

import json

import pytest

from megatron_lite.config import DataConfig
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.hugging_face.imported_settings import end_ids, exported_settings
from tests import local_tokenizers
from tests.hugging_face.models import build, saved
from tools import hf_export, hf_import

# What this exporter writes besides: both spellings of the rotary settings and of the dtype, derived and default values.
ADDED = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "torch_dtype",
    "dtype",
    "head_dim",
    "tie_word_embeddings",
}


def there_and_back(tmp_path, *more):
    """(config.json, generation_config.json) before and after."""
    flags = ["--no-verify", *more]
    hf_import.main(["--hf-model", str(tmp_path / "hf"), "--save", str(tmp_path / "ck"), *flags])
    hf_export.main(["--load", str(tmp_path / "ck"), "--output", str(tmp_path / "out"), *flags])
    names = ("config.json", "generation_config.json")
    return [
        [
            json.loads((tmp_path / where / name).read_text())
            for name in names
            if (tmp_path / where / name).exists()
        ]
        for where in ("hf", "out")
    ]


@pytest.mark.parametrize(
    "name",
    [
        "llama3-scaling-gqa-tied",
        "mistral-no-window-gqa-untied",
        "qwen2-mha-tied",
        "qwen3-gqa-untied",
        "gpt2-tied",
    ],
)
def test_every_field_of_every_family(name, tmp_path):
    model = build(name, bos_token_id=3, eos_token_id=[0, 7], pad_token_id=5, use_cache=False)
    model.config.somebodys_field = {"a": [1, None]}
    settings = model.generation_config
    settings.eos_token_id, settings.do_sample, settings.top_p = [0, 7, 9], True, 0.9
    model.save_pretrained(tmp_path / "hf")
    (config, generation), (back, generation_back) = there_and_back(tmp_path)
    assert generation_back == generation and generation["eos_token_id"] == [0, 7, 9]
    del config["transformers_version"]
    assert {key: back.get(key, "lost") for key in config} == config
    assert back.keys() - config.keys() <= ADDED


def test_ids_that_config_json_leaves_to_its_class_are_written_down(tmp_path):
    saved("llama-gqa-tied", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config.pop(name, None)
    path.write_text(json.dumps(config))
    (tmp_path / "hf" / "generation_config.json").unlink()
    _, (back, generation) = there_and_back(tmp_path)
    assert (back["bos_token_id"], back["eos_token_id"], back["pad_token_id"]) == (1, 2, None)
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}


def test_a_tokenizer_that_is_written_anew_keeps_its_template(tmp_path, capsys):
    model = local_tokenizers.write_sentencepiece(tmp_path / "t.model")
    flags = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(model))
    size = build_tokenizer(flags).vocab_size
    saved("llama-gqa-tied", tmp_path / "hf", vocab_size=size, eos_token_id=[2, 7])
    model.rename(tmp_path / "hf" / "tokenizer.model")
    said = {"chat_template": "{{ x }}", "model_max_length": 77, "padding_side": "left", "legacy": True}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(said))
    _, (back, _) = there_and_back(tmp_path)
    assert back["eos_token_id"] == [2, 7], "the tokenizer's own eos, 2, is one of them"
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    del said["legacy"]
    assert {key: written[key] for key in said} == said
    assert "without the imported legacy" in capsys.readouterr().out


def test_another_tokenizer_brings_its_own_ids():
    stored = {"config": {"bos_token_id": 1, "eos_token_id": [0, 7], "pad_token_id": None, "x": 1}}
    stored["generation_config"] = {"eos_token_id": [0, 7, 9], "top_p": 0.9}
    said = []
    config, generation = exported_settings(stored, {"eos": 4}, False, said.append)
    assert config == {"bos_token_id": None, "eos_token_id": 4, "pad_token_id": None, "x": 1}
    assert generation == {"eos_token_id": 4, "top_p": 0.9}
    assert said == [
        "another tokenizer than the imported model's: its bos_token_id 1, eos_token_id [0, 7] are left out"
    ]
    assert end_ids(stored) == {0, 7, 9}
    assert exported_settings(stored, {}, True, said.append)[1] == stored["generation_config"]


def test_a_model_without_a_tokenizer_gets_no_end_of_text():
    said = []
    assert exported_settings(None, {}, True, said.append) == (
        {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        {},
    )
    assert said == ["no token ends a text: eos_token_id is left out"]
