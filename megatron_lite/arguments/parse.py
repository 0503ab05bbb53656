"""From the command line to a checked Config, without importing torch.

`parse_or_exit` is what a program calls; `parse_arguments` does the same with exceptions.
"""

import argparse
import difflib
import re
import shlex
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from megatron_lite.arguments import (
    expert_checks,
    input_checks,
    layout_checks,
    model_checks,
    refusals,
    training_checks,
)
from megatron_lite.arguments.megatron_flags import ACCEPTED, DEFAULTS, RENAMED, why_refused
from megatron_lite.arguments.notes import notes_on
from megatron_lite.arguments.resolve import complete, merge_stored, place
from megatron_lite.arithmetic.layer_pattern import parse_layer_pattern
from megatron_lite.config import CONCERNS, CheckpointConfig, Config, ConfigError
from megatron_lite.config.declare import finite_number, flag_of, in_words, whole_number
from megatron_lite.distributed.environment import Environment
from megatron_lite.files.command_line import Parser, guarded
from megatron_lite.files.reading import read_text

StoredConfig = dict[str, dict[str, Any]]

# Another concern's checks are a file with its CHECKS, and a name here. In this order: each may rely on those before.
_CHECKS = (training_checks, refusals, model_checks, layout_checks, expert_checks, input_checks)

_EPILOG = (
    "Flags have Megatron-LM's names, meanings and defaults; those marked 'ours' are not Megatron's. "
    "@FILE reads more flags from a file: words as in a shell, # comments. Megatron's flags that change nothing here "
    "are accepted with a note, see docs/megatron_migration.md."
)


def parse_arguments(
    argv: Sequence[str],
    environment: Environment,
    read_stored: Callable[[Config], StoredConfig | None] = lambda config: None,
) -> Config:
    """The checked configuration of this command line, every derived value filled in.

    Args:
        read_stored: called with --use-checkpoint-args and what the command line says; returns the Config.to_dict() of
            the checkpoint to load, from which the model's flags come, or None where there is no checkpoint yet.

    Raises:
        ConfigError: one sentence about what is wrong.
    """
    words = _renamed(_without_quotes(_expand_files(argv, ())))
    config = place(*_read_words(words), environment)
    stored = read_stored(config) if config.checkpoint.use_checkpoint_args else None
    return checked(complete(config if stored is None else merge_stored(config, stored)))


def checked(config: Config) -> Config:
    """The config, with notes on idle flags and absent files. Raises ConfigError for the first contradiction."""
    for concern in _CHECKS:
        for check in concern.CHECKS:
            check(config)
    missing = input_checks.missing_files(config)
    if missing and not config.command.planning:
        more = f"; and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError("; ".join(missing[:3]) + more)
    notes = [f"not on this machine: {text}" for text in missing]
    notes += notes_on(config) + expert_checks.expert_notes(config)
    return replace(config, notes=(*config.notes, *notes))


def parse_or_exit(
    argv: Sequence[str],
    environment: Environment,
    read_stored: Callable[[Config], StoredConfig | None] = lambda config: None,
    check_folders: Callable[[CheckpointConfig], None] | None = None,
    describe: Callable[[Config], str] | None = None,
) -> Config:
    """`parse_arguments`, or the error on stderr once (rank 0 of the run) and exit code 2.

    With --check the data's headers are read and check_folders is called, which a run does later, when it knows whether
    torchrun started it again; what `describe` says is printed, and the program ends.
    """
    if {"-h", "--help"} & set(argv):
        print_and_exit(build_parser().format_help() if environment.rank == 0 else "")
    try:
        config = parse_arguments(argv, environment, read_stored)
        if config.command.check:
            input_checks.check_pairs(config)
            if check_folders is not None:
                check_folders(config.checkpoint)
    except ConfigError as error:
        exit_with_error(error, environment)
    if config.command.check and describe is not None:
        print_and_exit(describe(config))
    return config


def print_and_exit(text: str) -> NoReturn:
    """Print and leave with code 0; quietly, with 1, when nobody reads on (`--help | head`)."""
    guarded(lambda: print(text))
    sys.exit(0)


def exit_with_error(error: ConfigError, environment: Environment) -> NoReturn:
    """Print `error: ...` on rank 0 and leave with code 2.

    torchrun shows and stops everything at the first failing process, so the others give rank 0 time to be it.
    """
    if environment.rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(5)
    sys.exit(2)


def build_parser() -> argparse.ArgumentParser:
    """An argparse parser whose namespace holds only the fields that were given."""
    parser = Parser(
        "",
        prog="pretrain_gpt.py",
        argument_default=argparse.SUPPRESS,
        epilog=_EPILOG,
        usage="%(prog)s [@FILE] --flag value ...",
    )
    for concern in CONCERNS.values():
        types = typing.get_type_hints(concern)
        for part in concern.__mro__[:-1]:  # a group of flags may be a base class of its concern
            group = parser.add_argument_group(part.__doc__.strip().rstrip("."))
            for item in fields(concern):
                if item.name in part.__annotations__:
                    _add_field(group, item, types[item.name])
    for name, row in ACCEPTED.items():
        kind = {"nargs": row.value if row.value in "+*" else None} if row.value else {"action": "store_true"}
        parser.add_argument(name, dest=name, help=argparse.SUPPRESS, **kind)
    return parser


