"""Where calls run and how they are timed: a CUDA device by torch, or the host by numpy, to try everything else without one.

On CUDA an arm's calls, one a copy of the KV cache, are captured into one graph; a sample is the time of a replay, by
events, divided by the number of calls. Copies together are several times the L2 cache, and 256 MiB are written before
every replay, so KV is cold; that write also hides what launching the graph costs the host.
"""

import functools
import time

COLD_BYTES = 256_000_000  # distinct KV bytes that rotate
LEAST_COPIES = 4
MOST_COPIES = 96


class Cuda:
    """The current CUDA device, torch tensors in half precision."""

    def __init__(self, seed=7):
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device: --dry-run tries everything but the GPU's arms")
        self.np = self.torch = torch
        self.name = torch.cuda.get_device_name()
        self.num_processors = torch.cuda.get_device_properties("cuda").multi_processor_count
        self._random = torch.Generator("cuda").manual_seed(seed)
        self._written = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    @staticmethod
    def num_copies(distinct_bytes):
        """Of a KV cache of that many bytes."""
        return max(LEAST_COPIES, min(MOST_COPIES, -(-COLD_BYTES // distinct_bytes)))

    @functools.cached_property
    def scratch(self):
        """1 GiB of zeros, for libraries that want a workspace: all calls run one after the other, on one stream."""
        return self.torch.zeros(1 << 30, dtype=self.torch.uint8, device="cuda")

    def normal(self, *shape):
        return self.torch.randn(shape, dtype=self.torch.float16, device="cuda", generator=self._random)

    def ints(self, values, host=False):
        """int32, on the device or in host memory."""
        return self.torch.tensor(values, dtype=self.torch.int32, device="cpu" if host else "cuda")

    def double(self, array):
        return array.to("cuda", self.torch.float64)

    def poison(self, array):
        array.fill_(float("nan"))

    def synchronize(self):
        self.torch.cuda.synchronize()

    def release(self):
        """Gives memory that no tensor uses back, between cells."""
        self.torch.cuda.empty_cache()

    def capture(self, calls):
        return _Graph(self.torch, calls)

    def round(self, graphs):
        """Microseconds a call of each, replayed in this order; waits once, at the end."""
        event = lambda: self.torch.cuda.Event(enable_timing=True)  # noqa: E731
        marks = [(event(), event()) for _ in graphs]
        for value, (graph, (begin, end)) in enumerate(zip(graphs, marks)):
            self._written.fill_(value)
            begin.record()
            graph.replay()
            end.record()
        self.synchronize()
        return [begin.elapsed_time(end) * 1e3 / graph.num_calls for graph, (begin, end) in zip(graphs, marks)]

    def product_rate(self):
        """flop/s of one large fp16 product on this device, measured: the best of a few."""
        a, b = self.normal(8192, 8192), self.normal(8192, 8192)
        product = _Graph(self.torch, [lambda: self.torch.matmul(a, b)])
        return 2 * 8192**3 / min(self.round([product])[0] / 1e6 for _ in range(10))


class _Graph:
    """Calls in one CUDA graph; `out` is what the last of them returned, rewritten by every replay."""

    def __init__(self, torch, calls):
        self.num_calls = len(calls)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # loads kernels, makes what a library makes at its first call
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in calls:
                self.out = call()

    def replay(self):
        self._graph.replay()


class Host:
    """numpy arrays, calls one after the other. Times are of no meaning beyond the run."""

    def __init__(self, seed=7):
        import numpy

        self.np = numpy
        self.name = "host (dry run)"
        self._random = numpy.random.default_rng(seed)

    @staticmethod
    def num_copies(distinct_bytes):
        return 2

    def normal(self, *shape):
        return self._random.standard_normal(shape, dtype=self.np.float32).astype(self.np.float16)

    def ints(self, values, host=False):
        return self.np.asarray(values, dtype=self.np.int32)

    def double(self, array):
        return array.astype(self.np.float64)

    def poison(self, array):
        array.fill(float("nan"))

    def synchronize(self):
        pass

    def release(self):
        pass

    def capture(self, calls):
        return _Calls(calls)

    def round(self, graphs):
        out = []
        for graph in graphs:
            begin = time.perf_counter()
            graph.replay()
            out.append((time.perf_counter() - begin) * 1e6 / graph.num_calls)
        return out

    def product_rate(self):
        return 1e11  # flop/s, so that the report has something to divide by


class _Calls:
    def __init__(self, calls):
        self.num_calls = len(calls)
        self._calls = calls
        self.replay()

    def replay(self):
        for call in self._calls:
            self.out = call()
