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

/// "32/8" or "576:512" -> two positive numbers; one number stands for both where `second` is optional.
bool parse_pair(std::string_view text, char separator, bool second_optional, int& first, int& second) {
  const auto number = [](std::string_view digits, int& value) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return error == std::errc() && end == digits.data() + digits.size() && value >= 1;
  };
  const std::size_t at = text.find(separator);
  if (!number(text.substr(0, at), first)) return false;
  second = first;
  return at == std::string_view::npos ? second_optional : number(text.substr(at + 1), second);
}

std::string check_heads(const std::string& text) {
  int ignored = 0;
  return parse_pair(text, '/', false, ignored, ignored)
             ? ""
             : fmt::format("expected query heads/KV heads such as 32/8, got \"{}\"", text);
}

std::string check_head_dim(const std::string& text) {
  int ignored = 0;
  return parse_pair(text, ':', true, ignored, ignored)
             ? ""
             : fmt::format("expected a head size such as 128, or QK:VO such as 192:128, got \"{}\"", text);
}

/// The message of `parse` without the name, which CLI11 puts before it.
template <typename Parse>
std::string refusal(const Parse& parse, const std::string& text) {
  try {
    (void)parse(text, "");
  } catch (const Error& e) {
    return std::string(e.what()).substr(2);
  }
  return "";
}

}  // namespace

std::string check_policy(const std::string& text) {
  return refusal(parse_policy, text);
}

std::string check_dtype(const std::string& text) {
  return refusal(parse_dtype, text);
}

std::string check_isa(const std::string& text) {
  return refusal(parse_isa, text);
}

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
  command.add_option("--heads", heads, "query heads / KV heads, 32/8 for instance")->check(check_heads);
  command.add_option("--q-heads", q_heads, "query heads")->check(CLI::PositiveNumber);
  command.add_option("--kv-heads", kv_heads, "KV heads")->check(CLI::PositiveNumber);
  command.add_option("--head-dim", head_dim, "head size, 128; or QK:VO, 192:128")->check(check_head_dim);
  command.add_option("--page-size", page_size, "tokens in a page")->check(CLI::PositiveNumber);
  command.add_option("--dtype", dtype, "type of the query and the output, and of KV unless --kv-dtype: f32, f16, bf16")
      ->check([](const std::string& text) {
        std::string wrong = check_dtype(text);
        if (!wrong.empty() || parse_dtype(text, "") != DType::f8e4m3) return wrong;
        return std::string("expected f32, f16 or bf16, got f8e4m3 (that is a type of KV: --kv-dtype)");
      });
  command.add_option("--kv-dtype", kv_dtype, "type of the KV cache: f32, f16, bf16, f8e4m3")->check(check_dtype);
}

void ShapeFlags::apply(AttentionShape& shape, int& page_size_out) const {
  if (!heads.empty()) (void)parse_pair(heads, '/', false, shape.num_qo_heads, shape.num_kv_heads);
  if (q_heads > 0) shape.num_qo_heads = q_heads;
  if (kv_heads > 0) shape.num_kv_heads = kv_heads;
  if (!head_dim.empty()) (void)parse_pair(head_dim, ':', true, shape.head_dim_qk, shape.head_dim_vo);
  if (page_size > 0) page_size_out = page_size;
  if (!dtype.empty()) {
    shape.q_dtype = shape.kv_dtype = shape.out_dtype = parse_dtype(dtype, "--dtype");
  }
  if (!kv_dtype.empty()) shape.kv_dtype = parse_dtype(kv_dtype, "--kv-dtype");
}

void PlanFlags::add_to(CLI::App& command) {
  command.add_option("--policy", policy, "auto, flat, two_level, vllm or forest")->check(check_policy);
  command
      .add_option("--cascade", cascade,
                  "on: split every shared span; off: do not look for any; auto: as the policy says")
      ->check(CLI::IsMember({"auto", "on", "off"}));
  add_thresholds_to(command);
}

void PlanFlags::add_thresholds_to(CLI::App& command) {
  command.add_option("--min-shared-pages", min_shared_pages, "do not split off spans of fewer pages")
      ->check(CLI::PositiveNumber);
  command.add_option("--min-members", min_members, "do not split off spans of fewer requests")
      ->check(CLI::PositiveNumber);
}

void PlanFlags::apply(PlanOptions& options) const {
  if (!policy.empty()) {
    options.policy = parse_policy(policy, "--policy");
    options.cascade = CascadeSwitch::automatic;
  }
  if (!cascade.empty()) options.cascade = parse_cascade(cascade, "--cascade");
  if (min_shared_pages > 0) options.min_shared_pages = min_shared_pages;
  if (min_members > 0) options.min_members = min_members;
}

PlanOptions plan_options_from_environment() {
  return PlanOptions::from_env([](const char* name) { return static_cast<const char*>(std::getenv(name)); },
                               PlanOptions{});
}

std::string cache_folder() {
  const char* const cache = std::getenv("HEADWATER_CACHE");
  if (cache != nullptr && *cache != '\0') return cache;
  const char* const home = std::getenv("HOME");
  return home == nullptr || *home == '\0' ? "" : std::string(home) + "/.cache/headwater";
}

std::string default_device_model_path(bool cuda) {
  const std::string folder = cache_folder();
  return folder.empty() ? "" : folder + (cuda ? "/device_model_cuda.json" : "/device_model.json");
}

namespace {

/// The file of a model: the one that is named, else the one in the cache folder; empty: the shipped constants.
std::string device_model_file(const std::string& path, bool cuda) {
  if (path == "default") return "";
  if (!path.empty()) return path;
  std::string file = default_device_model_path(cuda);
  std::error_code ignored;
  if (file.empty() || !std::filesystem::exists(file, ignored)) file.clear();
  return file;
}

}  // namespace

DeviceModel load_device_model(const std::string& path, std::string& source) {
  const std::string file = device_model_file(path, false);
  source = file.empty() ? "shipped defaults" : file;
  return file.empty() ? DeviceModel::default_cpu() : parse_device_model(read_file(file), file);
}

std::optional<DeviceModel> load_cuda_model(const std::string& path, std::string& source) {
  const std::string file = device_model_file(path, true);
  source = file.empty() ? "shipped defaults" : file;
  if (file.empty()) return std::nullopt;
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
  // Beside the file first: what others read is whole, whenever this is interrupted. Devices are written directly.
  std::error_code error;
  const std::filesystem::file_type type = std::filesystem::symlink_status(path, error).type();
  const bool direct = type != std::filesystem::file_type::regular && type != std::filesystem::file_type::not_found;
  error.clear();
  const std::string target = direct ? path : path + ".part";
  std::ofstream out(target, std::ios::binary);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  out.close();
  if (out && !direct) std::filesystem::rename(target, path, error);
  if (!out || error) throw Error(ErrorCode::io, fmt::format("{}: cannot be written", path));
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
