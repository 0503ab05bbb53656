"""What flags cannot be together: each refusal is one sentence with the flags and the numbers.

`checked` looks at a config whose derived values are filled in; nothing here changes one. Another concern's
checks are a file beside this one with its CHECKS, and a name in _CONCERNS.
"""

from dataclasses import replace

from megatron_lite.arguments import (
    expert_checks,
    input_checks,
    layout_checks,
    model_checks,
    refusals,
    training_checks,
)
from megatron_lite.arguments.notes import notes_on
from megatron_lite.config import Config, ConfigError

# In this order: each may rely on those before it.
_CONCERNS = (training_checks, refusals, model_checks, layout_checks, expert_checks, input_checks)


def checked(config: Config) -> Config:
    """The config, with notes on flags that do nothing in this combination and on files that are not there.

    Raises:
        ConfigError: for the first contradiction, or files that are not there where that is an error.
    """
    for concern in _CONCERNS:
        for check in concern.CHECKS:
            check(config)
    missing = input_checks.missing_files(config)
    if missing and not config.command.planning:
        more = f"; and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError("; ".join(missing[:3]) + more)
    notes = [f"not on this machine: {text}" for text in missing]
    notes += notes_on(config) + expert_checks.expert_notes(config)
    return replace(config, notes=(*config.notes, *notes))
