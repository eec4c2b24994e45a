"""Make the demo's chat rows: worded arithmetic with worked steps, of very different lengths, the same for the same
seed.

Numbers stay small (single-digit steps, totals mostly below 100): a model of 0.65 million parameters gets most of them
right within minutes.
"""

from __future__ import annotations

import numpy as np

from lightning_fastft.core.checks import check_int

NAMES = (
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ida",
    "Jon",
    "Kim",
    "Lea",
    "Max",
    "Nora",
    "Omar",
    "Pia",
)
THINGS = (
    *(
        "apples",
        "balls",
        "beads",
        "books",
        "boxes",
        "cards",
        "coins",
        "cups",
        "eggs",
        "figs",
        "forks",
        "hats",
        "jars",
        "keys",
        "kites",
    ),
    *(
        "lamps",
        "maps",
        "nuts",
        "pears",
        "pens",
        "plums",
        "rings",
        "ropes",
        "seeds",
        "shells",
        "socks",
        "spoons",
        "stamps",
        "stones",
        "toys",
    ),
)
GAINS = ("finds {n} more", "buys {n} more", "is given {n} more", "picks up {n}")
LOSSES = ("loses {n}", "gives away {n}", "sells {n}", "drops {n}")
MAX_TOTAL = 99

Message = dict[str, str]
Row = dict[str, list[Message]]


def generate_rows(*, num_train: int = 8000, num_validation: int = 200, seed: int = 11) -> tuple[list[Row], list[Row]]:
    """Return chat rows (``{"messages": [...]}``) to train on and to validate on, with no question in both.

    They range from a single short sum to stories of dozens of steps and chats of several turns.

    Raises:
        OptionError: A number of rows is below 1.

    Cost:
        About 0.1 ms a row.

    Example:
        >>> train, validation = generate_rows(num_train=3, num_validation=1)
        >>> [message["role"] for message in validation[0]["messages"]][:2]
        ['user', 'assistant']
    """
    check_int("num_train", num_train, low=1)
    check_int("num_validation", num_validation, low=1)
    random = np.random.default_rng(seed)
    rows: list[Row] = []
    seen: set[str] = set()
    while len(rows) < num_train + num_validation:
        row = _draw_row(random)
        question = row["messages"][0]["content"]
        if question not in seen:
            seen.add(question)
            rows.append(row)
    return rows[:num_train], rows[num_train:]


def final_answer(text: str) -> str:
    r"""Return what follows the last ``Answer:`` of a worked solution, or an empty string.

    Example:
        >>> final_answer("3 + 4 = 7\nAnswer: 7")
        '7'
    """
    _, mark, answer = text.rpartition("Answer:")
    return answer.strip() if mark else ""


def _draw_row(random: np.random.Generator) -> Row:
    """Draw one row; short ones are frequent, long ones rare, as in real chat data."""
    kind = random.choice(5, p=[0.18, 0.17, 0.4, 0.1, 0.15])
    makers = (_sum_row, _boxes_row, _story_row, _list_row, _chat_row)
    return makers[int(kind)](random)


def _sum_row(random: np.random.Generator) -> Row:
    """One sum of two numbers."""
    total, step = _number(random, 10, MAX_TOTAL - 9), _number(random, 1, 9)
    result, line = _apply(total, step if random.random() < 0.5 else -step)
    return _row([(f"What is {line.partition(' =')[0]}?", f"{line}\nAnswer: {result}")])


def _boxes_row(random: np.random.Generator) -> Row:
    """A product of two single digits, then one step."""
    name, thing = random.choice(NAMES), random.choice(THINGS)
    bags, each, step = _number(random, 2, 9), _number(random, 2, 9), _number(random, 1, 9)
    start = bags * each
    result, line = _apply(start, step)
    question = f"{name} has {bags} bags with {each} {thing} each and {step} {thing} more. How many {thing} is that?"
    return _row(
        [(question, f"{bags} bags with {each}: {bags} x {each} = {start}\n{step} more: {line}\nAnswer: {result}")]
    )


def _story_row(random: np.random.Generator) -> Row:
    """A story of one to sixteen days, worked line by line."""
    name, thing, total = _opening(random)
    events, lines, total = _days(random, total=total, first_day=1, num_days=1 + min(15, int(random.exponential(2))))
    question = f"{name} has {_first(lines)} {thing}. {' '.join(events)} How many {thing} does {name} have now?"
    return _row([(question, _worked(lines, total))])


def _list_row(random: np.random.Generator) -> Row:
    """A running total over three to eighteen numbers, each named by its shelf."""
    most = int(random.choice((6, 10, 18), p=(0.75, 0.2, 0.05)))
    thing, total = str(random.choice(THINGS)), 0
    counts = [_number(random, 1, 9) for _ in range(_number(random, 3, most))]
    lines = []
    for shelf, count in enumerate(counts, start=1):
        total, line = _apply(total, count)
        lines.append(f"Shelf {shelf}: {count}, {line}")
    listed = " ".join(f"Shelf {shelf}: {count}." for shelf, count in enumerate(counts, start=1))
    return _row([(f"{listed} How many {thing} are there?", _worked(lines, total))])


def _chat_row(random: np.random.Generator) -> Row:
    """Two to four turns about the same things, each turn some days later."""
    name, thing, total = _opening(random)
    turns, day = [], 1
    for turn in range(_number(random, 2, 4)):
        num_days = _number(random, 1, 2)
        events, lines, total = _days(random, total=total, first_day=day, num_days=num_days)
        opening = f"{name} has {_first(lines)} {thing}. " if turn == 0 else ""
        turns.append((f"{opening}{' '.join(events)} How many {thing} now?", _worked(lines, total)))
        day += num_days
    return _row(turns)


def _opening(random: np.random.Generator) -> tuple[str, str, int]:
    return str(random.choice(NAMES)), str(random.choice(THINGS)), _number(random, 5, 60)


def _days(
    random: np.random.Generator, *, total: int, first_day: int, num_days: int
) -> tuple[list[str], list[str], int]:
    """Return what happens on each day, the worked lines, and the new total, which stays between 0 and MAX_TOTAL."""
    events, lines = [], []
    for day in range(first_day, first_day + num_days):
        step = _number(random, 1, 9)
        gains = total < step or (total + step <= MAX_TOTAL and random.random() < 0.55)
        event = str(random.choice(GAINS if gains else LOSSES)).format(n=step)
        total, line = _apply(total, step if gains else -step)
        events.append(f"Day {day}: {event}.")
        # The line names its day and event, so that a small model can look them up in the question.
        lines.append(f"Day {day}: {event}, {line}")
    return events, lines, total


def _apply(total: int, step: int) -> tuple[int, str]:
    result = total + step
    return result, f"{total} {'+' if step > 0 else '-'} {abs(step)} = {result}"


def _first(lines: list[str]) -> str:
    """Return the number that the first worked line starts from."""
    return lines[0].rpartition(", ")[2].partition(" ")[0]


def _worked(lines: list[str], total: int) -> str:
    return "\n".join([*lines, f"Answer: {total}"])


def _number(random: np.random.Generator, low: int, high: int) -> int:
    return int(random.integers(low, high + 1))


def _row(turns: list[tuple[str, str]]) -> Row:
    messages = []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}
