"""A model of the hub, looked at or fetched into its cache."""

from __future__ import annotations

import logging

from sd_scripts.runs import downloads
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.tools import FetchSection

from .report import Report

log = logging.getLogger("sd_scripts")


def fetch(options: FetchSection) -> Report:
    """Fetches, or with look_only says what a fetch would bring. Raises OptionError."""
    hub_id, files, left = options.hub_id, options.fetch_files, options.leave_files
    if downloads.is_offline():
        raise OptionError(Problem("hub_id", "hub_id: HF_HUB_OFFLINE is set, so the hub is not asked; unset it to fetch models"))
    try:
        ahead = downloads.look_ahead(hub_id, files, left, options.fetch_revision)
    except downloads.TOLD as err:
        raise downloads.problem_of(err, "hub_id", hub_id, options.fetch_revision) from err
    lines = ahead.lines()
    values = {"files": ahead.num_files, "bytes": ahead.total, "missing": ahead.missing, "free": ahead.free, "licence": ahead.licence}
    if options.look_only:
        return Report(lines, {**values, "gated": ahead.is_gated, "commit": ahead.revision})
    for line in lines:
        log.info("%s", line)
    folder = downloads.fetched("hub_id", hub_id, files, left, options.fetch_revision, ahead)
    return Report([*lines, f"it lies in {folder}"], {**values, "gated": ahead.is_gated, "commit": ahead.revision, "folder": str(folder)})
