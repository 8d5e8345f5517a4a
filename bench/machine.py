"""Conditions of a measurement: device, versions, date. Every row carries them."""

from __future__ import annotations

import datetime
import importlib.metadata
import subprocess
from pathlib import Path

import torch
from roofline import device_name


def version_of(package: str) -> str:
    """Installed version of a package, ``-`` when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def revision() -> str:
    """Commit of the checkout, ``-`` outside one; ``+`` marks uncommitted changes."""
    folder = Path(__file__).resolve().parent
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "-"


def conditions(device: torch.device) -> dict[str, str]:
    """The condition columns of a row."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "stof": f"{version_of('stof-compile')} {revision()}",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
    }
