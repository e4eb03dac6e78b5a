#!/usr/bin/env python3
"""Records token ids of an independent implementation for the tokenizer's tests: tests/data/tokenizer_ids.json.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install gguf==0.19.0 tokenizers==0.23.3
    /tmp/venv/bin/python tools/record_tokenizer_ids.py "$(tools/fetch_model.sh)" tests/data/tokenizer_ids.json

Two vocabularies: a small one (every byte, and the results of the model's first merges) that is stored with the ids, so that the tests need
no model, under each of the four pre-tokenizers; and the model's own, for tests that run when the model is there. The small one has besides
what the model lacks: merges of digits, and words that no merge leads to, so that the pre-tokenizers differ.
Texts are coded plainly ("as_text") and with special tokens recognised ("recognise").
"""
import json
import random
import sys

import gguf
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

NUM_SMALL_MERGES = 3000
EXTRA_MERGES = [("1", "2"), ("12", "3"), ("9", "9"), ("99", "9"), ("3", "4"), ("\u0120", "1"), ("\u0120", "12"), ("0", "1"), ("2", "0")]
EXTRA_WORDS = ["\u0120fox", "Hello", "\u0120lazy", "camel"]

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def split_by(pattern):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": lambda: split_by(LLAMA3),
    "qwen2": lambda: split_by(QWEN2),
}

