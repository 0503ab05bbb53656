"""What an addition takes: a family one file, an activation its row and its name in transformers."""

import importlib

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.costs import mlp_matrix_parameters
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.checkpoint.writing import write_checkpoint
from megatron_lite.config import Config
from megatron_lite.config.activations import ACTIVATIONS, Activation
from megatron_lite.distributed.environment import Environment
from megatron_lite.hugging_face import activation_names, families
from megatron_lite.hugging_face.checkpoint_model import CheckpointModel
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.planning.activations import block_activations
from megatron_lite.rehearsal.run_report import describe_run
from tests.hugging_face.models import VOCAB
from tools import hf_export, hf_import

# A family that is not among ours: Llama's names but for the MLP's, layer norms, biases, an activation of one input.
NEW_FAMILY = '''"""StarCoder2."""

from megatron_lite.hugging_face.activation_names import PLAIN
from megatron_lite.hugging_face.families import llama, mistral
from megatron_lite.hugging_face.family import Family, Row, Weight, activation, always, same
from megatron_lite.hugging_face.rope import read_rope, write_rope

OTHER_NAMES = {
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "pre_mlp_norm": "post_attention_layernorm",
    "input_norm": "input_layernorm",
}
BIASES = Row(
    lambda fields: {"disable_bias_linear": not fields.take("use_bias", bool)},
    lambda model: {"use_bias": not model.disable_bias_linear},
)


def weight(ours):
    theirs = ours.replace("layers.", "model.layers.").replace("attention.", "self_attn.")
    for old, new in OTHER_NAMES.items():
        theirs = theirs.replace(old, new)
    return Weight(theirs + ".{kind}", ours + ".{kind}")


LAYER = [f"attention.{name}_proj" for name in "qkvo"] + ["mlp.up_proj", "mlp.down_proj", "input_norm", "pre_mlp_norm"]
FAMILY = Family(
    "Starcoder2ForCausalLM",
    "starcoder2",
    (
        same("vocab_size", "vocab_size", needed=True),
        same("num_hidden_layers", "num_layers", needed=True),
        same("hidden_size", "hidden_size", needed=True),
        same("intermediate_size", "ffn_hidden_size", needed=True),
        same("num_attention_heads", "num_attention_heads", needed=True),
        same("num_key_value_heads", "num_query_groups"),
        same("max_position_embeddings", "max_position_embeddings"),
        same("norm_epsilon", "norm_epsilon", float),
        same("initializer_range", "init_method_std", float),
        same("residual_dropout", "hidden_dropout", float),
        same("attention_dropout", "attention_dropout", float),
        activation("hidden_act", PLAIN),
        llama.TIED_HEAD,
        Row(read_rope, write_rope),
        BIASES,
        mistral.WINDOW,
        always(normalization="LayerNorm"),
    ),
    (
        Weight("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
        *(weight("layers.{layer}." + name) for name in LAYER),
        Weight("model.norm.{kind}", "final_norm.{kind}"),
        Weight("lm_head.weight", "lm_head.weight"),
    ),
)
'''
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 7,
    "norm_epsilon": 2e-5,
    "initializer_range": 0.2,
    "hidden_act": "gelu_new",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def new_family(tmp_path, monkeypatch):
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "starcoder2.py").write_text(NEW_FAMILY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "families")])
    importlib.invalidate_caches()
    found = families.find_families()
    assert list(found)[-1] == "Starcoder2ForCausalLM" and found.keys() > families.FAMILIES.keys()
    monkeypatch.setitem(families.FAMILIES, "Starcoder2ForCausalLM", found["Starcoder2ForCausalLM"])


def test_a_family_is_one_file(new_family, tmp_path, capsys):
    """Import, export, the logits of both, the weights bit by bit, every field of config.json."""
    theirs = transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**TINY))
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "hf")
    hf_import.main(["--hf-model", str(tmp_path / "hf"), "--save", str(tmp_path / "ck")])
    model = CheckpointModel(str(tmp_path / "ck")).model
    assert (model.normalization, model.window_size, model.activation_name) == ("LayerNorm", (6, 0), "gelu")
    hf_export.main(["--load", str(tmp_path / "ck"), "--output", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert "-> Starcoder2ForCausalLM" in out and out.count("verified: random tokens: 128 positions") == 2
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    configs = [transformers.AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("hf", "out")]
    ours = ("head_dim", "_name_or_path", "rope_scaling", "rope_theta", "rope_parameters")
    before, after = ({k: v for k, v in config.items() if k not in ours} for config in configs)
    assert after == before


FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64
    --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60
    --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.3"""


def config_of(flags):
    return with_vocabulary(parse_arguments([*FLAGS.split(), *flags.split()], Environment()), 61)


def test_an_activation_is_its_row_and_its_name_in_transformers(tmp_path, capsys, monkeypatch):
    row = Activation(lambda f, up: f.relu(up), num_inputs=1, num_saved=1)
    monkeypatch.setitem(ACTIVATIONS, "relu", row)
    monkeypatch.setitem(activation_names.PLAIN, "relu", "relu")
    config = config_of("--activation relu --check")
    gelu = config_of("--check")
    # The planner and the count of parameters read the row: one saved tensor [64 tokens, F] in fp32 fewer than GELU.
    assert "relu" in describe_run(config) and config.model.ffn_hidden_size == 128
    assert mlp_matrix_parameters(config.model) == 2 * 32 * 128
    assert block_activations(gelu, None) - block_activations(config, None) == 64 * 4 * 128

    chunk = GPTChunk(config.model, range(2)).eval()
    weights = dict(chunk.named_global_parameters())
    rows = {n: chunk.initial_rows(n, tuple(p.shape), torch.arange(len(p)), 1) for n, p in weights.items()}
    stored = {"model": Config(model=config.model).to_dict()["model"]}
    write_checkpoint(str(tmp_path / "ck"), 1, list(rows.items()), stored, {})
    hf_export.main(["--load", str(tmp_path / "ck"), "--output", str(tmp_path / "hf"), "--no-tokenizer"])
    assert "-> GPT2LMHeadModel" in (out := capsys.readouterr().out) and "verified" in out
    assert transformers.AutoConfig.from_pretrained(tmp_path / "hf").activation_function == "relu"
    hf_import.main(["--hf-model", str(tmp_path / "hf"), "--save", str(tmp_path / "back")])
    assert CheckpointModel(str(tmp_path / "back")).model.activation == "relu"
