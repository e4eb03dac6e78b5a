// Random numbers for tests: the same sequence from a seed with every compiler and standard library (the distributions
// of <random> are not), so that a printed seed reproduces a failure anywhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace headwater::reference {

class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}

  /// splitmix64.
  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ULL;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }

  /// Uniform in [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(high - low + 1));
  }
  int integer(int low, int high) { return static_cast<int>(between(low, high)); }

  /// Uniform in [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  bool chance(double probability) { return uniform() < probability; }

  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

  template <class Container>
  const auto& pick(const Container& choices) {
    return choices[static_cast<std::size_t>(between(0, static_cast<std::int64_t>(std::size(choices)) - 1))];
  }

 private:
  std::uint64_t state_;
};

}  // namespace headwater::reference
