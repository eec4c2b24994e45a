"""Shorten the multi-line errors of the parser to one reason with hints."""

from __future__ import annotations

import difflib
import errno
import re
import sys
import traceback
from collections.abc import Collection
from pathlib import Path

from lightning_fastft.cli.other_names import hint_option, hint_value
from lightning_fastft.cli.signatures import read_options
from lightning_fastft.cli.words import TRAINER_COMMANDS, config_names

PARTLY_ALLOWED = ("lightning", "peft", "torch", "torchmetrics", "transformers")
_IMPORT_REFUSED = re.compile(r"Importing '([^']+)' is not allowed")
_UNKNOWN_OPTION = re.compile(
    r"[Oo]ption '([^']+)' is not accepted|does not accept option '([^']+)'|unrecognized arguments?: --([\w.+-]+)"
)
_UNKNOWN_LORA = re.compile(r"(lora has the unknown fields \[[^\]]*\])\.\s+(?:Did you mean ([^?]+)\?)?")
_NO_VALUE = re.compile(r"argument (?:-\w/)?(--[\w.]+): expected one argument")
_POSITIONAL = re.compile(r"unrecognized arguments?: ([^-\s]\S*)")
_NO_MAPPING = re.compile(r"Expected a <class 'dict'>")
_MISSING = re.compile(r"the following arguments are required: ([\w., ]+)")
_FUNCTION = re.compile(
    r'Parser key "(\w+)":(?:(?!Parser key)[\s\S])*?expects a function or a callable class: (.+?)(?:\. Got value|\n|$)'
)
# A value of an optimizer or a scheduler.
_FUNCTION_VALUE = re.compile(
    r'Parser key "(\w+)":(?:(?!Parser key)[\s\S])*?callable class: Parser key "(\w+)":\s+'
    r"Expected a (?:<class '(int|float|bool)'>|typing\.Literal\[(.+?)\])\. Got value: (.+?)\. Got value"
)
# The same, of an option with several types.
_FUNCTION_UNION = re.compile(
    r'Parser key "(\w+)":(?:(?!Parser key)[\s\S])*?callable class: Parser key "(\w+)":(?:(?!Parser key)[\s\S])*?'
    r"- Expected a (?:<class '(int|float|bool)'>|typing\.Literal\[(.+?)\])[\s\S]*?Given value: (.+?)\. Got value"
)
# What a value must be, by the type that the parser expects.
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_TYPE = re.compile(r"Expected a <class '(int|float|bool)'>(?:\. Got value: (.*))?")
# A float as a text, at most 1e18.
_WHOLE_FLOAT = re.compile(r"[+-]?\d{1,9}(?:\.\d{0,9})?(?:[eE]\+?0*\d)?")
_NO_CLASS = re.compile(r"Expected a dot import path string: ([A-Za-z_]\w*)\b(?!\.)")
_CHOICE = re.compile(r"Expected a typing\.Literal\[([^\]]*)\](?:\. Got value: (.*))?")
# Modules with classes of an option, by the last part of its name.
_CLASS_MODULES = {
    "callbacks": ("lightning_fastft", "lightning.pytorch.callbacks"),
    "logger": ("lightning.pytorch.loggers",),
    "strategy": ("lightning_fastft", "lightning.pytorch.strategies"),
    "optimizer": ("lightning_fastft", "torch.optim"),
    "model": ("lightning_fastft",),
    "data": ("lightning_fastft",),
}
# Options for a model and for data, by the option of their class.
PLACES = {"model": "model.model", "data": "data.paths"}
_SCHEDULE = re.compile(r"transformers\.(?:optimization\.)?get_\w*schedule")
_HINT_SCHEDULE = (
    "hint: schedules of transformers are functions, and a config names classes: write --model.scheduler cosine "
    "--model.warmup_steps 100 (or linear, constant), or a class of torch.optim.lr_scheduler\n"
)
_NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_AMBIGUOUS = re.compile(r"Multiple subclasses with name (\w+)\. Give the full class path[^:]*: ([\w., ]+\w)")
_INNER_KEY = re.compile(r"Problem with given class_path '[^']+': Parser key \"([\w.]+)\": ")
_INNER_OWNER = re.compile(r"is not accepted\. Got value: Namespace\(class_path='(?!torch\.optim\.Optimizer')([^']+)'")
# The parser has an error for each type of a union. A value with a class_path cannot have meant these types: texts, and
# values without a class.
_OTHER_TYPES = re.compile(
    r"\n\s*- (?:Expected a <class 'str'>(?=\n)|Not a valid subclass of .+(?:\n\s+Subclass types.+(?:\n\s+- .+){4})?)"
)
# The base class, for which the parser reads the options of a callback again.
_BASE_CALLBACK = re.compile(
    r"\n\s*- Problem with given class_path 'lightning\.Callback':\n\s+Option .+ is not accepted"
)
# A class that the parser tries for a list of callbacks, and for one.
_TWICE = re.compile(r"(\n\s*- Problem with given class_path '[^']+':(?:\n(?!\s*- ).*)+)\1")
_TEXT_BEFORE_CLASS = re.compile(r"\n\s*- Expected a <class 'str'>(?=\n\s*- Problem with given class_path)")
_CLASS_TRIED = re.compile(r"Problem with given class_path '([^']+)'")
_ERROR = re.compile(r"^\s*- (?!Expected a <class 'NoneType'>)", re.MULTILINE)
# Functions of transformers that read files of a folder or the hub.
_READERS = ("from_pretrained", "cached_files", "cached_file")
_NOISE = re.compile(
    r"^(Given value|Subtypes:|Errors:|Does not validate against|- Does not validate|- Expected a path but|- Expected a "
    r"<class 'NoneType'>)"
)


