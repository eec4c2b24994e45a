"""Parts of the run report: measurements, their evaluation, and the page.

``timing``, ``losses`` and ``copies`` collect, ``waits`` traces host syncs, ``findings`` and ``verdict`` evaluate,
``page`` and ``drawing`` render. Read ``verdict`` first.
"""
