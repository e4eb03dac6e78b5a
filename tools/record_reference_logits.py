#!/usr/bin/env python3
"""Records logits of a fixed prompt for tests/engine/reference_logits_test.cc.

An independent implementation of the Llama forward pass: numpy in float64, weights dequantised by PyPI's gguf package; no
code is shared with the engine. Needs `pip install numpy gguf`. Usage:
  tools/record_reference_logits.py MODEL.gguf > tests/data/smollm2_logits.json
"""
import json
import sys

import gguf
import numpy as np

# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198, 504, 3575, 282, 4649, 314]
NUM_GENERATED = 8
WATCHED = 48  # token ids whose logits are recorded at every position, spread over the vocabulary


def main():
    reader = gguf.GGUFReader(sys.argv[1])
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = {t.name: np.asarray(gguf.quants.dequantize(t.data, t.tensor_type), dtype=np.float64) for t in reader.tensors}
    layers = fields["llama.block_count"]
    heads = fields["llama.attention.head_count"]
    kv_heads = fields["llama.attention.head_count_kv"]
    hidden = fields["llama.embedding_length"]
    dim = hidden // heads
    eps = fields["llama.attention.layer_norm_rms_epsilon"]
    base = fields["llama.rope.freq_base"]

    def norm(x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight

    def rotate(x):  # [tokens, heads, dim]; pairs are complex numbers
        angles = np.outer(np.arange(x.shape[0]), base ** (-np.arange(0, dim, 2) / dim))
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None, :]
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)

    def forward(tokens):
        n = len(tokens)
        x = weights["token_embd.weight"][tokens]
        hidden_from = np.triu(np.full((n, n), -np.inf), 1)
        for layer in range(layers):
            w = lambda name: weights[f"blk.{layer}.{name}.weight"]
            h = norm(x, w("attn_norm"))
            q = rotate((h @ w("attn_q").T).reshape(n, heads, dim))
            k = rotate((h @ w("attn_k").T).reshape(n, kv_heads, dim)).repeat(heads // kv_heads, axis=1)
            v = (h @ w("attn_v").T).reshape(n, kv_heads, dim).repeat(heads // kv_heads, axis=1)
            scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(dim) + hidden_from
            p = np.exp(scores - scores.max(axis=-1, keepdims=True))
            p /= p.sum(axis=-1, keepdims=True)
            x = x + np.einsum("hij,jhd->ihd", p, v).reshape(n, heads * dim) @ w("attn_output").T
            h = norm(x, w("ffn_norm"))
            gate = h @ w("ffn_gate").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w("ffn_up").T)) @ w("ffn_down").T
        return norm(x, weights["output_norm.weight"]) @ weights["token_embd.weight"].T

    tokens = list(PROMPT)
    for _ in range(NUM_GENERATED):
        tokens.append(int(np.argmax(forward(tokens)[-1])))
    logits = forward(tokens)
    watched = [int(i) for i in np.linspace(0, logits.shape[1] - 1, WATCHED)]
    json.dump({
        "made_by": f"tools/record_reference_logits.py, numpy {np.__version__}, float64",
        "model": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "prompt": PROMPT,
        "generated": tokens[len(PROMPT):],
        "watched": watched,
        "argmax": [int(i) for i in logits.argmax(axis=1)],
        "max": [round(float(m), 5) for m in logits.max(axis=1)],
        "logits": [[round(float(value), 5) for value in row[watched]] for row in logits],
    }, sys.stdout, separators=(",", ":"))
    print()


if __name__ == "__main__":
    main()
