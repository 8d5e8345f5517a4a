"""The record of one compiled graph: what was found, chosen and why, as text and JSON.

The backend fills a :class:`Record` while it works; ``explain`` prints it, :func:`write_dump` puts
it on disk. Everything in it is plain data, so that a record outlives tensors and graphs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from stof_compile.dump_text import summary_of
from stof_compile.errors import StofPlanError
from stof_compile.plan import AttentionPlan, ChainPlan, PackPlan
from stof_compile.typed_json import built, part, problem_told, read_json

STAGES = ("captured", "normalized", "rewritten")
FORMAT = 1


@dataclass
class _Picture:
    """``masks.tile_map``, to check one that was read."""

    tiles: list[int]
    block: list[int]
    planes: int
    cells: list[str]


@dataclass
class SiteRecord:
    """One place where attention was found, and what became of it.

    Args:
        name: module path of the site, root-relative.
        form: how it was written: "sdpa", "softmax", "flex" or "stof".
        status: "rewritten", or "kept" (left to PyTorch, the reason stands in ``notes``).
        kernel: what runs there: the chosen kernel, or "sdpa" / "softmax" when kept.
        source: the user's line of code.
        shape: batch, q_heads, kv_heads, q_len, k_len, head_dim, dtype.
        mask: the mask in words, for instance "bigbird(window=32, ...) & padding".
        statistics: of the block mask: density, full_tiles, part_tiles, empty_tiles, ...
        choice: the decision with its candidates, None when nothing was to be decided.
        notes: reasons and remarks.
        picture: of its mask in ``Record.pictures``, "" where there is none.
    """

    name: str
    form: str
    status: str
    kernel: str
    source: str = ""
    shape: dict[str, Any] = field(default_factory=dict)
    mask: str = "none"
    statistics: dict[str, Any] = field(default_factory=dict)
    choice: AttentionPlan | None = None
    notes: list[str] = field(default_factory=list)
    picture: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The site as plain JSON values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SiteRecord:
        """Rebuild a site from its JSON form."""
        return built(SiteRecord, data)


@dataclass
class Record:
    """What STOF did with one graph.

    Args:
        versions: of Python, torch, triton and stof-compile.
        device: ``DeviceFacts.to_json()``.
        options: ``StofOptions.to_json()``.
        sites: every attention site.
        near_misses: {"name", "node", "reason"}: looked like attention and was not taken.
        fallbacks: {"where", "reason"}: left to PyTorch.
        masked: names of sites and near misses that take the option's mask.
        mask_paths: path of the option's mask -> names of the sites it matched in this graph.
        graphs: stage ("captured", "normalized", "rewritten") -> readable Python.
        timings_s: step -> seconds spent in the backend.
        chains: schemes of the op chains, one entry for equal chains.
        packs: projections that share an input, one entry for equal groups.
        notes: remarks on the whole graph.
        pictures: name -> tiles of a mask (``masks.tile_map``), one for equal masks.
        folder: where the dump was written, or is read from; "" while it is nowhere.
    """

    versions: dict[str, str] = field(default_factory=lambda: versions())
    device: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sites: list[SiteRecord] = field(default_factory=list)
    near_misses: list[dict[str, str]] = field(default_factory=list)
    fallbacks: list[dict[str, str]] = field(default_factory=list)
    masked: list[str] = field(default_factory=list)
    mask_paths: dict[str, list[str]] = field(default_factory=dict)
    graphs: dict[str, str] = field(default_factory=dict)
    timings_s: dict[str, float] = field(default_factory=dict)
    chains: list[ChainPlan] = field(default_factory=list)
    packs: list[PackPlan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pictures: dict[str, dict[str, Any]] = field(default_factory=dict)
    folder: str = ""

    @property
    def changes_function(self) -> bool:
        """Whether the option's mask makes the result differ from the model as written."""
        return bool(self.masked)

    def add_near_miss(self, name: str, node: str, reason: str) -> None:
        """Note something that looked like attention and was not taken."""
        self.near_misses.append({"name": name, "node": node, "reason": reason})

    def add_fallback(self, where: str, reason: str) -> None:
        """Note a part that is left to PyTorch."""
        self.fallbacks.append({"where": where, "reason": reason})

    def to_json(self) -> str:
        """The record as indented JSON, without the graphs (they are files of their own)."""
        body = dataclasses.asdict(self)
        del body["graphs"]
        body["changes_function"] = self.changes_function
        return json.dumps({"format": FORMAT, **body}, indent=1)

    @staticmethod
    def from_json(
        text: str, graphs: Mapping[str, str] | None = None, where: str = "record"
    ) -> Record:
        """Rebuild a record; fields that an older STOF did not write are empty.

        Args:
            text: of record.json. graphs: stage -> text. where: names the record in errors.
        Raises:
            StofPlanError: the text is no record of this version.
        """
        try:
            body = read_json(text)
            found = body.pop("format")
            strange = sorted(set(body) - {f.name for f in dataclasses.fields(Record)})
            strange = [name for name in strange if name != "changes_function"]
            if found != FORMAT or strange:
                what = f"unknown fields {strange}" if found == FORMAT else f"format {found!r}"
                made = dict(body.get("versions") or {}).get("stof-compile", "unknown")
                raise StofPlanError(
                    f"{where}: the record was written by another version of STOF ({what}, "
                    f"stof-compile {made}); this one reads format {FORMAT}: read it with the STOF "
                    "that wrote it, or dump again"
                )
            for name in ("sites", "chains", "packs"):  # which every STOF has written
                part(body, name, list)
            if body.pop("changes_function", False) and "masked" not in body:  # written before it
                body["masked"] = [part(site, "name", str) for site in body["sites"]]
            record = built(Record, {**body, "graphs": dict(graphs or {})})
            for site in record.sites:
                density = site.statistics.get("density", 1.0)
                if not isinstance(density, (int, float)):
                    raise TypeError(f"density of {site.name} is {density!r}, which is no float")
            for name, picture in record.pictures.items():
                built(_Picture, picture, f"pictures[{name}]")
            return record
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, StofPlanError):
                raise
            raise StofPlanError(
                f"{where}: not a record of STOF ({problem_told(error)}): it is damaged or "
                "something else; restore the file or dump again"
            ) from error

    def summary(self) -> str:
        """The record for people: one line per site, then decisions, misses and fallbacks."""
        return summary_of(self)


