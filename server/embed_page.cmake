# cmake -DPAGE=index.html -DOUT=page.cc -P embed_page.cmake: the page as a C++ array. Bytes as numbers: a string literal may
# not be longer than 64 KiB everywhere, and needs escapes.
file(READ "${PAGE}" bytes HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
string(REGEX REPLACE "(0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,)" "\\1\n" bytes "${bytes}")
file(WRITE "${OUT}" "// Made from ${PAGE} by embed_page.cmake.
#include \"server/page.h\"

namespace headwater::server {
namespace {
constexpr unsigned char kPage[] = {
${bytes}};
}

std::string_view start_page() noexcept {
  return {reinterpret_cast<const char*>(kPage), sizeof(kPage)};
}

}  // namespace headwater::server
")
