"""A run's page: one HTML file that needs no network, no scripts and no torch.

Works on a run that is live, ended, killed or empty; curves are drawn as they were logged, with
non-finite values as gaps that a note names.
"""

from __future__ import annotations

from tradewind.report.page import write_report

__all__ = ["write_report"]
