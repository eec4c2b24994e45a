"""What a run came to, in a few sentences, from the data of its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Shares worth a sentence: of the time without work for want of data, and of the room in packs that holds nothing.
_DATA_SHARE = 0.1
_EMPTY_SHARE = 0.1


def judge(data: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return ("good", "warn" or "bad", sentences); the first sentence says how the run ended.

    Args:
        data: The report without its verdict.
    """
    outcome, head = data["outcome"], data["head"]
    steps = _count(head["num_steps"], "optimizer step")
    bad, warn, good = [], [], []
    if outcome["state"] == "finished":
        good.append(f"The run finished after {steps}.")
    elif outcome["state"] == "interrupted":
        warn.append(f"The run was interrupted after {steps}; this is what is known so far.")
    else:
        bad.append(f"The run failed after {steps}; this is what is known so far.")
    num_not_finite = data["curves"]["loss"]["num_not_finite"]
    if num_not_finite:
        bad.append(f"The loss was not finite in {_count(num_not_finite, 'micro-batch')}.")
    first, final = head["first_loss"], head["final_loss"]
    if first is not None and final is not None and head["num_steps"] > 1:
        has_fallen = final < first
        how = "fell" if has_fallen else "did not fall: it went"
        (good if has_fallen else warn).append(f"The loss {how} from {first:.4g} to {final:.4g} (means of the first and the last steps).")
    refused = [status["name"] for status in data["statuses"] if status["state"] == "refused"]
    if refused:
        warn.append(f"Refused: {', '.join(refused)}; the table says why and what to do.")
    if data["waits"]["num_steps"] and data["waits"]["rows"]:
        per_step = f"{data['waits']['per_step']:g}"
        text = f"On a GPU the host would wait {per_step} times in" if data["waits"]["is_prediction"] else f"The host waited {per_step} times in"
        warn.append(f"{text} a step; the table names the lines.")
    between = next((part["share"] for part in data["times"]["parts"] if part["kind"] == "between"), 0.0)
    if between > _DATA_SHARE:
        warn.append(f"{100 * between:.0f} % of the time passed between micro-batches (data, transfer, logging).")
    warn += _judge_packs(data["packing"])
    if data["profile"]["step"] is not None and data["profile"]["copy_ms"]:
        good.append(f"{100 * data['profile']['hidden_share']:.0f} % of the copy time of the profiled step was hidden under compute.")
    # What ended the run comes first.
    return "bad" if bad else "warn" if warn else "good", [*bad, *warn, *good] if outcome["state"] != "finished" else [
        *good[:1],
        *bad,
        *warn,
        *good[1:],
    ]


def _judge_packs(packing: Mapping[str, Any] | None) -> list[str]:
    """Say how much room of the packs is empty where that is much; where nobody knows how much they hold, how much of them is padding."""
    if packing is None:
        return []
    fill, padding = packing["fill"], packing["padding"]
    if fill is not None:
        return [f"Packs are only {100 * fill:.0f} % full."] if fill < 1 - _EMPTY_SHARE else []
    return [f"{100 * padding:.0f} % of the tokens in the packs are padding."] if padding > _EMPTY_SHARE else []


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {noun if number == 1 else plural}"
