// A JSON writer of what a plan needs: objects, arrays, integers, booleans and plain strings.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace headwater::detail {

class JsonWriter {
 public:
  void begin_object() { open('{'); }
  void end_object() { close('}'); }
  void begin_array() { open('['); }
  void end_array() { close(']'); }

  void key(std::string_view name) {
    comma();
    quote(name);
    out_ += ':';
    fresh_ = true;
  }
  void value(std::integral auto number) {
    comma();
    if constexpr (std::same_as<decltype(number), bool>) {
      out_ += number ? "true" : "false";
    } else {
      out_ += std::to_string(number);
    }
  }
  void value(std::string_view text) {
    comma();
    quote(text);
  }
  void value(const char* text) { value(std::string_view(text)); }
  template <class T>
  void field(std::string_view name, const T& v) {
    key(name);
    value(v);
  }

  [[nodiscard]] std::string take() { return std::move(out_); }

 private:
  void comma() {
    if (!fresh_) out_ += ',';
    fresh_ = false;
  }
  void open(char bracket) {
    comma();
    out_ += bracket;
    fresh_ = true;
  }
  void close(char bracket) {
    out_ += bracket;
    fresh_ = false;
  }
  void quote(std::string_view text) {
    out_ += '"';
    for (const char c : text) {
      if (c == '"' || c == '\\') out_ += '\\';
      if (static_cast<unsigned char>(c) >= 0x20) out_ += c;
    }
    out_ += '"';
  }

  std::string out_;
  bool fresh_ = true;
};

}  // namespace headwater::detail
