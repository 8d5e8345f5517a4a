"""What test processes that work side by side share."""

import json
import os

from filelock import FileLock


def only_once(tmp_path_factory, name, run):
    """A folder of this test run, and what ``run`` of it returned, as JSON keeps it.

    It is called by the first process that asks.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        said = folder / "said.json"
        if not said.exists():
            said.write_text(json.dumps(run(folder)))
        return folder, json.loads(said.read_text())
