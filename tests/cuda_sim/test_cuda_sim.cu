// SPDX-License-Identifier: Apache-2.0
// test_cuda_sim.cu - the device in software itself: what kernels compute on it beside the same on the host, and that
// it finds the mistakes that it is there for.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

static int passed, failed;
#define EXPECT(condition, ...)                                                                                         \
    do {                                                                                                               \
        if (condition) passed++;                                                                                       \
        else failed++, printf("FAILED line %d: ", __LINE__), printf(__VA_ARGS__), printf("\n");                        \
    } while (0)

template <class T> struct Device {
    T *p = nullptr;
    size_t n;
    explicit Device(size_t count) : n(count)
    {
        if (cudaMalloc(&p, n * sizeof(T)) != cudaSuccess) exit(2);
        memset((void *)p, 0, n * sizeof(T));
    }
    ~Device() { cudaFree(p); }
};

// ---- Numbers ----

__global__ void integers(const int *a, const int *b, int *out, int n)
{
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    const int x = a[i], y = b[i];
    const unsigned u = (unsigned)x, v = (unsigned)y;
    int *o = out + 12 * i;
    o[0] = y ? x / y : 0, o[1] = y ? x % y : 0, o[2] = v ? (int)(u / v) : 0;
    o[3] = __popc(u), o[4] = __clz(x), o[5] = (int)__brev(u), o[6] = (int)__byte_perm(u, v, 0x5410);
    o[7] = x >> (y & 31), o[8] = (int)(u >> (v & 31)), o[9] = (int)(((long long)x * y) >> 32);
    o[10] = min(x, y), o[11] = (int)max(u, v);
}
static void check_integers()
{
    const int n = 1000;
    Device<int> a(n), b(n), out(12 * n);
    srand(1);
    for (int i = 0; i < n; i++)
        a.p[i] = rand() * (i % 2 ? 1 : -1) >> (i % 31), b.p[i] = rand() * (i % 3 ? 1 : -1) >> (i % 29);
    integers<<<4, 256>>>(a.p, b.p, out.p, n);
    int wrong = 0;
    for (int i = 0; i < n; i++) {
        const int x = a.p[i], y = b.p[i], *o = out.p + 12 * i;
        const unsigned u = (unsigned)x, v = (unsigned)y;
        unsigned turned = 0;
        for (int k = 0; k < 32; k++) turned |= (u >> k & 1) << (31 - k);
        const int want[12] = {y ? x / y : 0,
                              y ? x % y : 0,
                              v ? (int)(u / v) : 0,
                              __builtin_popcount(u),
                              u ? __builtin_clz(u) : 32,
                              (int)turned,
                              (int)((u & 0xffff) | v << 16),
                              x >> (y & 31),
                              (int)(u >> (v & 31)),
                              (int)(((long long)x * y) >> 32),
                              x < y ? x : y,
                              (int)(u > v ? u : v)};
        for (int k = 0; k < 12; k++) wrong += o[k] != want[k];
    }
    EXPECT(!wrong, "%d of %d whole numbers", wrong, 12 * n);
}

__global__ void floats(const float *a, const float *b, float *out, int n)
{
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    const float x = a[i], y = b[i];
    float *o = out + 10 * i;
    o[0] = fmaf(x, y, 1.f), o[1] = x / y, o[2] = sqrtf(fabsf(x)), o[3] = __bfloat162float(__float2bfloat16(x));
    o[4] = __half2float(__float2half(x)), o[5] = (float)(int)fminf(fmaxf(x, -1e9f), 1e9f), o[6] = truncf(y);
    o[7] = fmaxf(x, y), o[8] = x < y ? 1.f : x > y ? 2.f : x == y ? 3.f : 4.f, o[9] = __fadd_rz(x, y);
}
static void check_floats()
{
    const int n = 2000;
    Device<float> a(n), b(n), out(10 * n);
    for (int i = 0; i < n; i++) {
        a.p[i] = ldexpf((float)rand() / RAND_MAX - 0.5f, rand() % 30 - 15);
        b.p[i] = i % 7 ? ldexpf((float)rand() / RAND_MAX - 0.5f, rand() % 30 - 15) : a.p[i];
        if (i % 50 == 0) a.p[i] = i % 100 ? NAN : INFINITY;
    }
    floats<<<8, 256>>>(a.p, b.p, out.p, n);
    int wrong = 0;
    for (int i = 0; i < n; i++) {
        const float x = a.p[i], y = b.p[i], *o = out.p + 10 * i;
        const double exact = (double)x + y;
        float down = (float)exact;
        if (std::isfinite(exact) && fabs((double)down) > fabs(exact)) down = nextafterf(down, 0.f);
        if (std::isinf(down) && std::isfinite(exact)) down = nextafterf(down, 0.f);
        const float want[10] = {fmaf(x, y, 1.f),
                                x / y,
                                sqrtf(fabsf(x)),
                                __bfloat162float(__float2bfloat16(x)),
                                __half2float(__float2half(x)),
                                (float)(int)fminf(fmaxf(x, -1e9f), 1e9f),
                                truncf(y),
                                fmaxf(x, y),
                                x < y    ? 1.f
                                : x > y  ? 2.f
                                : x == y ? 3.f
                                         : 4.f,
                                down};
        for (int k = 0; k < 10; k++) wrong += memcmp(&o[k], &want[k], 4) && !(o[k] != o[k] && want[k] != want[k]);
    }
    EXPECT(!wrong, "%d of %d numbers", wrong, 10 * n);
}

