"""Reject YAML texts that are small and unfold into huge values."""

from __future__ import annotations

import yaml

# A config has some hundred values in a few levels. Larger ones could exhaust memory or stack of the parser.
MOST_VALUES, MOST_LEVELS = 100_000, 100
_TOO_LARGE = f"the text nests more than {MOST_LEVELS} levels, or its aliases unfold into more than {MOST_VALUES} values"


def check_size(text: str) -> None:
    """Reject YAML that is nested too deeply or expands to too many values; malformed YAML is left to the loader.

    Raises:
        yaml.YAMLError: A limit is exceeded.

    Cost:
        One pass over the text, without expanding aliases.

    Example:
        >>> check_size("a: [1, 2]")
    """
    try:
        _count_values(text)
    except yaml.scanner.ScannerError as error:
        # PyYAML from 6.0.4 on has a limit of its own, which other malformed text does not meet.
        if "nesting depth" in str(error):
            raise yaml.YAMLError(_TOO_LARGE) from error
    except (yaml.parser.ParserError, yaml.reader.ReaderError):
        pass


def _count_values(text: str) -> None:
    """Raise YAMLError where a text exceeds a limit, or is malformed."""
    size_of: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        size = 0
        if isinstance(event, yaml.AliasEvent):
            size = size_of.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            size_of[event.anchor] = size = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
            size_of[anchor or ""] = size
        outer, count = open_nodes[-1]
        open_nodes[-1] = (outer, count + size)
        if len(open_nodes) > MOST_LEVELS or open_nodes[-1][1] > MOST_VALUES:
            raise yaml.YAMLError(_TOO_LARGE)
