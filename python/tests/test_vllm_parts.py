"""Parts of headwater.vllm's GPU back end without vLLM or a GPU: on stand-ins for both, of what they are asked and answer."""

import dataclasses
import gc
import importlib
import struct
import sys
import types
import weakref

import pytest

import headwater.vllm as hv
from headwater.vllm._metrics import Meter


class Anything(types.ModuleType):
    """A module in which every name that is asked for is a class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


def stand_in(monkeypatch, *names):
    """Modules of these names; returns them by name. They, and what of headwater imported them, are gone after the test."""
    for name in ("headwater.vllm.gpu", "headwater.vllm.refused"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(hv, name.rpartition(".")[2], raising=False)
    modules = {}
    for name in names:
        modules[name] = Anything(name)
        modules[name].__path__ = []
        monkeypatch.setitem(sys.modules, name, modules[name])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, modules[name])
    return modules


# The back end of versions that are not served.


def test_a_refused_version_says_so_wherever_it_is_asked(monkeypatch):
    stand_in(monkeypatch, "vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend")
    monkeypatch.setattr(hv, "installed", lambda: ("vllm", "0.27.1"))
    backend = importlib.import_module(hv._REFUSAL.rpartition(".")[0]).RefusedBackend
    assert backend.get_name() == "CUSTOM"
    reasons = backend.validate_configuration(128, "bf16", "auto", 16, use_mla=False)
    assert reasons == ["headwater serves vllm 0.26.0, this is 0.27.1; HEADWATER_VLLM_UNTESTED=1 tries it all the same"]
    for ask in (backend.get_impl_cls, backend.get_builder_cls, lambda: backend.get_kv_cache_shape(1, 16, 8, 128)):
        with pytest.raises(NotImplementedError, match="headwater serves vllm 0.26.0, this is 0.27.1"):
            ask()
    assert callable(hv.refusal)  # the entry point may run again


# The sampler.


@pytest.fixture
def torch(monkeypatch):
    """torch, whose pinned memory is memory and whose events are what a test says."""
    torch = pytest.importorskip("torch", reason="torch is not installed: make test-torch")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    torch_cuda_event = types.SimpleNamespace(done=True)
    event = types.SimpleNamespace(record=lambda: None, query=lambda: torch_cuda_event.done)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch, "event_for_tests", torch_cuda_event, raising=False)
    return torch


class FakePlanner:
    """Copies a status and spans as DevicePlanner does: (begin, tokens, pages, members, depth) a row."""

    def __init__(self, torch, spans):
        self.torch, self.spans, self.copies = torch, spans, 0

    def copy_status(self, out):
        self.copies += 1
        tokens, members = sum(s[1] for s in self.spans), sum(s[3] for s in self.spans)
        packed = struct.pack("=Iiqqii", 0, len(self.spans), tokens, members, 11, 13)
        out[: len(packed)].copy_(self.torch.frombuffer(bytearray(packed), dtype=self.torch.uint8))

    def copy_spans(self, out):
        out.fill_(-1)
        for i, span in enumerate(self.spans):
            out[i] = self.torch.tensor(span, dtype=self.torch.int32)


def sampler_of(torch, spans, every=3, max_requests=8):
    from headwater.vllm._sampler import Sampler

    meter = Meter("", 10.0, clock=lambda: 0.0)
    plans = types.SimpleNamespace(planner=FakePlanner(torch, spans), max_requests=max_requests)
    return Sampler(meter, max_requests, every), meter, plans


def test_a_sample_is_what_the_planner_found_and_what_flat_reads(torch):
    sampler, meter, plans = sampler_of(torch, [(0, 100, 7, 4, 0), (100, 32, 2, 2, 1)])
    lengths = torch.tensor([150, 140, 130, 120, 7], dtype=torch.int32)
    for _ in range(4):
        sampler.step(plans, lengths)
    assert plans.planner.copies == 1 and meter.plans == {"flat": 0, "cascade": 0}  # copied, not yet read
    lengths.fill_(1)  # of the next step
    sampler.step(plans, lengths)
    assert meter.plans == {"flat": 0, "cascade": 1} and (meter.spans, meter.shared_tokens, meter.members) == (2, 132, 6)
    assert meter.flat == 547 and meter.read == 547 - 3 * 100 - 1 * 32


def test_a_flat_plan_is_counted_as_one(torch):
    sampler, meter, plans = sampler_of(torch, [])
    for _ in range(5):
        sampler.step(plans, torch.tensor([5, 6], dtype=torch.int32))
    assert meter.plans == {"flat": 1, "cascade": 0} and meter.read == meter.flat == 11


def test_nothing_waits_for_a_copy(torch):
    sampler, meter, plans = sampler_of(torch, [(0, 10, 1, 2, 0)])
    torch.event_for_tests.done = False
    for _ in range(20):
        sampler.step(plans, torch.tensor([20, 20], dtype=torch.int32))
    assert plans.planner.copies == 1 and sum(meter.plans.values()) == 0  # and no second sample on top of it
    torch.event_for_tests.done = True
    sampler.step(plans, torch.tensor([20, 20], dtype=torch.int32))
    assert sum(meter.plans.values()) == 1


def test_steps_before_the_first_plan_are_passed_over(torch):
    sampler, meter, plans = sampler_of(torch, [(0, 10, 1, 2, 0)], every=1)
    sampler.step(None, torch.tensor([1], dtype=torch.int32))
    for _ in range(3):
        sampler.step(plans, torch.tensor([20, 20], dtype=torch.int32))
    assert meter.plans == {"flat": 0, "cascade": 1} and meter.flat == 40


# The builder, with layers of its own and foreign ones.


@dataclasses.dataclass
class Common:
    """The fields of vLLM's CommonAttentionMetadata that the builder reads or cuts."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: object
    seq_lens: object
    block_table_tensor: object
    slot_mapping: object
    query_start_loc_cpu: object = None
    causal: bool = True
    mm_req_doc_ranges: object = None
    positions: object = None
    is_prefilling: object = None
    seq_lens_cpu_upper_bound: object = None
    _seq_lens_cpu: object = None
    _num_computed_tokens_cpu: object = None
    _num_computed_tokens_cache: object = None
    _token_to_req_indices_cache: object = None

    replace = dataclasses.replace


