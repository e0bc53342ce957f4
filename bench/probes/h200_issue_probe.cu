// Microbenchmarks of an H200's instruction issue: what the timing model charges for instructions that only compute
// (nvfp4_cute/emulator/record/costs.py), and how they share an SM with wgmma.
//
//     nvcc -O2 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o probe h200_issue_probe.cu && ./probe
//
// Prints one line a measurement; the lines of one H200 are in h200_issue_probe.txt. Everything is in SM cycles (clock64) of
// one SM. Runs for a second.
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>

#define CHECK(x) do { cudaError_t e = (x); if (e != cudaSuccess) { printf("%s: %s\n", #x, cudaGetErrorString(e)); return 1; } } while (0)
__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---- throughput and latency of one kind of instruction ----------------------------------------------------------------
// Each OP changes the register x; y and z are other operands that the compiler does not know.
#define LOP3 "lop3.b32 %0, %0, %1, %2, 0x6a;"
#define PRMT "prmt.b32 %0, %0, %1, 0x5140;"
#define SHR "shr.u32 %0, %0, %1;"
#define SHF "shf.l.wrap.b32 %0, %0, %1, %2;"
#define MAD "mad.lo.u32 %0, %0, %1, %2;"
#define SHL_OR "{ .reg .b32 t; shl.b32 t, %0, 4; or.b32 %0, t, %1; }"
#define SELECT "{ .reg .pred p; setp.lt.u32 p, %0, %1; selp.b32 %0, %2, %0, p; }"
#define HMUL2 "mul.rn.f16x2 %0, %0, %1;"
#define HFMA2 "fma.rn.f16x2 %0, %0, %1, %2;"
#define FMUL "mul.rn.f32 %0, %0, %1;"
#define FFMA "fma.rn.f32 %0, %0, %1, %2;"
#define UNPACK_E4M3 "{ .reg .b16 t; cvt.u16.u32 t, %0; cvt.rn.f16x2.e4m3x2 %0, t; }"
#define PACK_F16 "{ .reg .f32 a, b; mov.b32 a, %0; mov.b32 b, %1; cvt.rn.f16x2.f32 %0, a, b; }"
#define SHUFFLE "shfl.sync.up.b32 %0, %0, %1, 0, -1;"
#define POPC "popc.b32 %0, %0;"
#define EX2 "ex2.approx.ftz.f32 %0, %0;"
#define KINDS(F) F(LOP3) F(PRMT) F(SHR) F(SHF) F(MAD) F(SHL_OR) F(SELECT) F(HMUL2) F(HFMA2) F(FMUL) F(FFMA) F(UNPACK_E4M3) \
  F(PACK_F16) F(SHUFFLE) F(POPC) F(EX2)
#define MIXES(F) F(LOP3, PRMT) F(LOP3, MAD) F(LOP3, HMUL2) F(LOP3, FFMA) F(MAD, HMUL2) F(MAD, FFMA) F(HMUL2, FFMA) F(LOP3, UNPACK_E4M3) F(HMUL2, UNPACK_E4M3)

constexpr int CHAINS = 8, REPEATS = 8, LOOPS = 20;
#define ONE(op, x) asm volatile(op : "+r"(x) : "r"(y), "r"(z));
#define KERNEL(name, A, B)                                                                    \
  template <int CH> __global__ void name(long long* out, uint32_t y, uint32_t z) {            \
    uint32_t x[CHAINS];                                                                       \
    for (int i = 0; i < CHAINS; i++) x[i] = threadIdx.x * 77 + i + z;                         \
    __syncthreads();                                                                          \
    long long start = clock64();                                                              \
    for (int loop = 0; loop < LOOPS; loop++) {                                                \
      _Pragma("unroll") for (int r = 0; r < REPEATS * CHAINS / CH; r++) {                     \
        _Pragma("unroll") for (int i = 0; i < CH; i += 2) { ONE(A, x[i]) ONE(B, x[CH > 1 ? i + 1 : i]) } \
      }                                                                                       \
    }                                                                                         \
    __syncthreads();                                                                          \
    if (threadIdx.x == 0) out[0] = clock64() - start;                                         \
    uint32_t sum = 0;                                                                         \
    for (int i = 0; i < CHAINS; i++) sum += x[i];                                             \
    if (sum == 123456789) out[1] = sum;                                                       \
  }
#define KERNEL_OF_KIND(A) KERNEL(of_##A, A, A)
#define KERNEL_OF_MIX(A, B) KERNEL(of_##A##_##B, A, B)
KINDS(KERNEL_OF_KIND)
MIXES(KERNEL_OF_MIX)

