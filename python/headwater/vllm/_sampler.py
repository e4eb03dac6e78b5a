"""Metrics of plans that the host never sees: a sample of them, copied to it without waiting."""

import torch

import headwater.cuda


class Sampler:
    """Looks at every `every`-th plan that was made on the device, without waiting for it.

    A sampled step takes three calls of step(): in the first the length of all its requests is summed, in the second,
    after the step, the planner's status and spans are copied, some time later they are here and counted.
    """

    def __init__(self, meter, max_requests, every=50):
        self._meter = meter
        self._max_spans = max_requests
        self._every = every
        self._count = 0
        self._tokens = None  # of the step at hand
        self._copies = None  # on their way: (event, status, spans, tokens)
        self._plans = None  # of that step
        self._pinned = None  # made at the first sample

    def step(self, plans, seq_lens):
        """plans: the DevicePlans of this step, None if there are none yet; seq_lens: int32, on the device."""
        self._count += 1
        if self._tokens is not None:
            self._copy()
        elif self._copies is not None:
            self._read()
        elif self._count % self._every == 0:
            self._plans = plans
            if plans is not None:
                self._tokens = seq_lens.sum(dtype=torch.int64)

    def _copy(self):
        if self._pinned is None:
            self._pinned = (
                torch.empty(32, dtype=torch.uint8, pin_memory=True),
                torch.empty((self._max_spans, 5), dtype=torch.int32, pin_memory=True),
                torch.empty((), dtype=torch.int64, pin_memory=True),
            )
        status, spans, tokens = self._pinned
        spans = spans[: self._plans.max_requests]
        self._plans.planner.copy_status(status)
        self._plans.planner.copy_spans(spans)
        tokens.copy_(self._tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._tokens, self._copies = None, (event, *self._pinned)

    def _read(self):
        event, status, spans, tokens = self._copies
        if not event.query():
            return
        self._copies = None
        found = headwater.cuda.PlanStatus.read(status)
        here = spans[: found.num_spans]
        saved = int((here[:, 1].long() * (here[:, 3].long() - 1)).sum())
        flat = int(tokens)
        self._meter.plan(found.num_spans, found.shared_tokens, found.member_sequences, flat - saved, flat)
