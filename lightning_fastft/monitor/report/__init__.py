"""Parts of the run report: measurements, their evaluation, and the page.

``record`` holds the measurements of a run, which ``timing``, ``losses``, ``sums`` and ``copies`` collect; ``waits``
traces host syncs, which ``sync_calls`` knows. ``content`` turns them into plain values, with ``facts``, ``findings``
and ``verdict``; ``page`` and ``drawing`` render them. Read ``content`` first.
"""
