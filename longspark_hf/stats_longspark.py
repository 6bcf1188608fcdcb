"""What one `generate` call did, in numbers."""

from dataclasses import dataclass, field


@dataclass
class LongSparkStats:
    r"""
    What one `generate` call did.

    Args:
        rounds (`int`): Verification passes after the prefill.
        tokens (`int`): Tokens committed in those rounds; the token that follows from the prefill is not counted.
        accepted_by_position (`list[int]`): How many rounds kept the draft token at each position of the block.
        prefill_seconds, draft_seconds, verify_seconds (`float`): Wall clock of the phases.
        state_bytes (`int`): Size of the drafter's state.
    """

    rounds: int = 0
    tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    state_bytes: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens committed per round (τ in the paper); 0 when there was no round."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def count_round(self, committed: int) -> None:
        """Record a round that committed `committed` tokens: accepted drafts and one of the target's own."""
        self.rounds += 1
        self.tokens += committed
        for position in range(committed - 1):
            self.accepted_by_position[position] += 1
