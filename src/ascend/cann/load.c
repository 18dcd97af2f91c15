/* SPDX-License-Identifier: Apache-2.0
 *
 * load.c - find CANN's libraries and symbols, once for the process.
 *
 * Libraries: libascendcl.so (runtime), libnnopbase.so (descriptors), and the operators, either libopapi.so or, from
 * about CANN 8.5 on, libopapi_{transformer,nn,math}.so; the two kinds are never mixed. FMOE_ASCEND_PATH names a folder
 * to take all of them from. Otherwise what the process has already loaded (torch_npu) comes first, then the loader's
 * own search, then $ASCEND_HOME_PATH/lib64. The libraries stay loaded: CANN does not survive being unloaded. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl.h"

enum { RUNTIME, BASE, OPERATORS, LIBRARIES = OPERATORS + 3 }; /* up to three operator libraries */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static fmoe_acl loaded;
static fmoe_status outcome;
static char reason[1024];

static void *open_in(const char *folder, const char *sub, const char *name)
{
    char path[4096];
    const int n = snprintf(path, sizeof path, "%s%s/%s", folder, sub, name);
    return n > 0 && (size_t)n < sizeof path ? dlopen(path, RTLD_NOW | RTLD_GLOBAL) : NULL;
}

static void *open_library(const char *name)
{
    const char *own = secure_getenv("FMOE_ASCEND_PATH");
    if (own && *own) return open_in(own, "", name);
    void *lib = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    if (!lib) lib = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    const char *home = secure_getenv("ASCEND_HOME_PATH");
    if (!lib && home && *home) lib = open_in(home, "/lib64", name);
    return lib;
}

static fmoe_status missing(const char *what, const char *name)
{
    const char *own = secure_getenv("FMOE_ASCEND_PATH"), *why = dlerror();
    snprintf(reason, sizeof reason, "%s %s not found%s%s%s%s%s", what, name, own && *own ? " in FMOE_ASCEND_PATH " : "",
             own && *own ? own : "", why ? " (" : "", why ? why : "", why ? ")" : "");
    return FMOE_ERR_BACKEND;
}

/* Every symbol that is missing is named, not only the first. */
typedef struct names {
    char text[512];
    size_t used;
} names;

static void add(names *n, const char *name)
{
    const int w = snprintf(n->text + n->used, sizeof n->text - n->used, "%s%s", n->used ? ", " : "", name);
    n->used += (size_t)w < sizeof n->text - n->used ? (size_t)w : sizeof n->text - 1 - n->used;
}

static void *find(void *const *libs, int first, int last, const char *name)
{
    for (int i = first; i < last; i++) {
        void *f = libs[i] ? dlsym(libs[i], name) : NULL;
        if (f) return f;
    }
    return NULL;
}

static fmoe_status open_all(void **libs)
{
    static const char *const split[] = {"libopapi_transformer.so", "libopapi_nn.so", "libopapi_math.so"};
    dlerror();
    libs[RUNTIME] = open_library("libascendcl.so");
    if (!libs[RUNTIME]) return missing("library", "libascendcl.so");
    libs[BASE] = open_library("libnnopbase.so");
    if (!libs[BASE]) return missing("library", "libnnopbase.so");
    /* A process that already uses the split libraries must go on with them. */
    void *present = dlopen(split[0], RTLD_NOW | RTLD_NOLOAD);
    if (!present) {
        libs[OPERATORS] = open_library("libopapi.so");
        if (libs[OPERATORS]) return FMOE_OK;
    }
    for (int i = 0; i < 3; i++) {
        libs[OPERATORS + i] = open_library(split[2 - i]); /* math first: the others use it */
        if (!libs[OPERATORS + i]) return missing("library", "libopapi.so (nor libopapi_transformer, _nn and _math)");
    }
    return FMOE_OK;
}