// ---- shared memory ----------------------------------------------------------------------------------------------------
template <int WORDS> __global__ void shared_store(long long* out, uint32_t z) {
  extern __shared__ __align__(1024) char memory[];
  uint32_t at = shared_address(memory) + threadIdx.x * WORDS * 4, a = z;
  __syncthreads();
  long long start = clock64();
  for (int loop = 0; loop < LOOPS; loop++) {
    #pragma unroll
    for (int r = 0; r < 16; r++) {
      if (WORDS == 1) asm volatile("st.shared.b32 [%0], %1;" :: "r"(at), "r"(a) : "memory");
      if (WORDS == 4) asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" :: "r"(at), "r"(a) : "memory");
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) out[0] = clock64() - start;
}
// Stores, the fence that shows them to wgmma, and an elected arrival: what publishes a decoded tile. `stores` of 16 bytes.
template <int STORES> __global__ void publish(long long* out, uint32_t z) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ uint64_t barrier;
  uint32_t at = shared_address(memory) + threadIdx.x * 16, bar = shared_address(&barrier);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1000000;" :: "r"(bar));
  __syncthreads();
  long long start = clock64();
  for (int loop = 0; loop < 64; loop++) {
    #pragma unroll
    for (int r = 0; r < STORES; r++) asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" :: "r"(at + r * 16384), "r"(z) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("{ .reg .pred p; elect.sync _|p, -1; @p mbarrier.arrive.shared.b64 _, [%0]; }" :: "r"(bar) : "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) out[0] = clock64() - start;
}

// ---- wgmma beside computation -----------------------------------------------------------------------------------------
__device__ __forceinline__ void multiply(float (&d)[32], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;" : "+f"(d[0]),"+f"(d[1]),"+f"(d[2]),"+f"(d[3]),"+f"(d[4]),"+f"(d[5]),"+f"(d[6]),"+f"(d[7]),"+f"(d[8]),"+f"(d[9]),"+f"(d[10]),"+f"(d[11]),"+f"(d[12]),"+f"(d[13]),"+f"(d[14]),"+f"(d[15]),"+f"(d[16]),"+f"(d[17]),"+f"(d[18]),"+f"(d[19]),"+f"(d[20]),"+f"(d[21]),"+f"(d[22]),"+f"(d[23]),"+f"(d[24]),"+f"(d[25]),"+f"(d[26]),"+f"(d[27]),"+f"(d[28]),"+f"(d[29]),"+f"(d[30]),"+f"(d[31]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void multiply(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;" : "+f"(d[0]),"+f"(d[1]),"+f"(d[2]),"+f"(d[3]),"+f"(d[4]),"+f"(d[5]),"+f"(d[6]),"+f"(d[7]),"+f"(d[8]),"+f"(d[9]),"+f"(d[10]),"+f"(d[11]),"+f"(d[12]),"+f"(d[13]),"+f"(d[14]),"+f"(d[15]),"+f"(d[16]),"+f"(d[17]),"+f"(d[18]),"+f"(d[19]),"+f"(d[20]),"+f"(d[21]),"+f"(d[22]),"+f"(d[23]),"+f"(d[24]),"+f"(d[25]),"+f"(d[26]),"+f"(d[27]),"+f"(d[28]),"+f"(d[29]),"+f"(d[30]),"+f"(d[31]) : "l"(a), "l"(b));
}
__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;" : "+f"(d[0]),"+f"(d[1]),"+f"(d[2]),"+f"(d[3]),"+f"(d[4]),"+f"(d[5]),"+f"(d[6]),"+f"(d[7]),"+f"(d[8]),"+f"(d[9]),"+f"(d[10]),"+f"(d[11]),"+f"(d[12]),"+f"(d[13]),"+f"(d[14]),"+f"(d[15]),"+f"(d[16]),"+f"(d[17]),"+f"(d[18]),"+f"(d[19]),"+f"(d[20]),"+f"(d[21]),"+f"(d[22]),"+f"(d[23]),"+f"(d[24]),"+f"(d[25]),"+f"(d[26]),"+f"(d[27]),"+f"(d[28]),"+f"(d[29]),"+f"(d[30]),"+f"(d[31]),"+f"(d[32]),"+f"(d[33]),"+f"(d[34]),"+f"(d[35]),"+f"(d[36]),"+f"(d[37]),"+f"(d[38]),"+f"(d[39]),"+f"(d[40]),"+f"(d[41]),"+f"(d[42]),"+f"(d[43]),"+f"(d[44]),"+f"(d[45]),"+f"(d[46]),"+f"(d[47]),"+f"(d[48]),"+f"(d[49]),"+f"(d[50]),"+f"(d[51]),"+f"(d[52]),"+f"(d[53]),"+f"(d[54]),"+f"(d[55]),"+f"(d[56]),"+f"(d[57]),"+f"(d[58]),"+f"(d[59]),"+f"(d[60]),"+f"(d[61]),"+f"(d[62]),"+f"(d[63]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, 1, 1, 1, 0, 0;" : "+f"(d[0]),"+f"(d[1]),"+f"(d[2]),"+f"(d[3]),"+f"(d[4]),"+f"(d[5]),"+f"(d[6]),"+f"(d[7]),"+f"(d[8]),"+f"(d[9]),"+f"(d[10]),"+f"(d[11]),"+f"(d[12]),"+f"(d[13]),"+f"(d[14]),"+f"(d[15]),"+f"(d[16]),"+f"(d[17]),"+f"(d[18]),"+f"(d[19]),"+f"(d[20]),"+f"(d[21]),"+f"(d[22]),"+f"(d[23]),"+f"(d[24]),"+f"(d[25]),"+f"(d[26]),"+f"(d[27]),"+f"(d[28]),"+f"(d[29]),"+f"(d[30]),"+f"(d[31]),"+f"(d[32]),"+f"(d[33]),"+f"(d[34]),"+f"(d[35]),"+f"(d[36]),"+f"(d[37]),"+f"(d[38]),"+f"(d[39]),"+f"(d[40]),"+f"(d[41]),"+f"(d[42]),"+f"(d[43]),"+f"(d[44]),"+f"(d[45]),"+f"(d[46]),"+f"(d[47]),"+f"(d[48]),"+f"(d[49]),"+f"(d[50]),"+f"(d[51]),"+f"(d[52]),"+f"(d[53]),"+f"(d[54]),"+f"(d[55]),"+f"(d[56]),"+f"(d[57]),"+f"(d[58]),"+f"(d[59]),"+f"(d[60]),"+f"(d[61]),"+f"(d[62]),"+f"(d[63]) : "l"(a), "l"(b));
}

