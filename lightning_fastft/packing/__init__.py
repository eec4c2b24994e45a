"""Turn files into packed batches.

The input is rows of files, data sets or memory; the output is a ``PackedBatch`` with its ``BatchContext``. The modules
run in this order: ``sources`` opens files, ``rows`` and ``formats`` validate and tokenise rows (``pipeline`` does so in
worker processes), ``cache`` and ``dataset`` store tokens, ``planner`` assigns packs to ranks, ``stream`` reads them in
a thread, ``collate`` builds a batch. Read ``context`` first.
"""
