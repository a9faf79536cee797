"""Whether processes still work: the measure of a hang, which no busy machine can change.

A limit in seconds says more of the machine than of the test: processes that want two taken cores
take ten times as long. One that hangs computes nothing, however long it is given.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

WINDOW = 60  # seconds
LEAST = 1.0  # CPU seconds of all processes in a window; those that poll for each other use less


class Progress:
    """What processes compute, from when this is made.

    Args:
        pids: Processes; those that ended count with what they did while they were seen.
    """

    def __init__(self, pids: Sequence[int]):
        self._cpu_seconds = dict.fromkeys(pids, 0.0)
        self._seen = deque([(time.monotonic(), 0.0)])

    def has_stopped(self) -> bool:
        """Returns whether they computed next to nothing for a whole window; to be called often."""
        for pid, before in self._cpu_seconds.items():
            self._cpu_seconds[pid] = max(before, cpu_seconds(pid))
        now = time.monotonic()
        total = sum(self._cpu_seconds.values())
        self._seen.append((now, total))

        # The last look that is a window ago.
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW:
            self._seen.popleft()
        first, total_then = self._seen[0]
        return now - first >= WINDOW and total - total_then < LEAST


def cpu_seconds(pid: int) -> float:
    """Returns the user and system time of a process; 0 where the system does not tell it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
