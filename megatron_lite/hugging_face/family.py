"""What a family of Hugging Face models is: one table of config.json's fields and our flags, one of tensor names.

Both are read in both directions: a file of families/ says each thing once. Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lite.config.model import ModelConfig
from megatron_lite.hugging_face.fields import ConfigFields

Flags = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Fields of config.json and the flags of the same meaning.

    Attributes:
        read: takes its fields and returns {field of ModelConfig: value}; what no flag can hold it refuses
            (`ConfigFields.refuse`).
        write: {field: value} of a model. Where the family has no word for a flag it writes its nearest: reading that
            back shows what does not fit.
    """

    read: Callable[[ConfigFields], Flags]
    write: Callable[[ModelConfig], dict[str, Any]]


@dataclass(frozen=True)
class Weight:
    """A tensor of theirs, and the tensors of ours whose rows lie in it one after the other.

    Names hold {layer} where there is one for each layer, {kind} where there is a weight and may be a bias, theirs
    {expert} where each expert's is a tensor and ours [E, out, in]; what the model does not have (a bias, a norm,
    another layer's kind of MLP) is left out of the expanded table.

    Attributes:
        transposed: their weight is stored [in, out].
        rows: the dim of our tensors that is their rows: 1 where all experts are one tensor of theirs too.
    """

    theirs: str
    ours: str | tuple[str, ...]
    transposed: bool = False
    rows: int = 0

    @property
    def our_names(self) -> tuple[str, ...]:
        """`ours`, one or several."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    Attributes:
        architecture: the class that computes it.
        model_type: its name in config.json; transformers' configuration class of that name gives the defaults.
        rows: config.json <-> flags; two rows may not give the same flag.
        weights: tensor names, the embedding's first, in the order of the model.
        fused: the same for files in which all experts of a layer are one tensor, for the tensors of ours it names.
    """

    architecture: str
    model_type: str
    rows: tuple[Row, ...]
    weights: tuple[Weight, ...]
    fused: tuple[Weight, ...] = ()

    @property
    def is_mixture(self) -> bool:
        """Whether its models have experts."""
        return bool(self.fused)

    def names(self, fused: bool) -> tuple[Weight, ...]:
        """The tensor names of files of one form or the other."""
        if not fused:
            return self.weights
        replaced = {name for row in self.fused for name in row.our_names}
        return (*(row for row in self.weights if row.ours not in replaced), *self.fused)

    def read(self, fields: ConfigFields) -> Flags:
        """The flags of the fields; widths that follow from others are filled in."""
        flags = {name: value for row in self.rows for name, value in row.read(fields).items()}
        hidden, heads = flags["hidden_size"], flags["num_attention_heads"]
        flags["ffn_hidden_size"] = flags["ffn_hidden_size"] or 4 * hidden
        flags["kv_channels"] = flags.get("kv_channels") or hidden // heads
        flags["num_query_groups"] = flags.get("num_query_groups") or heads
        flags["group_query_attention"] = flags["num_query_groups"] != heads
        return flags

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The fields of config.json of the flags."""
        return {name: value for row in self.rows for name, value in row.write(model).items()}


def same(theirs: str, ours: str, kind: type = int, needed: bool = False) -> Row:
    """A field that is a flag under another name.

    Args:
        needed: no sane file leaves it out: transformers' default for it is not taken.
    """
    return Row(
        lambda fields: {ours: fields.take(theirs, kind, needed)},
        lambda model: {theirs: getattr(model, ours)},
    )


def always(**flags: Any) -> Row:
    """Flags that every model of the family has, without a field."""
    return Row(lambda fields: flags, lambda model: {})


def activation(theirs: str, names: Mapping[str, str]) -> Row:
    """The MLP's activation; names: transformers' name of each that the family can have -> ours."""

    def read(fields: ConfigFields) -> Flags:
        name = fields.take(theirs, str)
        if name not in names:
            fields.refuse(f"{theirs} = {name!r}")
            return {}
        ours = names[name]
        is_flag = ours in ModelConfig.__dataclass_fields__  # --swiglu, --squared-relu
        return {ours: True} if is_flag else {"activation": None if ours == "gelu" else ours}

    def write(model: ModelConfig) -> dict[str, Any]:
        known = (there for there, ours in names.items() if ours == model.activation_name)
        return {theirs: next(known, next(iter(names)))}

    return Row(read, write)


TIED_HEAD = Row(
    lambda fields: {"untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", bool)},
    lambda model: {"tie_word_embeddings": not model.untie_embeddings_and_output_weights},
)


def window_of(sliding_window: int | None) -> tuple[int, int] | None:
    """--window-size of a sliding window: transformers counts the token itself, Megatron the tokens to its left."""
    return None if sliding_window is None else (sliding_window - 1, 0)


def sliding_window_of(model: ModelConfig) -> int | None:
    """The reverse of `window_of`."""
    left = model.window_size[0] if model.window_size else -1
    return None if left < 0 else left + 1
