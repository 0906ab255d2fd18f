"""What a generation did and how long it took, with the definitions that make the figures comparable."""

from collections import Counter
from dataclasses import dataclass, field

TAU = "tokens emitted a round; the free token of the prefill is not counted, the verified bonus token is"


@dataclass
class Statistics:
    """Counts and seconds of one generation.

    ``new_tokens``: all tokens given to the caller, the prefill's included. ``emitted``: those of rounds.
    ``accepted[i]``: rounds in which exactly i proposals were accepted. ``proposed[i]`` and ``hits[i]``: rounds that
    proposed an (i+1)-th token, and that accepted it. Times in seconds: ``prefill``, and of the rounds ``verify``,
    ``draft`` and ``host`` (everything else).
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    emitted: int = 0
    rounds: int = 0
    chain: int = 0
    finished: str = ""  # "stop", "budget", "length"
    accepted: Counter = field(default_factory=Counter)
    proposed: Counter = field(default_factory=Counter)
    hits: Counter = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0
    decode_seconds: float = 0.0

    def record(self, chain: int, accepted: int, emitted: int) -> None:
        """One round: ``chain`` proposals, of which ``accepted`` were right, and ``emitted`` tokens given out."""
        self.rounds += 1
        self.emitted += emitted
        self.accepted[accepted] += 1
        for i in range(chain):
            self.proposed[i] += 1
            self.hits[i] += i < accepted

    @property
    def tau(self) -> float:
        """Tokens emitted a round; see ``TAU``."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def host_seconds(self) -> float:
        return max(0.0, self.decode_seconds - self.verify_seconds - self.draft_seconds)

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens of rounds a second."""
        return self.emitted / self.decode_seconds if self.decode_seconds else 0.0

    def acceptance(self) -> list[float]:
        """Share of the rounds that proposed an i-th token in which it was accepted, for i = 1.. ."""
        return [self.hits[i] / self.proposed[i] for i in sorted(self.proposed)]

    def to_json(self) -> dict[str, object]:
        """Everything, with the names used above."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "rounds": self.rounds,
            "emitted": self.emitted,
            "chain": self.chain,
            "tau": self.tau,
            "tau_definition": TAU,
            "accept_histogram": {str(i): self.accepted[i] for i in sorted(self.accepted)},
            "acceptance_by_position": self.acceptance(),
            "finished": self.finished,
            "prompt_tokens_per_second": self.prompt_rate,
            "decode_tokens_per_second": self.decode_rate,
            "seconds": {
                "prefill": self.prefill_seconds,
                "decode": self.decode_seconds,
                "verify": self.verify_seconds,
                "draft": self.draft_seconds,
                "host": self.host_seconds,
            },
        }