def explain_refusal(message: str, *, options: Collection[str], program: str) -> str:
    """Return the reason of a parser error in the first line, followed by hints.

    Example:
        >>> reason = "unrecognized arguments: --trainer.max_stps 2"
        >>> print(explain_refusal(reason, options=["trainer.max_steps"], program="fastft fit"), end="")
        error: unrecognized arguments: --trainer.max_stps 2
        hint: did you mean trainer.max_steps?
        hint: all options: fastft fit --help
    """
    message = _keep_type_meant(message)
    lines = [line.strip() for line in message.strip().splitlines()]
    key = re.match(r'Parser key "([^"]+)":', lines[0])
    where = f"{key[1]}: " if key else ""
    last_line = f"hint: all options: {program} --help\n"

    refused = _IMPORT_REFUSED.search(message)
    if refused:
        root, _, _ = refused[1].partition(".")
        # If a package is partly allowed, suggest only the named part of it.
        package = refused[1].rpartition(".")[0] if root in PARTLY_ALLOWED else root
        advice = f"hint: if you trust it, add --allow-import {package} to the command line (a file cannot)\n"
        return f"error: {where}a config may not import {refused[1]!r}\n{advice}{last_line}"

    unknown = _UNKNOWN_OPTION.search(message)
    if unknown:
        name = next(filter(None, unknown.groups()))
        return f"error: {where}{_explain_unknown(name, lines, options)}{last_line}"

    special = _explain_special(message, lines, where=where)
    if special:
        return f"{special}{last_line}"

    unknown = _NO_CLASS.search(message)
    if key and unknown and not _CHOICE.search(message):
        inner = _INNER_KEY.search(" ".join(lines))
        answer = _explain_no_class(f"{key[1]}.{inner[1]}" if inner else key[1], unknown[1])
        if answer:
            return f"{answer}{last_line}"

    kept = [
        _explain_choice(line.removeprefix("- "), lines)
        for line in lines[1 if key else 0 :]
        if line and not _NOISE.match(line)
    ]
    reason = " ".join(dict.fromkeys(filter(None, kept))) or message.strip()
    # The option of a class has a parser of its own.
    while key and (inner := _INNER_KEY.match(reason)):
        where = f"{where.removesuffix(': ')}.{inner[1]}: "
        reason = reason[inner.end() :]
    got = re.search(r", got '([^']*)'$", reason)
    hint = hint_value(where.removesuffix(": "), got[1]) if got else ""
    return f"error: {where}{reason}\n{hint}{last_line}"


