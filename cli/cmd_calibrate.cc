// `headwater calibrate`: measures the cost model's constants and keeps them for later runs.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "bench/calibrate.h"
#include "bench/cuda_processor.h"
#include "cli/command.h"
#include "cli/formats.h"

namespace headwater::cli {
namespace {

struct CalibrateFlags {
  std::string output;
  std::string device = "cpu";
  std::string dtype = "f16";
  std::string isa;
  int threads = 0;
  bool dry_run = false;
};

/// The measured model and the note that goes with it.
struct Measured {
  DeviceModel model;
  std::string machine;
};

Measured measure(const CalibrateFlags& flags) {
  ProgressBar bar;
  const auto progress = [&](double fraction, const std::string& what) {
    throw_if_interrupted();
    bar.show(fraction, what);
  };
  if (flags.device == "cuda") {
    const DType type = parse_dtype(flags.dtype, "--dtype");
    const std::string name = bench::cuda_device_name();
    return {bench::calibrate_cuda(type, progress), fmt::format("{}, {}, one KV head of 128", name, name_of(type))};
  }
  const Isa isa = flags.isa.empty() ? cpu::default_isa() : parse_isa(flags.isa, "--isa");
  if (isa > cpu::detect_isa())
    throw Error(ErrorCode::unsupported,
                fmt::format("--isa: this processor has {}, not {}", name_of(cpu::detect_isa()), flags.isa));
  ThreadPool pool(flags.threads);
  return {bench::calibrate(pool, isa, progress), fmt::format("{}, {} workers", machine_name(), pool.num_workers())};
}

int run_calibrate(const CalibrateFlags& flags) {
  const std::string path = flags.output.empty() ? default_device_model_path(flags.device == "cuda") : flags.output;
  if (path.empty() && !flags.dry_run)
    throw Error(ErrorCode::io, "--output: no cache folder (neither HEADWATER_CACHE nor HOME is set); name a file");
  const Measured measured = measure(flags);
  const std::string text = device_model_to_json(measured.model, measured.machine);
  fmt::print("{}", text);
  if (flags.dry_run) return kOk;
  if (path != "-") {
    const std::filesystem::path folder = std::filesystem::path(path).parent_path();
    std::error_code error;
    if (!folder.empty()) std::filesystem::create_directories(folder, error);
    if (error) throw Error(ErrorCode::io, fmt::format("{}: cannot be made: {}", folder.string(), error.message()));
    write_file(path, text);
    fmt::print(stderr, "written to {}\n", path);
  }
  return kOk;
}

}  // namespace

void add_calibrate(CLI::App& app, Action& action) {
  auto flags = std::make_shared<CalibrateFlags>();
  CLI::App& command =
      *app.add_subcommand("calibrate", "Measure the constants of the cost model on this machine and keep them");
  command.add_option("-o,--output", flags->output,
                     "file to write; default: device_model.json (device_model_cuda.json) in $HEADWATER_CACHE or "
                     "~/.cache/headwater");
  command
      .add_option("--device", flags->device, "what to measure; cuda: the current CUDA device, in a build that has it")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command.add_option("--dtype", flags->dtype, "cuda: type of q and KV, f16 or bf16")
      ->check(CLI::IsMember({"f16", "bf16"}))
      ->capture_default_str();
  command.add_option("--isa", flags->isa, "force scalar, avx2, avx512 or avx512_bf16")->check(check_isa);
  command.add_option("--threads", flags->threads, "workers; 0: all processors that this process may use")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command.add_flag("--dry-run", flags->dry_run, "print the constants, write nothing");
  command.footer(
      "bench, explain and generate use the file from its default place, or the one that --device-model names.\n\n"
      "Examples:\n"
      "  headwater calibrate\n"
      "  headwater calibrate --threads 1 --output one-thread.json\n"
      "  headwater calibrate --device cuda\n"
      "  headwater bench --workload '1,8|2048,256' --device-model one-thread.json --threads 1\n\n"
      "Exit codes: 0 done, 1 a run failed, 2 wrong usage, 3 the file cannot be written, 4 not supported here, 130 "
      "interrupted.");
  command.callback([flags, &action] { action = [flags] { return run_calibrate(*flags); }; });
}

}  // namespace headwater::cli
