"""Selection of test cases that cover every parameter value once."""

import pytest


def keep_covering_cases(items):
    """Mark every case as ``fault`` whose parameter values all occur in cases of the same test that were kept.

    Each value of each parameter keeps at least one case; combinations of them run in the fault lane.
    """
    seen = set()
    for item in sorted(items, key=lambda item: item.nodeid):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        # The cases of one test share the objects that were given to parametrize.
        values = {(item.function, name, id(value)) for name, value in params.items()}
        if values and values <= seen:
            item.add_marker(pytest.mark.fault)
        seen |= values
