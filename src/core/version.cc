#include "headwater/version.h"

namespace headwater {

#define HEADWATER_STRING_(x) #x
#define HEADWATER_STRING(x) HEADWATER_STRING_(x)
const char* version() noexcept {
  return HEADWATER_STRING(HEADWATER_VERSION_MAJOR) "." HEADWATER_STRING(HEADWATER_VERSION_MINOR) "." HEADWATER_STRING(
      HEADWATER_VERSION_PATCH);
}

}  // namespace headwater
