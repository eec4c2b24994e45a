"""Random plans on small models, against the kept model and torch's own checkpoint: the body of the CPU tests and
of the GPU stream.
"""

import copy
import random

import torch

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.planner.step import SegmentPlan
from tests.support.engine_use import describe_use
from tests.support.packs import assert_close


class PlannedModel:
    """A model under OffloadCheckpointing("auto") that was measured once and then follows any plan it is given."""

    def __init__(self, model, batches, *, make_copy_streams=None, vram_budget=1000.0, buffers=2):
        self.model, self.batches = model, batches
        self.patcher = ModelPatcher()
        self.checkpointing = OffloadCheckpointing("auto", vram_budget=vram_budget, host_budget=1.0, buffers=buffers)
        install_packed_training(model, self.patcher, checkpointing=self.checkpointing)
        (self.stack,) = self.checkpointing.stacks
        self.stack.executor.is_poisoned = True
        if make_copy_streams is not None:
            self.stack.executor.make_copy_streams = make_copy_streams
        while self.stack.plan is None:
            self.gradients(1)
        self.device = next(model.parameters()).device

    @property
    def value_names(self):
        return [[value.name for value in segment.values] for segment in self.stack.cost.segments]

    def follow(self, plan):
        self.stack.follow(plan, device=self.device, cost=self.stack.cost)

    def gradients(self, num_accumulated):
        self.model.zero_grad(set_to_none=True)
        for batch in self.batches[:num_accumulated]:
            self.model(**batch).loss.backward()
        return read_gradients(self.model)

    def use(self):
        return None if self.stack.engine is None else describe_use(self.stack.engine)


def read_gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def kept_gradients(model, batches, num_accumulated, *, policy="keep"):
    model = copy.deepcopy(model)
    install_packed_training(
        model, ModelPatcher(), checkpointing=OffloadCheckpointing("keep") if policy == "keep" else None
    )
    if policy == "torch":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for batch in batches[:num_accumulated]:
        model(**batch).loss.backward()
    return read_gradients(model)


def random_plan(value_names, *, seed):
    """Any mixture: kept layers, inputs here or there, values held here, there or not at all."""
    rng = random.Random(seed)
    plan = []
    for names in value_names:
        if rng.random() < 0.2:
            plan.append(SegmentPlan(is_kept=True, input_place="device", values=()))
            continue
        places = [(name, rng.choice([None, "device", "host"])) for name in names]
        plan.append(
            SegmentPlan(
                is_kept=False,
                input_place=rng.choice(["device", "host", "host"]),
                values=tuple((name, place) for name, place in places if place is not None),
            )
        )
    return plan


def assert_near(found, expected):
    """Check gradients that differ by rounding only."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, bound=1e-5)


def assert_equal(found, expected, *, what):
    assert found.keys() == expected.keys(), what
    different = [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)]
    assert not different, f"{what}: {len(different)} of {len(expected)} gradients differ, for example {different[0]}"
