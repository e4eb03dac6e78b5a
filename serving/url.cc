// See url.h.
#include "serving/url.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>

#include "headwater/error.h"

namespace headwater::serving {
namespace {

bool is_port(std::string_view text) {
  int port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  return error == std::errc() && end == text.data() + text.size() && port >= 1 && port <= 65535;
}

}  // namespace

std::string Url::text() const {
  const bool ipv6 = host.find(':') != std::string::npos;
  return fmt::format("http://{}{}{}:{}{}", ipv6 ? "[" : "", host, ipv6 ? "]" : "", port, base);
}

Url parse_url(std::string_view text) {
  const auto refuse = [&](std::string_view expected) {
    throw Error(ErrorCode::invalid_argument, fmt::format("--url: expected {}, got \"{}\"", expected, text));
  };
  std::string_view rest = text;
  if (const std::size_t scheme = rest.find("://"); scheme != std::string_view::npos) {
    if (rest.substr(0, scheme) != "http") refuse("http://HOST[:PORT][/BASE] (no TLS)");
    rest.remove_prefix(scheme + 3);
  }
  const bool clean = std::ranges::none_of(rest, [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte <= ' ' || byte >= 127 || c == '@' || c == '?' || c == '#';
  });
  if (!clean) refuse("a URL without user, query, fragment and spaces");
  Url url;
  std::string_view authority = rest.substr(0, rest.find('/'));
  std::string_view base = rest.substr(authority.size());
  while (base.ends_with('/')) base.remove_suffix(1);
  if (base.ends_with("/v1")) base.remove_suffix(3);
  while (base.ends_with('/')) base.remove_suffix(1);
  url.base = base;
  if (authority.starts_with('[')) {  // an IPv6 address
    const std::size_t close = authority.find(']');
    if (close == std::string_view::npos) refuse("a closing ] after the address");
    url.host = authority.substr(1, close - 1);
    authority.remove_prefix(close + 1);
  } else {
    url.host = authority.substr(0, authority.find(':'));
    authority.remove_prefix(url.host.size());
  }
  if (url.host.empty()) refuse("a host");
  if (!authority.empty()) {
    if (!authority.starts_with(':') || !is_port(authority.substr(1))) refuse("a port in [1, 65535]");
    url.port = authority.substr(1);
  }
  return url;
}

}  // namespace headwater::serving