class FlashBuilder:
    """FlashAttention's: one buffer of scheduler metadata, which every build writes."""

    dcp_world_size, rswa_window, block_size, device = 1, None, 16, "cpu"

    def __init__(self, spec, layer_names, config, device):
        self.vllm_config, self.layer_names, self.built = config, layer_names, []
        self.compilation_config = config.compilation_config
        self.scheduler_metadata = sys.modules["torch"].zeros(4)

    def _init_reorder_batch_threshold(self, threshold, supports_spec_as_decode):
        self.reorder_batch_threshold = threshold

    def build(self, common_prefix_len, common, fast_build=False):
        self.built.append(common.num_reqs)
        self.scheduler_metadata.fill_(common.num_reqs)
        return types.SimpleNamespace(requests=common.num_reqs, scheduler_metadata=self.scheduler_metadata, common=common)


@pytest.fixture
def gpu(monkeypatch, torch):
    """headwater.vllm.gpu on stand-ins."""
    base = "vllm.v1.attention"
    names = ["vllm", "vllm._custom_ops", "vllm.config", "vllm.logger", "vllm.model_executor", "vllm.model_executor.layers"]
    names += ["vllm.model_executor.layers.attention", "vllm.utils", "vllm.utils.torch_utils", "vllm.v1", base]
    names += [f"{base}.backend", f"{base}.backends", f"{base}.backends.flash_attn", f"{base}.backends.utils"]
    modules = stand_in(monkeypatch, *names)
    modules["vllm.config"].CUDAGraphMode = types.SimpleNamespace(FULL="full")
    modules["vllm.config"].get_layers_from_vllm_config = lambda config, kind, names: {n: config.layers[n] for n in names}
    modules["vllm.logger"].init_logger = lambda name: types.SimpleNamespace(info_once=lambda *text: None)
    modules[f"{base}.backends.flash_attn"].FlashAttentionMetadataBuilder = FlashBuilder

    def split(common, threshold):
        lengths = common.query_start_loc.diff().tolist()
        decodes = next((i for i, n in enumerate(lengths) if n > threshold), len(lengths))
        return decodes, len(lengths) - decodes, sum(lengths[:decodes]), sum(lengths[decodes:])

    modules[f"{base}.backends.utils"].split_decodes_and_prefills = split
    monkeypatch.setenv("HEADWATER_VLLM_METRICS_SECONDS", "0")
    from headwater.vllm import gpu

    return gpu


