// Names of the public enumerations, as they appear in options, JSON and messages.
#include "headwater/error.h"
#include "headwater/options.h"
#include "headwater/types.h"

namespace headwater {

std::string_view name_of(DType t) noexcept {
  switch (t) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f8e4m3:
      return "f8e4m3";
  }
  return "?";
}

std::string_view name_of(Isa isa) noexcept {
  switch (isa) {
    case Isa::scalar:
      return "scalar";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512_bf16:
      return "avx512_bf16";
  }
  return "?";
}

std::string_view name_of(Path path) noexcept {
  return path == Path::cascade ? "cascade" : "flat";
}

std::string_view name_of(Policy policy) noexcept {
  switch (policy) {
    case Policy::automatic:
      return "auto";
    case Policy::flat:
      return "flat";
    case Policy::two_level:
      return "two_level";
    case Policy::vllm:
      return "vllm";
    case Policy::forest:
      return "forest";
  }
  return "?";
}

std::string_view name_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::ok:
      return "ok";
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::invalid_page_table:
      return "invalid_page_table";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::workspace_too_small:
      return "workspace_too_small";
    case ErrorCode::capacity_exceeded:
      return "capacity_exceeded";
    case ErrorCode::out_of_pages:
      return "out_of_pages";
    case ErrorCode::io:
      return "io";
    case ErrorCode::device:
      return "device";
    case ErrorCode::internal:
      return "internal";
  }
  return "?";
}

}  // namespace headwater
