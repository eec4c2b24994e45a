"""One Status per optimisation, active or not and why, and the table that shows them."""

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

State = Literal["active", "inactive", "refused"]


class Status(NamedTuple):
    """The state of one optimisation in one run.

    Args:
        name: The optimisation, for example "packed attention".
        state: "active"; "inactive" (not asked for, or the model has no such structure); "refused".
        reason: The form in use, or the reason against it.
        remedy: What to change to make it active; empty when nothing is to be done.

    Example:
        >>> Status("expert router", "inactive", "no MoE layers").state
        'inactive'
    """

    name: str
    state: State
    reason: str
    remedy: str = ""


def summarize_obstacles(name: str, obstacles: Counter[str], *, counts: str, otherwise: str) -> Status:
    """Return the status of an optimisation that serves some places of a model.

    Args:
        name: Of the optimisation.
        obstacles: How many places each reason excludes; those that are served have the reason "".
        counts: What is served, after the number.
        otherwise: What happens if nothing is served.

    Example:
        >>> summarize_obstacles("fp8", Counter(["", "", "trained"]), counts="products in e4m3", otherwise="bf16").reason
        '2 products in e4m3, 1 not: trained'
    """
    others = Counter({reason: count for reason, count in obstacles.items() if reason})
    reason = others.most_common(1)[0][0] if others else ""
    if not obstacles[""]:
        return Status(name, "inactive", f"{reason}; {otherwise}")
    return Status(name, "active", f"{obstacles['']} {counts}{f', {others.total()} not: {reason}' if others else ''}")


def render_status_table(statuses: Iterable[Status]) -> str:
    """Return the statuses as an aligned text table, one line each, remedies on their own line.

    Example:
        >>> print(render_status_table([Status("packed attention", "active", "varlen, 28 layers")]))
        optimisation      state   reason
        packed attention  active  varlen, 28 layers
    """
    rows = [("optimisation", "state", "reason")]
    for status in statuses:
        rows.append((status.name, status.state, status.reason))
        if status.remedy:
            rows.append(("", "", f"-> {status.remedy}"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {state:<{widths[1]}}  {reason}".rstrip() for name, state, reason in rows)
