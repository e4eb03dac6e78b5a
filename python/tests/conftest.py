"""Batches that share pages, for the tests of this folder."""

import dataclasses

import numpy as np
import pytest

import headwater
import reference
from skips import pytest_addoption, pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401, hooks


@dataclasses.dataclass
class Case:
    """A batch over NHD caches, with its arrays and what is expected of it."""

    shape: headwater.AttentionShape
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    kv_last_page_len: np.ndarray
    page_size: int

    def batch(self):
        return headwater.Batch(
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.kv_last_page_len,
            page_size=self.page_size,
            num_pages=len(self.k),
        )

    def expected(self, **options):
        return reference.paged(
            self.q, self.k, self.v, self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_last_page_len, **options
        )


def make_case(
    *, groups=(4, 3), shared_pages=(6, 4), own_tokens=(5, 9, 1, 16), qo_len=1, heads=(8, 2), dim=64, page_size=4, seed=0
):
    """Groups of requests; each group shares pages, each request has own tokens behind them."""
    rng = np.random.default_rng(seed)
    tables, lasts, next_page = [], [], 0
    i = 0
    for members, pages in zip(groups, shared_pages):
        shared = list(range(next_page, next_page + pages))
        next_page += pages
        for _ in range(members):
            tokens = own_tokens[i % len(own_tokens)]
            i += 1
            n = -(-tokens // page_size)
            tables.append(shared + list(range(next_page, next_page + n)))
            next_page += n
            lasts.append(tokens - (n - 1) * page_size)
    order = rng.permutation(next_page)
    indices = np.array([order[p] for table in tables for p in table], dtype=np.int32)
    indptr = np.concatenate([[0], np.cumsum([len(t) for t in tables])]).astype(np.int32)
    rows = len(tables) * qo_len
    shape = headwater.AttentionShape(heads[0], heads[1], dim, q_dtype="f32")
    draw = lambda *s: rng.standard_normal(s).astype(np.float32)  # noqa: E731
    return Case(
        shape,
        draw(rows, heads[0], dim),
        draw(next_page, page_size, heads[1], dim),
        draw(next_page, page_size, heads[1], dim),
        np.arange(0, rows + 1, qo_len, dtype=np.int32),
        indptr,
        indices,
        np.array(lasts, dtype=np.int32),
        page_size,
    )


@pytest.fixture
def case():
    return make_case()


def assert_close(got, want, tolerance=2e-5):
    """Against the largest value expected; -inf must be -inf."""
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want)
    assert got.shape == want.shape
    assert np.array_equal(np.isinf(got), np.isinf(want))
    finite = np.isfinite(want)
    assert np.isfinite(got[finite]).all()
    assert np.abs(got[finite] - want[finite]).max(initial=0.0) <= tolerance * max(1.0, np.abs(want[finite]).max(initial=0.0))
