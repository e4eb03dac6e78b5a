"""headwater.vllm's GPU back end without a runner: builder and implementation against a float64 reference, as vLLM tests
its own. Needs vLLM (CUDA), a GPU and a headwater built with CUDA; skipped, and counted, without."""

import importlib.metadata
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import headwater.vllm as hv  # noqa: E402


def _missing():
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "vLLM is not installed"
    if not torch.cuda.is_available():
        return "there is no GPU"
    import headwater.cuda

    return None if headwater.cuda.is_built() else "this headwater was built without CUDA"


MISSING = _missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


BLOCKS = 600
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _split_every_shared_span(monkeypatch):
    """The forests of these tests are small: the cost model would read some of them flat."""
    monkeypatch.setenv("HEADWATER_CASCADE_ATTENTION", "on")


class Side:
    """One layer: a builder, an implementation, a cache in vLLM's layout."""

    def __init__(
        self,
        dtype=torch.bfloat16,
        heads=(32, 8),
        dim=128,
        block=16,
        hnd=False,
        fp8=False,
        max_seqs=256,
        columns=64,
        **impl,
    ):
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from headwater.vllm import gpu

        self.device = torch.device("cuda")
        self.dtype, self.heads, self.dim, self.block, self.fp8, self.columns = dtype, heads, dim, block, fp8, columns
        config = VllmConfig()
        config.model_config = types.SimpleNamespace(
            is_diffusion=False,
            dtype=dtype,
            rswa_window=None,
            get_num_attention_heads=lambda parallel: heads[0],
            get_num_kv_heads=lambda parallel: heads[1],
            get_head_size=lambda: dim,
        )
        config.scheduler_config.max_num_seqs = max_seqs
        config.cache_config.cache_dtype = "fp8" if fp8 else "auto"
        window = impl.pop("window", None)
        with set_current_vllm_config(config, check_compile=False):
            self.impl = gpu.HeadwaterImpl(
                heads[0], dim, dim**-0.5, heads[1], None, window, "fp8" if fp8 else "auto", **impl
            )
            config.compilation_config.static_forward_context["layer"] = types.SimpleNamespace(impl=self.impl)
            spec = FullAttentionSpec(
                block_size=block,
                num_kv_heads=heads[1],
                head_size=dim,
                dtype=torch.uint8 if fp8 else dtype,
                sliding_window=window,
            )
            self.builder = gpu.HeadwaterBuilder(spec, ["layer"], config, self.device)
        self.builder._foreign_layers = not self.impl.ours
        self.builder._impls = [self.impl] if self.impl.ours else []
        order = (0, 1, 2, 3) if hnd else (0, 2, 1, 3)
        shape = (BLOCKS, heads[1], block, 2 * dim)
        memory = torch.empty([shape[i] for i in order], dtype=torch.uint8 if fp8 else dtype, device=self.device)
        self.cache = memory.permute(*[order.index(i) for i in range(4)])
        generator = torch.Generator(device=self.device).manual_seed(1)
        values = torch.randn(shape, generator=generator, device=self.device)
        self.cache.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8) if fp8 else values.to(dtype))
        self.layer = types.SimpleNamespace(
            **{f"_{x}_scale": torch.tensor(s, device=self.device) for x, s in (("q", 1.0), ("k", 0.5), ("v", 2.0))}
        )

    def common(self, tables, lengths, qo_lens, padded=0):
        """As vLLM builds it; `padded` requests without rows stand behind."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        requests = len(tables) + padded
        table = torch.zeros((requests, self.columns), dtype=torch.int32)
        table[: len(tables)] = BLOCKS - 1  # stale ids behind a request's end
        for row, ids in enumerate(tables):
            table[row, : len(ids)] = torch.tensor(ids)
        starts = torch.tensor([0, *np.cumsum(qo_lens)] + [sum(qo_lens)] * padded, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([*lengths, *[0] * padded], dtype=torch.int32, device=self.device),
            num_reqs=requests,
            num_actual_tokens=sum(qo_lens) + padded,
            max_query_len=max(qo_lens),
            max_seq_len=max(lengths),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.full((sum(qo_lens) + padded,), -1, dtype=torch.int64, device=self.device),
        )

    def queries(self, rows, seed=2):
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randn(rows, self.heads[0], self.dim, generator=generator, device=self.device).to(self.dtype)

    def run(self, common, query, out=None, metadata=None):
        out = torch.full_like(query, float("nan")) if out is None else out
        metadata = self.builder.build(0, common) if metadata is None else metadata
        self.impl.forward(
            self.layer, query, query[:, : self.heads[1]], query[:, : self.heads[1]], self.cache, metadata, out
        )
        return out

    def expected(self, query, common):
        out = torch.zeros_like(query, dtype=torch.float64)
        cache = self.cache.view(torch.float8_e4m3fn) if self.fp8 else self.cache
        starts, lengths = common.query_start_loc.tolist(), common.seq_lens.tolist()
        group = self.heads[0] // self.heads[1]
        for b, n in enumerate(lengths):
            if n == 0:
                continue
            ids = common.block_table_tensor[b, : -(-n // self.block)].long()
            flat = cache[ids].double().transpose(1, 2).reshape(-1, self.heads[1], 2 * self.dim)[:n]
            k, v = (x.repeat_interleave(group, 1) for x in flat.split(self.dim, -1))
            if self.fp8:
                k, v = k * 0.5, v * 2.0
            q = query[starts[b] : starts[b + 1]].double()
            position = torch.arange(n - len(q), n, device=self.device)[:, None]
            visible = torch.arange(n, device=self.device)[None] <= position
            if self.impl.sliding_window[0] >= 0:
                visible &= torch.arange(n, device=self.device)[None] >= position - self.impl.sliding_window[0]
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.impl.scale
            if self.impl.logits_soft_cap:
                scores = self.impl.logits_soft_cap * torch.tanh(scores / self.impl.logits_soft_cap)
            scores = scores.masked_fill(~visible, float("-inf"))
            if self.impl.sinks is not None:
                scores = torch.cat([scores, self.impl.sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
            weights = torch.softmax(scores, -1)[..., :n]
            out[starts[b] : starts[b + 1]] = torch.einsum("hqk,khd->qhd", weights, v)
        return out

    def status(self):
        """What became of the last plan on the device."""
        import headwater.cuda

        plans = list(self.builder._plans.values())[-1]
        host = torch.empty(32, dtype=torch.uint8, pin_memory=True)
        plans.planner.copy_status(host)
        torch.cuda.synchronize()
        return headwater.cuda.PlanStatus.read(host)


def groups(sizes, shared, own, block, seed=0):
    """Block tables and lengths: requests in groups that share blocks, then own ones; ids in no order."""
    rng = np.random.default_rng(seed)
    ids = iter((1 + rng.permutation(BLOCKS - 2)).tolist())
    tables, lengths = [], []
    for members, pages in zip(sizes, shared):
        common = [next(ids) for _ in range(pages)]
        for _ in range(members):
            tokens = int(rng.integers(1, own + 1))
            tables.append(common + [next(ids) for _ in range(-(-tokens // block))])
            lengths.append(pages * block + tokens)
    return tables, lengths


def check(side, common, out, rows=None, begin=0, tolerance=None):
    rows = int(common.query_start_loc[-1]) if rows is None else rows
    query = side.queries(out.shape[0])
    expected = side.expected(query, common)
    error = (out[begin:rows].double() - expected[begin:rows]).abs().max().item()
    bound = (tolerance or TOLERANCE[side.dtype]) * max(1.0, expected.abs().max().item())
    assert error <= bound, f"off by {error}, expected at most {bound}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block, hnd", [(16, False), (32, True)], ids=["nhd16", "hnd32"])
def test_decode_in_groups_with_strangers_and_padding(dtype, block, hnd):
    side = Side(dtype, block=block, hnd=hnd)
    tables, lengths = groups((20, 7, 1, 1), (24, 12, 9, 0), 60, block)
    common = side.common(tables, lengths, [1] * len(tables), padded=3)
    out = side.run(common, side.queries(len(tables) + 3))
    check(side, common, out)
    status = side.status()
    assert status.flags == 0 and status.num_spans == 2


def test_nothing_shared_is_flat():
    side = Side()
    tables, lengths = groups([1] * 12, [0] * 12, 600, 16)
    common = side.common(tables, lengths, [1] * 12)
    check(side, common, side.run(common, side.queries(12)))
    assert side.status().num_spans == 0


def test_mixed_batches_split_and_prefill_is_left_to_flash_attention():
    side = Side()
    tables, lengths = groups((10, 3), (20, 5), 300, 16)
    lengths[-1] = max(lengths[-1], 20)
    qo_lens = [1] * 12 + [min(70, lengths[-1])]
    common = side.common(tables, lengths, qo_lens)
    metadata = side.builder.build(0, common)
    assert (metadata.num_requests, metadata.rest.num_actual_tokens) == (12, qo_lens[-1])
    check(side, common, side.run(common, side.queries(sum(qo_lens)), metadata=metadata))
    common = side.common(tables[-1:], lengths[-1:], qo_lens[-1:])
    check(side, common, side.run(common, side.queries(qo_lens[-1])))
    assert side.builder.meter.steps == {"mixed": 1, "prefill": 1}


def test_mixed_batches_with_fp8():
    side = Side(fp8=True)
    tables, lengths = groups((10, 1), (20, 5), 300, 16)
    qo_lens = [1] * 10 + [64]
    common = side.common(tables, lengths, qo_lens)
    out = side.run(common, side.queries(74))
    check(side, common, out, rows=10)
    check(side, common, out, begin=10, tolerance=0.1)  # FlashAttention rounds queries to fp8, too


def test_drafts_are_decoding():
    side = Side()
    side.builder.reorder_batch_threshold = 3
    tables, lengths = groups((12, 5), (20, 12), 60, 16)
    lengths = [n + 2 if n % 16 < 14 and n % 16 else n for n in lengths]
    qo_lens = [3] * 12 + [1, 2, 3, 1, 3]
    common = side.common(tables, lengths, qo_lens, padded=2)
    check(side, common, side.run(common, side.queries(sum(qo_lens) + 2)))
    assert side.builder.meter.steps == {"decode": 1} and side.status().num_spans == 2


def test_graphs_of_mixed_batches_are_ours_alone():
    from vllm.config import CUDAGraphMode

    side = Side()
    side.builder.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    side.builder.compilation_config.max_cudagraph_capture_size = 256
    tables, lengths = groups((10, 3), (20, 8), 100, 16)
    qo_lens = [1] * 11 + [70, 60]
    common = side.common(tables, lengths, qo_lens, padded=4)
    metadata = side.builder.build(0, common)
    assert metadata.rest is None and metadata.whole is None
    check(side, common, side.run(common, side.queries(sum(qo_lens) + 4), metadata=metadata))


@pytest.mark.parametrize(
    "more", [{"logits_soft_cap": 5.0}, {"sinks": True}, {"window": 50}, {"fp8": True}], ids=lambda m: next(iter(m))
)
def test_features(more):
    if "sinks" in more:
        more = {"sinks": torch.linspace(-1, 3, 32, dtype=torch.bfloat16, device="cuda")}
    side = Side(**more)
    tables, lengths = groups((12, 4), (20, 10), 40, 16)
    common = side.common(tables, lengths, [1] * 16)
    check(side, common, side.run(common, side.queries(16)))
    assert side.impl.ours == ("window" not in more)


def test_sinks_that_change_between_steps_are_followed_by_graphs_too():
    sinks = torch.linspace(-1, 3, 32, dtype=torch.bfloat16, device="cuda")
    side = Side(sinks=sinks)
    tables, lengths = groups((12, 4), (20, 10), 40, 16)
    common = side.common(tables, lengths, [1] * 16)
    query = side.queries(16)
    out = side.run(common, query)
    metadata = side.builder.build(0, common)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.run(common, query, out, metadata)
    sinks.data.copy_(sinks.flip(0) + 2)  # as weights are loaded anew
    side.builder.build(0, common)
    graph.replay()
    check(side, common, out)


def test_large_batches_have_a_planner_of_their_own():
    side = Side(heads=(8, 2), dim=64, max_seqs=512)
    tables, lengths = groups((300,), (10,), 16, 16)
    common = side.common(tables, lengths, [1] * 300)
    check(side, common, side.run(common, side.queries(300)))
    assert [small for _, small in side.builder._plans] == [False]
    assert side.status().num_spans == 1


def test_one_graph_serves_later_tables():
    """Captured as vLLM does it: metadata outside, the planner's launch and attention inside; two layers, one plan."""
    side = Side()
    tables, lengths = groups((20, 7), (24, 12), 60, 16)
    common = side.common(tables, lengths, [1] * 27, padded=5)
    query = side.queries(32)
    out, second = torch.full_like(query, float("nan")), torch.full_like(query, float("nan"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        side.run(common, query, out)
        metadata = side.builder.build(0, common)
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            side.run(common, query, out, metadata)
            side.run(common, query, second, metadata)
    for seed, sizes, shared in ((3, (5, 5, 10), (30, 3, 8)), (4, [1] * 20, [0] * 20), (5, (32,), (25,))):
        tables, lengths = groups(sizes, shared, 50, 16, seed)
        later = side.common(tables, lengths, [1] * len(tables), padded=32 - len(tables))
        for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
            getattr(common, name).copy_(getattr(later, name))
        side.builder.build(0, common)
        out.fill_(float("nan"))
        second.fill_(float("nan"))
        graph.replay()
        check(side, common, out, rows=len(tables))
        assert torch.equal(out[: len(tables)], second[: len(tables)])
        assert side.status().num_spans == sum(members > 1 for members in sizes)


def test_selection_gives_reasons():
    from headwater.vllm import gpu

    assert gpu._unsupported(128, torch.bfloat16, False, 16) is None
    assert gpu._unsupported(72, torch.bfloat16, False, 16)
    assert gpu.HeadwaterBackend.get_name() == "CUSTOM"
    assert hv.refusal("vllm", "0.26.0", hv.Settings()) is None
