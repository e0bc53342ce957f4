// How fast the CTAs of a cluster send each other sums, as split-K does (kernels/common/split_k.py), on an H200: what the
// timing model charges for it (exchange_bandwidth in nvfp4_cute/timing_constants.py).
//
//     nvcc -O2 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o probe h200_exchange_probe.cu && ./probe
//
// Four warps of every CTA have units of 4 KB; unit u goes to CTA u modulo the cluster's size. Prints one line a measurement,
// cycles (clock64) until the last instruction is issued and until all units that go to a CTA have come; the lines of one H200
// are in h200_exchange_probe.txt. Runs for a second.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>

enum Way { ASYNC_STORES, ASYNC_STORES_TO_OTHERS, BULK_COPIES };
static const char* NAMES[] = {"st.async to all", "st.async to others", "st.shared and bulk copies to all"};
constexpr int UNIT_BYTES = 4096, WARPS = 4, ROUNDS = 3, SMS = 132;
__device__ unsigned issued[SMS], done[SMS];

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ uint32_t in_cta(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra AGAIN; }"
               :: "r"(barrier), "r"(parity) : "memory");
}

template <int SPLIT, int SLICES, Way WAY> __global__ void __launch_bounds__(32 * WARPS) exchange(float value) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ __align__(8) uint64_t full;
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, units = WARPS * SLICES;
  const uint32_t received = shared_address(smem), sent = received + units * UNIT_BYTES, barrier = shared_address(&full);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(barrier));
  asm volatile("fence.mbarrier_init.release.cluster;");
  for (int round = 0; round < ROUNDS; round++) {
    cluster_barrier();
    const unsigned own = (int)rank < units ? (units - rank + SPLIT - 1) / SPLIT : 0;
    const unsigned senders = WAY == ASYNC_STORES_TO_OTHERS ? SPLIT - 1 : SPLIT;
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(own * senders * UNIT_BYTES) : "memory");
    cluster_barrier();
    const long long start = clock64();
    for (int slice = 0; slice < SLICES; slice++) {
      const int unit = warp * SLICES + slice, to = unit % SPLIT;
      if (WAY == ASYNC_STORES_TO_OTHERS && to == (int)rank) continue;
      const uint32_t target = in_cta(received + (unit / SPLIT * SPLIT + rank) * UNIT_BYTES, to), signal = in_cta(barrier, to);
      if (WAY == BULK_COPIES) {
        const uint32_t source = sent + unit * UNIT_BYTES;
        for (int chunk = 0; chunk < 8; chunk++)
          asm volatile("st.shared.v4.f32 [%0], {%1,%1,%1,%1};" :: "r"(source + lane * 16 + chunk * 512), "f"(value) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0)
          asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                       :: "r"(target), "r"(source), "n"(UNIT_BYTES), "r"(signal) : "memory");
      } else {
        for (int chunk = 0; chunk < 8; chunk++)
          asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%1,%1,%1}, [%2];"
                       :: "r"(target + lane * 16 + chunk * 512), "f"(value), "r"(signal) : "memory");
      }
    }
    const long long last = clock64();
    wait(barrier, round & 1);
    const long long end = clock64();
    if (threadIdx.x == 0) { issued[blockIdx.x] = last - start; done[blockIdx.x] = end - start; }
  }
  cluster_barrier();
}

template <int SPLIT, int SLICES, Way WAY> void measure() {
  auto kernel = exchange<SPLIT, SLICES, WAY>;
  const int bytes = 200 * 1024;  // one CTA an SM
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  for (int ctas : {SPLIT, 128}) {
    cudaLaunchAttribute attribute[1] = {};
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = SPLIT;
    attribute[0].val.clusterDim.y = attribute[0].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = ctas; config.blockDim = 32 * WARPS; config.dynamicSmemBytes = bytes; config.attrs = attribute; config.numAttrs = 1;
    cudaError_t error = cudaLaunchKernelEx(&config, kernel, 1.0f);
    error = error ? error : cudaDeviceSynchronize();
    if (error) { printf("%s\n", cudaGetErrorString(error)); continue; }
    unsigned i[SMS], d[SMS];
    cudaMemcpyFromSymbol(i, issued, sizeof i);
    cudaMemcpyFromSymbol(d, done, sizeof d);
    double issue = 0, end = 0;
    for (int cta = 0; cta < ctas; cta++) { issue += i[cta]; end += d[cta]; }
    printf("clusters of %d, %2d KB a CTA, %3d CTAs, %-32s: issued %5.0f, there %5.0f, latest %5u\n", SPLIT,
           WARPS * SLICES * UNIT_BYTES / 1024, ctas, NAMES[WAY], issue / ctas, end / ctas, *std::max_element(d, d + ctas));
  }
}
template <int SPLIT, int SLICES> void measure_ways() {
  measure<SPLIT, SLICES, ASYNC_STORES>(); measure<SPLIT, SLICES, ASYNC_STORES_TO_OTHERS>(); measure<SPLIT, SLICES, BULK_COPIES>();
}
template <int SPLIT> void measure_sizes() { measure_ways<SPLIT, 1>(); measure_ways<SPLIT, 2>(); measure_ways<SPLIT, 4>(); }
int main() { measure_sizes<2>(); measure_sizes<4>(); measure_sizes<8>(); }
