"""GivenOnce: a mixin of the callbacks of which a Trainer takes one each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_fastft.core.errors import OptionError


class GivenOnce:
    """Refuse, in ``setup``, a Trainer that has a second callback of this class or of a subclass.

    Two of a kind would swap the same modules, log the same metrics or write the same files.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the callbacks of the Trainer.

        Raises:
            OptionError: The callback is given more than once.
        """
        self.check_given_once(getattr(trainer, "callbacks", ()))
        # The class behind this one in the bases is a callback.
        super().setup(trainer, pl_module, stage)  # type: ignore[misc]

    def check_given_once(self, callbacks: Iterable[object]) -> None:
        """Check these callbacks, of which this is one.

        Raises:
            OptionError: The callback is given more than once.
        """
        kind = type(self)
        num_given = sum(isinstance(other, kind) for other in callbacks)
        if num_given > 1:
            raise OptionError(
                f"{kind.__name__} is given {num_given} times, and a Trainer takes one. --trainer.callbacks+= on the "
                "command line adds to the callbacks of the config and changes none of them. Give it once; to change an "
                "option of the one in the config, set it under its init_args in the YAML of your own config (a copy: "
                "fastft fit --config NAME --print_config > mine.yaml)."
            )
