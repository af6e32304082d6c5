"""`python -m surefoot.demo.child PARENT_PID ARGUMENTS…`: `surefoot ARGUMENTS…`, which ends when the demo does.

The kernel is told to kill this process when the demo that started it is gone, even by SIGKILL. It is told from here,
since code that runs between fork and exec is not safe in a parent with threads.
"""

from __future__ import annotations

import sys

from surefoot.checkpoint.processes import die_with_parent
from surefoot.cli import main

if __name__ == "__main__":
    die_with_parent(int(sys.argv.pop(1)))
    main()
