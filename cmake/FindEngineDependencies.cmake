# headwater_find_engine_dependencies(result): ON where everything that the engine and the command need is installed. For builds that
# take the command along if they can (HEADWATER_BUILD_ENGINE=AUTO: the Python wheel); elsewhere a missing package is an error.
function(headwater_find_engine_dependencies result)
  find_package(CLI11 QUIET)
  find_package(fmt QUIET)
  find_package(nlohmann_json QUIET)
  find_package(OpenMP QUIET COMPONENTS CXX)
  find_path(PCRE2_INCLUDE_DIR pcre2.h)
  find_library(PCRE2_LIBRARY pcre2-8)
  find_path(DNNL_INCLUDE_DIR dnnl.hpp)
  find_library(DNNL_LIBRARY dnnl)
  set(found ON)
  if(NOT (CLI11_FOUND AND fmt_FOUND AND nlohmann_json_FOUND AND OpenMP_CXX_FOUND AND PCRE2_INCLUDE_DIR AND PCRE2_LIBRARY
          AND DNNL_INCLUDE_DIR AND DNNL_LIBRARY))
    set(found OFF)
    message(STATUS "The command headwater is left out: one of CLI11, fmt, nlohmann_json, OpenMP, PCRE2, oneDNN is not installed")
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()