// `work` is 16 registers' computation: ROUNDS times a lop3 and a multiplication of each.
template <int ROUNDS> __device__ __forceinline__ void work(uint32_t (&a)[16], uint32_t y, uint32_t z) {
  #pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    #pragma unroll
    for (int i = 0; i < 16; i++) { asm volatile(LOP3 : "+r"(a[i]) : "r"(y), "r"(z)); asm volatile(HMUL2 : "+r"(a[i]) : "r"(y)); }
  }
}
// As our kernel's loop: compute operands, issue four multiplications with them, wait for the four before.
// out: cycles of all iterations; of those spent computing, issuing, waiting, by warp 0; iterations of the other warps.
template <int N, bool RS, int ROUNDS> __global__ void __launch_bounds__(384) beside(long long* out, uint32_t y, uint32_t z, int iterations, int groups, int others_work) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ volatile int done;
  for (int i = threadIdx.x; i < 65536 / 4; i += blockDim.x) ((uint32_t*)memory)[i] = 0;
  done = 0;
  asm volatile("fence.proxy.async;");
  __syncthreads();
  if (threadIdx.x / 128 >= groups) {  // the other warps: the same computation, no multiplication
    uint32_t a[16];
    for (int i = 0; i < 16; i++) a[i] = threadIdx.x + i;
    long long count = 0;
    if (others_work) while (!done) { work<4>(a, y, z); count++; }
    if (threadIdx.x % 32 == 0) out[16 + threadIdx.x / 32] = count;
    if (a[0] == 123456789) out[8] = a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7] + a[8] + a[9] + a[10] + a[11] + a[12] + a[13] + a[14] + a[15];
    return;
  }
  uint32_t base = shared_address(memory);
  uint64_t b = (uint64_t)((base & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
  uint32_t first[16], second[16];
  for (int i = 0; i < 16; i++) first[i] = second[i] = threadIdx.x % 2 ? z : 0;
  float d[N / 2];
  for (int i = 0; i < N / 2; i++) d[i] = 0.f;
  long long computing = 0, issuing = 0, waiting = 0, start = clock64();
  #define STEP(a) { \
      long long t0 = clock64(); work<ROUNDS>(a, y, z); \
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); long long t1 = clock64(); \
      _Pragma("unroll") for (int i = 0; i < 4; i++) { if constexpr (RS) multiply(d, a + 4 * i, b + 2 * i); else multiply(d, b, b + 2 * i); } \
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); long long t2 = clock64(); \
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); long long t3 = clock64(); \
      computing += t1 - t0; issuing += t2 - t1; waiting += t3 - t2; }
  for (int it = 0; it < iterations; it += 2) { STEP(first) STEP(second) }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  long long end = clock64();
  float sum = 0;
  for (int i = 0; i < N / 2; i++) sum += d[i];
  asm volatile("bar.sync 1, %0;" :: "r"(groups * 128));
  if (threadIdx.x == 0) { done = 1; out[0] = end - start; out[1] = computing; out[2] = issuing; out[3] = waiting; }
  if (sum == 123456789.f) out[9] = first[3] + second[5];
}
template <int ROUNDS> __global__ void alone(long long* out, uint32_t y, uint32_t z) {  // the others' work on an idle SM
  uint32_t a[16];
  for (int i = 0; i < 16; i++) a[i] = threadIdx.x + i;
  __syncthreads();
  long long start = clock64();
  for (int i = 0; i < 100; i++) work<ROUNDS>(a, y, z);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = clock64() - start;
  for (int i = 0; i < 16; i++) if (a[i] == 123456789) out[1] = a[i];
}

