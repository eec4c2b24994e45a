"""Watch a run: report and its pages, host-sync tracing, throughput, progress bar, watchdog process.

Hooks of a Trainer enter; numbers, pages and warnings leave. Nothing here changes a step. Read ``run_report`` first.
"""
