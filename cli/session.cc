// Models and requests; see session.h.
#include "cli/session.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "cli/formats.h"
#include "engine/model.h"

namespace headwater::cli {

std::string model_path(const EngineFlags& flags) {
  if (!flags.model.empty()) return flags.model;
  const std::string folder = cache_folder();
  std::string path = folder + "/SmolLM2-135M-Instruct.Q4_1.gguf";
  std::error_code ignored;
  if (folder.empty() || !std::filesystem::exists(path, ignored)) {
    throw Error(ErrorCode::io,
                fmt::format("--model: not given, and {} does not exist; tools/fetch_model.sh fetches it", path));
  }
  return path;
}

void EngineFlags::add_to(CLI::App& command) {
  command.add_option("-m,--model", model,
                     "GGUF file; default: SmolLM2-135M-Instruct in $HEADWATER_CACHE or ~/.cache/headwater");
  command.add_option("--chat-template", chat_template, "chatml or llama3, whatever the model file says");
  command.add_option("--system", system, "system message");
  plan.add_to(command);
  command.add_flag("--batch-invariant", batch_invariant,
                   "answers do not depend, bit for bit, on what else is in the batch");
  command.add_flag("--no-prefix-cache", no_prefix_cache, "compute every prompt in full");
  command.add_option("--threads", threads, "workers; 0: all processors that this process may use")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command.add_option("--page-size", page_size, "tokens in a KV page")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command.add_option("--kv-dtype", kv_dtype, "type of the KV cache: bf16, f16 or f32")
      ->check(CLI::IsMember({"bf16", "f16", "f32", "fp16", "fp32"}))
      ->capture_default_str();
  command.add_option("--kv-mib", kv_mib, "size of the KV cache, MiB")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command.add_option("--max-step-tokens", max_step_tokens, "tokens computed in one step at most")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_option("--isa", isa, "force attention's instruction set: scalar, avx2, avx512, avx512_bf16")
      ->check(check_isa);
  command.add_option("--device-model", device_model, "constants of the cost model: a file, or `default`");
}

std::vector<std::int32_t> Session::tokens_of(const std::string& shared, const std::string& question) const {
  const std::string text = shared.empty() ? question : shared + "\n\n" + question;
  const engine::Tokenizer& tokenizer = model->tokenizer();
  if (!chat) {
    std::vector<std::int32_t> tokens;
    const auto bos = tokenizer.bos();
    if (tokenizer.add_bos() && bos) tokens.push_back(*bos);
    tokenizer.encode_to(text, engine::Specials::as_text, tokens);
    return tokens;
  }
  std::vector<engine::ChatMessage> messages;
  if (!system.empty()) messages.push_back({"system", system});
  messages.push_back({"user", text});
  return chat->render(tokenizer, messages, true);
}

Session open_session(const EngineFlags& flags, ProgressBar& bar) {
  Session session;
  engine::ModelOptions options;
  options.num_threads = flags.threads;
  const std::string path = model_path(flags);
  const std::string name = std::filesystem::path(path).filename().string();
  options.progress = [&](double fraction) { bar.show(fraction, "loading " + name); };
  session.model = engine::load_model(path, options);
  throw_if_interrupted();
  if (!flags.raw) {
    std::optional<std::string_view> forced;
    if (!flags.chat_template.empty()) forced = flags.chat_template;
    session.chat.emplace(session.model->gguf(), session.model->tokenizer(), forced);
  }
  session.system = flags.system;
  return session;
}

engine::EngineOptions engine_options(const EngineFlags& flags) {
  engine::EngineOptions options;
  options.plan = plan_options_from_environment();
  flags.plan.apply(options.plan);
  options.plan.batch_invariant = flags.batch_invariant;
  options.page_size = flags.page_size;
  options.kv_dtype = parse_dtype(flags.kv_dtype, "--kv-dtype");
  options.kv_bytes = flags.kv_mib << 20;
  options.max_step_tokens = flags.max_step_tokens;
  options.prefix_cache = !flags.no_prefix_cache;
  std::string source;
  options.device = load_device_model(flags.device_model, source);
  if (!flags.isa.empty()) {
    options.isa = parse_isa(flags.isa, "--isa");
    if (*options.isa > cpu::detect_isa())
      throw Error(ErrorCode::unsupported,
                  fmt::format("--isa: this processor has {}, not {}", name_of(cpu::detect_isa()), flags.isa));
  }
  return options;
}

std::vector<std::string> lines_of_file(const std::string& path) {
  std::vector<std::string> lines;
  const std::string text = read_file(path);
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    std::string line = text.substr(at, end - at);
    if (line.ends_with('\r')) line.pop_back();
    if (line.find_first_not_of(" \t") != std::string::npos) lines.push_back(std::move(line));
    at = end + 1;
  }
  if (lines.empty()) throw Error(ErrorCode::io, fmt::format("{}: expected at least one line of text, got none", path));
  return lines;
}

}  // namespace headwater::cli