static long long *device_out, out[64];
static int get() {
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(out, device_out, sizeof out, cudaMemcpyDeviceToHost));
  return 0;
}
template <class K> static void measure_kind(const char* name, K many, K one) {
  printf("%s: cycles an instruction of a scheduler with", name);
  double n = (double)CHAINS * REPEATS * LOOPS;
  for (int warps : {4, 8, 16, 32}) {
    for (int r = 0; r < 2; r++) { many<<<1, 32 * warps>>>(device_out, 3, 5); get(); }
    printf(" %d warps %.2f", warps / 4, out[0] / (n * warps / 4));
  }
  for (int r = 0; r < 2; r++) { one<<<1, 32>>>(device_out, 3, 5); get(); }
  printf("; latency %.2f\n", out[0] / (2 * n));
}
template <class K> static void measure_shared(const char* name, K kernel) {
  printf("%s: cycles an access of an SM with", name);
  for (int warps : {1, 4, 16}) {
    for (int r = 0; r < 2; r++) { kernel<<<1, 32 * warps, 16384>>>(device_out, 3); get(); }
    printf(" %d warps %.2f", warps, out[0] / (16.0 * LOOPS * warps));
  }
  printf("\n");
}
template <int N, bool RS, int ROUNDS> static void measure_beside() {
  if (cudaFuncSetAttribute(beside<N, RS, ROUNDS>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536)) return;
  for (int groups : {1, 2}) for (int others : {0, 1}) {
    const int iterations = 400;
    for (int r = 0; r < 2; r++) { cudaMemset(device_out, 0, sizeof out); beside<N, RS, ROUNDS><<<1, others ? 384 : 128 * groups, 65536>>>(device_out, 3, 5, iterations, groups, others); get(); }
    double n = iterations;
    printf("wgmma n %d A %s, %d instructions between, %d warpgroups%s: %.0f cycles a step (tensor cores %d); computing %.0f issuing %.0f waiting %.0f",
           N, RS ? "registers" : "shared", 32 * ROUNDS, groups, others ? " beside others" : "", out[0] / n, groups * 4 * N / 2, out[1] / n, out[2] / n, out[3] / n);
    if (others) { double rounds = 0; for (int w = 4 * groups; w < 12; w++) rounds += out[16 + w]; printf("; others issue %.3f an SM's scheduler and cycle", rounds * 128 / 4 / out[0]); }
    printf("\n");
  }
}
int main() {
  CHECK(cudaMalloc(&device_out, sizeof out));
#define MEASURE_KIND(A) measure_kind(#A, of_##A<CHAINS>, of_##A<1>);
#define MEASURE_MIX(A, B) measure_kind(#A " and " #B, of_##A##_##B<CHAINS>, of_##A##_##B<1>);
  KINDS(MEASURE_KIND)
  MIXES(MEASURE_MIX)
  measure_shared("st.shared.b32", shared_store<1>);
  measure_shared("st.shared.v4", shared_store<4>);
#define PUBLISH(n) CHECK(cudaFuncSetAttribute(publish<n>, cudaFuncAttributeMaxDynamicSharedMemorySize, 131072)); \
  for (int warps : {1, 4, 8}) { for (int r = 0; r < 2; r++) { publish<n><<<1, 32 * warps, 131072>>>(device_out, 3); get(); } \
    printf("%d stores of 16 bytes, proxy fence, elected arrival: %d warps %.1f cycles\n", n, warps, out[0] / 64.0); }
  PUBLISH(0) PUBLISH(1) PUBLISH(4) PUBLISH(8)
  for (int warps : {4, 8, 16}) { for (int r = 0; r < 2; r++) { alone<4><<<1, 32 * warps>>>(device_out, 3, 5); get(); }
    printf("128 instructions, half lop3 and half mul.f16x2, without wgmma: %d warps of a scheduler %.3f an SM's scheduler and cycle\n", warps / 4, 12800.0 * warps / 4 / out[0]); }
  measure_beside<64, false, 0>(); measure_beside<64, true, 0>(); measure_beside<64, true, 3>();
  measure_beside<128, false, 0>(); measure_beside<128, false, 3>(); measure_beside<128, true, 0>(); measure_beside<128, true, 1>();
  measure_beside<128, true, 3>(); measure_beside<128, true, 6>(); measure_beside<128, true, 12>();
  return 0;
}