def builder_of(gpu, *ours):
    """A builder whose i-th layer is Headwater's if ours[i]."""
    impls = [types.SimpleNamespace(ours=mine, sinks=None, sinks32=None) for mine in ours]
    graphs = types.SimpleNamespace(mixed_mode=lambda: None)
    config = types.SimpleNamespace(
        layers={str(i): types.SimpleNamespace(impl=impl) for i, impl in enumerate(impls)},
        scheduler_config=types.SimpleNamespace(max_num_seqs=8),
        compilation_config=types.SimpleNamespace(max_cudagraph_capture_size=None, cudagraph_mode=graphs),
    )
    return gpu.HeadwaterBuilder(types.SimpleNamespace(), [str(i) for i in range(len(ours))], config, "cpu")


def batch(torch, *query_lens):
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0)
    count, rows = len(query_lens), int(starts[-1])
    table = torch.arange(count * 2, dtype=torch.int32).view(count, 2)
    lengths = torch.full((count,), 20, dtype=torch.int32)
    return Common(count, rows, max(query_lens), starts, lengths, table, torch.arange(rows), starts)


def test_layers_of_ones_own_leave_the_prefills_to_flash_attention(gpu, torch):
    builder = builder_of(gpu, True, True)
    made = builder.build(0, batch(torch, 1, 1, 1, 9))
    assert (made.num_requests, made.num_rows, made.num_actual_tokens) == (3, 3, 12)
    assert made.whole is None and builder.built == [1]
    rest = made.rest.common
    assert rest.query_start_loc.tolist() == [0, 9] and rest.slot_mapping.tolist() == list(range(3, 12))
    assert rest.block_table_tensor.tolist() == [[6, 7]]
    made = builder.build(0, batch(torch, 1, 1))
    assert made.rest is None and made.whole is None and builder.built == [1]
    assert builder.build(0, batch(torch, 5, 7)).requests == 2  # nothing but prefills: FlashAttention's own metadata
    assert builder.meter.steps == {"mixed": 1, "decode": 1, "prefill": 1}


def test_foreign_layers_have_metadata_of_the_whole_batch(gpu, torch):
    builder = builder_of(gpu, True, False)
    made = builder.build(0, batch(torch, 1, 1, 1, 9))
    assert (made.rest.requests, made.whole.requests) == (1, 4) and builder.built == [1, 4]
    assert made.rest.scheduler_metadata.tolist() == [1] * 4  # not what the second build wrote
    assert made.whole.scheduler_metadata.tolist() == [4] * 4
    made = builder.build(0, batch(torch, 1, 1))
    assert made.rest is None and made.whole.requests == 2


def test_a_builder_without_layers_of_its_own_is_flash_attentions(gpu, torch):
    builder = builder_of(gpu, False, False)
    for query_lens in ((1, 1, 1, 9), (1, 1), (5, 7)):
        made = builder.build(0, batch(torch, *query_lens))
        assert not isinstance(made, gpu.HeadwaterMetadata) and made.requests == len(query_lens)
    assert builder.built == [4, 2, 2] and builder.meter.steps == {}


@pytest.mark.parametrize("change", [{"causal": False}, {"mm_req_doc_ranges": [0]}, "chunks", "context parallelism", "crowd"])
def test_what_headwater_does_not_serve_is_flash_attentions(gpu, torch, change):
    builder = builder_of(gpu, True)
    common = batch(torch, *[1] * (9 if change == "crowd" else 2))
    if isinstance(change, dict):
        common = common.replace(**change)
    builder._in_chunks = change == "chunks"
    builder.dcp_world_size = 2 if change == "context parallelism" else 1
    assert not isinstance(builder.build(0, common), gpu.HeadwaterMetadata)


@pytest.mark.parametrize("made_in_inference_mode", [False, True])  # as vLLM does; as it profiles
def test_views_of_a_cache_are_kept_as_long_as_it(gpu, torch, made_in_inference_mode):
    impl = gpu.HeadwaterImpl.__new__(gpu.HeadwaterImpl)
    impl.head_size, impl._cache, impl._kv = 4, None, None
    with torch.inference_mode(made_in_inference_mode):
        first = torch.zeros(5, 2, 16, 8)
        again = first.detach()[:3]  # the same address, fewer blocks
    with torch.inference_mode():  # as vLLM runs layers
        k, v = impl._views(first)
        assert k.shape == v.shape == (5, 16, 2, 4) and impl._views(first)[0] is k
        gone = weakref.ref(first)
        del first, k, v
        gc.collect()
        assert gone() is None and impl._kv is None and impl._cache is None
        assert impl._views(again)[0].shape[0] == 3
