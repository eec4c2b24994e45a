"""Turn files into packed batches.

The input is rows of files, data sets or memory; the output is a ``PackedBatch`` with its ``BatchContext``. A row passes
these places in order: ``reading`` opens files, ``rows`` validates rows, ``tokens`` tokenises them (in worker processes
if asked), ``store`` keeps the tokens, ``packs`` groups documents (``windows`` those of a stream), ``step_plan`` assigns
packs to ranks, ``loader`` reads them in a thread, ``collate`` builds a batch. Read ``document`` and ``context`` first.
"""