def _explain_no_class(option: str, name: str) -> str:
    """Return the reason and the hint of a name that is no class; "" if there is no hint."""
    if option.endswith("strategy") and (owner := _find_strategy(name)):
        return f"error: {option}: the name {name!r} takes no options\nhint: name its class first: --{option} {owner}\n"
    hint = hint_value(option, name)
    if not hint and (near := _find_near_classes(option, name)):
        hint = f"hint: did you mean {'lightning_fastft.' if near == name else ''}{near}?\n"
    elif not hint and option in PLACES:
        hint = f"hint: --{option} names a class; did you mean --{PLACES[option]} {name}?\n"
    return f"error: {option}: there is no class {name}\n{hint}" if hint else ""


def _keep_type_meant(message: str) -> str:
    """Return an error of the parser without the errors of types that the value cannot have meant."""
    if "class_path='" in message:
        kept = _OTHER_TYPES.sub("", message)
        message = kept if _ERROR.search(kept) else message
    if len(set(_CLASS_TRIED.findall(message))) > 1:
        message = _BASE_CALLBACK.sub("", message)
    return _TWICE.sub(r"\1", _TEXT_BEFORE_CLASS.sub("", message))


def _explain_special(message: str, lines: list[str], *, where: str) -> str:
    """Return the reason and the hint of an error that the parser words for itself; "" for others."""
    key = re.match(r'Parser key "([^"]+)":', lines[0])
    field = _UNKNOWN_LORA.search(message)
    if field:
        hint = f"did you mean {field[2]}?" if field[2] else "the fields are those of PEFT's LoraConfig"
        return f"error: {where}{field[1]}\nhint: {hint}\n"
    function = _explain_function(message, where)
    if function:
        return function
    absent = _NO_ATTRIBUTE.search(message)
    if absent:
        module = sys.modules.get(absent[1])
        near = difflib.get_close_matches(absent[2], getattr(module, "__all__", dir(module)), n=1)
        advice = f"hint: did you mean {absent[1]}.{near[0]}?\n" if near else ""
        return f"error: {where}there is no class {absent[2]} in {absent[1]}\n{advice}"
    has_class = "Problem with given class_path" in message or _NO_CLASS.search(message)
    if "Not a valid subclass of" in message and not has_class:
        return f"error: {where}no class is named\nhint: write class_path: NAME, and its options under init_args\n"
    several = _AMBIGUOUS.search(message)
    if several:
        return f"error: {where}several classes are called {several[1]}\nhint: write one of {several[2]}\n"
    missing = _MISSING.search(message)
    if missing:
        names = ", ".join(f"--{f'{key[1]}.' if key else ''}{name.strip()}" for name in missing[1].split(","))
        advice = (
            f"hint: give a config that has it, --config NAME or FILE; shipped configs: {', '.join(config_names())}\n"
        )
        return f"error: {names} is required and was not given\n{'' if where.startswith('trainer') else advice}"
    no_value = _NO_VALUE.search(message)
    if no_value:
        return f"error: {no_value[1]} needs a value: {no_value[1]} VALUE\n"
    word = _POSITIONAL.search(message)
    if word:
        return f"error: unrecognized arguments: {word[1]}\n{_hint_positional(word[1])}"
    inner = _INNER_KEY.search(" ".join(lines))
    if inner and _NO_MAPPING.search(message):
        advice = "hint: for example --model.lora.r 16\n" if inner[1] == "lora" else ""
        kinds = (
            "a text or a mapping of options to values"
            if "Expected a <class 'str'>" in message
            else "a mapping of options to values"
        )
        return f"error: {where.removesuffix(': ')}.{inner[1]}: must be {kinds}\n{advice}"
    return ""


