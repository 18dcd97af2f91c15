/* SPDX-License-Identifier: Apache-2.0
 *
 * cann.h - the part of CANN's C interface that the simulator offers, from the vendor's documentation: types and
 * constants. The functions themselves are defined where they are implemented; a caller brings prototypes of its own. */
#ifndef FMOE_SIM_CANN_H
#define FMOE_SIM_CANN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int aclError;
typedef int32_t aclnnStatus;
typedef int aclDataType;
typedef int aclFormat;
typedef void *aclrtStream;
typedef void *aclrtEvent;
typedef void *aclrtContext;

typedef struct aclTensor aclTensor;
typedef struct aclScalar aclScalar;
typedef struct aclIntArray aclIntArray;
typedef struct aclFloatArray aclFloatArray;
typedef struct aclBoolArray aclBoolArray;
typedef struct aclTensorList aclTensorList;
typedef struct aclScalarList aclScalarList;
typedef struct aclOpExecutor aclOpExecutor;

enum {
    ACL_FLOAT = 0,
    ACL_FLOAT16 = 1,
    ACL_INT8 = 2,
    ACL_INT32 = 3,
    ACL_UINT8 = 4,
    ACL_INT16 = 6,
    ACL_UINT16 = 7,
    ACL_UINT32 = 8,
    ACL_INT64 = 9,
    ACL_UINT64 = 10,
    ACL_DOUBLE = 11,
    ACL_BOOL = 12,
    ACL_BF16 = 27
};

enum { ACL_FORMAT_NCHW = 0, ACL_FORMAT_NHWC = 1, ACL_FORMAT_ND = 2, ACL_FORMAT_NCDHW = 30, ACL_FORMAT_NCL = 47 };

enum {
    ACL_HOST_TO_HOST = 0,
    ACL_HOST_TO_DEVICE = 1,
    ACL_DEVICE_TO_HOST = 2,
    ACL_DEVICE_TO_DEVICE = 3,
    ACL_DEFAULT = 4
};

enum {
    ACL_OK = 0,
    ACL_E_PARAM = 100000,
    ACL_E_REPEAT_INIT = 100002,
    ACL_E_UNSUPPORTED = 500002,
    ACL_E_INTERNAL = 500000,
    ACL_E_RT_PARAM = 107000,
    ACL_E_NO_CONTEXT = 107002,
    ACL_E_NO_STREAM = 107003,
    ACL_E_UNALIGNED = 107008,
    ACL_E_TIMEOUT = 107020,
    ACL_E_MEMORY = 207018,
    ACL_E_AICORE = 507015,
    ACLNN_E_NULL = 161001,
    ACLNN_E_PARAM = 161002,
    ACLNN_E_RUNTIME = 361001,
    ACLNN_E_INNER = 561000,
    ACLNN_E_TILING = 561002,
    ACLNN_E_INNER_NULL = 561103
};

#endif
