"""``python -m stof_compile.cli``: the command ``stof`` where no script is installed."""

import sys

from stof_compile.cli import main

sys.exit(main())
