// Framing of streamed answers: server-sent events ("data: ...\n\n"), and the chunks of HTTP/1.1 that carry them.
#pragma once

#include <string>
#include <string_view>

namespace headwater::server {

/// Appends one event. `data` is one line: JSON text as this server writes it has no line breaks.
void append_event(std::string& out, std::string_view data);

/// The event that ends a stream.
inline constexpr std::string_view kDone = "[DONE]";

/// Appends `data`, which is not empty, as one chunk.
void append_chunk(std::string& out, std::string_view data);
/// The empty chunk that ends a chunked body.
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

}  // namespace headwater::server
