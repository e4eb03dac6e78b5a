// Where a server is: "http://host:port/base". Only plain HTTP; what speaks TLS sits in front of the server.
#pragma once

#include <string>
#include <string_view>

namespace headwater::serving {

struct Url {
  std::string host;
  std::string port = "80";
  std::string base;  ///< path before "/v1", without a slash at its end; often empty

  /// "http://host:port/base".
  [[nodiscard]] std::string text() const;
};

/// "http://127.0.0.1:8000", with or without "/v1" at its end, which is dropped; "127.0.0.1:8000" is taken as http.
/// Error(invalid_argument) "--url: expected ..., got ...".
[[nodiscard]] Url parse_url(std::string_view text);

}  // namespace headwater::serving
