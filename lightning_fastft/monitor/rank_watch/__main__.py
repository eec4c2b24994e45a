"""Start the watchdog process of a rank."""

import sys
from pathlib import Path
from types import ModuleType

# A bare package, because lightning_fastft/__init__.py loads torch.
package = ModuleType("lightning_fastft")
package.__path__ = [str(Path(__file__).parents[2])]
sys.modules[package.__name__] = package

from lightning_fastft.monitor.rank_watch.watch import main  # noqa: E402 - needs the package above

if __name__ == "__main__":
    main(sys.argv[1])
