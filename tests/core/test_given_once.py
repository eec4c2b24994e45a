"""GivenOnce: a Trainer that has one of our callbacks twice is refused by name, before a step and before data is read."""

import pytest
from lightning.pytorch.callbacks import Callback, ProgressBar

import lightning_fastft
from lightning_fastft import GenerateSamples, RunReport
from lightning_fastft.core.errors import OptionError
from lightning_fastft.strategies.registry import register_strategies
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama

register_strategies()

CALLBACKS = [
    kind
    for kind in (getattr(lightning_fastft, name) for name in lightning_fastft.__all__)
    if isinstance(kind, type) and issubclass(kind, Callback)
]


@pytest.mark.parametrize("kind", [kind for kind in CALLBACKS if not issubclass(kind, ProgressBar)])
@pytest.mark.parametrize("strategy", ["fastft", "auto"])
def test_a_callback_that_is_given_twice_is_refused_by_name(tmp_path, kind, strategy):
    given = [kind(["Say"]) if kind is GenerateSamples else kind() for _ in range(2)]
    trainer = quiet_trainer(tmp_path, strategy=strategy, callbacks=given)
    with pytest.raises(OptionError, match=rf"^{kind.__name__} is given 2 times") as refused:
        trainer.fit(PlainModule(tiny_llama()), packed_loader())
    assert all(word in str(refused.value) for word in ("command line", "config", "init_args", "YAML"))
    assert trainer.global_step == 0
    assert not list(tmp_path.rglob("run_report*"))


def test_a_subclass_counts_as_its_class(tmp_path):
    class OwnReport(RunReport):
        pass

    trainer = quiet_trainer(tmp_path, callbacks=[RunReport(), OwnReport()])
    with pytest.raises(OptionError, match="RunReport is given 2 times"):
        trainer.fit(PlainModule(tiny_llama()), packed_loader())
