"""What flags cannot be together: each refusal is one sentence with the flags and the numbers.

`check_config` looks at a config whose derived values are filled in; nothing here changes one. Another concern's
checks are a file beside this one with its CHECKS, and a name in _CONCERNS.
"""

from megatron_lite.arguments import (
    expert_checks,
    input_checks,
    layout_checks,
    model_checks,
    refusals,
    training_checks,
)
from megatron_lite.arguments.notes import notes_on
from megatron_lite.config import FIELDS, Config, ConfigError
from megatron_lite.config.declare import broken_limit, flag_name

# In this order: each may rely on those before it.
_CONCERNS = (training_checks, refusals, model_checks, layout_checks, expert_checks, input_checks)


def check_ranges(config: Config) -> None:
    """Raise ConfigError for a number outside the limits that its field states."""
    for name, (_, item) in FIELDS.items():
        value = config.value(name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                wanted = broken_limit(number, item)
                if wanted is not None:
                    raise ConfigError(f"{flag_name(name)} is {number}, wanted {wanted}")


def check_config(config: Config) -> list[str]:
    """Raise ConfigError for the first contradiction.

    Returns:
        Notes on flags that do nothing in this combination, and on files that are not there where that is no error.
    """
    for concern in _CONCERNS:
        for check in concern.CHECKS:
            check(config)
    missing = input_checks.missing_files(config)
    if missing and not config.command.planning:
        more = f"; and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError("; ".join(missing[:3]) + more)
    return (
        [f"not on this machine: {text}" for text in missing]
        + notes_on(config)
        + expert_checks.expert_notes(config)
    )
