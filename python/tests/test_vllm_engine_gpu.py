"""vLLM itself, with headwater.vllm and with FlashAttention: small models of random weights answer the same requests
greedily, and the tokens are compared. Kinds of batches, graphs, runners, caches and layers that a builder alone
(test_vllm_gpu.py) does not meet. Needs vLLM 0.26 (CUDA), a GPU and a headwater built with CUDA; skipped without."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

vllm_decode = pytest.importorskip("vllm_decode", reason="bench/vllm_decode.py is not there")
from test_vllm_gpu import MISSING  # noqa: E402

pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")

VOCABULARY = 4096
_COMMON = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
}
#: Every other layer has a window; soft cap; heads of 256.
GEMMA2 = _COMMON | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 128,
    "tie_word_embeddings": True,
}


@dataclasses.dataclass
class Case:
    model: dict = dataclasses.field(default_factory=lambda: LLAMA)
    options: dict = dataclasses.field(default_factory=dict)  # of LLM
    new_tokens: int = 64  # more steps than between two samples of the metrics
    runner: str = ""  # VLLM_USE_V2_MODEL_RUNNER; "": vLLM's choice
    graphs: str = "FULL_DECODE_ONLY"
    #: FlashAttention rounds queries to fp8, too: there Headwater's cascade is compared with its own flat attention.
    against_itself: bool = False


CASES = {
    "decode graphs": Case(runner="1"),
    "older runner": Case(runner="0"),
    "graphs of mixed batches": Case(graphs="FULL", runner="1"),
    "no graphs, fp16, blocks of 32": Case(graphs="NONE", options={"dtype": "float16", "block_size": 32}),
    "drafts": Case(
        new_tokens=128,
        options={
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        }
    ),
    "windows and soft cap": Case(model=GEMMA2),
    "fp8 cache": Case(options={"kv_cache_dtype": "fp8"}, against_itself=True),
}


def _prompts():
    """Two documents with a dozen questions each, a stranger; few different tokens, so that drafts are found."""
    rng = random.Random(3)
    draw = lambda n: [rng.randrange(40, 72) for _ in range(n)]  # noqa: E731
    documents = [draw(700), draw(500)]
    return [document + draw(20 + i) for document in documents for i in range(12)] + [draw(300)]


def _answer(name, backend, folder):
    """What one engine answers, and the steps and plans that Headwater's builders counted. In a process of its own: vLLM
    cannot capture graphs for a second engine."""
    from vllm import LLM

    from headwater.vllm import gpu

    meters = {}
    step = gpu.Meter.step

    def counted(meter, kind):
        meters[id(meter)] = meter
        step(meter, kind)

    gpu.Meter.step = counted
    case = CASES[name]
    (folder / "config.json").write_text(json.dumps(case.model))
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=1024,  # prompts come in parts, beside requests that decode
        gpu_memory_utilization=0.06,
        kv_cache_memory_bytes=1 << 30,  # not measured: other engines come and go
        enable_prefix_caching=True,
        attention_config={"backend": backend},
        compilation_config={"mode": 0, "cudagraph_mode": case.graphs, "cudagraph_capture_sizes": [1, 8, 32, 128]},
        **({"dtype": "bfloat16"} | case.options),
    )
    llm.apply_model(vllm_decode.draw_weights)
    llm.reset_prefix_cache()
    meters.clear()
    tokens, best, _ = vllm_decode.decode(llm, _prompts(), case.new_tokens, logprobs=2)
    counts = [{"steps": meter.steps, "plans": meter.plans} for meter in meters.values()]
    (folder / "answers.json").write_text(json.dumps({"tokens": tokens, "best": best, "counts": counts}))


def _in_a_process(name, backend, cascade, folder):
    folder.mkdir(parents=True)
    case = CASES[name]
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # builders are looked at from there
        "HEADWATER_VLLM_METRICS_SECONDS": "100000",  # no line in between, which would begin counting anew
        "HEADWATER_CASCADE_ATTENTION": cascade,
    }
    if case.runner:
        env["VLLM_USE_V2_MODEL_RUNNER"] = case.runner
    done = subprocess.run(
        [sys.executable, __file__, name, backend, str(folder)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{name}, {backend}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads((folder / "answers.json").read_text())


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """By case: what is to be compared, theirs and ours, both under way."""
    base = tmp_path_factory.mktemp("engines")
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        start = lambda *run: pool.submit(_in_a_process, *run, base / "-".join(run).replace(" ", "_"))  # noqa: E731
        yield {
            name: (
                start(name, "CUSTOM", "off") if case.against_itself else start(name, "FLASH_ATTN", "off"),
                start(name, "CUSTOM", "on"),
            )
            for name, case in CASES.items()
        }


@pytest.mark.parametrize("name", CASES)
def test_same_tokens(name, engines):
    theirs, ours = (side.result() for side in engines[name])
    steps = [count["steps"] for count in ours["counts"]]
    plans = [count["plans"] for count in ours["counts"]]
    equal, gaps, _, usual = vllm_decode.differences(theirs, ours)
    largest = [round(gap, 4) for gap in sorted(gaps)[-3:]]
    print(
        f"\n{name}: {equal} of {len(gaps) + equal} answers equal; largest gaps where others first differ {largest}, "
        f"{usual:.3f} is usual; {steps}, {plans}"
    )
    assert any(s.get("decode", 0) >= 10 for s in steps), "Headwater decoded nothing"
    assert any(s.get("mixed", 0) >= 1 for s in steps) or CASES[name].graphs == "FULL", "no mixed batch"
    assert any(p["cascade"] >= 1 for p in plans), "no plan that was looked at shared anything"
    # Kernels round differently: an answer may leave the other's where the best tokens are a rounding or two of a bf16
    # logit apart (1/64 each).
    assert equal >= len(ours["tokens"]) // 4
    assert all(gap <= 0.25 * usual for gap in gaps)


if __name__ == "__main__":
    _answer(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
