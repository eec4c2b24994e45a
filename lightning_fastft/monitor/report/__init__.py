"""Parts of the run report: what is measured, what is found in it, and the page that shows it.

``timing``, ``losses`` and ``copies`` collect, ``waits`` traces host syncs, ``findings`` and ``verdict`` judge, ``page``
and ``drawing`` render. Read ``verdict`` first.
"""
