"""Two lanes on one device, timed fairly. Does not know: what a lane does while it holds the baton."""

import threading
import time


class Baton:
    """
    Lets one lane run at a time, always the one whose own clock is behind, and counts for each the seconds it ran.

    So both lanes advance side by side, neither runs beside the other, and waiting costs nothing on the clock.

    Args:
        lanes (`list[str]`): In the order in which they begin.
    """

    def __init__(self, lanes: list[str]):
        self.seconds = dict.fromkeys(lanes, 0.0)
        self._running = list(lanes)
        self._holder: str | None = None
        self._since = 0.0
        self._changed = threading.Condition()

    def take(self, lane: str) -> None:
        """Wait for the turn of `lane`, then start its clock."""
        with self._changed:
            self._changed.wait_for(lambda: self._holder is None and self._next() == lane)
            self._holder, self._since = lane, time.perf_counter()

    def put_down(self, lane: str) -> float:
        """Stop the clock of `lane`; returns its seconds so far. Without the baton it does nothing."""
        with self._changed:
            if self._holder == lane:
                self.seconds[lane] += time.perf_counter() - self._since
                self._holder = None
                self._changed.notify_all()
            return self.seconds[lane]

    def elapsed(self, lane: str) -> float:
        """Seconds of `lane` so far, its turn that goes on included."""
        with self._changed:
            running = time.perf_counter() - self._since if self._holder == lane else 0.0
            return self.seconds[lane] + running

    def leave(self, lane: str) -> None:
        """`lane` is done, or failed: the other one goes on alone."""
        self.put_down(lane)
        with self._changed:
            if lane in self._running:
                self._running.remove(lane)
            self._changed.notify_all()

    def _next(self) -> str | None:
        return min(self._running, key=self.seconds.__getitem__, default=None)
