# SPDX-License-Identifier: Apache-2.0
# The CPU backend. Files of one ISA level are compiled with that level's flags and reached only through the kernel table, so
# no instruction of a level runs on a CPU without it. Files *_tmpl.c (conversions, epilogues, softmax) are compiled once per level.
add_library(fmoe_cpu OBJECT
            src/cpu/backend.c src/cpu/groups.c src/cpu/isa.c src/cpu/parallel.c src/cpu/peak.c
            src/cpu/ops/activation.c src/cpu/ops/describe.c src/cpu/ops/experts_bwd.c src/cpu/ops/experts_fwd.c src/cpu/ops/gmm.c src/cpu/ops/lora.c
            src/cpu/ops/permute.c src/cpu/ops/prepacked.c src/cpu/ops/quantize.c src/cpu/ops/route.c
            src/cpu/gemm/chunking.c src/cpu/gemm/combine.c src/cpu/gemm/decode.c src/cpu/gemm/forms.c src/cpu/gemm/grouped_gemm.c src/cpu/gemm/inplace_amx.c
            src/cpu/gemm/pipeline.c src/cpu/gemm/views.c src/cpu/gemm/wgrad.c src/cpu/gemm/widen.c
            src/cpu/ref/ref.c src/cpu/ref/ref_experts.c src/cpu/ref/ref_quant.c src/cpu/ref/ref_route.c)
target_link_libraries(fmoe_cpu PRIVATE fmoe_flags)
set(FMOE_CPU_OBJECTS $<TARGET_OBJECTS:fmoe_cpu>)

function(fmoe_isa level)
  cmake_parse_arguments(ISA "" "" "SOURCES;FLAGS" ${ARGN})
  add_library(fmoe_cpu_${level} OBJECT ${ISA_SOURCES})
  target_link_libraries(fmoe_cpu_${level} PRIVATE fmoe_flags)
  target_compile_options(fmoe_cpu_${level} PRIVATE ${ISA_FLAGS})
  target_compile_definitions(fmoe_cpu_${level} PRIVATE FMOE_ISA=${level})
  if(FMOE_SANITIZE) # checks at every index of an unrolled tile: minutes at -O2; of clang's levels -O0 alone does not unroll
    target_compile_options(fmoe_cpu_${level} PRIVATE $<IF:$<C_COMPILER_ID:GNU>,-Og,-O0>)
    target_compile_definitions(fmoe_cpu_${level} PRIVATE FMOE_SANITIZED)
  endif()
  set(FMOE_CPU_OBJECTS ${FMOE_CPU_OBJECTS} $<TARGET_OBJECTS:fmoe_cpu_${level}> PARENT_SCOPE)
endfunction()

# Levels newer than some compilers in use: an instruction of theirs has to compile and to assemble. Else the library is
# built without the level, and says so; FMOE_NO_<LEVEL> leaves its lines of kernels.inc out.
include(CheckCSourceCompiles)
function(fmoe_has level instruction header)
  string(TOUPPER ${level} upper)
  string(JOIN " " CMAKE_REQUIRED_FLAGS ${ARGN})
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
  check_c_source_compiles("#include <${header}>\nint main(void) { ${instruction}; return 0; }" FMOE_HAS_${upper})
  if(NOT FMOE_HAS_${upper})
    message(WARNING "${CMAKE_C_COMPILER} ${CMAKE_C_COMPILER_VERSION} or its assembler does not know the instructions of "
                    "CPU level ${level}: built without it, bf16 is slower on CPUs that have them")
    target_compile_definitions(fmoe_flags INTERFACE FMOE_NO_${upper})
  endif()
endfunction()

set(kernels src/cpu/kernels)
set(x86 ${kernels}/x86)
set(arm ${kernels}/arm)
set(templates ${kernels}/convert_tmpl.c ${kernels}/epilogue_tmpl.c ${kernels}/softmax_tmpl.c)
fmoe_isa(c SOURCES ${templates} ${kernels}/dequant_tmpl.c ${kernels}/gemm_c.c)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2 -mavx2 -mfma -mf16c)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
  fmoe_isa(avx2 SOURCES ${templates} ${x86}/quant/dequant_avx2.c ${x86}/gemm_avx2.c ${x86}/gemm_kmajor_avx2.c ${x86}/wgrad_avx2.c
           FLAGS ${avx2})
  fmoe_isa(avx512 SOURCES ${templates} ${x86}/quant/dequant_avx512.c ${x86}/gemm_avx512.c ${x86}/wgrad_avx512.c FLAGS ${avx512})
  set(bf16 ${avx512} -mavx512bf16)
  fmoe_has(avx512_bf16 "_mm512_cvtne2ps_pbh(_mm512_setzero_ps(), _mm512_setzero_ps())" immintrin.h ${bf16})
  if(FMOE_HAS_AVX512_BF16)
    fmoe_isa(avx512_bf16 SOURCES ${kernels}/epilogue_tmpl.c ${x86}/quant/coded_few_rows_avx512_bf16.c
             ${x86}/quant/dequant_avx512.c ${x86}/gemm_avx512_bf16.c ${x86}/wgrad_avx512.c FLAGS ${bf16})
  endif()
  fmoe_has(amx_bf16 "__asm__ volatile(\"tdpbf16ps %tmm2, %tmm1, %tmm0\")" immintrin.h ${bf16})
  if(FMOE_HAS_AMX_BF16)
    fmoe_isa(amx_bf16 SOURCES ${x86}/gemm_amx_bf16.c ${x86}/gemm_inplace_amx_bf16.c FLAGS ${bf16})
    if(FMOE_AMX_EMULATE)
      target_compile_definitions(fmoe_cpu PRIVATE FMOE_AMX_EMULATE)
      target_compile_definitions(fmoe_cpu_amx_bf16 PRIVATE FMOE_AMX_EMULATE)
    endif()
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64") # NEON is the baseline; its elementwise rows but dequant are level c's
  fmoe_isa(neon SOURCES ${arm}/dequant_neon.c ${arm}/gemm_neon.c)
  fmoe_has(neon_bf16 "vbfmmlaq_f32(vdupq_n_f32(0), vreinterpretq_bf16_u16(vdupq_n_u16(0)), vreinterpretq_bf16_u16(vdupq_n_u16(0)))"
           arm_neon.h -march=armv8.2-a+bf16)
  if(FMOE_HAS_NEON_BF16)
    fmoe_isa(neon_bf16 SOURCES ${arm}/gemm_neon_bf16.c FLAGS -march=armv8.2-a+bf16)
  endif()
endif()
