// Inside of the C interface: what a handle holds, how exceptions become codes, how C structs become C++ ones.
//
// Every fallible function is `return guard(error, [&] { ... });`. Structs with struct_size are read through
// read_struct, which lays the caller's bytes (perhaps an older, shorter version) over the defaults.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "headwater/headwater.h"
#include "headwater/headwater_c.h"

struct hw_planner {
  headwater::Planner planner;
};
struct hw_plan {
  headwater::Plan plan;
};
struct hw_executor {
  std::unique_ptr<headwater::Executor> executor;
};
struct hw_page_pool {
  headwater::PagePool pool;
};
struct hw_prefix_cache {
  explicit hw_prefix_cache(headwater::PagePool& p) : pool(p), cache(p) {}
  headwater::PagePool& pool;
  headwater::PrefixCache cache;
};

namespace headwater::capi {

int report(hw_error* error, int code, std::string_view message) noexcept;

/// Runs f; an exception becomes a code and a message.
template <typename F>
int guard(hw_error* error, F&& f) noexcept {
  try {
    std::forward<F>(f)();
    return report(error, HW_OK, "");
  } catch (const Error& e) {
    return report(error, static_cast<int>(e.code()), e.what());
  } catch (const std::bad_alloc&) {
    return report(error, HW_ERROR_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return report(error, HW_ERROR_INTERNAL, e.what());
  } catch (...) {
    return report(error, HW_ERROR_INTERNAL, "unknown exception");
  }
}

[[noreturn]] void refuse(const std::string& message);

/// *p, or an error that names the argument.
template <typename T>
T& need(T* p, const char* name) {
  if (p == nullptr) refuse(std::string(name) + " = null, expected a pointer");
  return *p;
}

/// The array [count] at p; null is fine only where count is 0.
template <typename T, typename N>
std::span<T> array(T* p, N count, const char* name) {
  if (std::cmp_less(count, 0))
    refuse("number of entries of " + std::string(name) + " = " + std::to_string(count) + ", expected at least 0");
  if (p == nullptr && count != 0) refuse(std::string(name) + " = null, expected " + std::to_string(count) + " entries");
  return {p, static_cast<std::size_t>(count)};
}

/// An array that may be left out: null gives an empty span.
template <typename T, typename N>
std::span<T> optional_array(T* p, N count, const char* name) {
  return p == nullptr ? std::span<T>{} : array(p, count, name);
}

/// Writes `value` to the caller's struct of `size` bytes (all structs start with struct_size).
template <typename T>
void write_struct(T* to, T value, std::size_t size) {
  value.struct_size = size;
  std::memcpy(to, &value, std::min(size, sizeof(T)));
}

/// The caller's struct over the defaults that `init` gives.
template <typename T>
T read_struct(const T* from, const char* name, void (*init)(T*, std::size_t)) {
  T value;
  init(&value, sizeof(T));
  const std::size_t size = need(from, name).struct_size;
  if (size < sizeof(size) || size > sizeof(T)) {
    refuse(std::string(name) + "->struct_size = " + std::to_string(size) +
           ", expected what the init function set, at most " + std::to_string(sizeof(T)));
  }
  std::memcpy(&value, from, size);
  return value;
}

/// Checks the struct_size of a struct that the library is about to fill.
template <typename T>
std::size_t output_size(const T* to, const char* name) {
  const std::size_t size = need(to, name).struct_size;
  if (size < sizeof(size) || size > sizeof(T)) {
    refuse(std::string(name) + "->struct_size = " + std::to_string(size) +
           ", expected what the init function set, at most " + std::to_string(sizeof(T)));
  }
  return size;
}

/// A C enumerator in [0, count) as the C++ enumeration.
template <typename E>
E enumerator(int value, int count, const char* name) {
  if (value < 0 || value >= count) {
    refuse(std::string(name) + " = " + std::to_string(value) + ", expected 0 to " + std::to_string(count - 1));
  }
  return static_cast<E>(value);
}

DType dtype(int value, const char* name);
LseBase lse_base(int value, const char* name);

AttentionShape to_cpp(const hw_attention_shape& s);
PlanOptions to_cpp(const hw_plan_options& o);
hw_plan_options to_c(const PlanOptions& o);
DeviceModel to_cpp(const hw_device_model& m);
hw_device_model to_c(const DeviceModel& m);
Batch to_cpp(const hw_batch& b);
Changes to_cpp(const hw_changes& c);
KvCache to_cpp(const hw_kv_cache& c, const char* name);
RowsView to_cpp(const hw_rows& r, const char* name);
ConstRowsView to_cpp(const hw_const_rows& r, const char* name);
LseView to_cpp(const hw_lse& l, const char* name);
ConstLseView to_cpp(const hw_const_lse& l, const char* name);
Scale to_cpp(const hw_scale& s);

}  // namespace headwater::capi
