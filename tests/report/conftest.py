"""A dump on disk for the tests of reports."""

import pytest
from written_dump import make_record

from stof_compile.dump import Record, write_dump


@pytest.fixture
def record() -> Record:
    return make_record()


@pytest.fixture
def dump(tmp_path, record):
    """Folder of a dump with one graph."""
    write_dump(record, tmp_path / "dump")
    return tmp_path / "dump"