def _add_field(group: argparse._ArgumentGroup, item: Field, annotation: Any) -> None:
    options = item.metadata
    names = [flag_of(item), *options.get("aliases", ())]
    if options.get("no_effect"):
        text = argparse.SUPPRESS
    else:
        default = "" if item.default in (None, False, ()) else f" (default {in_words(item.default)})"
        text = (options["help"] + default).replace("%", "%%")
    if annotation is bool:
        group.add_argument(*names, dest=item.name, action="store_true", help=text)
        return
    several = "nargs" in options
    group.add_argument(
        *names,
        dest=item.name,
        type=str if several else _reader(annotation, options),
        nargs="+" if several and _scalar(annotation) is not str else options.get("nargs"),
        choices=options.get("choices"),
        help=text,
        metavar=None if "choices" in options else {int: "N", float: "X"}.get(_scalar(annotation), "TEXT"),
    )


def _scalar(annotation: Any) -> type:
    """int, float or str, of an annotation such as `int | None` or `tuple[int, ...]`."""
    text = str(annotation)
    return int if "int" in text else float if "float" in text else str


def _reader(annotation: Any, options: Mapping[str, Any]) -> Callable[[str], Any]:
    if "synonyms" in options:
        return lambda text: options["synonyms"].get(text, text)
    read = {int: whole_number, float: finite_number, str: str}[_scalar(annotation)]

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(error) from None

    return convert


def _value(item: Field, annotation: Any, given: Any) -> Any:
    """What argparse read, as the field has it: one text of several words, or numbers.

    Numbers come as words or in one, as a YAML file has them: '[384 384 97656250]', '2,4'.
    """
    if item.metadata.get("join"):
        return " ".join(given)
    if item.metadata.get("layer_pattern"):
        return parse_layer_pattern(" ".join(given))
    if "nargs" not in item.metadata or _scalar(annotation) is str:
        return given
    read = {int: whole_number, float: finite_number}[_scalar(annotation)]
    count, text = item.metadata["nargs"], " ".join(given)
    words = re.findall(r"[^\s,\[\]()]+", text)
    if isinstance(count, int) and len(words) != count:
        raise ConfigError(f"{flag_of(item)} is '{text}', wanted {count} numbers")
    try:
        return [read(word) for word in words]
    except ValueError as error:
        raise ConfigError(f"{flag_of(item)}: {error}") from None


def _expand_files(argv: Sequence[str], opened: tuple[Path, ...]) -> list[str]:
    """Replace each @FILE by the words in it; paths inside a file are relative to that file."""
    words = []
    for word in argv:
        if not word.startswith("@"):
            words.append(word)
            continue
        path = (opened[-1].parent if opened else Path()) / word[1:]
        if path in opened:
            raise ConfigError(f"{word} includes itself: {' -> '.join(map(str, (*opened, path)))}")
        text = read_text(path, word)
        try:
            inner = shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise ConfigError(f"{word} cannot be read: {error}") from None
        words += _expand_files(inner, (*opened, path))
    return words


def _without_quotes(words: Sequence[str]) -> list[str]:
    """Take away quotes that arrived literally, as when a script expands ARGS="--split '949,50,1'" unquoted."""
    bare, opened = [], None
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if opened is None and value[:1] in ("'", '"'):
            opened, value = value[0], value[1:]
        if opened is not None and value.endswith(opened):
            opened, value = None, value[:-1]
        bare.append(name + equals + value)
    return bare if opened is None else list(words)


def _renamed(words: Sequence[str]) -> list[str]:
    """Old spellings put into today's; what stands for a default comes first, so that any other word wins."""
    new, defaults = [], []
    for word in words:
        name, equals, value = word.partition("=")
        if name in RENAMED:
            *before, last = RENAMED[name]
            new += [*before, last + equals + value]
        elif name in DEFAULTS:
            defaults += DEFAULTS[name]
        else:
            new.append(word)
    return defaults + new


def _read_words(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields given on the command line, and the accepted flags without effect."""
    parser = build_parser()
    _check_names(words, parser)
    namespace, rest = parser.parse_known_args(words)
    if rest:
        once = words.count(rest[0]) == 1
        before = [word for word in words[: words.index(rest[0])] if word.startswith("--")] if once else []
        after = f" after {before[-1]}" if before else ""
        raise ConfigError(f"'{rest[0]}'{after} does not belong to any flag")
    given = vars(namespace)
    values = {}
    for concern in CONCERNS.values():
        types = typing.get_type_hints(concern)
        for item in fields(concern):
            if item.name in given:
                values[item.name] = _value(item, types[item.name], given[item.name])
    return values, {name: value for name, value in given.items() if name in ACCEPTED}


def _check_names(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Refuse flags that are refused or unknown, before argparse looks at their values."""
    known = parser._option_string_actions
    names = [word.split("=", 1)[0] for word in words if word.startswith("--") and word != "--"]
    strange = list(dict.fromkeys(name for name in names if name not in known))
    for name in strange:
        reason = why_refused(name)
        if reason is not None:
            same = [other for other in strange if why_refused(other) == reason]
            raise ConfigError(f"{', '.join(same)}: {reason}")
    if strange:
        close = [difflib.get_close_matches(n.replace("_", "-"), [*known], n=3, cutoff=0.7) for n in strange]
        hints = [f"{n} (did you mean {' or '.join(c)}?)" if c else n for n, c in zip(strange, close)]
        raise ConfigError(f"unknown flag{'s' if len(strange) > 1 else ''}: {', '.join(hints)}")
