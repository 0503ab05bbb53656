"""A reader of config.json: every value taken is logged, every field left is looked at. Imports no torch."""

import functools
import inspect
import json
from dataclasses import dataclass
from typing import Any

from megatron_lite.config.declare import ConfigError


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Fields of transformers' classes that change no logits.
HARMLESS = words(
    """
    use_cache bos_token_id eos_token_id pad_token_id pretraining_tp reorder_and_upcast_attn summary_type
    summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout n_ctx is_decoder
    attention_in_fp32 torch_dtype model_type output_router_logits router_aux_loss_coef router_jitter_noise
    num_nextn_predict_layers num_mtp_layers
    """
)
# Fields that change what a model computes and that a family's own class does not know: transformers would pass them
# over in silence. None, false, 0, "full_attention" and nothing but these change nothing; 1 where it is a factor.
MATHS = words(
    """
    add_cross_attention alibi attention_bias attention_k_eq_v attention_out_bias attn_logit_softcapping
    attn_temperature_tuning clip_qkv cross_layer_kv_sharing dual_chunk_attention_config
    final_logit_softcapping first_k_dense_replace is_encoder_decoder kv_lora_rank layer_types
    layernorm_epsilon layer_norm_epsilon mlp_bias moe_intermediate_size multi_query no_rope_layers
    num_experts_per_tok n_routed_experts parallel_attn pruned_heads q_lora_rank
    qk_layernorm qkv_bias quantization_config query_pre_attn_scalar rotary_dim
    scale_attn_by_inverse_layer_idx scale_embedding scale_depth sliding_window use_cross_attention
    use_mrope use_parallel_residual use_qk_norm use_qkv_bias use_sliding_window
    """
)
MATHS_FACTORS = words(
    """
    attention_multiplier embedding_multiplier embed_scale logit_scale logits_scaling num_experts
    num_local_experts partial_rotary_factor residual_multiplier rotary_pct scale_emb
    """
)


@dataclass(frozen=True)
class ConfigClass:
    """The defaults and names of transformers' configuration class of a family.

    Attributes:
        defaults: {field: value} where config.json is silent.
        own: fields that are the class's own, not every class's.
        aliases: {other name: field} that it takes for the field.
    """

    defaults: dict[str, Any]
    own: frozenset[str]
    aliases: dict[str, str]


@functools.cache
def config_class(model_type: str) -> ConfigClass:
    """The configuration class of transformers for a model_type."""
    # Seconds, which a plan without a Hugging Face model need not wait.
    from transformers import CONFIG_MAPPING, PretrainedConfig

    kind = CONFIG_MAPPING[model_type]
    example = kind()
    # The signature before the object: an object has derived what depends on other fields.
    declared = {
        name: parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind != parameter.VAR_KEYWORD
    }
    rotary = getattr(example, "rope_parameters", None) or {}  # transformers 4: in the signature
    every_class = PretrainedConfig().to_dict().keys() | HARMLESS
    defaults = example.to_dict() | {"rope_theta": rotary.get("rope_theta")} | declared
    return ConfigClass(defaults, frozenset(declared.keys() - every_class), dict(kind.attribute_map))


class ConfigFields:
    """The fields of one config.json.

    `log` holds one line per value taken; `refused` what must not be ignored, reported together by `finish`.
    """

    def __init__(self, content: dict[str, Any], architecture: str, model_type: str, where: str) -> None:
        """Raises ConfigError when a field stands there under two names with two values."""
        self.content, self.architecture, self.where = dict(content), architecture, where
        self.log: list[str] = []
        self.refused: list[str] = []
        self._class = config_class(model_type)
        self._taken: set[str] = set()
        for alias, name in self._class.aliases.items():
            value = self.content.pop(alias, None)
            if value is not None and self.content.setdefault(name, value) != value:
                raise ConfigError(
                    f"{where} contradicts itself: {name} is {self.content[name]}, {alias} is {value}"
                )

    def take(self, name: str, kind: type, needed: bool = False, minimum: int = 1) -> Any:
        """The value of a field, else what transformers assumes; None where that may be.

        Args:
            needed: the default is not taken.
            minimum: of a whole number.

        Raises:
            ConfigError: for a field that is needed and missing, or of another type.
        """
        name = self._class.aliases.get(name, name)
        first, defaults = name not in self._taken, self._class.defaults
        self._taken.add(name)
        if needed and self.content.get(name) is None:
            raise ConfigError(f"{self.where} has no {name}, which {self.architecture} needs")
        value = self.content.get(name, defaults.get(name))
        if first:
            assumed = "" if name in self.content else " (not in the file: what transformers assumes)"
            self.log.append(f"{name} = {value}{assumed}")
        return None if value is None else self.checked(name, value, kind, minimum)

    def checked(self, name: str, value: Any, kind: type, minimum: int = 1) -> Any:
        """The value, a float as float.

        Raises:
            ConfigError: for one of another type, or a whole number under the minimum.
        """
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = {int: numeric and isinstance(value, int), float: numeric}.get(kind, isinstance(value, kind))
        if not fits:
            raise ConfigError(f"{self.where}: {name} is {value!r}, wanted {WANTED[kind]}")
        if kind is int and value < minimum:
            raise ConfigError(f"{self.where}: {name} is {value:,}, wanted at least {minimum}")
        return float(value) if kind is float else value

    def mark(self, *names: str) -> None:
        """Fields that were read in another way."""
        self._taken.update(names)

    def refuse(self, what: str) -> None:
        """Remember what no flag can hold."""
        self.refused.append(what)

    def finish(self) -> None:
        """Look at the fields that nobody read.

        Raises:
            ConfigError: naming every field that changes the maths and has no counterpart here.
        """
        for name, value in self.content.items():
            if name in self._taken or name in HARMLESS or name.startswith("_"):
                continue
            own = name in self._class.own and value != self._class.defaults[name]
            maths = name in MATHS or name in MATHS_FACTORS
            if own or (maths and not _changes_nothing(name, value)):
                self.refuse(f"{name} = {json.dumps(value)}")
            elif maths or name not in self._class.defaults:
                self.log.append(f"{name} = {json.dumps(value)} {'changes nothing' if maths else 'ignored'}")
        if self.refused:
            raise ConfigError(
                f"{self.where}: {self.architecture} with {' and '.join(self.refused)} computes something this model "
                "cannot"
            )


def _changes_nothing(name: str, value: Any) -> bool:
    if isinstance(value, list):
        return all(entry == "full_attention" for entry in value)
    return not value or (name in MATHS_FACTORS and value == 1 and value is not True)


WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", list: "a list"}