def _explain_function(message: str, where: str) -> str:
    """Return the reason of an error about an optimizer or a scheduler; "" for others."""
    value = _FUNCTION_VALUE.search(message) or _FUNCTION_UNION.search(message)
    if value:
        option = f"{where.removesuffix(': ')}.{value[1]}.{value[2]}"
        allowed = _KINDS[value[3]] if value[3] else f"one of {value[4]}"
        return f"error: {option}: must be {allowed}, got {value[5]!r}\n"
    function = _FUNCTION.search(message)
    if not function:
        return ""
    hint = _HINT_SCHEDULE if _SCHEDULE.search(message) else ""
    return f"error: {where}{function[1]}: {function[2].rstrip('. ')}\n{hint}"


def explain_missing_files(error: OSError | ValueError) -> str:
    """Return an error text with hints if transformers could not read the files of a model; "" for other errors.

    Example:
        >>> explain_missing_files(OSError("no space left on device"))
        ''
    """
    calls = {
        (frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_name)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    }
    if not calls & {("transformers", name) for name in _READERS}:
        return ""
    named = (frame.f_locals.get("pretrained_model_name_or_path") for frame, _ in traceback.walk_tb(error.__traceback__))
    name = next((repr(value) for value in named if isinstance(value, str)), "--model.model")
    return (
        f"error: the model's files could not be read: {' '.join(str(error).split()) or type(error).__name__}\n"
        f"hint: {name} must be a name on huggingface.co or a folder (searched from {Path.cwd()}); gated models "
        "need `hf auth login`\n"
        "hint: without a network set HF_HUB_OFFLINE=1 and give a local folder; fastft demo writes a small model to "
        "runs/demo/trained\n"
    )


def explain_full_disk(error: OSError | ValueError) -> str:
    """Return an error text with a hint if a file could not be written for want of space; "" for other errors.

    Example:
        >>> explain_full_disk(OSError(2, "No such file or directory"))
        ''
    """
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    return (
        f"error: a file could not be written: {error.strerror}{f': {error.filename}' if error.filename else ''}\n"
        "hint: free space on the disks of the logs, checkpoints and cached data (df -h); a run then continues from its "
        "last checkpoint with --ckpt_path last\n"
    )


def _explain_unknown(name: str, lines: list[str], options: Collection[str]) -> str:
    """Return the reason of an unknown option with its owner, and the closest known option as a hint."""
    owner = _owner_of(lines, name)
    # The name may be a part of another word, as path of class_path.
    reason = next(line for line in sorted(lines, key=lambda line: f"'{name}'" not in line) if name in line)
    if found := re.search(
        rf"expects a function or a callable class: (Option '{re.escape(name)}' is not accepted)", reason
    ):
        reason = found[1]
    known = read_options(owner) if owner else options
    near = _find_initials(name, known)
    hint = "" if near else hint_option(name, known=known)
    near = near or next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), "")
    hint = hint or (f"hint: did you mean {near}?\n" if near else "")
    if name[:1].isupper():
        hint = f"hint: write class_path: {name.partition('.')[0]}, and its options under init_args\n"
    if name in TRAINER_COMMANDS:
        hint = f"hint: the options of a config have no level {name} above them\n"
    return f"{reason}{f' by {owner}' if owner else ''}\n{hint}"


def _find_near_classes(key: str, name: str) -> str:
    """Return the names of loaded classes that were probably meant by an option's value; "" for none."""
    modules = [sys.modules[path] for path in _CLASS_MODULES.get(key.rpartition(".")[2], ()) if path in sys.modules]
    known = {known for module in modules for known in getattr(module, "__all__", dir(module)) if known[:1].isupper()}
    beginning = sorted(other for other in known if other.lower().startswith(name.lower().replace("_", "")))
    return " or ".join(difflib.get_close_matches(name, known, n=2, cutoff=0.7) or beginning[:2])


