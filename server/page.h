// The page at /, embedded when the server is built (server/page/index.html).
#pragma once

#include <string_view>

namespace headwater::server {

[[nodiscard]] std::string_view start_page() noexcept;

}  // namespace headwater::server
