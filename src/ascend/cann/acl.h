/* SPDX-License-Identifier: Apache-2.0
 *
 * acl.h - CANN as this backend sees it: types, constants, and one struct with every function of acl.inc, filled by
 * load.c. No header of the vendor is needed to build, and none of its libraries to load ours. */
#ifndef FMOE_ASCEND_ACL_H
#define FMOE_ASCEND_ACL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend.h"

typedef int aclError;
typedef int32_t aclnnStatus;
typedef int aclDataType;
typedef int aclFormat;
typedef void *aclrtStream;
typedef void *aclrtEvent;
typedef struct aclTensor aclTensor;
typedef struct aclScalar aclScalar;
typedef struct aclIntArray aclIntArray;
typedef struct aclTensorList aclTensorList;
typedef struct aclOpExecutor aclOpExecutor;
typedef struct aclVersion {
    char version[128], major[64], minor[64], release[64], patch[64], reserved[128];
} aclVersion;

enum {
    ACL_FLOAT = 0,
    ACL_FLOAT16 = 1,
    ACL_INT8 = 2,
    ACL_INT32 = 3,
    ACL_UINT8 = 4,
    ACL_INT64 = 9,
    ACL_BOOL = 12,
    ACL_BF16 = 27
};
enum { ACL_FORMAT_ND = 2 };
enum { ACL_REPEAT_INITIALIZE = 100002 };
enum { ACL_HOST_TO_DEVICE = 1, ACL_DEVICE_TO_HOST = 2, ACL_DEVICE_TO_DEVICE = 3 };
enum { ACL_MEM_MALLOC_HUGE_FIRST = 0 };
enum { ACL_EVENT_SYNC = 1, ACL_EVENT_CAPTURE_STREAM_PROGRESS = 2 };
enum { ACL_EVENT_RECORDED_STATUS_COMPLETE = 1 };

#define T const aclTensor *
#define TL const aclTensorList *
#define WS uint64_t *workspaceSize, aclOpExecutor **executor
typedef struct fmoe_acl {
#define ACL_FN(need, library, ret, name, args) ret(*name) args;
#define ACL_OP(need, name, args)                                                                                       \
    aclnnStatus(*aclnn##name##GetWorkspaceSize) args;                                                                  \
    aclnnStatus (*aclnn##name)(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream);
#include "acl.inc"
#undef ACL_FN
#undef ACL_OP
    char version[32]; /* of CANN, "" when it does not say */
    int number;       /* 100 * major + minor of it; 0: not known. What CANN can do is asked of its symbols first */
    char soc[64];
    bool is_950;
    uint32_t devices;
    bool mixed_probs; /* UnpermuteGrad is known to take f32 probs with 16-bit tokens (CANN 8.5 and later) */
} fmoe_acl;
#undef T
#undef TL
#undef WS

/* load.c: load once for the process. FMOE_ERR_BACKEND names what is missing. */
fmoe_status fmoe_acl_get(const fmoe_acl **acl);

#endif
