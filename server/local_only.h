// Who may ask a server that listens on loopback and has no key: programs of this machine, and pages that it served
// itself. Not the pages of other sites in a browser of this machine, whether they name the server by its address (the
// browser then tells their origin) or by a name of their own that they have had resolved to loopback (the Host header
// then has that name). Pure.
#pragma once

#include <string>
#include <string_view>

namespace headwater::server {

/// Why a request is refused; empty: it is not. `host` and `origin` are the headers' values, empty where absent: every
/// browser sends Host, and Origin with whatever a page of another site sends but plain GETs.
[[nodiscard]] std::string why_foreign(std::string_view host, std::string_view origin);

}  // namespace headwater::server
