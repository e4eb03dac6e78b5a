#include "headwater/plan.h"
#include "plan/memory.h"

namespace headwater {

std::string Plan::describe() const {
  return "path " + std::string(name_of(stats().path)) + "\n";
}

std::string Plan::to_json() const {
  return "{}";
}

}  // namespace headwater