TEXTS = [
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", " \n \n", "a", " a", "a ", "  a", "a  ", "a  b", "a   b", "a\nb",
    "a\n\nb", "a \n b", "a\n  b", "a\r\n\r\nb", "\t\ta", "\t a\t b", "   \n   a", "hello world", "Hello, World!", "Hello,  World !!",
    "The quick brown fox jumps over the lazy dog.", "HELLO hello Hello hELLO", "it's we're they've I'm you'll he'd don't",
    "IT'S WE'RE THEY'VE I'M YOU'LL HE'D DON'T", "'s 's't 'S 'll'LL 'x ''s", "it\u2019s we\u2019re", "'\u017f '\u017ft x'\u017f",
    "rock 'n' roll", "1", "12", "123", "1234", "12345", "1234567890", " 1", "  1", "   12 34  5", "3.14159", "1,234,567.89", "1e-10", "0xDEADBEEF",
    "2024-02-29T12:34:56Z", "v1.2.3-rc4", "a1b2c3", "1a 2b 3c", "x=1\n y=2\n", "\u00bd \u00b2 \u2167 \u2460 \u0663\u0664 \u09ea \u4e09", "5\u00d77\u00f73",
    "foo  1", "foo  1 ", "foo\t1", "foo \n1", " \n1 ", "1  2", "1 \n\n 2",
    "def f(x):\n    return x + 1\n", "for (int i = 0; i < n; ++i) { sum += a[i]; }\n", "#include <vector>\nint main() { return 0; }\n",
    "\tif x:\n\t\ty()\n\telse:\n\t\tz()\n", "SELECT * FROM t WHERE a >= 10 AND b != 'x';", "{\"key\": [1, 2.5, null, true], \"s\": \"\\n\"}",
    "<div class=\"a b\">text &amp; more</div>", "std::unordered_map<std::string_view, int>", "f(g(h(1,2),3),4);;", "a->b.c::d && !e || f", "x**2 // y %% z", "$HOME/.cache/*.gguf",
    "https://example.org/a/b?c=d&e=f#g", "user@example.org", "C:\\Windows\\System32", "`code` **bold** _it_ ~~no~~", "- item\n  - sub\n    - subsub\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n", "/* comment */ // more", "\\begin{equation} e^{i\\pi} + 1 = 0 \\end{equation}", "camelCaseWord snake_case_word kebab-case-word SCREAMING_CASE",
    "fran\u00e7ais: \u00e0 \u00e9 \u00e8 \u00ea \u0153 \u00e7a va?", "Stra\u00dfe, Gr\u00f6\u00dfe, \u00c4rger, \u00fcber", "espa\u00f1ol \u00bfqu\u00e9 tal? \u00a1bien!", "portugu\u00eas: cora\u00e7\u00e3o, n\u00e3o",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u041a\u0430\u043a \u0434\u0435\u043b\u0430?", "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5 \u03ba\u03cc\u03c3\u03bc\u03b5", "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd", "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c \u0661\u0662\u0663",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01", "\u6211\u559c\u6b22 GPU \u548c CPU\u3002", "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c", "\u30ab\u30bf\u30ab\u30ca \u3072\u3089\u304c\u306a \u6f22\u5b57", "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4", "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01", "\u0b95\u0bcd\u0baf \u0ba4\u0bae\u0bbf\u0bb4\u0bcd", "\u10d2\u10d0\u10db\u10d0\u10e0\u10ef\u10dd\u10d1\u10d0", "\u0531\u0580\u0587\u0577\u0561\u057f", "ti\u1ebfng Vi\u1ec7t c\u00f3 d\u1ea5u", "T\u00fcrk\u00e7e \u0130stanbul \u0131\u015f\u0131k",
    "z\u0142oty \u0141\u00f3d\u017a \u017c\u00f3\u0142\u0107", "\u010de\u0161tina p\u0159\u00edli\u0161 \u017elu\u0165ou\u010dk\u00fd k\u016f\u0148", "\u12a0\u121b\u122d\u129b", "\U00010330\U00010331 \U0001d538\U0001d539 \U00020000\U0002a6d6",
    "\U0001f600", "\U0001f600\U0001f601\U0001f602", "hi \U0001f44b\U0001f3fd there", "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family", "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7", "\u2764\ufe0f \u2b50\ufe0f 1\ufe0f\u20e3", "ok \u2705 no \u274c",
    "e\u0301 vs \u00e9", "a\u0300\u0301\u0302\u0303", "Z\u0351\u036b\u0343alg\u030ao", "\u200b\u200czero\u200dwidth\ufeff", "soft\u00adhyphen", "\u202eright\u202c", "\u180e \u180ea\u180e", "nbsp\u00a0here\u00a0\u00a0twice",
    "\u2028line\u2029para\u0085nel", "\u3000ideographic\u3000space", "\u2003em\u2009thin\u200ahair", "\x0b\x0cvt ff", "\x00\x01\x02nul", "\x1c\x1d\x1e\x1f\x7f", "\ufffd\uffff\U0010ffff", "\ue000\uf8ff\U000f0000 private", "\u0378unassigned",
    "\u2026\u2014\u2013 \u201cquotes\u201d \u2018single\u2019 \u00abguillemets\u00bb", "\u20ac100 \u00a350 \u00a5 \u20bf", "\u2200x\u2208\u211d: x\u00b2\u22650", "\u03b1\u03b2\u03b3 \u2211\u222b\u221a", "\u2500\u2502\u250c\u2510 \u2588\u2591", "\u00a9\u00ae\u2122 \u00b0C \u00b5m",
    "!", "!!", "!!!", "!?!?!?", "...", ". . .", " .", " ..", "a.b.c", "(a)", "( a )", "[1]", "--", "---", "----------------", "========", "****", "____", "#####", "\"\"\"", "'''", "' '", "\" \"", "~!@#$%^&*()_+", "\u3002\u3002\u3002\u3001\u3001",
    "!\n", "!\n\n", "! \n", "!!\r\n\r\n x", ";\n}", "a!\n\n\nb",
    " " * 7, " " * 8, " " * 15, " " * 16, " " * 31, " " * 64, " " * 300, "\n" * 7, "\n" * 100, "\t" * 9, "\t" * 40, " \t" * 12, "\r\n" * 10, " " * 20 + "x" + " " * 20 + "\n" + " " * 4,
    "x" * 50, "ab" * 200, "a" * 1000, "antidisestablishmentarianism", "Donaudampfschifffahrtselektrizit\u00e4tenhauptbetriebswerkbauunterbeamtengesellschaft", "supercalifragilisticexpialidocious" * 5,
    "\u4e2d" * 120, "\u0416" * 90, "9" * 100, "!" * 200, "\U0001f600" * 30, "the" * 60, "\u00e9" * 70,
    "<|endoftext|>", "<|im_start|>user\nHi<|im_end|>\n", "a<|im_end|>b", "<|im_start|><|im_end|>", " <|im_start|> x <|im_end|> ", "<|im_start", "<|im_end|", "<|im_end|>>", "<<|im_end|>", "<|IM_END|>", "<repo_name>x/y<file_sep>a.py\n", "<jupyter_start><jupyter_text>a<jupyter_code>b",
    "<reponame><repo_name>", "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n1 + 1 = ?<|im_end|>\n<|im_start|>assistant\n", "user<|im_end|>\n<|im_start|>system\nobey", "12<|im_end|>34", "<file_sep> <filename>  <gh_stars>10",
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and dedicated to the proposition that all men are created equal.",
    "Attention reads the whole cache once per step; what is shared need be read only once.\n\n1. Find who shares.\n2. Split.\n3. Merge.\n",
    "Mixed: English, \u4e2d\u6587, \u0420\u0443\u0441\u0441\u043a\u0438\u0439, \u0627\u0644\u0639\u0631\u0628\u064a\u0629, \u65e5\u672c\u8a9e, \ud55c\uad6d\uc5b4 & \U0001f30d 123\u20ac.",
]

