"""A small schedule-free optimizer with the conventions of the package schedulefree."""

import torch


class ScheduleFreeSGD(torch.optim.Optimizer):
    """SGD whose parameters are at y in training and at the average x in evaluation (arXiv 2405.15682)."""

    def __init__(self, params, lr=0.1, beta=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self):
        self._move(is_train=False)

    @torch.no_grad()
    def train(self):
        self._move(is_train=True)

    def _move(self, *, is_train):
        for group in self.param_groups:
            weight = 1 - group["beta"] if is_train else 1 - 1 / group["beta"]
            for parameter in group["params"] if group["train_mode"] is not is_train else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = is_train

    @torch.no_grad()
    def step(self, closure=None):
        # As the package raises it.
        if not self.param_groups[0]["train_mode"]:
            raise Exception("Optimizer was not in train mode when step is called.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["k"] += 1
            share = 1 / group["k"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, share)
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])
        return loss
