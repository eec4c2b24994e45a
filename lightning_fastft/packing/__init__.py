"""Turn files into packed batches.

Rows of files, data sets or memory enter; a ``PackedBatch`` with its ``BatchContext`` leaves. In order: ``sources``
opens, ``rows`` and ``formats`` judge and tokenise (``pipeline`` in processes), ``cache`` and ``dataset`` hold tokens,
``planner`` shares packs out, ``stream`` reads them in a thread, ``collate`` builds a batch. Read ``context`` first.
"""
