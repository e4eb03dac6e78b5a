#!/usr/bin/env python3
"""Writes the seed corpora that are made by rule (corpus/<target>/seed-*). Inputs that a fuzzer found lie beside them.

Deterministic and without dependencies: running it again changes nothing.
"""
import json
import random
import struct
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "data"


def write(target, name, content):
    folder = HERE / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"seed-{name}").write_bytes(content if isinstance(content, bytes) else content.encode())


def run_seeds():
    for i in range(40):
        rng = random.Random(i)
        # Small bytes choose ordinary values, large ones the wild paths.
        limit = 256 if i % 4 == 3 else 15
        write("run", f"{i:02}", bytes(rng.randrange(limit) for _ in range(60 + 4 * i)))


def openai_seeds():
    chat = {"model": "m", "messages": [{"role": "system", "content": "s"},
                                       {"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    seeds = {
        "chat": {**chat, "max_completion_tokens": 9, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["a", "b"],
                 "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 3,
                 "logit_bias": {"5": -1.5}, "presence_penalty": 1, "frequency_penalty": -1, "seed": 7, "user": "u"},
        "completion": {"model": "m", "prompt": ["a", "b"], "max_tokens": 0, "echo": True, "logprobs": 5, "best_of": 1,
                       "suffix": None, "top_k": -1},
        "tokens": {"model": "m", "prompt": [1, 2, 3]},
        "token-lists": {"model": "m", "prompt": [[1], [2, 3]], "n": 64},
        "tools": {**chat, "tools": [{"type": "function"}], "response_format": {"type": "json_object"}},
        "tokenize": {"prompt": "x", "messages": None, "add_special_tokens": False},
        "detokenize": {"tokens": [0, 1, 2147483647]},
    }
    for name, body in seeds.items():
        write("openai", name, json.dumps(body))
    write("openai", "deep", '{"model":' + "[" * 40)
    write("openai", "invalid-utf8", b'{"model":"m","prompt":"\xff\xc3"}')
    write("openai", "broken", '{"model":"m","prompt":"x",}')
    write("openai", "large-numbers", '{"model":"m","prompt":"x","seed":18446744073709551616,"n":1e400}')


def table_seeds():
    base = {"page_size": 4, "qo_indptr": [0, 1, 2, 4], "kv_indptr": [0, 3, 6, 8],
            "kv_indices": [0, 1, 2, 0, 1, 3, 0, 4], "kv_last_page_len": [4, 2, 3]}
    variants = {
        "plain": {},
        "shape": {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "q_dtype": "bf16", "kv_dtype": "f8e4m3"},
        "dims": {"head_dim_qk": 192, "head_dim_vo": 128, "policy": "forest", "num_pages": 9, "null_page": 0},
        "window": {"window_left": 5, "causal": True, "num_sink_tokens": 2, "policy": "two_level"},
        "local": {"local_chunk": 4, "logits_soft_cap": 30.0, "min_shared_pages": 1, "min_members": 2},
        "starts": {"kv_start_page": [0, 0, 1], "first_page_offset": [0, 1, 2]},
        "invariant": {"batch_invariant": True, "invariant_chunk": 16},
        "bad-indptr": {"kv_indptr": [0, 5, 4, 8]},
        "bad-id": {"kv_indices": [0, 1, 2, 0, 1, -3, 0, 4], "num_pages": 5},
        "bad-type": {"page_size": "four"},
        "bad-key": {"pagesize": 4},
    }
    for name, change in variants.items():
        write("tables_json", name, json.dumps({**base, **change}))
    write("tables_json", "empty", "")
    write("tables_json", "open", '{"page_size": 4, "qo_indptr": [0')
    write("tables_json", "deep", "[" * 200)
    write("tables_json", "model", json.dumps({"machine": "x", "num_workers": 2, "item_ps": 5}))


def trace_seeds():
    for path in sorted((DATA / "trees").glob("*.jsonl")):
        line = json.loads(path.read_text().splitlines()[0])
        line["nodes"] = line["nodes"][:6]
        write("traces", path.stem, b"\0" + json.dumps(line).encode())
    mooncake = (DATA / "traces" / "mooncake_conversation.jsonl").read_text().splitlines()
    write("traces", "mooncake", b"\1" + "\n".join(mooncake[:3]).encode())
    csv = (DATA / "traces" / "toolagent_tail_sample.csv").read_text().splitlines()
    write("traces", "toolagent", b"\2" + "\n".join(csv[:6]).encode())
    for i, text in enumerate(["1,64|8192,256", "1,2,4|16,16,16", "256|1024", "2,1|8,8", "1,|", "99999999999,1|1,1"]):
        write("traces", f"workload-{i}", b"\3" + text.encode())
    for i, text in enumerate(["a 32 8 128 3 -1 100 0 20 0 30", "# c\n\nb 1 1 64 1 -1 1\nc 2 2 64 2 -1 7 1 9", "d 4 2 64 99999999 -1"]):
        write("traces", f"cells-{i}", b"\4" + text.encode())
    write("traces", "tree-cycle", b'\0{"nodes":[{"id":0,"parent":1,"num_tokens":1,"first_step":0,"last_step":0},'
          b'{"id":1,"parent":0,"num_tokens":1,"first_step":1,"last_step":2}]}')
    write("traces", "negative", b'\1{"timestamp": -1, "input_length": 0, "output_length": -5, "hash_ids": [1]}')


def gguf(keys, tensors, magic=b"GGUF", version=3, alignment=32):
    def text(s):
        raw = s.encode()
        return struct.pack("<Q", len(raw)) + raw

    def value(v):
        if isinstance(v, bool):
            return struct.pack("<I?", 7, v)
        if isinstance(v, int):
            return struct.pack("<II", 4, v)
        if isinstance(v, float):
            return struct.pack("<If", 6, v)
        if isinstance(v, str):
            return struct.pack("<I", 8) + text(v)
        kind = 8 if v and isinstance(v[0], str) else 5
        items = b"".join(text(x) if kind == 8 else struct.pack("<i", x) for x in v)
        return struct.pack("<IIQ", 9, kind, len(v)) + items

    out = magic + struct.pack("<IQQ", version, len(tensors), len(keys))
    for key, v in keys.items():
        out += text(key) + value(v)
    data = b""
    for name, kind, shape, raw in tensors:
        data += b"\0" * (-len(data) % alignment)
        out += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        out += struct.pack("<IQ", kind, len(data))
        data += raw
    out += b"\0" * (-len(out) % alignment)
    return out + data


def gguf_seeds():
    alphabet = []
    extra = 0
    for b in range(256):
        if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255:
            alphabet.append(chr(b))
        else:
            alphabet.append(chr(256 + extra))
            extra += 1
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + alphabet + ["th", "the"]
    tokenizer = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["t h", "th e"], "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }
    kinds = {"f32": (0, 1, 4), "f16": (1, 1, 2), "q4_1": (3, 32, 20), "q8_0": (8, 32, 34), "q4_k": (12, 256, 144),
             "q6_k": (14, 256, 210), "bf16": (30, 1, 2)}
    rng = random.Random(7)
    tensors = []
    for name, (kind, block, size) in kinds.items():
        width = max(block, 4)
        raw = bytes(rng.randrange(256) for _ in range(2 * width // block * size))
        tensors.append((name, kind, [width, 2], raw))
    keys = {"general.architecture": "llama", "llama.block_count": 2, "llama.rope.freq_base": 10000.0, "flag": True}
    whole = gguf({**keys, **tokenizer}, tensors)
    small = gguf(keys, tensors[:2])
    write("gguf", "whole", whole)
    write("gguf", "small", small)
    write("gguf", "no-tensors", gguf(keys, []))
    write("gguf", "truncated", whole[:-100])
    write("gguf", "header-only", whole[:24])
    write("gguf", "magic", gguf(keys, [], magic=b"GGML"))
    write("gguf", "version", gguf(keys, [], version=2))
    write("gguf", "huge-count", small[:8] + struct.pack("<QQ", 2**62, 2**62) + small[24:])
    model_seeds(tokenizer)
    write("gguf", "far-offset", small[:-1].replace(struct.pack("<IQ", 1, 32), struct.pack("<IQ", 1, 2**40)))


def model_seeds(tokenizer):
    """Whole models of one layer whose metadata and tensors agree, and some whose metadata claim what is not there."""
    vocab = len(tokenizer["tokenizer.ggml.tokens"])
    sizes = {"llama.block_count": 1, "llama.embedding_length": 8, "llama.feed_forward_length": 4,
             "llama.context_length": 64, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1,
             "llama.attention.key_length": 16, "llama.attention.layer_norm_rms_epsilon": 1e-5}
    shapes = {"token_embd": [8, vocab], "output_norm": [8], "blk.0.attn_norm": [8], "blk.0.attn_q": [8, 32],
              "blk.0.attn_k": [8, 16], "blk.0.attn_v": [8, 16], "blk.0.attn_output": [32, 8], "blk.0.ffn_norm": [8],
              "blk.0.ffn_gate": [8, 4], "blk.0.ffn_up": [8, 4], "blk.0.ffn_down": [4, 8]}

    def model(change, drop=None):
        tensors = []
        for name, shape in shapes.items():
            if name != drop:
                tensors.append((name + ".weight", 1, shape, bytes(2 * shape[0] * (shape + [1])[1])))  # F16 zeros
        chat = "{{ '<|im_start|>' }}{{ '<|im_end|>' }}"
        return gguf({"general.architecture": "llama", "tokenizer.chat_template": chat, **sizes, **change, **tokenizer},
                    tensors)

    write("gguf", "model", model({}))
    write("gguf", "model-wrong-kind", model({"llama.attention.key_length": "16"}))
    write("gguf", "model-no-tensor", model({}, drop="blk.0.ffn_up"))
    write("gguf", "model-layers", model({"llama.block_count": 3000000}))
    write("gguf", "model-heads", model({"llama.attention.head_count": 2**24, "llama.attention.key_length": 2**24}))
    write("gguf", "model-widths", model({"llama.embedding_length": 2**24, "llama.feed_forward_length": 2**24}))
    write("gguf", "model-gpt2", model({"general.architecture": "gpt2"}))


def tokenizer_seeds():
    texts = ["", "Hello, world!", "the the  the\n\n the", "don't I'll we've", "x = 12345 + 6.7e-8", "  leading, trailing  ",
             "naïve café Ünïcödé", "日本語のテキスト", "Привет, мир", "مرحبا", "🙂🙃👩‍👩‍👧", "<|im_start|>user\nhi<|im_end|>", "\r\n\t\x0b",
             "a" * 300, "\u00a0\u2003wide spaces"]
    for i, text in enumerate(texts):
        write("tokenizer", f"{i:02}", text)
    write("tokenizer", "invalid", b"\xff\xfe\xc3(\xe2\x82\xf0\x9f\x98 ok \x80")
    write("tokenizer", "zero", b"a\0b\0\0")


if __name__ == "__main__":
    run_seeds()
    openai_seeds()
    table_seeds()
    trace_seeds()
    gguf_seeds()
    tokenizer_seeds()
