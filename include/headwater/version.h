// Version of the headers. headwater::version() tells the version of the library that is linked.
#pragma once

#define HEADWATER_VERSION_MAJOR 0
#define HEADWATER_VERSION_MINOR 1
#define HEADWATER_VERSION_PATCH 0

namespace headwater {
/// "0.1.0".
[[nodiscard]] const char* version() noexcept;
}  // namespace headwater
