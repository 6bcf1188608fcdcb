"""How many tokens to draft in the next round of a call.

Knows: the user's cap, how often each position was accepted and what rounds of each length took, in this call.
Does not know: how tokens are drafted or verified.
"""

AUTO = "auto"
# Weight of the newest observation in the running means: times differ little, acceptance is a coin that must be thrown often.
NEW_SECONDS, NEW_ACCEPTED = 0.2, 0.05
# Before many were made, all weigh the same, and half accepted as much as so many together.
HALF_ACCEPTED = 2
# One round counts as so many times slower than those before at most: a machine that stops for a moment says nothing.
SLOWEST = 1.5
# How far a length that was not tried is believed to be as slow as the line between its neighbours, not as fast as the shorter.
FEARED = 0.5
# Rounds at the start that measure both ends, the whole block and no draft, in turn.
PROBES = 4
# Rounds without drafts before drafting is tried again: doubled after every failure, back to the first after a success.
FIRST_PAUSE, LONGEST_PAUSE = 16, 128


class DraftSchedule:
    r"""
    Args:
        block_size (`int`): Tokens that a drafter can propose.
        num_assistant_tokens (`int` or `"auto"`, *optional*):
            Of the call. A number caps the draft. `"auto"` drafts what committed most tokens a second in this call so far,
            nothing at all where drafting does not pay, and tries again from time to time.

    Raises:
        `ValueError`: for anything else.

    `"auto"` chooses the length k that maximises `(1 + sum_j a_1 ... a_j) / t_k`, where `a_j` is how often position j was
    accepted when those before it were, and `t_k` the seconds that a round with k drafts took.
    """

    def __init__(self, block_size: int, num_assistant_tokens: int | str | None = None):
        self.auto = num_assistant_tokens == AUTO
        if not self.auto and num_assistant_tokens is not None and not isinstance(num_assistant_tokens, int):
            raise ValueError(f'`num_assistant_tokens` must be a whole number or "auto", got {num_assistant_tokens!r}.')
        self.cap = block_size if self.auto or num_assistant_tokens is None else min(num_assistant_tokens, block_size)
        self.accepted, self.judged = [0.5] * block_size, [0] * block_size
        self.seconds: dict[int, float] = {}
        self.samples = [0] * (block_size + 1)
        self.rounds, self.pause, self.resume_at = 0, FIRST_PAUSE, 0

    def length(self) -> int:
        """Tokens to draft in the next round."""
        if not self.auto:
            return self.cap
        if self.rounds < PROBES:
            return (self.cap, 0)[self.rounds % 2]
        best = max(range(self.cap + 1), key=self._tokens_per_second)
        if best == 0 and self.rounds >= self.resume_at:
            return min(2, self.cap)  # a short try costs least
        return best

    def note(self, length: int, accepted: list[int], seconds: float) -> None:
        """
        Take down a finished round.

        Args:
            length (`int`): Tokens that were to be drafted; a draft may have ended before.
            accepted (`list[int]`): Drafts that were accepted, by sequence.
            seconds (`float`): From its draft to its last committed token.
        """
        self.rounds += 1
        if not self.auto:
            return
        seconds = max(seconds, 1e-9)  # a coarse clock may see no time pass
        self.samples[length] += 1
        known = self.seconds.get(length, seconds)
        if self.samples[length] <= 2:  # one may pay for allocations, one may meet a busy machine, hardly both
            self.seconds[length] = min(known, seconds)
        else:
            self.seconds[length] = known + NEW_SECONDS * (min(seconds, SLOWEST * known) - known)
        for number in accepted:
            for position in range(min(number + 1, length)):
                self.judged[position] += 1
                weight = max(NEW_ACCEPTED, 1 / (self.judged[position] + HALF_ACCEPTED))
                self.accepted[position] += weight * ((position < number) - self.accepted[position])
        if self.rounds < PROBES or (length == 0 and self.rounds > PROBES):
            return
        if max(range(self.cap + 1), key=self._tokens_per_second) == 0:
            self.resume_at = self.rounds + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        else:
            self.pause = FIRST_PAUSE

    def resize(self, share: float) -> None:
        """Scale what rounds took: only a `share` of the sequences is left."""
        self.seconds = {length: seconds * share for length, seconds in self.seconds.items()}

    def _tokens_per_second(self, length: int) -> float:
        tokens, chain = 1.0, 1.0
        for rate in self.accepted[:length]:
            chain *= rate
            tokens += chain
        return tokens / self._seconds(length)

    def _seconds(self, length: int) -> float:
        """Measured; before, a hopeful guess from the nearest lengths that were, so that it is tried where it could be best."""
        if self.samples[length] >= 2:
            return self.seconds[length]
        below = max((known for known in range(length + 1) if self.samples[known] >= 2), default=min(self.seconds))
        above = next((known for known in range(length, self.cap + 1) if self.samples[known] >= 2), below)
        share = FEARED * (length - below) / max(above - below, 1)
        return self.seconds[below] + share * (self.seconds[above] - self.seconds[below])