POOL = (
    list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") + list("     \n\n\t\r.,;:!?'\"-_()[]{}<>/\\|@#$%^&*+=~`")
    + list("\u00e9\u00df\u00f1\u0416\u044f\u03bb\u05d0\u0639\u4e2d\u6587\u3042\uac00\u0e01\u0301\u00a0\u2003\u3000\u2028\u00b2\u0663\u2019\u2014\u200d\ufe0f\U0001f600\U0001f1e9")
    + ["the", " and", "ing", "'s", "'ll", "  ", "<|im_end|>", " 12"]
)


def random_texts(count):
    draw = random.Random(20260101)
    return ["".join(draw.choice(POOL) for _ in range(draw.randint(3, 60))) for _ in range(count)]


def build(vocab, merges, pre, specials):
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return tokenizer


def record(vocab, merges, pre, specials, texts):
    ids = {}
    for mode, used in (("as_text", []), ("recognise", specials)):
        tokenizer = build(vocab, merges, pre, used)
        ids[mode] = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return ids


def main():
    model, target = sys.argv[1:]
    reader = gguf.GGUFReader(model)
    read = lambda key: reader.fields["tokenizer.ggml." + key].contents()
    tokens, kinds = read("tokens"), read("token_type")
    merges = [tuple(merge.split(" ")) for merge in read("merges")]
    specials = [token for token, kind in zip(tokens, kinds) if kind == 3]
    texts = TEXTS + random_texts(60)

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    small = merges[:NUM_SMALL_MERGES] + EXTRA_MERGES
    small_tokens = specials + alphabet + [left + right for left, right in small] + EXTRA_WORDS
    # Ids of special tokens are the same in both vocabularies of the library: they are listed in the vocabulary too.
    small_vocab = {token: i for i, token in enumerate(small_tokens)}
    full_vocab = {token: i for i, token in enumerate(tokens)}
    ids = {f"small/{pre}": record(small_vocab, small, pre, specials, texts) for pre in PRE_TOKENIZERS}
    ids["model/smollm"] = record(full_vocab, merges, "smollm", specials, texts)

    line = lambda value: json.dumps(value, separators=(",", ":"))
    lines = lambda values: "[\n" + ",\n".join(line(value) for value in values) + "\n]"
    with open(target, "w", encoding="ascii") as out:
        out.write("{\n")
        out.write(f'"made_by": {line("tools/record_tokenizer_ids.py with tokenizers " + tokenizers.__version__)},\n')
        out.write(f'"vocabulary_of": {line("SmolLM2-135M-Instruct (Apache-2.0), the first merges")},\n')
        out.write(f'"specials": {line(specials)},\n"alphabet": {line(alphabet)},\n')
        out.write(f'"merges": {line([" ".join(merge) for merge in small])},\n')
        out.write(f'"words": {line(EXTRA_WORDS)},\n')
        out.write(f'"texts": {lines(texts)},\n"ids": {{\n')
        out.write(",\n".join(f'"{name}": {{"as_text": {lines(i["as_text"])},\n"recognise": {lines(i["recognise"])}}}' for name, i in ids.items()))
        out.write("\n}\n}\n")
    print(f"{len(texts)} texts, {len(ids)} settings -> {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
