// SPDX-License-Identifier: Apache-2.0
// inst_coded.cu - compiles the products that decode (gemm_coded.cuh), and launches them.
#include "gemm_coded.cuh"

struct CodedEntry {
    void (*function)(Sm90CodedArgs);
    unsigned threads;
    size_t shared; // without the offsets
};
template <class C> static constexpr CodedEntry entry(void (*function)(Sm90CodedArgs))
{
    static_assert(C::SMEM <= SM90_MAX_SMEM, "too much shared memory");
    return {function, C::THREADS, C::SMEM};
}
template <CodedKernel K, CodeKind CODE> static constexpr CodedEntry rows()
{
    return entry<CodedConfig<K, CODE>>(coded_sm90_kernel<CodedConfig<K, CODE>>);
}
#define EACH_CODE(f, K) {f<K, CODE_NIBBLES>(), f<K, CODE_E4M3>(), f<K, CODE_S8>()}
static const CodedEntry kEntries[][3] = {EACH_CODE(rows, CODED_UP),       EACH_CODE(rows, CODED_ROWS_K),
                                         EACH_CODE(rows, CODED_GATHER_K), EACH_CODE(rows, CODED_ROWS_N),
                                         EACH_CODE(rows, CODED_GATHER_N), EACH_CODE(rows, CODED_DH)};

cudaError_t sm90_coded_setup()
{
    for (const auto &kernel : kEntries)
        for (const CodedEntry &e : kernel) {
            const cudaError_t error =
                cudaFuncSetAttribute(e.function, cudaFuncAttributeMaxDynamicSharedMemorySize, SM90_MAX_SMEM);
            if (error != cudaSuccess) return error;
        }
    return cudaSuccess;
}

cudaError_t sm90_coded_launch(Stream &s, Product product, CodedKernel kernel, CodeKind code, Sm90CodedArgs &a, int sms)
{
    const CodedEntry &e = kEntries[kernel][code];
    const size_t all = e.shared + ((size_t)a.p.E + 1) * 4;
    a.p.off_shared = all <= SM90_MAX_SMEM;
    return launch(s, product, e.function, Grid{(unsigned)sms, e.threads, a.p.off_shared ? all : e.shared}, a);
}
