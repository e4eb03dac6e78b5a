// Parts shared by the subcommands; see command.h.
#include "cli/command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "bench/probe.h"
#include "cli/formats.h"

namespace headwater::cli {
namespace {

std::atomic<bool> stop_requested{false};

extern "C" void on_interrupt(int /*signal*/) {
  if (stop_requested.exchange(true)) _exit(kInterrupted);
}

int parse_int(std::string_view text, std::string_view flag, std::string_view whole) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1) {
    throw Error(ErrorCode::invalid_argument, fmt::format("{}: expected positive numbers, got \"{}\"", flag, whole));
  }
  return value;
}

}  // namespace

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() noexcept {
  return stop_requested.load(std::memory_order_relaxed);
}

void throw_if_interrupted() {
  if (interrupted()) throw Interrupted{};
}

void ShapeFlags::add_to(CLI::App& command) {
  command.add_option("--heads", heads, "query heads / KV heads, 32/8 for instance");
  command.add_option("--q-heads", q_heads, "query heads")->check(CLI::PositiveNumber);
  command.add_option("--kv-heads", kv_heads, "KV heads")->check(CLI::PositiveNumber);
  command.add_option("--head-dim", head_dim, "head size, 128; or QK:VO, 192:128");
  command.add_option("--page-size", page_size, "tokens in a page")->check(CLI::PositiveNumber);
  command.add_option("--dtype", dtype, "type of the query and the output, and of KV unless --kv-dtype: f32, f16, bf16");
  command.add_option("--kv-dtype", kv_dtype, "type of the KV cache: f32, f16, bf16, f8e4m3");
}

void ShapeFlags::apply(AttentionShape& shape, int& page_size_out) const {
  if (!heads.empty()) {
    const std::size_t slash = heads.find('/');
    if (slash == std::string::npos)
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--heads: expected query heads/KV heads such as 32/8, got \"{}\"", heads));
    shape.num_qo_heads = parse_int(std::string_view(heads).substr(0, slash), "--heads", heads);
    shape.num_kv_heads = parse_int(std::string_view(heads).substr(slash + 1), "--heads", heads);
  }
  if (q_heads > 0) shape.num_qo_heads = q_heads;
  if (kv_heads > 0) shape.num_kv_heads = kv_heads;
  if (!head_dim.empty()) {
    const std::size_t colon = head_dim.find(':');
    shape.head_dim_qk = parse_int(std::string_view(head_dim).substr(0, colon), "--head-dim", head_dim);
    shape.head_dim_vo = colon == std::string::npos
                            ? shape.head_dim_qk
                            : parse_int(std::string_view(head_dim).substr(colon + 1), "--head-dim", head_dim);
  }
  if (page_size > 0) page_size_out = page_size;
  if (!dtype.empty()) {
    shape.q_dtype = shape.kv_dtype = shape.out_dtype = parse_dtype(dtype, "--dtype");
    if (shape.q_dtype == DType::f8e4m3)
      throw Error(ErrorCode::invalid_argument,
                  "--dtype: expected f32, f16 or bf16, got f8e4m3 (that is a type of KV: --kv-dtype)");
  }
  if (!kv_dtype.empty()) shape.kv_dtype = parse_dtype(kv_dtype, "--kv-dtype");
}

std::string cache_folder() {
  const char* const cache = std::getenv("HEADWATER_CACHE");
  if (cache != nullptr && *cache != '\0') return cache;
  const char* const home = std::getenv("HOME");
  return home == nullptr || *home == '\0' ? "" : std::string(home) + "/.cache/headwater";
}

std::string default_device_model_path() {
  const std::string folder = cache_folder();
  return folder.empty() ? "" : folder + "/device_model.json";
}

DeviceModel load_device_model(const std::string& path, std::string& source) {
  std::string file = path;
  if (path.empty()) {
    file = default_device_model_path();
    std::error_code ignored;
    if (file.empty() || !std::filesystem::exists(file, ignored)) file.clear();
  }
  if (file.empty() || path == "default") {
    source = "shipped defaults";
    return DeviceModel::default_cpu();
  }
  source = file;
  return parse_device_model(read_file(file), file);
}

std::string machine_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string model = "unknown processor";
  std::string family;
  std::string number;
  for (std::string line; std::getline(info, line);) {
    const std::size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    const std::string value = line.substr(colon + 2);
    if (line.starts_with("model name")) model = value;
    if (line.starts_with("cpu family")) family = value;
    if (line.starts_with("model\t")) number = value;
    if (line.empty() || !number.empty()) {
      if (model != "unknown processor") break;
    }
  }
  return fmt::format("{} (family {}, model {}), {}", model, family, number, name_of(cpu::default_isa()));
}

void write_file(const std::string& path, const std::string& text) {
  if (path == "-") {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return;
  }
  std::ofstream out(path, std::ios::binary);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  out.close();
  if (!out) throw Error(ErrorCode::io, fmt::format("{}: cannot be written", path));
}

ProgressBar::ProgressBar(bool wanted) : enabled_(wanted && isatty(STDERR_FILENO) != 0) {}

ProgressBar::~ProgressBar() {
  clear();
}

void ProgressBar::clear() {
  if (drawn_) std::fputs("\r\033[K", stderr);
  drawn_ = false;
}

void ProgressBar::show(double fraction, const std::string& text) {
  if (!enabled_) return;
  const double time = bench::now();
  if (time - last_ < 0.05 && fraction < 1) return;  // twenty times a second is enough
  last_ = time;
  constexpr int kCells = 28;
  const int full = static_cast<int>(std::min(std::max(fraction, 0.0), 1.0) * kCells);
  const std::string line = fmt::format("\r\033[K[{:=<{}}{:>{}}] {:3.0f} % {}", "", full, "", kCells - full,
                                       fraction * 100, text.substr(0, 80));
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace headwater::cli
