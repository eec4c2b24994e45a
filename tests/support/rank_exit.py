"""One rank of a test: ``-m tests.support.rank_exit <limit in seconds> <module> <arguments>`` runs the module, with an
end in every case.

A rank that is still there at the limit writes the Python stacks of all its threads to stderr and exits with 1; no lock
of the interpreter stops that.
"""

import faulthandler
import gc
import runpy
import sys

import torch


def leave():
    """Leave the process group before the interpreter is finalised: its threads drop tensors that Python made, and
    must not do so after that.
    """
    if torch.distributed.is_initialized():
        # What holds the group in a circle, as DistributedDataParallel does.
        gc.collect()
        torch.distributed.destroy_process_group()


def main(limit_s, module, *arguments):
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
