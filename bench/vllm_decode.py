#!/usr/bin/env python3
"""Decoding speed of vLLM on a GPU by one attention back end; greedy tokens of two back ends side by side.

    bench/vllm_decode.py MODEL --backend CUSTOM --cells 128x8192,4x32x8192 --out custom.json
    bench/vllm_decode.py MODEL --backend FLASH_ATTN --cells 32x0+2048 --greedy --out flash.json
    bench/vllm_decode.py --compare custom.json flash.json

MODEL: a folder with config.json; weights are random. A cell is [groups x] requests x shared tokens [+ own tokens, 32].
Tokens/s count the steps in which all requests decode. --greedy: weights are drawn anew, wide enough that attention
matters, and requests of three batches are answered greedily with the two best log probabilities of each token, then
again in batches of 16. --compare shows where tokens first differ, and how far apart the two best were there: bf16
rounds differently in different kernels and batches, so near ties fall either way, for one back end alone, too.
VLLM_USE_V2_MODEL_RUNNER chooses the runner.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import time

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the function that draws weights


def parse_cell(text):
    """(groups, requests of a group, shared tokens, own tokens)."""
    shape, _, own = text.partition("+")
    numbers = [int(n) for n in shape.split("x")]
    return (*([1] if len(numbers) == 2 else []), *numbers, int(own or 32))


def prompts_of(cell, vocabulary):
    groups, requests, shared, own = cell
    rng = random.Random(sum(cell))
    draw = lambda n: [rng.randrange(vocabulary) for _ in range(n)]  # noqa: E731
    return [prefix + draw(own) for prefix in [draw(shared) for _ in range(groups)] for _ in range(requests)]


def decode(llm, prompts, new_tokens, logprobs=None):
    """Tokens and log probabilities by request, and tokens/s and ms a step while all requests decode."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=new_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = llm.llm_engine
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{time.monotonic_ns()}.{i}", {"prompt_token_ids": prompt}, params)
    tokens, best, steps = {}, {}, []
    while engine.has_unfinished_requests():
        count = 0
        for output in engine.step():
            part = output.outputs[0]
            i = int(output.request_id.partition(".")[2].partition("-")[0])
            tokens.setdefault(i, []).extend(part.token_ids)
            count += len(part.token_ids)
            for top in part.logprobs or []:
                ranked = sorted(((x.logprob, token) for token, x in top.items()), reverse=True)
                best.setdefault(i, []).append([ranked[0][0] - ranked[1][0], ranked[1][1]])
        steps.append((time.perf_counter(), count))
    full = [(t, n) for t, n in steps if n == len(prompts)]
    seconds = full[-1][0] - full[0][0] if len(full) > 1 else float("nan")
    speed = {
        "tokens_per_s": sum(n for _, n in full[1:]) / seconds,
        "step_ms": 1e3 * statistics.median([b[0] - a[0] for a, b in zip(full, full[1:])] or [float("nan")]),
        "steps": len(full) - 1,
    }
    rows = range(len(prompts))
    return [tokens[i] for i in rows], [best.get(i, []) for i in rows], speed


def draw_weights(model):
    import torch

    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1.0)


def greedy(llm, vocabulary):
    llm.apply_model(draw_weights)
    llm.reset_prefix_cache()
    found = {}
    for name in ("64x2048", "4x16x1024", "16x0+512"):
        prompts = prompts_of(parse_cell(name), vocabulary)
        decode(llm, prompts[-1:], 1)
        tokens, best, _ = decode(llm, prompts, 16, logprobs=2)
        again = [decode(llm, prompts[i : i + 16], 16, logprobs=2) for i in range(0, len(prompts), 16)]
        found[name] = {"tokens": tokens, "best": best}
        found[f"{name} by 16"] = {"tokens": [t for a in again for t in a[0]], "best": [b for a in again for b in a[1]]}
    return found


def differences(a, b):
    """(requests with equal tokens, of the others: gaps between the two best on side a where they first differ, how many
    of them took the second best, the median of all gaps)."""
    gaps, swapped, equal = [], 0, 0
    for x, y, best in zip(a["tokens"], b["tokens"], a["best"]):
        at = next((i for i, (p, q) in enumerate(zip(x, y)) if p != q), None)
        if at is None:
            equal += 1
            continue
        gaps.append(best[at][0])
        swapped += best[at][1] == y[at]
    return equal, gaps, swapped, statistics.median(gap for best in a["best"] for gap, _ in best)


def compare(title, a, b):
    """One line of differences()."""
    equal, gaps, swapped, usual = differences(a, b)
    text = f"{title}: {equal} of {len(a['tokens'])} requests equal in all {len(a['tokens'][0])} tokens"
    if gaps:
        text += (
            f"; first differences: {swapped} of {len(gaps)} took the second best, log probabilities apart by "
            f"{statistics.median(gaps):.4f} (median), {max(gaps):.4f} (most); {usual:.3f} is usual"
        )
    print(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=pathlib.Path)
    parser.add_argument("--backend", default="CUSTOM")
    parser.add_argument("--cells", default="")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--compare", nargs=2, type=pathlib.Path)
    args = parser.parse_args()
    if args.compare:
        a, b = (json.loads(path.read_text())["greedy"] for path in args.compare)
        for name in [name for name in a if " by " not in name]:
            compare(f"{name}, {args.compare[0].stem} and {args.compare[1].stem}", a[name], b[name])
            for side, path in ((a, args.compare[0]), (b, args.compare[1])):
                compare(f"{name}, {path.stem} and itself by 16", side[name], side[f"{name} by 16"])
        return
    from vllm import LLM

    llm = LLM(
        model=str(args.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=33280,
        enable_prefix_caching=True,
        attention_config={"backend": args.backend},
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]},
    )
    vocabulary = llm.model_config.get_vocab_size() - 1
    result = {"backend": args.backend, "cells": {}}
    for name in filter(None, args.cells.split(",")):
        prompts = prompts_of(parse_cell(name), vocabulary)
        per_group = parse_cell(name)[1]
        decode(llm, prompts[::per_group], 1)  # fills the prefix cache
        decode(llm, prompts, 8)
        tokens = min(args.new_tokens, 33280 - len(prompts[0]))
        result["cells"][name] = decode(llm, prompts, tokens)[2]
        print(args.backend, name, result["cells"][name], flush=True)
    if args.greedy:
        result["greedy"] = greedy(llm, vocabulary)
    if args.out:
        args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
