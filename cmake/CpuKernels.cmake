# SPDX-License-Identifier: Apache-2.0
# The CPU backend. Files of one ISA level are compiled with that level's flags and reached only through the kernel table, so
# no instruction of a level runs on a CPU without it. Files *_tmpl.c (rows, epilogues, a router's softmax) are compiled once per level.
add_library(fmoe_cpu OBJECT
            src/cpu/cpu.c src/cpu/ceiling.c src/cpu/pool.c src/cpu/groups.c src/cpu/operands.c src/cpu/chunk.c
            src/cpu/line.c src/cpu/gemm.c src/cpu/direct.c src/cpu/wide.c src/cpu/outer.c src/cpu/experts.c src/cpu/experts_bwd.c src/cpu/adapters.c
            src/cpu/packed.c src/cpu/gmm.c src/cpu/permute.c src/cpu/route.c src/cpu/activation.c src/cpu/ref.c
            src/cpu/ref_route.c src/cpu/ref_experts.c)
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

set(rows src/cpu/rows_tmpl.c src/cpu/blocks_tmpl.c src/cpu/softmax_tmpl.c)
fmoe_isa(c SOURCES ${rows} src/cpu/gemm_c.c)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2 -mavx2 -mfma -mf16c)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
  fmoe_isa(avx2 SOURCES ${rows} src/cpu/gemm_avx2.c src/cpu/quads_avx2.c src/cpu/outer_avx2.c FLAGS ${avx2})
  fmoe_isa(avx512 SOURCES ${rows} src/cpu/gemm_avx512.c src/cpu/outer_avx512.c FLAGS ${avx512})
  set(bf16 ${avx512} -mavx512bf16)
  fmoe_has(avx512_bf16 "_mm512_cvtne2ps_pbh(_mm512_setzero_ps(), _mm512_setzero_ps())" immintrin.h ${bf16})
  if(FMOE_HAS_AVX512_BF16)
    fmoe_isa(avx512_bf16 SOURCES src/cpu/blocks_tmpl.c src/cpu/gemm_avx512_bf16.c src/cpu/outer_avx512.c FLAGS ${bf16})
  endif()
  fmoe_has(amx_bf16 "__asm__ volatile(\"tdpbf16ps %tmm2, %tmm1, %tmm0\")" immintrin.h ${bf16})
  if(FMOE_HAS_AMX_BF16)
    fmoe_isa(amx_bf16 SOURCES src/cpu/gemm_amx_bf16.c src/cpu/direct_amx_bf16.c FLAGS ${bf16})
    if(FMOE_AMX_EMULATE)
      target_compile_definitions(fmoe_cpu PRIVATE FMOE_AMX_EMULATE)
      target_compile_definitions(fmoe_cpu_amx_bf16 PRIVATE FMOE_AMX_EMULATE)
    endif()
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64") # NEON is the baseline; its elementwise rows are those of level c
  fmoe_isa(neon SOURCES src/cpu/gemm_neon.c)
  fmoe_has(neon_bf16 "vbfmmlaq_f32(vdupq_n_f32(0), vreinterpretq_bf16_u16(vdupq_n_u16(0)), vreinterpretq_bf16_u16(vdupq_n_u16(0)))"
           arm_neon.h -march=armv8.2-a+bf16)
  if(FMOE_HAS_NEON_BF16)
    fmoe_isa(neon_bf16 SOURCES src/cpu/gemm_neon_bf16.c FLAGS -march=armv8.2-a+bf16)
  endif()
endif()
