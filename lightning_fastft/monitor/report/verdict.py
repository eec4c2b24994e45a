"""The verdict on a run in a few sentences, from the data of its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fastft.core.errors import count

# Shares worth a sentence: of the time between micro-batches, and of the unused room in packs.
_DATA_SHARE = 0.1
_EMPTY_SHARE = 0.1
# What PolicyTuner logs.
_REWARD = "train_reward"


def judge(data: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return ("good", "warn" or "bad", sentences); the first sentence says how the run ended."""
    outcome, head = data["outcome"], data["head"]
    bad: list[str] = []
    warn: list[str] = []
    good: list[str] = []
    finished = good if head["num_steps"] else warn
    {"finished": finished, "stopped": warn, "interrupted": warn}.get(outcome["state"], bad).append(_describe_end(data))
    num_not_finite = data["curves"]["loss"]["num_not_finite"]
    if num_not_finite:
        bad.append(f"The loss was not finite in {count(num_not_finite, 'micro-batch')}.")
    bad += [
        f"{metric['name']} was not finite in {count(metric['num_not_finite'], 'validation')}."
        for metric in (data["validation"] or {"metrics": ()})["metrics"]
        if metric["num_not_finite"]
    ]
    reward = _find_reward(data)
    first, final = (head["first_loss"], head["final_loss"]) if reward is None else (reward["first"], reward["final"])
    if first is not None and final is not None and head["num_steps"] > 1:
        # The loss of a policy says nothing: its advantages sum to 0 in every group.
        name, verb, is_better = ("loss", "fall", final < first) if reward is None else ("reward", "rise", final > first)
        how = {"fall": "fell", "rise": "rose"}[verb] if is_better else f"did not {verb}: it went"
        means = _describe_means(head, first_step=reward is None)
        (good if is_better else warn).append(f"The {name} {how} from {_describe_change(first, final)} {means}.")
    refused = [status["name"] for status in data["statuses"] if status["state"] == "refused"]
    if refused:
        warn.append(f"Refused: {', '.join(refused)}; the table says why and what to do.")
    # Logged steps are few; only the table has their syncs.
    per_step = sum(row["per_step"] for row in data["waits"].get("rows", ()) if not row["is_logging"])
    if per_step:
        times = f"{per_step:g} {'time' if per_step == 1 else 'times'} a {head['unit']}"
        warn.append(
            f"{'On a GPU the host would wait' if data['waits']['is_prediction'] else 'The host waited'} {times}; the "
            "table names the lines."
        )
    between = next((part["share"] for part in data["times"]["parts"] if part["kind"] == "between"), 0.0)
    if between > _DATA_SHARE:
        warn.append(f"{100 * between:.0f} % of the time passed between micro-batches (data, transfer, logging).")
    warn += _judge_packs(data["packing"])
    if data["profile"]["step"] is not None and data["profile"]["copy_ms"]:
        good.append(
            f"{100 * data['profile']['hidden_share']:.0f} % of the copy time of the profiled step was hidden under "
            "compute."
        )
    level = "bad" if bad else "warn" if warn else "good"
    # The sentence on the end of the run comes first.
    first_good = good[:1] if outcome["state"] == "finished" else []
    return level, [*first_good, *bad, *warn, *good[len(first_good) :]]


def summarize(data: Mapping[str, Any]) -> str:
    """Return one line for the end of a run: steps, loss, speed, and where the weights are."""
    head = data["head"]
    parts = [count(head["num_steps"], "optimizer step")]
    if data["resumed"]:
        parts[0] += f" ({data['resumed']['step']:,} to {head['last_step']:,})"
    reward = _find_reward(data)
    if reward is not None and reward["first"] is not None:
        means = _describe_means(head, first_step=False)
        parts.append(f"reward {_describe_change(reward['first'], reward['final'])} {means}")
    elif head["first_loss"] is not None and head["final_loss"] is not None:
        parts.append(f"loss {_describe_change(head['first_loss'], head['final_loss'])} {_describe_means(head)}")
    if head["tokens_per_s"] is not None:
        parts.append(f"{head['tokens_per_s']:,.0f} tokens/s")
    stop = data["outcome"]["stop"]
    checkpoints = data["checkpoints"] | ({"last": stop["checkpoint"]} if stop else {})
    parts += [f"{kind} checkpoint {path}" for kind, path in checkpoints.items()]
    return "; ".join(parts)


def _describe_end(data: Mapping[str, Any]) -> str:
    """Return how the run ended, after how many steps, and where it began if not at step 0."""
    outcome, resumed, head = data["outcome"], data["resumed"], data["head"]
    steps = count(head["num_steps"], "optimizer step")
    ends = {"finished": "finished", "stopped": "was stopped", "interrupted": "was interrupted"}
    end = ends.get(outcome["state"], "failed")
    stop = outcome["stop"]
    if stop is not None:
        end += f" by {stop['signal']}"
    if resumed is None:
        text = f"The run {end} after {steps}"
    else:
        source = f" (checkpoint {resumed['checkpoint']})" if resumed["checkpoint"] else ""
        text = (
            f"The run went on from step {resumed['step']:,}{source} to {head['last_step']:,}, and {end} after {steps}"
        )
    if stop is not None:
        return (
            f"{text}; saved at {stop['checkpoint']}; go on with --ckpt_path {stop['checkpoint']} (in Python: "
            "ckpt_path= of fit)."
        )
    return f"{text}." if outcome["state"] == "finished" else f"{text}; this is what is known so far."


def _find_reward(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the rewards of sampled completions; None for a run that has none."""
    return next((values for values in data["logged"] if values["name"] == _REWARD), None)


def _describe_change(first: float, final: float) -> str:
    """Return two values with as many digits as tell them apart: 4 to 7."""
    texts = ((f"{first:.{digits}g}", f"{final:.{digits}g}") for digits in range(4, 8))
    one, other = next((pair for pair in texts if pair[0] != pair[1]), (f"{first:.4g}", f"{final:.4g}"))
    return f"{one} to {other}"


def _describe_means(head: Mapping[str, Any], *, first_step: bool = True) -> str:
    """Return of how many steps the first and the final value are means, and the loss of the first step."""
    number, unit = head["num_loss_steps"], head["unit"]
    if number == 1:
        return f"(the first and the last {unit})"
    alone = f"; the first {unit} alone {head['first_step_loss']:.4g}" if first_step else ""
    return f"(means of the first {number} and the last {count(number, unit)}{alone})"


def _judge_packs(packing: Mapping[str, Any] | None) -> list[str]:
    """Return a sentence if much of the packs is empty, unless fewer packs could not hold the tokens.

    If max_tokens is not known, the sentence is about the share of padding.
    """
    if packing is None:
        return []
    fill, padding = packing["fill"], packing["padding"]
    if fill is not None:
        if fill >= 1 - _EMPTY_SHARE or packing["limit"] == "tokens":
            return []
        cause = (
            f": no more of the documents fit into one of {packing['max_tokens']:,} tokens. Another max_tokens may be "
            "filled better."
        )
        return [f"Packs are only {100 * fill:.0f} % full{cause if packing['limit'] == 'documents' else '.'}"]
    return [f"{100 * padding:.0f} % of the tokens in the packs are padding."] if padding > _EMPTY_SHARE else []
