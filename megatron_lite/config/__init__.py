"""Every flag of the program, one frozen dataclass per concern.

A field is a flag: `--num-layers` is `ModelConfig.num_layers`; its default, type, help, choices and limits stand in
the dataclass and nowhere else. Names, meanings and defaults are Megatron's; the ones that are ours say so in their
help. A field that is None in a fresh object gets its value from the others in `megatron_lite.arguments.resolve`.
"""

from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from megatron_lite.config.data import DataConfig
from megatron_lite.config.declare import ConfigError, check_stored, flag_of, in_words, refuse_together
from megatron_lite.config.model import ModelConfig, PrecisionConfig
from megatron_lite.config.output import CheckpointConfig, CommandConfig, LoggingConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.training import EvaluationConfig, OptimizerConfig, TrainingConfig


@dataclass(frozen=True)
class Config:
    """The whole run. `given` names the fields set on the command line, `notes` what rank 0 tells at start."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    command: CommandConfig = CommandConfig()
    given: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def value(self, name: str) -> Any:
        """The value of a field, whichever concern has it."""
        return getattr(getattr(self, FIELDS[name][0]), name)

    def is_set(self, name: str) -> bool:
        """Whether a field has another value than its default."""
        return self.value(name) != FIELDS[name][1].default

    def shown(self, name: str) -> str:
        """A field's flag with its value: '--num-layers 4'; of a switch, or without a value, the flag alone."""
        value = self.value(name)
        flag = flag_of(FIELDS[name][1])
        return flag if value is None or isinstance(value, bool) else f"{flag} {in_words(value)}"

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """{concern: {field: value}} in plain JSON types (tuples become lists)."""
        plain = {name: asdict(getattr(self, name)).items() for name in CONCERNS}
        return {
            name: {key: list(value) if isinstance(value, tuple) else value for key, value in items}
            for name, items in plain.items()
        }

    @classmethod
    def from_dict(cls, stored: dict[str, dict[str, Any]]) -> "Config":
        """The reverse of to_dict; absent keys take their default. Raises ConfigError for wrong keys and values."""
        unknown = [name for name in stored if name not in CONCERNS]
        parts = {}
        for name, concern in CONCERNS.items():
            values = stored.get(name, {})
            known = {f.name: f for f in fields(concern)}
            kinds = get_type_hints(concern)
            unknown += [f"{name}.{key}" for key in values if key not in known]
            for key in values.keys() & known.keys():
                check_stored(f"the stored configuration's {name}.{key}", values[key], known[key], kinds[key])
            parts[name] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        if unknown:
            raise ConfigError(f"the stored configuration has keys not known here: {', '.join(unknown)}")
        return cls(**{name: CONCERNS[name](**values) for name, values in parts.items()})


# Concern -> its dataclass, as Config's fields say.
CONCERNS: dict[str, type] = {
    item.name: type(item.default) for item in fields(Config) if is_dataclass(item.default)
}
FIELDS = {item.name: (name, item) for name, concern in CONCERNS.items() for item in fields(concern)}
