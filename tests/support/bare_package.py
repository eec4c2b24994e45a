"""Importing this lets the kernels be imported alone: the package's own start, which takes longer than torch,
brings Lightning for the strategies.
"""

import sys
from importlib.util import find_spec, module_from_spec

# The package with its folders, and nothing run: what is in no folder of it is not there.
sys.modules.setdefault("lightning_fastft", module_from_spec(find_spec("lightning_fastft")))
