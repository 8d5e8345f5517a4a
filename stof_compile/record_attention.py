"""What became of a graph's attention, written into its record."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from stof_compile.attention.site import NearMiss
from stof_compile.attention.site_report import SiteReport
from stof_compile.dump import Record, SiteRecord
from stof_compile.errors import StofUnsupportedError
from stof_compile.options import StofOptions

logger = logging.getLogger("stof_compile")


def record_near_misses(near_misses: Sequence[NearMiss], opts: StofOptions, record: Record) -> None:
    """Note every near miss and log it.

    Raises:
        StofUnsupportedError: ``strict`` and there is one.
    """
    for miss in near_misses:
        record.add_near_miss(miss.name, miss.node.name, miss.reason)
        logger.info("%s is left to PyTorch: %s", miss.name, miss.reason)
        if opts.strict and opts.attention != "off":
            raise StofUnsupportedError(
                f"{miss.name} is left to PyTorch: {miss.reason} (strict=True; {miss.source})"
            )


def record_sites(reports: Sequence[SiteReport], record: Record) -> None:
    """Note every site; one that was not rewritten is a fallback."""
    for report in reports:
        record.sites.append(replace(_site_record(report), picture=_picture(report, record)))
        if report.status != "rewritten":
            record.add_fallback(report.name, report.reason)


def _picture(report: SiteReport, record: Record) -> str:
    """The name of its mask's picture in the record; equal masks share one."""
    if not report.tiles:
        return ""
    for name, tiles in record.pictures.items():
        if tiles == report.tiles:
            return name
    name = f"mask_{len(record.pictures)}"
    record.pictures[name] = report.tiles
    return name


def _site_record(report: SiteReport) -> SiteRecord:
    fp8 = f"fp8 is not used: {report.no_fp8}" if report.no_fp8 else ""
    return SiteRecord(
        name=report.name,
        form=report.form,
        status=report.status,
        kernel=report.kernel,
        source=report.source,
        shape=report.shape,
        mask=report.mask,
        statistics=report.statistics,
        choice=report.choice,
        notes=[note for note in (report.reason, fp8) if note],
    )
