// How long warps of an H100 wait for what kernels for few rows load: gathers of 32 weight rows, and rows of activations.
// nvcc -cubin -arch=sm_90a; launched by h100_gather_probe.py, whose output is h100_gather_probe.txt
#include <cstdint>
#define LOADNA(v, p, stride) asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%16];\nld.global.nc.L1::no_allocate.v4.u32 {%4,%5,%6,%7}, [%17];\nld.global.nc.L1::no_allocate.v4.u32 {%8,%9,%10,%11}, [%18];\nld.global.nc.L1::no_allocate.v4.u32 {%12,%13,%14,%15}, [%19];\n" : "=r"(v[0].x), "=r"(v[0].y), "=r"(v[0].z), "=r"(v[0].w), "=r"(v[1].x), "=r"(v[1].y), "=r"(v[1].z), "=r"(v[1].w), "=r"(v[2].x), "=r"(v[2].y), "=r"(v[2].z), "=r"(v[2].w), "=r"(v[3].x), "=r"(v[3].y), "=r"(v[3].z), "=r"(v[3].w) : "l"(p), "l"((p) + (stride)), "l"((p) + 2 * (stride)), "l"((p) + 3 * (stride)))
#define LOAD(v, p, stride) asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%16];\nld.global.nc.v4.u32 {%4,%5,%6,%7}, [%17];\nld.global.nc.v4.u32 {%8,%9,%10,%11}, [%18];\nld.global.nc.v4.u32 {%12,%13,%14,%15}, [%19];\n" : "=r"(v[0].x), "=r"(v[0].y), "=r"(v[0].z), "=r"(v[0].w), "=r"(v[1].x), "=r"(v[1].y), "=r"(v[1].z), "=r"(v[1].w), "=r"(v[2].x), "=r"(v[2].y), "=r"(v[2].z), "=r"(v[2].w), "=r"(v[3].x), "=r"(v[3].y), "=r"(v[3].z), "=r"(v[3].w) : "l"(p), "l"((p) + (stride)), "l"((p) + 2 * (stride)), "l"((p) + 3 * (stride)))
#define USE(r) (r.x ^ r.y ^ r.z ^ r.w)
__device__ __forceinline__ long long now() { long long t; asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) :: "memory"); return t; }
__device__ __forceinline__ void async16(uint32_t to, const char *from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory"); }
__device__ __forceinline__ void keep(uint32_t v, long long *out) { if (v == 0x12345679) out[0] = v; }

// Every warp: steps of four loads, 8 rows x 64 bytes each, one after the other. out[(cta * warps + warp) * steps + step]: cycles.
extern "C" __global__ void gather(const char *base, long long pitch, int steps, int width, int asynchronous, long long *out)
{
    extern __shared__ __align__(16) char smem[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint32_t place = (uint32_t)__cvta_generic_to_shared(smem) + threadIdx.x * 64;
    // width: bytes of a row that a load has: 64, 128, 256, 512
    int lanes = width / 16, rows = 32 / lanes, g = lane / lanes, t = lane % lanes;
    uint32_t sum = 0;
    __syncthreads();
    #pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const char *at = base + (blockIdx.x * 32LL + g) * pitch + (long long)(warp + step * warps) * width + t * 16;
        long long t0 = now();
        if (asynchronous) {
            for (int i = 0; i < 4; i++) async16(place + 16 * i, at + (long long)(i * rows) * pitch);
            asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
            uint4 a = *(const uint4 *)(smem + threadIdx.x * 64);
            sum ^= USE(a);
        } else {
            uint4 v[4];
            LOADNA(v, at, (long long)rows * pitch);
            sum ^= USE(v[0]) ^ USE(v[1]) ^ USE(v[2]) ^ USE(v[3]);
        }
        keep(sum, out);
        long long t1 = now();
        if (lane == 0) out[((long long)blockIdx.x * warps + warp) * steps + step] = t1 - t0;
    }
}

// Every warp: steps of `blocks` x 4 loads of activations: 8 rows, of which each of four lanes has 64 bytes, 16 a load. All at once.
// again: steps read the same ones. out: cycles of each step; of all the warps of a CTA between two barriers in the last place.
extern "C" __global__ void tokens(const char *base, long long pitch, int steps, int blocks, int again, int pattern, long long *out)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    int g = lane / 4, t = lane % 4;
    uint32_t sum = 0;
    #pragma unroll 1
    for (int step = 0; step < steps; step++) {
        int chunk = again ? warp : warp + step * warps;
        const char *at = base + g * pitch + (long long)chunk * 256 + t * 64;
        int stride = 16;
        if (pattern == 1) { at = base + (lane / 16) * pitch + (long long)chunk * 256 + lane % 16 * 16; stride = 2 * (int)pitch; }  // 2 rows of 256
        if (pattern == 2) { at = base + (lane / 4) * pitch + (long long)chunk * 256 + t * 16; stride = 64; }                     // 8 rows of 64
        __syncthreads();
        long long t0 = now();
        #pragma unroll 1
        for (int b = 0; b < blocks; b++) {
            uint4 v[4];
            const char *p = at + 8LL * b * pitch;
            LOAD(v, p, (long long)stride);
            if (b == blocks - 1) sum ^= USE(v[0]) ^ USE(v[1]) ^ USE(v[2]) ^ USE(v[3]);
            else sum += v[0].x & v[1].y & v[2].z & v[3].w;
        }
        keep(sum, out);
        long long t1 = now();
        __syncthreads();
        long long t2 = now();
        if (lane == 0) { long long *o = out + (((long long)blockIdx.x * warps + warp) * steps + step) * 2; o[0] = t1 - t0; o[1] = t2 - t0; }
    }
}
