"""FlashInfer's arms: flat decoding, its cascade as it comes, its cascade with other kernels, and a shared prefix.

Its cascade takes the fa3 kernels on Hopper, which do not split long KV; the same levels by the fa2 kernels are often
quicker, so those are arms too, made of the public parts that its cascade is made of (prefill wrappers and
merge_state_in_place). Page tables that the host plans by are host tensors: that is the quickest way to call `plan`.
"""

from .arm import LN2, Arm, NotServed, Unavailable
from .cells import PAGE


class _FlashInfer(Arm):
    library = "flashinfer"

    def __init__(self):
        try:
            import flashinfer
        except Exception as error:  # its import fails in many ways: missing packages, no compiler, versions
            raise Unavailable(f"flashinfer cannot be imported: {error!r}") from None
        self.flashinfer = flashinfer
        self.version = flashinfer.__version__

    def _heads(self):
        cell = self.inputs.cell
        return cell.num_qo_heads, cell.num_kv_heads, cell.head_dim, PAGE

    def _types(self):
        half = self.inputs.device.torch.float16
        return dict(q_data_type=half, kv_data_type=half)

    def _table(self, indptr, indices, last_page_len):
        ints = self.inputs.device.ints
        return ints(indptr, host=True), ints(indices), ints(last_page_len, host=True)

    def _levels(self, most):
        """Lists with one entry a level, as the cascade's plan takes them."""
        count = min(most, self.inputs.tables.depth)
        if count < 2:
            raise NotServed("nothing is shared: one level")
        ints = self.inputs.device.ints
        levels = self.inputs.tables.levels(count)
        return [(ints(qo_indptr, host=True), *self._table(*table)) for qo_indptr, *table in levels]


class Flat(_FlashInfer):
    """BatchDecodeWithPagedKVCacheWrapper on tensor cores."""

    def prepare(self, inputs):
        super().prepare(inputs)
        wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self.wrapper = wrapper(inputs.device.scratch, "NHD", use_tensor_cores=True)
        indptr, indices, last_page_len = inputs.csr
        self.table = indptr, indices.to(inputs.q.device), last_page_len
        self.out = inputs.device.torch.empty_like(inputs.q)

    def plan(self):
        self.wrapper.plan(*self.table, *self._heads(), **self._types())

    def call(self, copy):
        return self.wrapper.run(self.inputs.q, self.inputs.copies[copy], out=self.out)

    def call_with_lse(self, copy):
        out, lse = self.wrapper.run(self.inputs.q, self.inputs.copies[copy], return_lse=True)
        return out, lse * LN2

    def path(self):
        backend = getattr(self.wrapper, "resolved_backend", None) or self.wrapper._backend
        assert backend in ("fa2", "fa3"), f"backend {backend}, expected fa2 or fa3"
        return f"flat {backend}"


class Cascade(_FlashInfer):
    """MultiLevelCascadeAttentionWrapper as it comes, as many levels as the forest is deep."""

    def prepare(self, inputs):
        super().prepare(inputs)
        levels = self._levels(most=99)
        self.lists = [list(column) for column in zip(*levels)]
        wrapper = self.flashinfer.MultiLevelCascadeAttentionWrapper
        self.wrapper = wrapper(len(levels), inputs.device.scratch, "NHD")

    def plan(self):
        self.wrapper.plan(*self.lists, *self._heads(), causal=False, **self._types())

    def call(self, copy):
        return self.wrapper.run(self.inputs.q, self.inputs.copies[copy])

    def path(self):
        parts = self.wrapper._batch_prefill_wrappers
        assert len(parts) >= 2, f"{len(parts)} levels"
        return "cascade " + "+".join(part._backend for part in parts)


class Levels(_FlashInfer):
    """The same by named kernels: `shared` for inner levels, `own` for the last; at most `most` levels."""

    def __init__(self, shared, own, most=99):
        super().__init__()
        self.shared, self.own, self.most = shared, own, most

    def prepare(self, inputs):
        super().prepare(inputs)
        if self.most < 99 and inputs.tables.depth <= self.most:
            raise NotServed(f"no more than {self.most} levels: the arm with all levels")
        self.levels = self._levels(self.most)
        wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper
        backends = [self.shared] * (len(self.levels) - 1) + [self.own]
        self.wrappers = [wrapper(inputs.device.scratch, "NHD", backend=backend) for backend in backends]

    def plan(self):
        for wrapper, level in zip(self.wrappers, self.levels):
            wrapper.plan(*level, *self._heads(), causal=False, **self._types())

    def _run(self, copy):
        q, kv = self.inputs.q, self.inputs.copies[copy]
        out, lse = self.wrappers[-1].run(q, kv, return_lse=True)
        for wrapper in self.wrappers[:-1]:
            self.flashinfer.merge_state_in_place(out, lse, *wrapper.run(q, kv, return_lse=True))
        return out, lse

    def call(self, copy):
        return self._run(copy)[0]

    def call_with_lse(self, copy):
        out, lse = self._run(copy)
        return out, lse * LN2

    def path(self):
        ran = [wrapper._backend for wrapper in self.wrappers]
        assert set(ran[:-1]) == {self.shared} and ran[-1] == self.own, f"backends {ran}"
        return "cascade " + "+".join(ran)


class SharedPrefix(_FlashInfer):
    """BatchDecodeWithSharedPrefixPagedKVCacheWrapper: one prefix in contiguous memory, own tokens in pages."""

    def prepare(self, inputs):
        super().prepare(inputs)
        forest = inputs.cell.forest
        if forest.inner != {0} or forest.parents.count(-1) != 1:
            raise NotServed("not one prefix of all requests")
        _, own = inputs.tables.levels(2)
        self.table = self._table(*own[1:])
        pages = inputs.tables.node_pages[0]
        self.prefixes = [tuple(x[pages].flatten(0, 1) for x in kv) for kv in inputs.copies]
        wrapper = self.flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper
        self.wrapper = wrapper(inputs.device.scratch, "NHD")

    def plan(self):
        self.wrapper.begin_forward(*self.table, *self._heads(), data_type="float16")

    def call(self, copy):
        return self.wrapper.forward(self.inputs.q, *self.prefixes[copy], self.inputs.copies[copy])

    def path(self):
        return "shared prefix"
