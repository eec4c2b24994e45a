"""Selection of test cases that cover every parameter value once."""

from collections import defaultdict

import pytest


def keep_covering_cases(items):
    """Mark as ``fault`` the cases of each test but a few, in which every value of every parameter occurs.

    The case with most values that are not covered yet is kept first; combinations of them run in the fault lane.
    """
    cases_of_test = defaultdict(list)
    for item in sorted(items, key=lambda item: item.nodeid):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        # The cases of one test share the objects that were given to parametrize.
        cases_of_test[item.function].append((item, {(name, id(value)) for name, value in params.items()}))
    for cases in cases_of_test.values():
        open_values = set().union(*(values for _, values in cases))
        while open_values:
            kept = max(cases, key=lambda case: len(case[1] & open_values))
            open_values -= kept[1]
            cases.remove(kept)
        for item, values in cases:
            if values:
                item.add_marker(pytest.mark.fault)
