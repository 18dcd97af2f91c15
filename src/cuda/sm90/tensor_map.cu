// SPDX-License-Identifier: Apache-2.0
// tensor_map.cu - the descriptions of matrices that TMA reads and writes by.
#include "product.cuh"

typedef CUresult (*EncodeFn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                             const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                             CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver is reached through the runtime, so that the library links neither.
static EncodeFn encoder()
{
    static const EncodeFn fn = [] {
        void *f = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        const cudaError_t e =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
#else // which 13 deprecates
        const cudaError_t e = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &found);
#endif
        if (e != cudaSuccess || found != cudaDriverEntryPointSuccess) f = nullptr;
        cudaGetLastError();
        return (EncodeFn)f;
    }();
    return fn;
}

bool sm90_driver() { return encoder() != nullptr; }

bool sm90_map(CUtensorMap *map, int dtype, const void *p, const int64_t dim[3], const int64_t stride[3],
              const int box[3])
{
    const int64_t size = dtype == FMOE_F32 ? 4 : 2;
    const CUtensorMapDataType type = dtype == FMOE_F32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : dtype == FMOE_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                         : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    cuuint64_t d[3], s[2];
    cuuint32_t b[3], one[3] = {1, 1, 1};
    for (int i = 0; i < 3; i++) {
        if (dim[i] < 1 || dim[i] > ((int64_t)1 << 31)) return false;
        d[i] = (cuuint64_t)dim[i];
        b[i] = (cuuint32_t)box[i];
    }
    for (int i = 0; i < 2; i++) {
        int64_t bytes = stride[i + 1] * size;
        if (dim[i + 1] == 1 && (bytes % 16 || bytes < 16)) bytes = (dim[0] * size + 15) / 16 * 16; // not used
        if (bytes % 16 || bytes < 1) return false;
        s[i] = (cuuint64_t)bytes;
    }
    if (stride[0] != 1 || (uintptr_t)p % 16) return false;
    return encoder()(map, type, 3, (void *)p, d, s, b, one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool sm90_map2(CUtensorMap *map, int dtype, const void *p, int64_t cols, int64_t rows, int64_t pitch, int box_cols,
               int box_rows)
{
    const int64_t size = dtype == FMOE_F32 ? 4 : 2, bytes = pitch * size;
    const CUtensorMapDataType type = dtype == FMOE_F32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : dtype == FMOE_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                         : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    if (cols < 1 || rows < 1 || rows > ((int64_t)1 << 31) || bytes % 16 || (uintptr_t)p % 16) return false;
    const cuuint64_t d[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, s = (cuuint64_t)bytes;
    const cuuint32_t b[2] = {(cuuint32_t)box_cols, (cuuint32_t)box_rows}, one[2] = {1, 1};
    return encoder()(map, type, 2, (void *)p, d, &s, b, one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool sm90_map_glu(CUtensorMap *map, int dtype, const void *gate, int64_t H, int64_t I, int64_t E, int64_t row,
                  int64_t half, int64_t expert)
{
    const cuuint64_t dim[5] = {(cuuint64_t)H, 8, 2, (cuuint64_t)(I / 8), (cuuint64_t)E};
    int64_t bytes[4] = {row * 2, half * 2, row * 16, expert * 2};
    if (E == 1 && (bytes[3] < 16 || bytes[3] % 16)) bytes[3] = row * 2 * I; // not used
    cuuint64_t stride[4];
    for (int i = 0; i < 4; i++) {
        if (bytes[i] % 16 || bytes[i] < 16 || bytes[i] >= (int64_t)1 << 40) return false;
        stride[i] = (cuuint64_t)bytes[i];
    }
    const cuuint32_t box[5] = {64, 8, 2, 8, 1}, one[5] = {1, 1, 1, 1, 1};
    if ((uintptr_t)gate % 16 || I % 8) return false;
    return encoder()(map, dtype == FMOE_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
                     (void *)gate, dim, stride, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool sm90_map_bytes(CUtensorMap *map, const void *p, int dims, const int64_t *dim, const int64_t *stride,
                    const int *box, int swizzle_bytes)
{
    cuuint64_t d[5], s[4];
    cuuint32_t b[5], one[5];
    for (int i = 0; i < dims; i++) {
        if (dim[i] < 1 || dim[i] > ((int64_t)1 << 31)) return false;
        d[i] = (cuuint64_t)dim[i], b[i] = (cuuint32_t)box[i], one[i] = 1;
        if (i + 1 == dims) break;
        if (stride[i] % 16 || stride[i] < 1 || stride[i] >= (int64_t)1 << 40) return false;
        s[i] = (cuuint64_t)stride[i];
    }
    const CUtensorMapSwizzle swizzle = swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                             : CU_TENSOR_MAP_SWIZZLE_NONE;
    return (uintptr_t)p % 16 == 0 &&
           encoder()(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, (cuuint32_t)dims, (void *)p, d, s, b, one,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
