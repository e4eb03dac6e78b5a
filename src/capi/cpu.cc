// The C interface: executors and the CPU back end.
#include "capi/capi.h"

using namespace headwater;
using namespace headwater::capi;

namespace {

/// Workers that the caller supplies.
class CallbackExecutor final : public Executor {
 public:
  CallbackExecutor(int workers, hw_parallel call, void* user) : num_workers_(workers), parallel_(call), user_(user) {}
  [[nodiscard]] int num_workers() const noexcept override { return num_workers_; }
  void parallel(void (*task)(void* context, int worker) noexcept, void* context) override {
    parallel_(user_, task, context);
  }

 private:
  int num_workers_;
  hw_parallel parallel_;
  void* user_;
};

Executor& need_executor(hw_executor* executor) {
  return *need(executor, "executor").executor;
}

}  // namespace

int hw_executor_create_serial(hw_executor** executor, hw_error* error) {
  return guard(error, [&] {
    need(executor, "executor");
    *executor = new hw_executor{std::make_unique<SerialExecutor>()};
  });
}

int hw_executor_create_thread_pool(int num_workers, hw_executor** executor, hw_error* error) {
  return guard(error, [&] {
    need(executor, "executor");
    if (num_workers < 0) refuse("num_workers = " + std::to_string(num_workers) + ", expected at least 0");
    *executor = new hw_executor{std::make_unique<ThreadPool>(num_workers)};
  });
}

int hw_executor_create_custom(int num_workers, hw_parallel parallel, void* user, hw_executor** executor,
                              hw_error* error) {
  return guard(error, [&] {
    need(executor, "executor");
    if (num_workers < 1) refuse("num_workers = " + std::to_string(num_workers) + ", expected at least 1");
    if (parallel == nullptr) refuse("parallel = null, expected a function");
    *executor = new hw_executor{std::make_unique<CallbackExecutor>(num_workers, parallel, user)};
  });
}

void hw_executor_destroy(hw_executor* executor) {
  delete executor;
}

int hw_executor_num_workers(const hw_executor* executor) {
  return executor == nullptr ? 0 : executor->executor->num_workers();
}

int hw_executor_parallel(hw_executor* executor, hw_task task, void* context, hw_error* error) {
  struct Call {
    hw_task task;
    void* context;
  };
  return guard(error, [&] {
    Executor& e = need_executor(executor);
    if (task == nullptr) refuse("task = null, expected a function");
    Call call{task, context};
    e.parallel(
        [](void* c, int worker) noexcept {
          const Call& inner = *static_cast<const Call*>(c);
          inner.task(inner.context, worker);
        },
        &call);
  });
}

int hw_cpu_run(const hw_plan* plan, const hw_run_args* args, hw_executor* executor, hw_run_outcome* outcome,
               hw_error* error) {
  return guard(error, [&] {
    const Plan& p = need(plan, "plan").plan;
    const hw_run_args a = read_struct(args, "args", hw_run_args_init);
    const std::size_t outcome_size = outcome == nullptr ? 0 : output_size(outcome, "outcome");
    Executor& workers = need_executor(executor);
    std::vector<KvCache> caches;
    for (const hw_kv_cache& cache : array(a.kv, a.num_kv, "args->kv")) {
      caches.push_back(to_cpp(cache, "args->kv[].dtype"));
    }
    cpu::RunArgs r;
    r.q = to_cpp(a.q, "args->q.dtype");
    r.kv = caches;
    r.out = to_cpp(a.out, "args->out.dtype");
    r.lse = to_cpp(a.lse, "args->lse.base");
    r.alibi_slopes = a.alibi_slopes;
    r.sinks = a.sinks;
    r.include_sink = a.include_sink != 0;
    r.k_scale = to_cpp(a.k_scale);
    r.v_scale = to_cpp(a.v_scale);
    r.workspace = {a.workspace, a.workspace_bytes};
    if (a.isa != HW_ISA_DEFAULT) r.isa = enumerator<Isa>(a.isa, HW_ISA_AVX512_BF16 + 1, "args->isa");
    const cpu::RunOutcome o = cpu::run(p, r, workers);
    if (outcome != nullptr) {
      write_struct(outcome,
                   {0, static_cast<int>(o.path), static_cast<int>(o.isa), o.items, o.kv_bytes_read, o.merged_rows},
                   outcome_size);
    }
  });
}

int hw_cpu_merge_states(const hw_const_rows* v_in, const hw_const_lse* lse_in, const int32_t* o_indptr,
                        int32_t num_groups, int32_t num_heads, int32_t head_dim, const hw_rows* v_out,
                        const hw_lse* lse_out, hw_executor* executor, hw_error* error) {
  return guard(error, [&] {
    if (num_groups < 0) refuse("num_groups = " + std::to_string(num_groups) + ", expected at least 0");
    const auto groups = array(o_indptr, std::int64_t{num_groups} + 1, "o_indptr");
    cpu::merge_states(to_cpp(need(v_in, "v_in"), "v_in->dtype"), to_cpp(need(lse_in, "lse_in"), "lse_in->base"), groups,
                      num_heads, head_dim, to_cpp(need(v_out, "v_out"), "v_out->dtype"),
                      to_cpp(need(lse_out, "lse_out"), "lse_out->base"), need_executor(executor));
  });
}

int hw_cpu_append_kv(const hw_kv_cache* cache, const hw_const_rows* k, const hw_const_rows* v,
                     const int64_t* token_slots, size_t num_rows, int32_t num_kv_heads, int32_t head_dim_qk,
                     int32_t head_dim_vo, const hw_scale* k_scale, const hw_scale* v_scale, hw_executor* executor,
                     hw_error* error) {
  return guard(error, [&] {
    const Scale ks = k_scale == nullptr ? Scale{} : to_cpp(*k_scale);
    const Scale vs = v_scale == nullptr ? Scale{} : to_cpp(*v_scale);
    cpu::append_kv(to_cpp(need(cache, "cache"), "cache->dtype"), to_cpp(need(k, "k"), "k->dtype"),
                   to_cpp(need(v, "v"), "v->dtype"), array(token_slots, num_rows, "token_slots"), num_kv_heads,
                   head_dim_qk, head_dim_vo, ks, vs, need_executor(executor));
  });
}

int hw_cpu_copy_pages(const hw_kv_cache* cache, const hw_page_copy* copies, size_t num_copies, int32_t num_kv_heads,
                      int32_t head_dim_qk, int32_t head_dim_vo, hw_executor* executor, hw_error* error) {
  return guard(error, [&] {
    std::vector<cpu::PageCopy> list;
    for (const hw_page_copy& c : array(copies, num_copies, "copies")) list.push_back({c.src, c.dst, c.num_tokens});
    cpu::copy_pages(to_cpp(need(cache, "cache"), "cache->dtype"), list, num_kv_heads, head_dim_qk, head_dim_vo,
                    need_executor(executor));
  });
}
