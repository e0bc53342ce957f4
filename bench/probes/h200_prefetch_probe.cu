// What cp.async.bulk.prefetch.tensor costs the copy engine of an H200's SM, and what it gains: what the timing model says of it
// (nvfp4_cute/timing/memory.py), measured.
//
//     nvcc -O2 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o probe h200_prefetch_probe.cu && ./probe
//
// Prints one line a measurement, in SM cycles (clock64), means over CTAs and launches; the lines of one H200 are in
// h200_prefetch_probe.txt. "cold": other, clean data fill L2 before. Runs for a few seconds.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cuda.h>
#include <cuda_runtime.h>

constexpr int SMS = 132, SMEM = 200 * 1024, ROW_BYTES = 128, ROUNDS = 5;
enum Request { LOADS, PREFETCHES };
enum Turns { NOBODY, IN_TURN, EVERYBODY };
__device__ unsigned first[SMS], last[SMS];

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(uint64_t* bar) { asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(shared_address(bar))); }
__device__ __forceinline__ void expect(uint64_t* bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ void wait(uint64_t* bar, uint32_t parity) {
  asm volatile("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra AGAIN; }"
               :: "r"(shared_address(bar)), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(void* to, const CUtensorMap* map, int x, int y, uint64_t* bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               :: "r"(shared_address(to)), "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void prefetch(const CUtensorMap* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" :: "l"(map), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void start(uint64_t* bars, int count) {
  for (int i = 0; i < count; i++) init(&bars[i]);
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;");
}
__global__ void fill(const float4* data, size_t count, float* out) {
  float sum = 0;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) sum += data[i].x;
  if (sum == 1.5f) *out = sum;
}

// `count` boxes of a strip of the CTA's own, then a small box that L2 holds: the engine takes requests in their order.
__global__ void requests(const __grid_constant__ CUtensorMap boxes, const __grid_constant__ CUtensorMap small, int rows, int count,
                         Request request) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ __align__(8) uint64_t bars[2];
  if (threadIdx.x) return;
  start(bars, 2);
  expect(&bars[0], 8 * ROW_BYTES); load(smem, &small, 0, 0, &bars[0]); wait(&bars[0], 0);
  prefetch(&boxes, 0, blockIdx.x * rows);
  const long long begin = clock64();
  if (request == LOADS && count) expect(&bars[1], count * rows * ROW_BYTES);
  for (int i = 0; i < count; i++) {
    if (request == LOADS) load(smem + 1024 + (i * rows * ROW_BYTES) % (128 * 1024), &boxes, i * 64, blockIdx.x * rows, &bars[1]);
    else prefetch(&boxes, i * 64, blockIdx.x * rows);
  }
  const long long issued = clock64();
  expect(&bars[0], 8 * ROW_BYTES); load(smem, &small, 0, 0, &bars[0]); wait(&bars[0], 1);
  first[blockIdx.x] = issued - begin; last[blockIdx.x] = clock64() - begin;
  if (request == LOADS && count) wait(&bars[1], 0);
}

// A box, asked for `delay` cycles after its prefetch, or without one where `delay` is negative.
__global__ void later(const __grid_constant__ CUtensorMap boxes, int rows, int delay) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ __align__(8) uint64_t bar;
  if (threadIdx.x) return;
  start(&bar, 1);
  expect(&bar, rows * ROW_BYTES); load(smem, &boxes, 64 * 15, blockIdx.x * rows, &bar); wait(&bar, 0);
  if (delay >= 0) prefetch(&boxes, 0, blockIdx.x * rows);
  for (const long long begin = clock64(); clock64() - begin < delay;) {}
  const long long begin = clock64();
  expect(&bar, rows * ROW_BYTES); load(smem, &boxes, 0, blockIdx.x * rows, &bar); wait(&bar, 1);
  first[blockIdx.x] = last[blockIdx.x] = clock64() - begin;
}

// The kernel's pattern: `share` CTAs walk along one strip of weights, each with a strip of its own that L2 holds beside it, a ring of
// 4 stages, `work` cycles a K tile. `turns`: who has L2 fetch a box of weights, 4 K tiles ahead.
__global__ void walk(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens, int share, int k_tiles,
                     int work, Turns turns) {
  extern __shared__ __align__(1024) uint8_t smem[];
  constexpr int STAGES = 4, ROWS = 128, BOX = ROWS * ROW_BYTES;
  __shared__ __align__(8) uint64_t full[STAGES], empty[STAGES];
  if (threadIdx.x == 0) { start(full, STAGES); start(empty, STAGES); }
  __syncthreads();
  const int member = blockIdx.x % share;
  if (threadIdx.x == 0) {
    for (int i = 0; i < k_tiles; i++) {
      const int stage = i % STAGES;
      if (i >= STAGES) wait(&empty[stage], i / STAGES - 1 & 1);
      expect(&full[stage], 2 * BOX);
      load(smem + stage * 2 * BOX, &weights, i * 64, blockIdx.x / share * ROWS, &full[stage]);
      load(smem + stage * 2 * BOX + BOX, &tokens, i * 64, member * ROWS, &full[stage]);
      const int ahead = i + STAGES;
      if (ahead < k_tiles && (turns == EVERYBODY || (turns == IN_TURN && ahead % share == member)))
        prefetch(&weights, ahead * 64, blockIdx.x / share * ROWS);
    }
  } else if (threadIdx.x == 32) {
    const long long begin = clock64();
    for (int i = 0; i < k_tiles; i++) {
      wait(&full[i % STAGES], i / STAGES & 1);
      for (const long long now = clock64(); clock64() - now < work;) {}
      arrive(&empty[i % STAGES]);
    }
    first[blockIdx.x] = last[blockIdx.x] = clock64() - begin;
  }
}

// What a prefetch takes from loads: boxes in a ring of 4 stages, and with every second one `extra` prefetches of boxes of another strip
// of the CTA's own; `strip` boxes are a strip, walked in a circle.
__global__ void mixed(const __grid_constant__ CUtensorMap loaded, const __grid_constant__ CUtensorMap fetched, int strip, int count,
                      int extra) {
  extern __shared__ __align__(1024) uint8_t smem[];
  constexpr int STAGES = 4, ROWS = 128, BOX = ROWS * ROW_BYTES;
  __shared__ __align__(8) uint64_t full[STAGES];
  if (threadIdx.x) return;
  start(full, STAGES);
  int next = 0;
  const long long begin = clock64();
  for (int i = 0; i < count + STAGES; i++) {
    if (i >= STAGES) wait(&full[i % STAGES], (i / STAGES - 1) & 1);
    if (i < count) {
      expect(&full[i % STAGES], BOX);
      load(smem + i % STAGES * BOX, &loaded, i % strip * 64, blockIdx.x * ROWS, &full[i % STAGES]);
      for (int j = 0; i % 2 && j < extra; j++, next++) prefetch(&fetched, next % strip * 64, blockIdx.x * ROWS);
    }
  }
  first[blockIdx.x] = last[blockIdx.x] = clock64() - begin;
}

// Whether a burst of prefetches is dropped: `count` boxes prefetched one behind the other, then, much later, all of them loaded.
__global__ void burst(const __grid_constant__ CUtensorMap boxes, int count, bool is_prefetched) {
  extern __shared__ __align__(1024) uint8_t smem[];
  constexpr int STAGES = 4, ROWS = 128, BOX = ROWS * ROW_BYTES;
  __shared__ __align__(8) uint64_t full[STAGES];
  if (threadIdx.x) return;
  start(full, STAGES);
  for (int i = 0; is_prefetched && i < count; i++) prefetch(&boxes, i * 64, blockIdx.x * ROWS);
  for (const long long begin = clock64(); clock64() - begin < 100000;) {}
  const long long begin = clock64();
  for (int i = 0; i < count + STAGES; i++) {
    if (i >= STAGES) wait(&full[i % STAGES], (i / STAGES - 1) & 1);
    if (i < count) {
      expect(&full[i % STAGES], BOX);
      load(smem + i % STAGES * BOX, &boxes, i * 64, blockIdx.x * ROWS, &full[i % STAGES]);
    }
  }
  first[blockIdx.x] = last[blockIdx.x] = clock64() - begin;
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                           const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static Encode encode;
static char *data, *other;
static float* sink;
constexpr size_t OTHER_BYTES = 256u << 20, DATA_BYTES = 256u << 20;

static CUtensorMap tensor_map(size_t offset, int columns, int rows, int box_rows) {
  CUtensorMap map;
  cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, pitch[1] = {2u * columns};
  cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, steps[2] = {1, 1};
  if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, data + offset, sizes, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) printf("no tensor map\n");
  return map;
}
static void cold() { for (int i = 0; i < 2; i++) fill<<<SMS * 8, 256>>>((const float4*)other, OTHER_BYTES / 16, sink); }
struct Means { double first = 0, last = 0; unsigned latest = 0; };
static void add(Means& means, int ctas) {
  if (cudaError_t error = cudaDeviceSynchronize()) printf("%s\n", cudaGetErrorString(error));
  unsigned f[SMS], l[SMS];
  cudaMemcpyFromSymbol(f, first, sizeof f);
  cudaMemcpyFromSymbol(l, last, sizeof l);
  for (int i = 0; i < ctas; i++) { means.first += f[i] / (double)(ctas * ROUNDS); means.last += l[i] / (double)(ctas * ROUNDS); }
  means.latest = std::max(means.latest, *std::max_element(l, l + ctas));
}

int main() {
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", (void**)&encode, cudaEnableDefault, &found);
  cudaMalloc(&data, DATA_BYTES); cudaMalloc(&other, OTHER_BYTES); cudaMalloc(&sink, 4);
  cudaMemset(data, 0, DATA_BYTES); cudaMemset(other, 0, OTHER_BYTES);
  for (const void* kernel : {(const void*)requests, (const void*)later, (const void*)walk, (const void*)mixed,
                             (const void*)burst})
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
  const CUtensorMap small = tensor_map(DATA_BYTES / 2, 64, 8, 8);
  for (int rows : {8, 32, 64, 128, 256}) for (int ctas : {1, SMS}) for (int is_cold : {0, 1})
    for (Request request : {LOADS, PREFETCHES}) for (int count : {0, 4, 8}) {
      const CUtensorMap boxes = tensor_map(0, 1024, SMS * rows, rows);
      Means means;
      requests<<<ctas, 32, SMEM>>>(boxes, small, rows, count, LOADS);
      for (int round = 0; round < ROUNDS; round++) {
        if (is_cold) cold();
        requests<<<ctas, 32, SMEM>>>(boxes, small, rows, count, request);
        add(means, ctas);
      }
      printf("%d %-10s of %5d bytes, %3d CTAs, %s: issued %6.0f, the box behind them there %6.0f\n", count,
             request == LOADS ? "loads" : "prefetches", rows * ROW_BYTES, ctas, is_cold ? "cold" : "warm", means.first, means.last);
    }
  for (int rows : {32, 128}) for (int ctas : {1, SMS}) for (int delay : {-1, 0, 250, 500, 1000, 1500, 2000, 3000, 5000}) {
    const CUtensorMap boxes = tensor_map(0, 1024, SMS * rows, rows);
    Means means;
    for (int round = 0; round < ROUNDS; round++) { cold(); later<<<ctas, 32, SMEM>>>(boxes, rows, delay); add(means, ctas); }
    printf("box of %5d bytes, %3d CTAs, %d cycles after its prefetch: %6.0f, latest %5u\n", rows * ROW_BYTES, ctas, delay, means.last,
           means.latest);
  }
  for (int share : {2, 4}) for (int work : {0, 300, 400, 500, 700}) for (Turns turns : {NOBODY, IN_TURN, EVERYBODY}) {
    const int k_tiles = 64;
    const CUtensorMap weights = tensor_map(0, 64 * k_tiles, SMS / share * 128, 128);
    const CUtensorMap tokens = tensor_map(DATA_BYTES / 2, 64 * k_tiles, share * 128, 128);
    Means means;
    for (int round = 0; round < ROUNDS; round++) {
      cold();
      walk<<<SMS, 64, SMEM>>>(weights, tokens, share, k_tiles, work, turns);
      add(means, SMS);
    }
    static const char* NAMES[] = {"nobody", "in turn", "everybody"};
    printf("walk of %d K tiles, %d share weights, %3d cycles of work, prefetches by %-9s: %6.0f, latest %6u\n", k_tiles, share, work,
           NAMES[turns], means.last, means.latest);
  }
  for (int ctas : {1, SMS}) for (bool is_cold : {false, true}) for (int extra : {0, 1, 2, 4}) {
    const int strip = is_cold ? 48 : 4, count = 48;
    const CUtensorMap loaded = tensor_map(0, 64 * strip, SMS * 128, 128);
    const CUtensorMap fetched = tensor_map(DATA_BYTES / 2, 64 * strip, SMS * 128, 128);
    Means means;
    if (!is_cold) mixed<<<SMS, 32, SMEM>>>(fetched, loaded, strip, count, 2);
    for (int round = 0; round < ROUNDS; round++) {
      if (is_cold) cold();
      mixed<<<ctas, 32, SMEM>>>(loaded, fetched, strip, count, extra);
      add(means, ctas);
    }
    printf("%d loads of 16384 bytes and %2d prefetches of as many, %3d CTAs, %s: %6.0f, latest %6u\n", count, extra * count / 2, ctas,
           is_cold ? "cold" : "warm", means.last, means.latest);
  }
  for (int count : {4, 8, 12}) for (bool is_prefetched : {false, true}) {
    const CUtensorMap boxes = tensor_map(0, 64 * count, SMS * 128, 128);
    Means means;
    for (int round = 0; round < ROUNDS; round++) { cold(); burst<<<SMS, 32, SMEM>>>(boxes, count, is_prefetched); add(means, SMS); }
    printf("%2d boxes of 16384 bytes, 132 CTAs, 100000 cycles after their prefetch in a burst%s: %6.0f, latest %6u\n", count,
           is_prefetched ? "" : " that was left out", means.last, means.latest);
  }
}
