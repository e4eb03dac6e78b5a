#!/bin/sh
# Builds and runs the two consumers against Headwater in one of three ways. Usage:
#   run.sh find_package|pkg_config|add_subdirectory <source folder> <build folder> <scratch folder> <cc> <cxx> <werror> [<toolkit>]
# <toolkit>: the CUDA toolkit's folder, where the build has the CUDA back end; else nothing of CUDA may be installed.
# find_package and pkg_config use an installed copy, which is moved after the installation: nothing may point back.
set -eu
way=$1 source=$2 build=$3 scratch=$4 cc=$5 cxx=$6 werror=$7 toolkit=${8:-}
consumer=$source/tests/install/consumer

rm -rf "$scratch"
mkdir -p "$scratch"
if [ "$way" != add_subdirectory ]; then
  cmake --install "$build" --prefix "$scratch/first" >"$scratch/install.log"
  mv "$scratch/first" "$scratch/prefix"
  traces=$(find "$scratch/prefix" -iname '*cuda*' | wc -l)
  if [ -z "$toolkit" ] && [ "$traces" -gt 0 ]; then
    echo "built without CUDA, but installed: $(find "$scratch/prefix" -iname '*cuda*')" >&2
    exit 1
  fi
fi

case "$way" in
  find_package)
    cmake -S "$consumer" -B "$scratch/build" -G Ninja -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" \
      -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$scratch/prefix" \
      -DCONSUMER_CUDA="$([ -n "$toolkit" ] && echo TRUE || echo FALSE)" ${toolkit:+-DCUDAToolkit_ROOT="$toolkit"}
    cmake --build "$scratch/build"
    ;;
  pkg_config)
    mkdir "$scratch/build"
    PKG_CONFIG_PATH=$(dirname "$(find "$scratch/prefix" -name headwater.pc)")
    export PKG_CONFIG_PATH
    [ "$(pkg-config --modversion headwater)" = 0.1.0 ]
    flags=$(pkg-config --cflags --libs headwater)
    # The flags come last: libraries follow the objects that need them.
    "$cc" -std=c99 -Wall -Wextra -Werror -o "$scratch/build/consumer_c" "$consumer/consumer.c" $flags
    "$cxx" -std=c++20 -Wall -Wextra -Werror -o "$scratch/build/consumer_cc" "$consumer/consumer.cc" $flags
    if [ -n "$toolkit" ]; then
      "$cxx" -std=c++20 -Wall -Wextra -Werror -o "$scratch/build/consumer_cuda" "$consumer/consumer_cuda.cc" \
        $(pkg-config --cflags --libs headwater-cuda)
    fi
    LD_LIBRARY_PATH=$(pkg-config --variable=libdir headwater)
    export LD_LIBRARY_PATH
    ;;
  add_subdirectory)
    cmake -S "$consumer" -B "$scratch/build" -G Ninja -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" \
      -DCMAKE_BUILD_TYPE=Release -DHEADWATER_SOURCE="$source" -DHEADWATER_WERROR="$werror" \
      ${CMAKE_CXX_COMPILER_LAUNCHER:+-DCMAKE_CXX_COMPILER_LAUNCHER="$CMAKE_CXX_COMPILER_LAUNCHER"}
    cmake --build "$scratch/build" -j 2
    ;;
  *)
    echo "unknown way '$way'" >&2
    exit 2
    ;;
esac
"$scratch/build/consumer_c"
"$scratch/build/consumer_cc"
if [ -n "$toolkit" ] && [ "$way" != add_subdirectory ]; then "$scratch/build/consumer_cuda"; fi