def versions() -> dict[str, str]:
    """Versions of everything a decision depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "stof-compile"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def graph_text(gm: torch.fx.GraphModule) -> str:
    """A graph as readable Python, shapes and dtypes beside each value."""
    text: str = gm.print_readable(print_output=False)
    return text


def write_dump(record: Record, dump_dir: Path) -> Path:
    """Write a record as ``<dump_dir>/graph_<n>_<hash>/``.

    The folder appears complete or not at all. The hash names what was compiled (captured graph,
    options, device), so that running the same program again replaces its own folders.
    Returns:
        The folder, which ``record.folder`` names too.
    """
    dump_dir = Path(dump_dir)
    dump_dir.mkdir(parents=True, exist_ok=True)
    identity = json.dumps([record.graphs.get("captured"), record.options, record.device])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    with FileLock(dump_dir / ".lock"):
        folder = _folder_for(dump_dir, digest)
        record.folder = str(folder)
        temporary = Path(tempfile.mkdtemp(dir=dump_dir, prefix=".new-"))
        try:
            for stage in STAGES:
                if stage in record.graphs:
                    text = f"# {stage} graph\n{record.graphs[stage].strip()}\n"
                    (temporary / f"{stage}.py").write_text(text, encoding="utf-8")
            (temporary / "record.json").write_text(record.to_json() + "\n", encoding="utf-8")
            (temporary / "summary.txt").write_text(record.summary(), encoding="utf-8")
            temporary.chmod(0o755)  # mkdtemp makes it private
            if folder.exists():
                old = Path(tempfile.mkdtemp(dir=dump_dir, prefix=".old-"))
                os.replace(folder, old / folder.name)
                os.replace(temporary, folder)
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def read_dump(dump_dir: Path) -> list[Record]:
    """Read all records below ``dump_dir`` (or the one of a single graph folder), in order.

    Raises:
        StofPlanError: a record is malformed.
    """
    return [read_record(folder) for folder in dump_folders(dump_dir)]


def dump_folders(dump_dir: Path) -> list[Path]:
    """The folders of single graphs in a dump, in order; itself where it is one."""
    dump_dir = Path(dump_dir)
    return [dump_dir] if (dump_dir / "record.json").is_file() else _graph_folders(dump_dir)


def read_record(folder: Path) -> Record:
    """Read the folder of one graph.

    Raises:
        StofPlanError: it cannot be read or is malformed.
    """
    file = folder / "record.json"
    stages = {stage: folder / f"{stage}.py" for stage in STAGES}
    graphs = {stage: _text(path) for stage, path in stages.items() if path.is_file()}
    record = Record.from_json(_text(file), graphs, where=str(file))
    record.folder = str(folder)  # a dump may have been moved
    return record


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StofPlanError(
            f"{file}: cannot be read ({error}); restore the file or dump again"
        ) from error


def _graph_folders(dump_dir: Path) -> list[Path]:
    found = []
    for folder in dump_dir.glob("graph_*"):
        match = re.fullmatch(r"graph_(\d+)_[0-9a-f]{8}", folder.name)
        if match and (folder / "record.json").is_file():
            found.append((int(match.group(1)), folder))
    return [folder for _, folder in sorted(found)]


def _folder_for(dump_dir: Path, digest: str) -> Path:
    folders = _graph_folders(dump_dir)
    for folder in folders:
        if folder.name.endswith(f"_{digest}"):
            return folder
    last = int(folders[-1].name.split("_")[1]) if folders else -1
    return dump_dir / f"graph_{last + 1}_{digest}"
