"""What the back ends did, as lines of vLLM's log: steps by path, spans, KV bytes read against what flat reads.

One Meter a builder. The CPU back end counts every step; the GPU one, whose plans the host never sees, counts every step
by kind and looks at a sample of the plans.
"""

import logging
import time

logger = logging.getLogger("vllm.headwater")  # vLLM formats what is below its own


class Meter:
    """Counts and, every `seconds`, a line."""

    def __init__(self, name, seconds, clock=time.monotonic):
        self._name = name
        self._seconds = seconds
        self._clock = clock
        self._next = clock() + seconds
        self._clear()

    def _clear(self):
        self.steps = {}
        self.plans = {"flat": 0, "cascade": 0}
        self.spans = self.shared_tokens = self.members = self.read = self.flat = 0

    def step(self, kind):
        """A step of a kind ("decode", "prefill", ...)."""
        self.steps[kind] = self.steps.get(kind, 0) + 1

    def plan(self, spans, shared_tokens, members, read, flat):
        """A plan: spans split off, tokens and sequences summed over them, KV read and what flat reads (one unit)."""
        self.plans["cascade" if spans else "flat"] += 1
        self.spans += spans
        self.shared_tokens += shared_tokens
        self.members += members
        self.read += read
        self.flat += flat

    def line(self):
        steps = ", ".join(f"{count} {kind}" for kind, count in sorted(self.steps.items())) or "none"
        text = (
            f"Headwater {self._name}: steps {steps}; plans {self.plans['cascade']} cascade, {self.plans['flat']} flat"
        )
        if self.spans:
            text += (
                f"; {self.spans / self.plans['cascade']:.1f} spans a plan of {self.shared_tokens / self.spans:.0f} "
                f"tokens for {self.members / self.spans:.1f} sequences"
            )
        if self.flat:
            text += f"; KV read {100 * self.read / self.flat:.1f} % of flat"
        return text

    def report(self):
        """Logs the line if it is time; the counts start anew."""
        if self._seconds <= 0 or not self.steps or self._clock() < self._next:
            return
        logger.info("%s", self.line())
        self._next = self._clock() + self._seconds
        self._clear()
