"""`python -m surefoot.demo.child PID ARGUMENTS…`: `surefoot ARGUMENTS…`, killed by the kernel when process PID is gone.

The kernel is told from here, since code between fork and exec is not safe in a parent with threads."""

import sys

from surefoot.checkpoint.processes import die_with_parent
from surefoot.cli import main

if __name__ == "__main__":
    die_with_parent(int(sys.argv.pop(1)))
    main()