// ---- Warps and blocks ----

// Lanes that go different ways meet again, loops have different lengths, and the block sums what they found.
__global__ void ways(int *out)
{
    __shared__ int sums[8];
    const int t = (int)threadIdx.x, lane = t % 32;
    int v = 0;
    if (lane & 1)
        for (int i = 0; i < lane; i++) v += i & 2 ? 3 : 1;
    else if (lane & 2) v = 7;
    const unsigned odd = __ballot_sync(~0u, lane & 1);
    v += __popc(odd);
    if (lane < 16) v += __shfl_sync(0xffffu, v, lane ^ 1);
    for (int i = 16; i; i /= 2) v += __shfl_down_sync(~0u, v, i);
    if (!lane) sums[t / 32] = v;
    __syncthreads();
    if (t) return;
    int all = 0;
    for (int i = 0; i < 8; i++) all += sums[i];
    atomicAdd(out, all);
}
static void check_ways()
{
    int each[32], warp = 0;
    for (int l = 0; l < 32; l++) {
        each[l] = 0;
        if (l & 1)
            for (int i = 0; i < l; i++) each[l] += i & 2 ? 3 : 1;
        else if (l & 2) each[l] = 7;
        each[l] += 16;
    }
    for (int l = 0; l < 32; l++) warp += l < 16 ? each[l] + each[l ^ 1] : each[l];
    Device<int> out(1);
    ways<<<5, 256>>>(out.p);
    EXPECT(*out.p == 5 * 8 * warp, "lanes that part and meet: %d, not %d", *out.p, 5 * 8 * warp);
}

// A block waits for a later one's word: all of them have to go on.
__global__ void relay(volatile int *turn)
{
    const int me = (int)(gridDim.x - 1 - blockIdx.x);
    if (!threadIdx.x) {
        while (*turn != me) {}
        *turn = me + 1;
    }
}
static void check_relay()
{
    Device<int> turn(1);
    relay<<<20, 64>>>(turn.p);
    EXPECT(*turn.p == 20, "blocks that wait for one another: %d of 20", *turn.p);
}

// ---- Mistakes: each in a process of its own, since a device that is broken stays so ----

__global__ void beyond_memory(int *p) { p[threadIdx.x + 1] = 1; }
__global__ void beyond_shared(int *p)
{
    extern __shared__ int own[];
    own[threadIdx.x] = 1;
    *p = own[0];
}
__global__ void crooked(int *p) { *(int4 *)(p + 1) = int4{1, 2, 3, 4}; }
__global__ void not_waited(int *p) // reads what cp.async has not brought
{
    __shared__ alignas(16) int own[4];
    const unsigned to = (unsigned)__cvta_generic_to_shared(own);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(p + 4) : "memory");
    p[0] = own[0];
    asm volatile("cp.async.wait_all;" ::: "memory");
    p[1] = own[0];
}
__global__ void not_met(int *p) // half of the block is not at the barrier
{
    if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
    *p = 1;
    if (threadIdx.x >= 32) asm volatile("bar.sync 2, 64;" ::: "memory");
}
__global__ void not_synchronised(int *p)
{
    __shared__ int own[256];
    own[threadIdx.x] = (int)threadIdx.x + 1;
    p[threadIdx.x] = own[(threadIdx.x + 32) % 256]; // __syncthreads() is missing
}
__global__ void overtaken(int *p) // a second round writes what the first may still read
{
    __shared__ int own[64];
    for (int i = 0; i < 2; i++) {
        own[threadIdx.x] = i;
        __syncthreads();
        p[threadIdx.x] = own[63 - threadIdx.x]; // and here another one
    }
}
__global__ void stops() { __trap(); }