def _find_strategy(name: str) -> str:
    """Return the class that a strategy name such as "fastft" is registered for; "" for none."""
    strategies = sys.modules.get("lightning.pytorch.strategies")
    registry = getattr(strategies, "StrategyRegistry", {})
    return str(registry[name]["strategy"].__name__) if name in registry else ""


def _explain_choice(reason: str, lines: list[str]) -> str:
    """Return a reason with the wrong value, and the allowed choices or the type in words."""
    found = _CHOICE.search(reason)
    if found and len(groups := [other[1] for other in map(_CHOICE.search, lines) if other]) > 1:
        # A union of choices has a line for each of them, and the first line is answered for all.
        return "" if found[1] != groups[0] else f"must be one of {', '.join(groups)}{_got(found, lines)}"
    if (_TYPE.search(reason) or _NO_CLASS.match(reason)) and any(map(_CHOICE.search, lines)):
        return ""
    types = [line.removeprefix("- ") for line in lines if _TYPE.search(line)]
    found = found or _TYPE.search(reason)
    if not found:
        return reason
    if found[1] in _KINDS and types.index(reason) > 0:
        # A union of types has a line for each of them, and the first line is answered for all.
        return ""
    has_none = "- Expected a <class 'NoneType'>" in lines and found[2] is None
    allowed = _join_kinds(types) if found[1] in _KINDS else f"one of {found[1]}"
    # The union that the choices belong to. An outer one may have None.
    union = next((line for line in lines if line.startswith("Subtypes: ") and f"Literal[{found[1]}]" in line), "")
    if union:
        has_none = "NoneType" in union
        kinds = [_KINDS[kind] for kind in re.findall(r"<class '(int|float|bool)'>", union)]
        allowed = " or ".join([*kinds, found[1] if kinds and "," not in found[1] else allowed])
    return f"{reason[: found.start()]}must be {'None or ' if has_none else ''}{allowed}{_got(found, lines)}"


def _join_kinds(types: list[str]) -> str:
    """Return what a value must be, by the types that the parser expects."""
    names = [found[1] for found in map(_TYPE.search, types) if found]
    return " or ".join(_KINDS[name] for name in names if name != "int" or "float" not in names)


def _got(found: re.Match[str], lines: list[str]) -> str:
    """Return the wrong value in words; nested errors come first, and the innermost one is that of the value."""
    value = found[2] or next((line.partition(": ")[2] for line in lines if line.startswith("Given value: ")), None)
    if value is None:
        return ""
    whole = _WHOLE_FLOAT.fullmatch(value) if found.re is _TYPE and found[1] == "int" else None
    is_whole = whole is not None and float(value).is_integer()
    return f", got {value!r}{f': write {float(value):.0f}' if is_whole else ''}"


def _owner_of(lines: list[str], option: str) -> str | None:
    """Return the class that rejected the option, if the message names one."""
    owner = None
    for line in lines:
        found = re.search(r"Problem with given class_path '([^']+)'", line)
        owner = found[1] if found else owner
        if f"'{option}'" in line and "not accepted" in line:
            # An option of an optimizer or a scheduler, inside that of the model. Without a class it is the base class.
            inner = _INNER_OWNER.search(line)
            return inner[1] if inner else owner
    return None


def _find_initials(name: str, accepted: Collection[str]) -> str:
    """Return the accepted name with these initials; "" for none."""
    return next((known for known in accepted if "_" in known and name == "".join(p[:1] for p in known.split("_"))), "")


def _hint_positional(word: str) -> str:
    """Return a hint on a word without an option, if it is a config or data; "" for another."""
    if word in config_names() or word.endswith((".yaml", ".yml")):
        return f"hint: did you mean --config {word}?\n"
    return f"hint: did you mean --data.paths {word}?\n" if Path(word).exists() else ""
