"""Memory of this process."""

import re
import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes. On Linux it is that of the program itself: the usual
    count also holds what the parent had when it started it.
    """
    if STATUS.is_file() and (found := re.search(r"^VmHWM:\s*(\d+) kB", STATUS.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
