/* SPDX-License-Identifier: Apache-2.0
 * stubs.c - symbols that must resolve for torch_npu to load and that nothing here calls: they answer "not supported"
 * and say who asked. Profiling and logging do nothing. */
#include <stdio.h>

#include "sim.h"

static int refuse(const char *name)
{
    fprintf(stderr, "ascend_sim: %s is not simulated\n", name);
    sim_message("%s is not simulated", name);
    return ACL_E_UNSUPPORTED;
}

#define REFUSE(name)                                                                                                   \
    int name(void) { return refuse(#name); }
#define NOTHING(name)                                                                                                  \
    int name(void) { return 0; }
#define OBJECT(name)                                                                                                   \
    void *name(void)                                                                                                   \
    {                                                                                                                  \
        static char object[64];                                                                                        \
        return object;                                                                                                 \
    } /* of the old operator path */

NOTHING(aclAppLog)
NOTHING(MsprofRegisterCallback)
NOTHING(MsprofReportAdditionalInfo)
NOTHING(MsprofReportApi)
NOTHING(MsprofReportCompactInfo)
uint64_t MsprofGetHashId(void) { return 0; }
uint64_t MsprofSysCycleTime(void) { return 0; }

/* The old operator path: torch_npu goes there when an aclnn function is missing. */
int aclopCompileAndExecute(const char *type) { return refuse(type); }
OBJECT(aclCreateDataBuffer)
OBJECT(aclCreateTensorDesc)
OBJECT(aclopCreateAttr)
NOTHING(aclDestroyDataBuffer)
NOTHING(aclDestroyTensorDesc)
NOTHING(aclopDestroyAttr)
NOTHING(aclGetTensorDescDimV2)
NOTHING(aclGetTensorDescFormat)
NOTHING(aclGetTensorDescNumDims)
NOTHING(aclGetTensorDescType)
NOTHING(aclSetTensorDescName)
NOTHING(aclSetTensorFormat)
NOTHING(aclSetTensorPlaceMent)
NOTHING(aclSetTensorShape)
NOTHING(aclopSetAttrBool)
NOTHING(aclopSetAttrDataType)
NOTHING(aclopSetAttrFloat)
NOTHING(aclopSetAttrInt)
NOTHING(aclopSetAttrListBool)
NOTHING(aclopSetAttrListFloat)
NOTHING(aclopSetAttrListInt)
NOTHING(aclopSetAttrListListInt)
NOTHING(aclopSetAttrString)

REFUSE(aclmdlFinalizeDump)
REFUSE(aclmdlInitDump)
REFUSE(aclmdlSetDump)
REFUSE(aclrtBinaryGetFunction)
REFUSE(aclrtBinaryLoadFromData)
NOTHING(aclrtDeviceEnablePeerAccess)
REFUSE(aclrtDeviceGetBareTgid)
REFUSE(aclrtFreePhysical)
REFUSE(aclrtGetFunctionAddr)
REFUSE(aclrtMallocPhysical)
REFUSE(aclrtMapMem)
REFUSE(aclrtMemExportToShareableHandle)
REFUSE(aclrtMemImportFromShareableHandle)
REFUSE(aclrtMemSetPidToShareableHandle)
REFUSE(aclrtProcessReport)
REFUSE(aclrtReleaseMemAddress)
REFUSE(aclrtReserveMemAddress)
REFUSE(aclrtUnmapMem)
REFUSE(rtDevBinaryRegister)
REFUSE(rtFunctionRegister)
REFUSE(rtGetC2cCtrlAddr)
REFUSE(rtKernelLaunch)
