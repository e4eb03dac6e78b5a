"""The cells of the comparison: decode steps over forests of shared tokens, with their page tables.

A forest is a text: `4096[256*32]` is a node of 4096 tokens with 32 nodes of 256 behind it; siblings are separated by
spaces, `*n` repeats a node and all below it. A leaf is a request of one query row; it attends to the tokens of all nodes
on its path. Inner nodes are whole pages, so that nothing is shared within a page. Requests are numbered depth first:
those below a node are neighbours, as explicit levels need them.
"""

import dataclasses
import functools
import itertools
import random
import re

PAGE = 16  # tokens of a page


@dataclasses.dataclass(frozen=True)
class Forest:
    """Nodes in depth-first order; `parents[i]` is -1 for a root."""

    parents: tuple
    tokens: tuple

    def __post_init__(self):
        for i, parent in enumerate(self.parents):
            if not -1 <= parent < i:
                raise ValueError(f"parent of node {i} is {parent}, expected -1 or an earlier node")
        for i in self.inner:
            if self.tokens[i] % PAGE:
                raise ValueError(f"node {i} has {self.tokens[i]} tokens and nodes behind it, expected whole pages of {PAGE}")
        if min(self.tokens, default=0) < 1:
            raise ValueError("a node has no tokens, expected at least one")

    @functools.cached_property
    def inner(self):
        """Nodes with others behind them."""
        return set(self.parents) - {-1}

    @functools.cached_property
    def paths(self):
        """For each request its nodes, outermost first."""
        paths, leaves = [], []
        for i, parent in enumerate(self.parents):
            paths.append((paths[parent] if parent >= 0 else ()) + (i,))
            if i not in self.inner:
                leaves.append(paths[i])
        return leaves


