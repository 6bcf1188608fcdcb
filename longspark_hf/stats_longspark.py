"""What one `generate` call did, in numbers."""

import time
from dataclasses import dataclass, field

import torch


@dataclass
class LongSparkStats:
    r"""
    What one `generate` call did.

    Args:
        rounds (`int`): Verification passes after the prefill, counted for each sequence of a batch that took part.
        tokens (`int`): Tokens committed in those rounds; the token that follows from the prefill is not counted.
        accepted_by_position (`list[int]`): How many rounds kept the draft token at each position of the block.
        prefill_seconds, draft_seconds, verify_seconds (`float`): Wall clock of the phases.
        state_bytes (`int`): Size of the drafter's state.
        transferred_bytes (`int`):
            Between target and drafter, where the drafter is on a device of its own: views, drafts and their logits.
    """

    rounds: int = 0
    tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    state_bytes: int = 0
    transferred_bytes: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens committed per round (τ in the paper); 0 when there was no round."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def count_round(self, committed: int, accepted: int | None = None) -> None:
        """
        Record a round that committed `committed` tokens: accepted drafts and, unless one of them ended the sequence, one of the
        target's own. `accepted` counts the drafts where that is known.
        """
        self.rounds += 1
        self.tokens += committed
        for position in range(committed - 1 if accepted is None else accepted):
            self.accepted_by_position[position] += 1


class PhaseClock:
    """
    Wall clock of the phases of a call, by events on a GPU, so that measuring waits for nothing.

    Args:
        device (`torch.device`): Where the phases run.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def mark(self, phase: str) -> None:
        """Say which phase ended now."""
        if not self.on_gpu:
            self._marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def seconds(self) -> dict[str, float]:
        """Sums by phase. Waits for the device."""
        sums: dict[str, float] = {}
        if self.on_gpu and self._marks:
            self._marks[-1][1].synchronize()
        for (_, before), (phase, now) in zip(self._marks, self._marks[1:]):
            seconds = 1e-3 * before.elapsed_time(now) if self.on_gpu else now - before
            sums[phase] = sums.get(phase, 0.0) + seconds
        return sums
