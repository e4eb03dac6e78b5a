# headwater_native_gpus(OUT FALLBACK): the architectures of this machine's GPUs, as nvidia-smi tells them, in CMake's
# notation, or FALLBACK where there is none that the kernels run on. CMake's own `native` gives 90 for Hopper, whose
# wgmma and bulk copies need 90a.
function(headwater_native_gpus out fallback)
  find_program(HEADWATER_NVIDIA_SMI nvidia-smi)
  set(found "")
  if(HEADWATER_NVIDIA_SMI)
    execute_process(COMMAND ${HEADWATER_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE text ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${text}")
    foreach(capability IN LISTS capabilities)
      string(REPLACE "." "" number "${capability}")
      if(number GREATER 90)
        list(APPEND found "90-virtual")  # nvcc may not know it, the driver translates
      elseif(number EQUAL 90)
        list(APPEND found "90a-real")
      elseif(number GREATER_EQUAL 80)
        list(APPEND found "${number}-real")
      endif()
    endforeach()
    list(REMOVE_DUPLICATES found)
  endif()
  if(NOT found)
    set(found "${fallback}")
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()
