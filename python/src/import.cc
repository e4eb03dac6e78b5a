// Where an argument's memory is. torch tensors are read through DLPack's C exchange interface where torch has it, else
// by their attributes (3 microseconds; torch's DLPack export to Python takes 9), device arrays of others by
// __cuda_array_interface__ where they have it, all else through DLPack or the buffer protocol. Nothing here waits for a
// device or orders streams.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tensor.h"

namespace headwater::python {
namespace {

using Code = nb::dlpack::dtype_code;

std::string type_of(nb::handle object) {
  return nb::cast<std::string>(object.type().attr("__name__"));
}

std::string text_of(const nb::object& object) {
  const nb::object text = nb::steal(PyObject_Str(object.ptr()));
  return text.is_valid() ? nb::cast<std::string>(text) : "?";
}

/// As a tuple, or Python's exception: constructors of nb::tuple believe what they are given.
nb::tuple tuple_of(const nb::object& object) {
  PyObject* const made = PySequence_Tuple(object.ptr());
  if (made == nullptr) nb::raise_python_error();
  return nb::steal<nb::tuple>(made);
}

/// DLPack's C exchange interface (DLPackExchangeAPI of dlpack.h 1.3) as far as it is used: a tensor's description
/// without a call of Python.
struct ExchangeApi {
  std::uint32_t major;
  std::uint32_t minor;
  const void* older;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, nb::dlpack::dltensor* out);  ///< may be null; -1: with a Python error
  void* current_stream;
};

/// nullptr where a type has none, or one that is laid out otherwise.
const ExchangeApi* exchange_api_of(nb::handle type) {
  if (!nb::hasattr(type, "__dlpack_c_exchange_api__")) return nullptr;
  const nb::object capsule = type.attr("__dlpack_c_exchange_api__");
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return nullptr;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  return api->major == 1 && api->tensor_from_object != nullptr ? api : nullptr;
}

/// What is compared with while tensors are read. Made at the first tensor, never freed; guarded by the GIL.
struct Torch {
  nb::object tensor;
  std::vector<std::pair<nb::object, nb::dlpack::dtype>> dtypes;
  const ExchangeApi* exchange = nullptr;
};

/// nullptr: nobody imported torch, so no argument is one of its tensors.
const Torch* torch_if_imported() {
  static const Torch* known = nullptr;
  if (known != nullptr) return known;
  static PyObject* const name = PyUnicode_InternFromString("torch");
  const nb::object torch = nb::steal(PyImport_GetModule(name));
  if (!torch.is_valid()) {
    PyErr_Clear();
    return nullptr;
  }
  if (!nb::hasattr(torch, "Tensor") || !nb::hasattr(torch, "float8_e4m3fn")) return nullptr;  // being imported
  auto* made = new Torch{torch.attr("Tensor"), {}};
  const std::pair<const char*, nb::dlpack::dtype> types[] = {
      {"float16", {static_cast<std::uint8_t>(Code::Float), 16, 1}},
      {"bfloat16", {static_cast<std::uint8_t>(Code::Bfloat), 16, 1}},
      {"float32", {static_cast<std::uint8_t>(Code::Float), 32, 1}},
      {"int32", {static_cast<std::uint8_t>(Code::Int), 32, 1}},
      {"int64", {static_cast<std::uint8_t>(Code::Int), 64, 1}},
      {"uint8", {static_cast<std::uint8_t>(Code::UInt), 8, 1}},
      {"float8_e4m3fn", {static_cast<std::uint8_t>(Code::Float8_E4M3FN), 8, 1}},
      {"int8", {static_cast<std::uint8_t>(Code::Int), 8, 1}},
      {"int16", {static_cast<std::uint8_t>(Code::Int), 16, 1}},
      {"uint16", {static_cast<std::uint8_t>(Code::UInt), 16, 1}},
      {"float64", {static_cast<std::uint8_t>(Code::Float), 64, 1}},
      {"bool", {static_cast<std::uint8_t>(Code::Bool), 8, 1}}};
  for (const auto& [type_name, type] : types) {
    if (nb::hasattr(torch, type_name)) made->dtypes.emplace_back(torch.attr(type_name), type);
  }
  made->exchange = exchange_api_of(made->tensor);
  known = made;
  return known;
}

[[noreturn]] void refuse_gradient(const std::string& name) {
  refuse(name + " requires a gradient, which is not computed here: pass " + name + ".detach()");
}

[[noreturn]] void refuse_type(nb::handle object, const std::string& name) {
  refuse(name + " is of type " + type_of(object) +
         ", expected an array with DLPack, the buffer protocol or __cuda_array_interface__ (numpy, torch, jax, cupy, "
         "array.array) whose strides are whole elements");
}

const char* device_name(int type) {
  switch (type) {
    case nb::device::cuda::value:
    case nb::device::cuda_managed::value:
      return "CUDA device";
    case nb::device::metal::value:
      return "Metal device";
    case nb::device::rocm::value:
      return "ROCm device";
    default:
      return "device of DLPack type";
  }
}

bool is_host(int type) {
  return type == nb::device::cpu::value || type == nb::device::cuda_host::value;
}

bool is_cuda(int type) {
  return type == nb::device::cuda::value || type == nb::device::cuda_managed::value;
}

}  // namespace

