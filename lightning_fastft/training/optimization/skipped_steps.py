"""Counts of the steps that a guard skipped, kept on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Cohort:
    """Parameters that were in the same guarded steps, and the number of these that were skipped.

    The number is on the device: shape (), float64.
    """

    def __init__(self, num_skipped: torch.Tensor, *, num_params: int) -> None:
        self.num_skipped = num_skipped
        self.num_params = num_params


class SkippedSteps:
    """Count skipped steps for each parameter without a host sync, until the counts are taken."""

    def __init__(self) -> None:
        self._cohorts: dict[torch.Tensor, Cohort] = {}

    def cohort_of(self, param: torch.Tensor) -> Cohort | None:
        """Return the cohort of a parameter; None if it was in no guarded step."""
        return self._cohorts.get(param)

    def join(self, params: Sequence[torch.Tensor]) -> Cohort:
        """Return the cohort of parameters that were together so far.

        Parameters that take part in a step without the others of their cohort leave it, with its count.
        """
        cohort = self._cohorts.get(params[0])
        if cohort is None:
            cohort = Cohort(torch.zeros((), dtype=torch.float64, device=params[0].device), num_params=len(params))
        elif cohort.num_params != len(params):
            cohort.num_params -= len(params)
            cohort = Cohort(cohort.num_skipped, num_params=len(params))
        self._cohorts.update(dict.fromkeys(params, cohort))
        return cohort

    def take(self) -> list[tuple[torch.Tensor, float]]:
        """Return each parameter with its skipped steps, and start from 0.

        Cost:
            One host sync where steps were guarded.
        """
        cohorts = list(dict.fromkeys(self._cohorts.values()))
        if not cohorts:
            return []
        num_skipped = dict(zip(cohorts, torch.stack([cohort.num_skipped for cohort in cohorts]).tolist()))
        counts = [(param, num_skipped[cohort]) for param, cohort in self._cohorts.items()]
        self._cohorts = {}
        return counts
