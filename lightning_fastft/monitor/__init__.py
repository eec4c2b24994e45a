"""Watch a run: report and its pages, host-sync tracing, throughput, progress bar, watchdog process.

Hooks of a Trainer enter; numbers, pages and warnings leave. Nothing here changes a step. Each callback has a module of
its name; the process behind the callback ``Watchdog`` is in ``rank_watch``. Read ``run_report`` first.
"""