template <class F> static void mistake(const char *name, F launch, const char *says)
{
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        fclose(stderr);
        launch();
        const cudaError_t e = cudaDeviceSynchronize();
        _exit(e != cudaSuccess && strstr(cudaGetErrorString(e), says) ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    EXPECT(!status, "%s was not found", name);
}
static void check_mistakes()
{
    mistake(
        "a store behind the memory",
        [] {
            Device<int> d(32);
            beyond_memory<<<1, 32>>>(d.p);
        },
        "nothing is allocated");
    mistake("a store to NULL", [] { beyond_memory<<<1, 32>>>(nullptr); }, "nothing is allocated");
    mistake(
        "shared memory that was not asked for",
        [] {
            Device<int> d(1);
            beyond_shared<<<1, 32, 64>>>(d.p);
        },
        "of shared memory");
    mistake(
        "an address that is no multiple",
        [] {
            Device<int> d(32);
            crooked<<<1, 1>>>(d.p);
        },
        "no multiple of 16");
    mistake(
        "barriers that do not meet",
        [] {
            Device<int> d(1);
            not_met<<<1, 64>>>(d.p);
        },
        "nobody can go on");
    setenv("FMOE_SIM_RACES", "1", 1);
    mistake(
        "a race of a write after a write's reader",
        [] {
            Device<int> d(64);
            overtaken<<<1, 64>>>(d.p);
        },
        "a race");
    mistake(
        "a race",
        [] {
            Device<int> d(256);
            not_synchronised<<<1, 256>>>(d.p);
        },
        "a race");
    Device<int> relayed(1);
    ways<<<2, 256>>>(relayed.p);
    EXPECT(cudaDeviceSynchronize() == cudaSuccess, "a race that is none: %s", cudaGetErrorString(cudaGetLastError()));
    unsetenv("FMOE_SIM_RACES");
    mistake("a trap", [] { stops<<<1, 1>>>(); }, "a trap");
    mistake(
        "too much shared memory",
        [] {
            Device<int> d(1);
            beyond_shared<<<1, 32, 100 << 10>>>(d.p);
            _exit(cudaGetLastError() == cudaErrorInvalidValue ? 0 : 1);
        },
        "");
    Device<int> p(8);
    p.p[4] = 5;
    not_waited<<<1, 1>>>(p.p);
    EXPECT(p.p[0] == -1 && p.p[1] == 5, "a copy that was not waited for: %d, then %d", p.p[0], p.p[1]);
    Device<int> all(256);
    not_synchronised<<<1, 256>>>(all.p);
    int early = 0;
    for (int i = 0; i < 256; i++) early += all.p[i] == -1;
    EXPECT(early, "no lane saw that a barrier is missing");
}

// ---- Products: mma.sync, ldmatrix ----

__global__ void products(const __nv_bfloat16 *a, const __nv_bfloat16 *b, float *d) // 16 x 16, 8 x 16 by rows
{
    __shared__ alignas(16) __nv_bfloat16 sa[256], sb[128];
    const int lane = (int)threadIdx.x;
    for (int i = lane; i < 256; i += 32) sa[i] = a[i];
    for (int i = lane; i < 128; i += 32) sb[i] = b[i];
    __syncwarp();
    unsigned fa[4], fb[2];
    const unsigned pa = (unsigned)__cvta_generic_to_shared(sa + (lane % 16) * 16 + lane / 16 * 8),
                   pb = (unsigned)__cvta_generic_to_shared(sb + (lane % 8) * 16 + lane / 8 % 2 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(fa[0]), "=r"(fa[1]), "=r"(fa[2]), "=r"(fa[3])
                 : "r"(pa));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(fb[0]), "=r"(fb[1]) : "r"(pb));
    float c[4] = {1, 1, 1, 1};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(fa[0]), "r"(fa[1]), "r"(fa[2]), "r"(fa[3]), "r"(fb[0]), "r"(fb[1]));
    for (int h = 0; h < 4; h++) d[(lane / 4 + h / 2 * 8) * 8 + lane % 4 * 2 + h % 2] = c[h];
}
static void check_products()
{
    Device<__nv_bfloat16> a(256), b(128);
    Device<float> d(128);
    for (int i = 0; i < 256; i++) a.p[i] = __float2bfloat16((float)(rand() % 17 - 8));
    for (int i = 0; i < 128; i++) b.p[i] = __float2bfloat16((float)(rand() % 17 - 8));
    products<<<1, 32>>>(a.p, b.p, d.p);
    int wrong = 0;
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++) {
            float sum = 1;
            for (int k = 0; k < 16; k++) sum += __bfloat162float(a.p[m * 16 + k]) * __bfloat162float(b.p[n * 16 + k]);
            wrong += sum != d.p[m * 8 + n];
        }
    EXPECT(!wrong, "%d of 128 elements of a product", wrong);
}

int main()
{
    check_integers();
    check_floats();
    check_ways();
    check_relay();
    check_products();
    check_mistakes();
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed ? 1 : 0;
}