def parse(text):
    """A Forest from its text."""
    words = re.findall(r"\d+|[\[\]*]|\S", text)
    parents, tokens = [], []

    def siblings(at, parent):
        while at < len(words) and words[at] != "]":
            first = len(tokens)
            parents.append(parent)
            tokens.append(number(at))
            at += 1
            if at < len(words) and words[at] == "[":
                at = siblings(at + 1, first)
                if at >= len(words):
                    raise ValueError(f'forest "{text}": "[" without "]"')
                at += 1
            if at < len(words) and words[at] == "*":
                repeat(first, number(at + 1) - 1)
                at += 2
        return at

    def number(at):
        if at >= len(words) or not words[at].isdigit():
            raise ValueError(f'forest "{text}": expected a number, got "{words[at] if at < len(words) else ""}"')
        return int(words[at])

    def repeat(first, times):
        size = len(tokens) - first
        for _ in range(times):
            for i in range(len(tokens) - size, len(tokens)):
                parents.append(parents[i] + size if parents[i] >= first else parents[i])
                tokens.append(tokens[i])

    if siblings(0, -1) != len(words):
        raise ValueError(f'forest "{text}": "]" without "["')
    return Forest(tuple(parents), tuple(tokens))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One decode step: requests of one query row over a forest, with q heads / KV heads / head size."""

    name: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    forest: Forest

    @property
    def num_requests(self):
        return len(self.forest.paths)

    @property
    def lengths(self):
        """Tokens that each request attends to."""
        return [sum(self.forest.tokens[i] for i in path) for path in self.forest.paths]

    @property
    def is_shared(self):
        return bool(self.forest.inner)

    @property
    def token_bytes(self):
        """K and V of one token in 16 bits."""
        return 2 * self.num_kv_heads * self.head_dim * 2

    @property
    def distinct_bytes(self):
        """K and V of every page once: the least that has to be read."""
        return sum(-(-n // PAGE) for n in self.forest.tokens) * PAGE * self.token_bytes

    @property
    def flat_bytes(self):
        """K and V of every page as often as requests have it."""
        return sum(-(-n // PAGE) for n in self.lengths) * PAGE * self.token_bytes

    @property
    def flops(self):
        """Both products: two operations a multiplication and addition."""
        return 4 * self.head_dim * self.num_qo_heads * sum(self.lengths)

    def shrunk(self, factor):
        """The same forest with about 1/factor of the tokens of each node: for runs without a GPU."""
        inner = self.forest.inner
        tokens = [
            max(PAGE, n // factor // PAGE * PAGE) if i in inner else max(1, n // factor)
            for i, n in enumerate(self.forest.tokens)
        ]
        return dataclasses.replace(self, forest=Forest(self.forest.parents, tuple(tokens)))


class Tables:
    """Page tables of a cell: pages in random order, a fifth of the pool unused."""

    def __init__(self, cell, seed=1):
        counts = [-(-n // PAGE) for n in cell.forest.tokens]
        self.num_pages = sum(counts) * 5 // 4 + 1
        order = random.Random(seed).sample(range(self.num_pages), sum(counts))
        ends = list(itertools.accumulate(counts))
        self.node_pages = [order[end - n : end] for n, end in zip(counts, ends)]
        self.forest = cell.forest
        self.requests = [self._pages(path) for path in cell.forest.paths]
        self.last_page_len = [(n - 1) % PAGE + 1 for n in cell.lengths]

    def _pages(self, nodes):
        return [page for i in nodes for page in self.node_pages[i]]

    @property
    def distinct(self):
        """Every page that some request has, once."""
        return self._pages(range(len(self.node_pages)))

    def csr(self):
        """(indptr, indices, last_page_len) of the requests."""
        return _csr(self.requests) + (self.last_page_len,)

    def block_table(self):
        """A row a request, filled up with page 0."""
        width = max(map(len, self.requests))
        return [pages + [0] * (width - len(pages)) for pages in self.requests]

    @property
    def depth(self):
        return max(map(len, self.forest.paths))

    def levels(self, count):
        """Explicit levels, outermost first: (qo_indptr, indptr, indices, last_page_len) each.

        Level d has the inner nodes at depth d; the last has the rest of every path, each request for itself. Where a
        request has nothing at a level, the level has an empty range for it.
        """
        rests = [min(count, len(path)) - 1 for path in self.forest.paths]
        out = []
        for depth in range(count - 1):
            held = [path[depth] if depth < rest else None for path, rest in zip(self.forest.paths, rests)]
            groups = [(node, len(list(rows))) for node, rows in itertools.groupby(held)]
            qo_indptr = [0, *itertools.accumulate(n for _, n in groups)]
            pages = [[] if node is None else self.node_pages[node] for node, _ in groups]
            out.append((qo_indptr, *_csr(pages), [0 if node is None else PAGE for node, _ in groups]))
        pages = [self._pages(path[rest:]) for path, rest in zip(self.forest.paths, rests)]
        return out + [(list(range(len(pages) + 1)), *_csr(pages), self.last_page_len)]

    def common_pages(self):
        """Pages that every request begins with, less than any request has."""
        shortest = min(map(len, self.requests)) - 1
        columns = itertools.islice(zip(*self.requests), shortest)
        return len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))


def _csr(pages):
    return [0, *itertools.accumulate(map(len, pages))], [p for row in pages for p in row]


def _uneven():
    """Leaves of 64 to 192 tokens, by a linear congruential generator."""
    state, leaves = 12345, []
    for _ in range(64):
        state = (state * 1103515245 + 12345) % 2**31
        leaves.append(str(64 + (state >> 8) % 129))
    return "4096[" + " ".join(f"512[{' '.join(leaves[i : i + 8])}]" for i in range(0, 64, 8)) + "]"


# Moments of Tree-of-Thoughts searches: thoughts under way (leaves) behind those they continue.
_SEARCHES = {
    "docmerge_line26_t1131": "1312[1131*6 1088[36*10]]",
    "docmerge_line15_t876": "1312[480[408*5 416[4*10] 408*2] 876*9]",
    "keyword_line85_t141": "1472[66*7 64[14*10]]",
    "keyword_line44_t356": "1696[90*8 96[6*10] 90]",
    "set128_line51_t36": "1600[36*2 32[6*9] 36*5]",
    "set128_line57_t96": "1600[96*4 64[32[3*10] 33*4] 96*3]",
    "sorting128_line48_t1216": "1120[672[547*4 192[352[1*10] 355]] 1216]",
    "sorting128_line22_t1336": "1120[1336*3 768[553*5 192[361*3 352[10*9] 361] 553] 1336]",
}


def standard():
    """The 48 cells: 44 share tokens, 4 (`flat_`) do not. 32 q heads, 8 KV heads of 128 unless the name says otherwise."""
    out = []

    def add(name, text, heads=(32, 8, 128)):
        out.append(Cell(name, *heads, parse(text)))

    def two_levels(requests, shared, own, prefix="2lv", **options):
        add(f"{prefix}_B{requests}_P{shared}_U{own}", f"{shared}[{own}*{requests}]", **options)

    for requests, shared in itertools.product((4, 8, 32, 64, 128, 256), (512, 2048, 8192, 32768)):
        two_levels(requests, shared, 256)
    two_levels(64, 4096, 128)
    two_levels(16, 2048, 2048)
    two_levels(128, 1024, 1024)
    two_levels(128, 32768, 256, "mha", heads=(32, 32, 128))
    two_levels(128, 2048, 256, "mha", heads=(32, 32, 128))
    two_levels(8, 4000, 64, "h8-1", heads=(8, 1, 128))
    two_levels(64, 8192, 256, "h64-8", heads=(64, 8, 128))
    two_levels(64, 4096, 256, "d64", heads=(32, 8, 64))
    for requests, own in ((64, 2048), (8, 8192), (1, 32768), (256, 512)):
        add(f"flat_B{requests}_L{own}", f"{own}*{requests}")
    add("tree3_2048-4x1024-16x256", "2048[1024[256*16]*4]")
    add("bin5_512", "512[" * 5 + "512*2" + "]*2" * 4 + "]")
    add("tree3v_4096-8x512-8x128+-64", _uneven())
    add("groups_2x32xP4096+16xL2048", "4096[256*32]*2 2048*16")
    for name, text in _SEARCHES.items():
        add(f"tot_{name}", text)
    return out


def notation(cell):
    """A line as `headwater bench --cells` reads it: name, q heads, KV heads, head size, number of nodes, then parent and
    tokens of each."""
    nodes = [f"{parent} {tokens}" for parent, tokens in zip(cell.forest.parents, cell.forest.tokens)]
    return f"{cell.name} {cell.num_qo_heads} {cell.num_kv_heads} {cell.head_dim} {len(nodes)} {' '.join(nodes)}"
