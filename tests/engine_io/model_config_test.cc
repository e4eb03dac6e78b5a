// What a file's metadata say of the model is believed only as far as its tensors go: every refusal by name, and none
// costs more than the file itself, whatever sizes it claims.
#include "engine/model_config.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "engine_io/expect.h"
#include "support/gguf_writer.h"

namespace headwater::engine {
namespace {

/// A model as its file describes it; a test changes one thing. All tensors are fp32 zeros.
struct Description {
  using Value = std::variant<std::uint32_t, std::uint64_t, std::int32_t, float, double, std::string>;
  std::map<std::string, Value> keys{
      {"general.architecture", "llama"},
      {"llama.block_count", 2U},
      {"llama.embedding_length", 8U},
      {"llama.feed_forward_length", 12U},
      {"llama.context_length", 100U},
      {"llama.attention.head_count", 4U},
      {"llama.attention.head_count_kv", 2U},
      {"llama.attention.key_length", 16U},
      {"llama.attention.layer_norm_rms_epsilon", 1e-5F},
  };
  std::map<std::string, std::vector<std::uint64_t>> shapes{{"token_embd.weight", {8, 5}}, {"output_norm.weight", {8}}};

  Description() {
    for (const std::string layer : {"blk.0.", "blk.1."}) {
      shapes[layer + "attn_norm.weight"] = {8};
      shapes[layer + "attn_q.weight"] = {8, 64};
      shapes[layer + "attn_k.weight"] = {8, 32};
      shapes[layer + "attn_v.weight"] = {8, 32};
      shapes[layer + "attn_output.weight"] = {64, 8};
      shapes[layer + "ffn_norm.weight"] = {8};
      shapes[layer + "ffn_gate.weight"] = {8, 12};
      shapes[layer + "ffn_up.weight"] = {8, 12};
      shapes[layer + "ffn_down.weight"] = {12, 8};
    }
  }

  [[nodiscard]] std::vector<std::byte> bytes() const {
    test::GgufWriter file;
    const auto add = [&](const std::string& key, GgufType type, auto value) { file.number(key, type, value); };
    for (const auto& [key, value] : keys) {
      if (const auto* text = std::get_if<std::string>(&value)) file.string(key, *text);
      if (const auto* number = std::get_if<std::uint32_t>(&value)) add(key, GgufType::u32, *number);
      if (const auto* number = std::get_if<std::uint64_t>(&value)) add(key, GgufType::u64, *number);
      if (const auto* number = std::get_if<std::int32_t>(&value)) add(key, GgufType::i32, *number);
      if (const auto* number = std::get_if<float>(&value)) add(key, GgufType::f32, *number);
      if (const auto* number = std::get_if<double>(&value)) add(key, GgufType::f64, *number);
    }
    for (const auto& [name, shape] : shapes) {
      std::size_t elements = 1;
      for (const std::uint64_t size : shape) elements *= size;
      file.tensor(name, GgmlType::f32, shape, std::vector<std::byte>(4 * elements));
    }
    return file.bytes();
  }
};

using Change = std::function<void(Description&)>;

Change key(const std::string& name, const Description::Value& value) {
  return [=](Description& d) { d.keys[name] = value; };
}
Change without_key(const std::string& name) {
  return [=](Description& d) { d.keys.erase(name); };
}
Change shape(const std::string& name, const std::vector<std::uint64_t>& value) {
  return [=](Description& d) { d.shapes[name] = value; };
}
Change without_tensor(const std::string& name) {
  return [=](Description& d) { d.shapes.erase(name); };
}

ModelConfig read(const Description& description) {
  const std::vector<std::byte> bytes = description.bytes();
  return read_model_config(Gguf::from_bytes(bytes, "m"));
}

void expect_refused(const Change& change, ErrorCode code, const std::string& message) {
  Description description;
  change(description);
  try {
    (void)read(description);
    ADD_FAILURE() << "nothing was refused, expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), "m: " + message);
    EXPECT_EQ(error.code(), code) << message;
  }
}

TEST(ModelConfig, ReadsSizesAndDefaults) {
  Description description;
  description.keys["general.name"] = "small";
  const ModelConfig config = read(description);
  EXPECT_EQ(config.name, "small");
  EXPECT_EQ(config.num_layers, 2);
  EXPECT_EQ(config.hidden, 8);
  EXPECT_EQ(config.ffn, 12);
  EXPECT_EQ(config.context, 100);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.q_width(), 64);
  EXPECT_EQ(config.kv_width(), 32);
  EXPECT_EQ(config.qkv_width(), 128);
  EXPECT_EQ(config.vocab, 5);
  EXPECT_EQ(config.rope_dim, 16);
  EXPECT_EQ(config.rope_base, 10000.0);
  EXPECT_EQ(config.rms_eps, 1e-5F);

