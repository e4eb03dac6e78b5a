// See local_only.h.
#include "server/local_only.h"

#include <arpa/inet.h>

#include <algorithm>

#include "server/json_text.h"

namespace headwater::server {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  return out;
}

/// "localhost", "127.0.0.1", "[::1]", each with or without ":PORT". Any port: it may be forwarded from another one.
bool is_loopback_authority(std::string_view authority) {
  const std::size_t bracket = authority.starts_with('[') ? authority.find(']') : 0;
  if (bracket == std::string_view::npos) return false;
  const std::size_t colon = authority.find(':', bracket);
  if (colon != std::string_view::npos) {
    const std::string_view port = authority.substr(colon + 1);
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    if (port.empty() || port.size() > 5 || !std::ranges::all_of(port, is_digit)) return false;
  }
  const std::string host = lower(authority.substr(0, colon));
  if (host == "localhost" || host == "[::1]") return true;
  in_addr address{};
  return inet_pton(AF_INET, host.c_str(), &address) == 1 && ntohl(address.s_addr) >> 24 == 127;
}

}  // namespace

std::string why_foreign(std::string_view host, std::string_view origin) {
  if (!host.empty() && !is_loopback_authority(host)) {
    return "Host: " + json_string(clipped(host)) +
           " is no name of loopback; expected localhost, 127.0.0.1 or [::1], or a server with an API key";
  }
  if (!origin.empty() && (host.empty() || lower(origin) != "http://" + lower(host))) {
    return "Origin: " + json_string(clipped(origin)) +
           " is another site; expected pages of this server alone, or a server with an API key";
  }
  return "";
}

}  // namespace headwater::server
