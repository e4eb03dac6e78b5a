// See omp_executor.h.
#include "engine/omp_executor.h"

#include <algorithm>

// Declared here because clang's tools have no omp.h of their own.
extern "C" {
int omp_get_thread_num();
int omp_get_num_threads();
int omp_get_max_threads();
int omp_get_num_procs();
void omp_set_num_threads(int num_threads);
}

namespace headwater::engine {

void OmpExecutor::parallel(void (*task)(void* context, int worker) noexcept, void* context) {
  const int workers = num_workers_;
#pragma omp parallel num_threads(workers) default(none) shared(task, context, workers)
  {
    // OpenMP may grant fewer threads than asked for; every worker index still runs exactly once.
    const int granted = omp_get_num_threads();
    for (int worker = omp_get_thread_num(); worker < workers; worker += granted) task(context, worker);
  }
}

int available_processors() noexcept {
  return std::max(1, omp_get_num_procs());
}

std::unique_ptr<Executor> make_executor(int num_workers) {
  const int workers = num_workers > 0 ? num_workers : available_processors();
#ifdef HEADWATER_SERIAL_PRODUCTS
  return std::make_unique<ThreadPool>(workers);
#else
  return std::make_unique<OmpExecutor>(workers);
#endif
}

ProductThreads::ProductThreads([[maybe_unused]] int num_threads) noexcept : before_(omp_get_max_threads()) {
#ifdef HEADWATER_SERIAL_PRODUCTS
  omp_set_num_threads(1);
#else
  omp_set_num_threads(num_threads);
#endif
}

ProductThreads::~ProductThreads() {
  omp_set_num_threads(before_);
}

}  // namespace headwater::engine
