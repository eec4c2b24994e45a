"""Parts of the run report: measurements, their evaluation, and the page.

``record`` holds the measurements of a run, which ``timing``, ``losses``, ``sums`` and ``step_profile`` collect;
``waits`` traces host syncs, which ``sync_calls`` knows. ``content`` turns them into plain values, with ``facts``,
``findings`` and ``verdict``; ``page``, ``charts`` and ``drawing`` render them, in the ``style`` of all pages.
``comparison`` is the page of ``fastft report``. Read ``content`` first.
"""
