"""Reading a dump for a report, with errors that say what is wrong, where, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stof_compile.dump import Record, dump_folders, read_record
from stof_compile.errors import StofPlanError
from stof_compile.report.graph import lacks_its_end
from stof_compile.typed_json import problem_told, read_json

MEASURED = "as bench/ writes it beside its CSV (`stof bench ceilings` measures one)"


@dataclass(frozen=True)
class Ceilings:
    """What the device can do at most, as ``bench/`` measures it.

    Args:
        copy_tb_s: TB/s, read and written. matmul_tflops: TFLOP/s of a large matrix product.
    """

    copy_tb_s: float
    matmul_tflops: float

    def floor_us(self, flops: float, nbytes: float) -> float:
        """Microseconds below which no kernel that moves and computes so much can be."""
        return max(nbytes / self.copy_tb_s / 1e6, flops / self.matmul_tflops / 1e6)


def load_dump(path: Path, graphs: bool = False) -> list[Record]:
    """Read all graphs of a dump.

    Args:
        path: folder given as ``dump_dir``, one of its graph folders, or a record.json.
        graphs: their texts are read, too, so these have to be whole.
    Raises:
        StofPlanError: there is no dump, or a record is damaged or of another version, or the text
            of a graph was cut off.
    """
    if path.name == "record.json":
        path = path.parent
    if not path.exists():
        raise StofPlanError(
            f"{path}: no such folder, so it holds no dump; give the folder that "
            "options={'dump_dir': ...} named"
        )
    if not path.is_dir():
        raise StofPlanError(
            f"{path} is a file, so it holds no dump; give the folder that "
            "options={'dump_dir': ...} named, or its graph_<n>_<hash>"
        )
    folders = dump_folders(path)
    if not folders:
        raise StofPlanError(
            f"{path} holds no dump: neither a record.json nor a folder graph_<n>_<hash> with one; "
            "write a dump with options={'dump_dir': ...} and call the compiled model once"
        )
    records: list[Record] = []
    good: list[str] = []
    failures: list[StofPlanError] = []
    for folder in folders:
        try:
            record = read_record(folder)
            if graphs:
                _check_texts(record)
            records.append(record)
            good.append(str(folder))
        except StofPlanError as failure:
            failures.append(failure)
    if failures:
        message = str(failures[0].args[0])
        if good:
            message += f" (the other graphs are fine, read them one by one: {', '.join(good)})"
        raise StofPlanError(message)
    return records


def _check_texts(record: Record) -> None:
    for stage, text in record.graphs.items():
        found = lacks_its_end(text)
        if found:
            raise StofPlanError(
                f"{Path(record.folder) / stage}.py: the {stage} graph is cut off ({found}; a graph "
                "ends with the return of its forward()); restore the file or dump again"
            )


def load_ceilings(path: Path, records: list[Record]) -> Ceilings:
    """Read the ceilings of a device.

    Args:
        path: JSON with ``device``, ``copy_tb_s`` and ``matmul_tflops``, as a benchmark leaves it.
        records: of the dump; its device has to be that of the ceilings.
    Raises:
        StofPlanError: unreadable, incomplete, or of another device.
    """
    try:
        body = read_json(path.read_text(encoding="utf-8"))
        found = Ceilings(float(body["copy_tb_s"]), float(body["matmul_tflops"]))
        device = str(body["device"])
    except OSError as error:
        raise StofPlanError(
            f"--ceilings {path} cannot be read ({error.strerror or error}): name a file "
            f"*.ceilings.json, {MEASURED}"
        ) from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise StofPlanError(
            f"--ceilings {path} holds no ceilings ({problem_told(error)}): it has to be JSON with "
            f"device, copy_tb_s and matmul_tflops, {MEASURED}"
        ) from error
    if not (0 < found.copy_tb_s < float("inf") and 0 < found.matmul_tflops < float("inf")):
        raise StofPlanError(f"--ceilings {path}: rates are positive numbers, got {found}")
    for record in records:
        here = str(record.device.get("name", ""))
        if not here or not device.startswith(here):
            raise StofPlanError(
                f"--ceilings {path}: of {device!r}, the dump was made on {here!r}; measure the "
                "ceilings of that device"
            )
    return found