static fmoe_status bind(void *const *libs, fmoe_acl *acl)
{
    names lost = {.used = 0};
    /* ISO C has no cast from void * to a function pointer; POSIX defines the copy. */
#define ACL_FN(need, library, ret, name, args)                                                                         \
    {                                                                                                                  \
        void *f = find(libs, library, library + 1, #name);                                                             \
        if (need && !f) add(&lost, #name);                                                                             \
        memcpy(&acl->name, &f, sizeof f);                                                                              \
    }
#define ACL_OP(need, name, args)                                                                                       \
    {                                                                                                                  \
        void *one = find(libs, OPERATORS, LIBRARIES, "aclnn" #name "GetWorkspaceSize");                                \
        void *two = find(libs, OPERATORS, LIBRARIES, "aclnn" #name);                                                   \
        if (need && !(one && two)) add(&lost, "aclnn" #name);                                                          \
        if (!one || !two) one = two = NULL;                                                                            \
        memcpy(&acl->aclnn##name##GetWorkspaceSize, &one, sizeof one);                                                 \
        memcpy(&acl->aclnn##name, &two, sizeof two);                                                                   \
    }
#include "acl.inc"
#undef ACL_FN
#undef ACL_OP
    if (!acl->aclnnGroupedMatmulV4 && !acl->aclnnGroupedMatmulV5) add(&lost, "aclnnGroupedMatmulV5 (nor V4)");
    if (!acl->aclnnMoeInitRoutingV2 && !acl->aclnnMoeInitRoutingV3) add(&lost, "aclnnMoeInitRoutingV3 (nor V2)");
    if (!lost.used) return FMOE_OK;
    dlerror(); /* it would speak of the last symbol only */
    return missing("symbols", lost.text);
}

/* The number says little: without ASCEND_HOME_PATH CANN answers "", and files of 8.1 exist that say 7.7. So nothing is
 * refused for it, symbols decide (bind), and where only the number could tell, unknown means no. FMOE_ASCEND_MIXED=1
 * (or 0) overrules: mixed dtypes are the one thing without a symbol of their own. */
static void read_version(fmoe_acl *acl)
{
    aclVersion v;
    char text[256] = "", package[] = "ops_transformer";
    memset(&v, 0, sizeof v);
    if (acl->aclsysGetCANNVersion && acl->aclsysGetCANNVersion(0, &v) == 0)
        snprintf(text, sizeof v.version, "%.127s", v.version);
    if (!text[0] && (!acl->aclsysGetVersionStr || acl->aclsysGetVersionStr(package, text) != 0)) text[0] = 0;
    text[sizeof text - 1] = 0;
    snprintf(acl->version, sizeof acl->version, "%.31s", text);
    int major = 0, minor = 0;
    if (sscanf(acl->version, "%d.%d", &major, &minor) >= 1 && major >= 8 && major < 100 && minor >= 0 && minor < 100)
        acl->number = 100 * major + minor;
    const char *say = secure_getenv("FMOE_ASCEND_MIXED");
    if (say && *say) acl->mixed_probs = strcmp(say, "0") != 0;
    else
        acl->mixed_probs = acl->number >= 805 || acl->aclnnGroupedMatmulAddV2 || acl->aclnnMoeGatingTopKBackward ||
                           acl->aclnnClippedSwiglu; /* each of these is newer than 8.5 */
}

static fmoe_status start(fmoe_acl *acl)
{
    /* 100002: torch_npu or the program itself was here before us. We never finalize. */
    const aclError code = acl->aclInit(NULL);
    if (code != 0 && code != ACL_REPEAT_INITIALIZE) {
        const char *text = acl->aclGetRecentErrMsg();
        snprintf(reason, sizeof reason, "aclInit failed with %d%s%.300s", code, text ? ": " : "", text ? text : "");
        return FMOE_ERR_BACKEND;
    }
    if (acl->aclrtGetDeviceCount(&acl->devices) != 0 || acl->devices == 0) {
        snprintf(reason, sizeof reason, "CANN is there and finds no NPU");
        return FMOE_ERR_BACKEND;
    }
    const char *soc = acl->aclrtGetSocName();
    snprintf(acl->soc, sizeof acl->soc, "%s", soc ? soc : "unknown");
    /* The first 910 (A, and a plain "Ascend910B" without a number) and 310P have no grouped matmul for training. */
    static const char *const refused[] = {"Ascend910A", "Ascend910Pro", "Ascend910Premium", "Ascend310"};
    bool old = strcmp(acl->soc, "Ascend910B") == 0;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        old = old || strncmp(acl->soc, refused[i], strlen(refused[i])) == 0;
    if (old) {
        snprintf(reason, sizeof reason, "%s has no grouped matrix product; 910B1 to 910B4, 910_93 or 950 is needed",
                 acl->soc);
        return FMOE_ERR_BACKEND;
    }
    acl->is_950 = strncmp(acl->soc, "Ascend950", 9) == 0;
    read_version(acl);
    return FMOE_OK;
}

static void load(void)
{
    void *libs[LIBRARIES] = {NULL};
    outcome = open_all(libs);
    if (outcome == FMOE_OK) outcome = bind(libs, &loaded);
    if (outcome == FMOE_OK) outcome = start(&loaded);
}

fmoe_status fmoe_acl_get(const fmoe_acl **acl)
{
    pthread_once(&once, load);
    if (outcome != FMOE_OK) return fmoe_fail(outcome, "Ascend: %s", reason);
    *acl = &loaded;
    return FMOE_OK;
}