  description.keys["llama.rope.scaling.type"] = "none";
  description.keys["llama.expert_count"] = 0U;
  description.keys["llama.rope.dimension_count"] = 6U;
  description.shapes["rope_freqs.weight"] = {3};
  description.shapes["output.weight"] = {8, 5};
  EXPECT_EQ(read(description).rope_dim, 6);

  // As many KV heads as query heads, each as wide as its share of the residual stream.
  description.keys["llama.embedding_length"] = 64U;
  description.keys.erase("llama.attention.head_count_kv");
  description.keys.erase("llama.attention.key_length");
  for (auto& [name, sizes] : description.shapes) {
    for (std::uint64_t& size : sizes) size = size == 8 || size == 32 ? 64 : size;
  }
  EXPECT_EQ(read(description).num_kv_heads, 4);
  EXPECT_EQ(read(description).head_dim, 16);
}

TEST(ModelConfig, FuzzingBeginsWithAModelThatIsAccepted) {
  const Gguf gguf = Gguf::open(HEADWATER_TEST_DATA "/../fuzz/corpus/gguf/seed-model");
  EXPECT_EQ(read_model_config(gguf).num_layers, 1);
}

TEST(ModelConfig, OtherFamiliesAreUnsupported) {
  const auto refused = [](const Change& change, const std::string& message) {
    expect_refused(change, ErrorCode::unsupported, message);
  };
  refused(key("general.architecture", "gpt2"), "general.architecture = 'gpt2', expected 'llama'");
  refused(key("general.architecture", "\x1b[2J"), "general.architecture = '\\x1b[2J', expected 'llama'");
  refused(key("llama.rope.scaling.type", "yarn"), "llama.rope.scaling.type = 'yarn', expected 'none' or no such key");
  refused(key("llama.expert_count", 8U), "llama.expert_count = 8, expected 0: mixtures of experts are not known");
  refused(key("llama.attention.key_length", 40U),
          "llama.attention.key_length (head size) = 40, expected a multiple of 16 up to 1024");
  refused(key("llama.attention.key_length", 1040U),
          "llama.attention.key_length (head size) = 1040, expected a multiple of 16 up to 1024");
  refused(key("llama.attention.value_length", 32U), "llama.attention.value_length = 32, expected key_length = 16");
  refused(shape("blk.0.attn_q.bias", {64}),
          "tensor 'blk.0.attn_q.bias' has no place in the llama forward pass of 2 layers");
  refused(key("llama.block_count", 1U),
          "tensor 'blk.1.attn_k.weight' has no place in the llama forward pass of 1 layers");
}

TEST(ModelConfig, SizesThatCannotBeAreRefusedByKey) {
  const auto refused = [](const Change& change, const std::string& message) {
    expect_refused(change, ErrorCode::io, message);
  };
  for (const std::string name : {"embedding_length", "feed_forward_length", "context_length"}) {
    const std::string full = "llama." + name;
    refused(without_key(full), "key '" + full + "' is missing, expected an integer");
    refused(key(full, 0U), full + " = 0, expected 1..16777216");
    refused(key(full, ~std::uint64_t{0}), full + " = 18446744073709551615, expected 1..16777216");
    refused(key(full, -1), "key '" + full + "' = -1, expected 0 or more");
  }
  refused(without_key("llama.block_count"), "key 'llama.block_count' is missing, expected an integer");
  refused(key("llama.block_count", 0U),
          "llama.block_count = 0, expected 1..2: the file has 20 tensors, a layer takes 9");
  refused(key("llama.block_count", 3U),
          "llama.block_count = 3, expected 1..2: the file has 20 tensors, a layer takes 9");
  refused(key("llama.attention.head_count", 32768U), "llama.attention.head_count = 32768, expected 1..32767");
  refused(key("llama.attention.head_count_kv", 0U), "llama.attention.head_count_kv = 0, expected 1..32767");
  refused(key("llama.attention.head_count_kv", 3U),
          "llama.attention.head_count = 4, expected a multiple of head_count_kv = 3");
  refused(key("llama.attention.value_length", 0U), "llama.attention.value_length = 0, expected 1..16777216");
  refused(key("llama.rope.dimension_count", 18U),
          "llama.rope.dimension_count = 18, expected an even number up to the head size 16");
  refused(key("llama.rope.dimension_count", 7U),
          "llama.rope.dimension_count = 7, expected an even number up to the head size 16");
  refused(key("llama.rope.freq_base", 0.0F), "llama.rope.freq_base = 0, expected a finite number above 0");
  refused(key("llama.rope.freq_base", std::numeric_limits<double>::infinity()),
          "llama.rope.freq_base = inf, expected a finite number above 0");
  refused(without_key("llama.attention.layer_norm_rms_epsilon"),
          "key 'llama.attention.layer_norm_rms_epsilon' is missing, expected f32 or f64");
  for (const auto& [value, text] : {std::pair{-1.0, "-1"}, {2.0, "2"}, {std::nan(""), "nan"}}) {
    refused(key("llama.attention.layer_norm_rms_epsilon", value),
            std::string("llama.attention.layer_norm_rms_epsilon = ") + text + ", expected 0..1");
  }
}

TEST(ModelConfig, TensorsMustHaveTheShapesThatTheMetadataSay) {
  const auto refused = [](const Change& change, const std::string& message) {
    expect_refused(change, ErrorCode::io, "tensor " + message);
  };
  refused(without_tensor("token_embd.weight"), "'token_embd.weight' is missing, expected shape [8, vocabulary]");
  refused(shape("token_embd.weight", {8}), "'token_embd.weight' has shape [8], expected [8, 1]");
  refused(shape("token_embd.weight", {9, 5}), "'token_embd.weight' has shape [9, 5], expected [8, 5]");
  refused(shape("token_embd.weight", {1, (1U << 24) + 1}),
          "'token_embd.weight' has 16777217 rows, expected 1..16777216");
  refused(shape("output.weight", {8, 6}), "'output.weight' has shape [8, 6], expected [8, 5]");
  refused(shape("rope_freqs.weight", {9}), "'rope_freqs.weight' has shape [9], expected [8]");
  const Description whole;
  int tried = 0;
  for (const auto& [name, sizes] : whole.shapes) {
    if (name == "token_embd.weight") continue;
    // A tensor more keeps the count, so that what is missing is found by name and not by block_count.
    refused([&](Description& d) { d.shapes.erase(name), d.shapes["extra"] = {1}; },
            "'" + name + "' is missing, expected shape [" + std::to_string(sizes[0]) +
                (sizes.size() > 1 ? ", " + std::to_string(sizes[1]) : "") + "]");
    std::vector<std::uint64_t> other = sizes;
    ++other.back();
    refused(shape(name, other), "'" + name + "' has shape [" +
                                    (other.size() > 1 ? std::to_string(other[0]) + ", " : "") +
                                    std::to_string(other.back()) + "], expected [" + std::to_string(sizes[0]) +
                                    (sizes.size() > 1 ? ", " + std::to_string(sizes[1]) : "") + "]");
    ++tried;
  }
  EXPECT_EQ(tried, 1 + 2 * 9);
}

constexpr std::uint32_t kHuge = 1U << 24;

/// How many bytes more than before a call had in memory at its peak.
std::int64_t peak_growth(const std::function<void()>& call) {
  const auto status = [](const std::string& field) {
    std::ifstream file("/proc/self/status");
    std::string line;
    while (std::getline(file, line)) {
      if (line.starts_with(field)) return std::stoll(line.substr(field.size())) * 1024;
    }
    ADD_FAILURE() << "no " << field;
    return 0LL;
  };
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins anew
  const std::int64_t before = status("VmRSS:");
  call();
  return status("VmHWM:") - before;
}

TEST(ModelConfig, HugeClaimsCostNothing) {
#ifdef __linux__
  const std::vector<Change> claims{
      key("llama.block_count", 3'000'000U),
      key("llama.block_count", ~std::uint64_t{0}),
      key("llama.embedding_length", kHuge),
      key("llama.feed_forward_length", kHuge),
      [](Description& d) {
        d.keys["llama.attention.head_count"] = kHuge;
        d.keys["llama.attention.key_length"] = kHuge;
      },
      [](Description& d) {
        d.keys["llama.attention.head_count"] = d.keys["llama.attention.head_count_kv"] = 32767U;
        d.keys["llama.attention.key_length"] = 1024U;
      },
      [](Description& d) {
        for (const char* name : {"llama.embedding_length", "llama.feed_forward_length"}) d.keys[name] = kHuge;
      },
  };
  const auto refuse_all = [&] {
    for (const Change& claim : claims) {
      Description description;
      claim(description);
      EXPECT_THROW((void)read(description), Error);
    }
  };
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_LT(peak_growth(refuse_all), 16 << 20);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2)) << "milliseconds, but for sanitizers";
  // Negative control: the measure sees what is touched.
  EXPECT_GT(peak_growth([] {
              std::vector<char> touched(64 << 20, 1);
              EXPECT_EQ(touched.back(), 1);
            }),
            48 << 20);
#else
  GTEST_SKIP() << "the peak of memory is read from /proc/self";
#endif
}

}  // namespace
}  // namespace headwater::engine