bool is_torch_tensor(nb::handle object) {
  const Torch* torch = torch_if_imported();
  return torch != nullptr && PyObject_IsInstance(object.ptr(), torch->tensor.ptr()) == 1;
}

void Array::set_rank(std::size_t rank) {
  if (rank > kMaxRank) {
    refuse(name_ + " has " + std::to_string(rank) + " dimensions, expected at most " + std::to_string(kMaxRank));
  }
  rank_ = rank;
}

/// False where torch has no such interface, or says that this tensor has no memory.
bool Array::exchange_torch(nb::handle object) {
  const Torch& torch = *torch_if_imported();
  if (torch.exchange == nullptr || !object.type().is(torch.tensor)) return false;  // subclasses may be anything
  nb::dlpack::dltensor tensor{};
  if (torch.exchange->tensor_from_object(object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (!is_host(tensor.device.device_type) && !is_cuda(tensor.device.device_type)) return false;
  set_rank(static_cast<std::size_t>(tensor.ndim));
  for (std::size_t i = 0; i < rank_; ++i) {
    shape_[i] = tensor.shape[i];
    stride_[i] = tensor.strides[i];
  }
  dtype_ = tensor.dtype;
  device_type_ = tensor.device.device_type;
  device_id_ = tensor.device.device_id;
  data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
  owner_ = nb::borrow(object);
  return true;
}

bool Array::import_torch(nb::handle object) {
  if (!is_torch_tensor(object)) return false;
  try {
    if (nb::cast<bool>(object.attr("requires_grad"))) refuse_gradient(name_);
    if (nb::cast<bool>(object.attr("is_neg")())) {  // its memory holds the numbers with the other sign
      refuse(name_ + " is a negated view, whose numbers are not in memory: pass " + name_ + ".resolve_neg()");
    }
    if (exchange_torch(object)) return true;
    if (nb::cast<bool>(object.attr("is_cuda"))) {
      device_type_ = nb::device::cuda::value;
      device_id_ = nb::cast<int>(object.attr("get_device")());
    } else if (!nb::cast<bool>(object.attr("is_cpu"))) {
      refuse(name_ + " is on device " + text_of(object.attr("device")) + ", expected the CPU or a CUDA device");
    }
    const nb::object type = object.attr("dtype");
    bool known = false;
    for (const auto& [torch_type, dlpack_type] : torch_if_imported()->dtypes) {
      if (!torch_type.is(type)) continue;
      dtype_ = dlpack_type;
      known = true;
      break;
    }
    if (!known) refuse(name_ + " has dtype " + text_of(type) + ", which is not served");
    // Not tuples by type but by descent, which nb::tuple would copy.
    const auto shape = nb::borrow<nb::tuple>(nb::object(object.attr("shape")));
    const auto strides = nb::borrow<nb::tuple>(nb::object(object.attr("stride")()));
    set_rank(nb::len(shape));
    for (std::size_t i = 0; i < rank_; ++i) {
      shape_[i] = nb::cast<std::int64_t>(shape[i]);
      stride_[i] = nb::cast<std::int64_t>(strides[i]);
    }
    data_ = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(object.attr("data_ptr")()));
  } catch (const nb::python_error& e) {  // sparse, fake, functional ...
    refuse(name_ + " is a " + type_of(object) + " without memory that can be read: " + e.what());
  }
  owner_ = nb::borrow(object);
  return true;
}

bool Array::import_cuda_interface(nb::handle object, Access access) {
  if (!nb::hasattr(object, "__cuda_array_interface__")) return false;
  try {
    const nb::object description = object.attr("__cuda_array_interface__");
    if (!nb::isinstance<nb::dict>(description)) refuse(name_ + ".__cuda_array_interface__ is no dict");
    if (!read_cuda_interface(nb::borrow<nb::dict>(description), access)) return false;
    // The interface does not tell which device; arrays that know have it as cupy does.
    device_id_ = kAnyDevice;
    if (nb::hasattr(object, "device") && nb::hasattr(object.attr("device"), "id")) {
      device_id_ = nb::cast<int>(object.attr("device").attr("id"));
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {  // Python's, of keys and types
    refuse(name_ + " has a __cuda_array_interface__ that cannot be read: " + e.what());
  }
  device_type_ = nb::device::cuda::value;
  owner_ = nb::borrow(object);
  return true;
}

/// False for types that it has no letters for, bfloat16 for one: DLPack may have them.
bool Array::read_cuda_interface(const nb::dict& description, Access access) {
  const auto text = nb::cast<std::string>(description["typestr"]);
  const int bytes = text.size() == 3 ? text[2] - '0' : 0;
  const char kind = text.size() == 3 && text[0] != '>' ? text[1] : '?';
  if ((kind != 'f' && kind != 'i' && kind != 'u') || bytes < 1 || bytes > 8) return false;
  const Code code = kind == 'f' ? Code::Float : kind == 'i' ? Code::Int : Code::UInt;
  const nb::tuple shape = tuple_of(description["shape"]);
  set_rank(nb::len(shape));
  std::int64_t dense = 1;
  for (std::size_t i = rank_; i-- > 0;) {
    shape_[i] = nb::cast<std::int64_t>(shape[i]);
    stride_[i] = dense;
    if (shape_[i] < 0 || __builtin_mul_overflow(dense, std::max<std::int64_t>(shape_[i], 1), &dense)) {
      refuse(name_ + ".shape[" + std::to_string(i) + "] = " + std::to_string(shape_[i]) +
             ", expected a size of memory");
    }
  }
  if (description.contains("strides") && !description["strides"].is_none()) {
    const nb::tuple strides = tuple_of(description["strides"]);
    if (nb::len(strides) != rank_) refuse(name_ + " has not as many strides as dimensions");
    for (std::size_t i = 0; i < rank_; ++i) {
      const auto stride = nb::cast<std::int64_t>(strides[i]);
      if (stride % bytes != 0) refuse(name_ + ".strides[" + std::to_string(i) + "] is no multiple of its elements");
      stride_[i] = stride / bytes;
    }
  }
  const nb::tuple data = tuple_of(description["data"]);
  if (nb::len(data) != 2) refuse(name_ + " has no (address, read-only) in its __cuda_array_interface__");
  if (access == Access::write && nb::cast<bool>(data[1])) {
    refuse(name_ + " is read-only, expected an array to write to");
  }
  data_ = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(data[0]));
  dtype_ = {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bytes * 8), 1};
  return true;
}

void Array::import_dlpack(nb::handle object, Access access) {
  nb::ndarray<nb::ro> array;
  if (access == Access::write) {
    // jax exports its immutable arrays as writable.
    const auto module = nb::cast<std::string>(object.type().attr("__module__"));
    if (module.starts_with("jax")) refuse(name_ + " is a jax array, which is read-only, expected one to write to");
    nb::ndarray<> writable;
    if (nb::try_cast(object, writable, false)) {
      array = nb::ndarray<nb::ro>(writable);
    } else if (nb::try_cast(object, array, false)) {
      refuse(name_ + " is read-only, expected an array to write to");
    }
  } else {
    (void)nb::try_cast(object, array, false);
  }
  if (!array.is_valid()) refuse_type(object, name_);
  set_rank(array.ndim());
  for (std::size_t i = 0; i < rank_; ++i) {
    shape_[i] = static_cast<std::int64_t>(array.shape(i));
    stride_[i] = array.stride(i);
  }
  data_ = const_cast<void*>(array.data());
  dtype_ = array.dtype();
  device_type_ = array.device_type();
  device_id_ = array.device_id();
  dlpack_ = std::move(array);
}

Array::Array(nb::handle object, std::string name, Access access, int device) : name_(std::move(name)) {
  const bool imported = import_torch(object) || (device != kHost && import_cuda_interface(object, access));
  if (!imported) import_dlpack(object, access);
  given_ = true;
  if (data_ == nullptr && size() > 0) refuse(name_ + " has no memory (it was freed)");
  if (device == kAnyDevice) return;
  const bool here = device == kHost ? is_host(device_type_)
                                    : is_cuda(device_type_) && (device_id_ == device || device_id_ == kAnyDevice);
  if (here) return;
  const std::string got = is_host(device_type_) ? "the CPU"
                                                : std::string(device_name(device_type_)) + " " +
                                                      std::to_string(is_cuda(device_type_) ? device_id_ : device_type_);
  refuse(name_ + " is on " + got + ", expected " +
         (device == kHost ? "the CPU (headwater.cuda serves CUDA devices)"
                          : "CUDA device " + std::to_string(device) + ", as the plan"));
}

}  // namespace headwater::python
