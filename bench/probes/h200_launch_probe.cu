// What a launch takes on an H200 between two CUDA events, as a graph: nothing in it, with all that a persistent GEMM asks for, and
// behind another launch. L2 is filled before, by a memset, then by a kernel: a median of 60, and the first and ninth decile.
// nvcc -gencode=arch=compute_90a,code=sm_90a; its output: h200_launch_probe.txt
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define CK(x)                                                             \
  do {                                                                    \
    cudaError_t err_ = (x);                                               \
    if (err_) {                                                           \
      printf("%s line %d: %s\n", #x, __LINE__, cudaGetErrorString(err_)); \
      exit(1);                                                            \
    }                                                                     \
  } while (0)
struct Big {
  char b[4000];
};
__global__ void tiny(int* p) {
  asm volatile("griddepcontrol.launch_dependents;");
  if (p && threadIdx.x == 9999) *p = 1;
}
__global__ void plain(int* p) {
  extern __shared__ char s[];
  if (p && threadIdx.x == 9999) *p = s[0];
}
__global__ void __launch_bounds__(384, 1) big(int* p, __grid_constant__ const Big b) {
  extern __shared__ char s[];
  if (p && threadIdx.x == 9999) *p = s[0] + b.b[threadIdx.x];
}
__global__ void __launch_bounds__(384, 1) waits(int* p, __grid_constant__ const Big b) {
  extern __shared__ char s[];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (p && threadIdx.x == 9999) *p = s[0] + b.b[threadIdx.x];
}
__global__ void __launch_bounds__(384, 1) clustered(int* p, __grid_constant__ const Big b) {
  extern __shared__ char s[];
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (p && threadIdx.x == 9999) *p = s[0] + b.b[threadIdx.x];
}
__global__ void __launch_bounds__(384, 1) clustered_waits(int* p, __grid_constant__ const Big b) {
  extern __shared__ char s[];
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (p && threadIdx.x == 9999) *p = s[0] + b.b[threadIdx.x];
}
// 168 registers a thread by the launch's allocation
__global__ void __maxnreg__(168) regs(int* p, __grid_constant__ const Big b) {
  extern __shared__ char s[];
  float a[140];
  if (p && threadIdx.x >= 9999) {
#pragma unroll
    for (int i = 0; i < 140; i++) a[i] = ((volatile float*)p)[i * threadIdx.x];
#pragma unroll 1
    for (int j = 0; j < p[1]; j++) {
#pragma unroll
      for (int i = 0; i < 140; i++) a[i] = a[i] * a[(i + 1) % 140] + b.b[3];
    }
    float t = 0;
#pragma unroll
    for (int i = 0; i < 140; i++) t += a[i] * a[(i * 7) % 140];
    *p = s[0] + t;
  }
}
__global__ void touch(float* p, size_t n) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) p[i] = 0;
}
cudaGraphExec_t graph(cudaStream_t s, void (*f)(cudaStream_t)) {
  cudaGraph_t g;
  cudaGraphExec_t e;
  CK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  f(s);
  CK(cudaStreamEndCapture(s, &g));
  CK(cudaGraphInstantiate(&e, g, 0));
  return e;
}
static void go(cudaStream_t s, const void* f, int grid, int block, int smem, int cluster, bool pdl, int carve) {
  cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  if (carve >= 0) cudaFuncSetAttribute(f, cudaFuncAttributePreferredSharedMemoryCarveout, carve);
  cudaLaunchConfig_t c = {};
  c.gridDim = dim3(grid);
  c.blockDim = dim3(block);
  c.dynamicSmemBytes = smem;
  c.stream = s;
  cudaLaunchAttribute a[2];
  int n = 0;
  if (cluster > 1) {
    a[n].id = cudaLaunchAttributeClusterDimension;
    a[n].val.clusterDim = {(unsigned)cluster, 1, 1};
    n++;
  }
  if (pdl) {
    a[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a[n].val.programmaticStreamSerializationAllowed = 1;
    n++;
  }
  c.attrs = a;
  c.numAttrs = n;
  static int* p = nullptr;
  static Big b;
  void* args[2] = {&p, &b};
  CK(cudaLaunchKernelExC(&c, f, args));
}
int main() {
  cudaStream_t s;
  CK(cudaStreamCreate(&s));
  float* fl;
  size_t nb = 240u << 20;
  CK(cudaMalloc(&fl, nb));
  const int S = 227 * 1024;
  struct V {
    const char* n;
    void (*f)(cudaStream_t);
  };
  std::vector<V> v = {
      {"nothing", nullptr},
      {"plain 132x384", [](cudaStream_t s) { go(s, (void*)plain, 132, 384, 0, 1, 0, -1); }},
      {"plain 132x128", [](cudaStream_t s) { go(s, (void*)plain, 132, 128, 0, 1, 0, -1); }},
      {"+4KB params", [](cudaStream_t s) { go(s, (void*)big, 132, 384, 0, 1, 0, -1); }},
      {"+227KB", [](cudaStream_t s) { go(s, (void*)big, 132, 384, S, 1, 0, 100); }},
      {"+168 regs", [](cudaStream_t s) { go(s, (void*)regs, 132, 384, S, 1, 0, 100); }},
      {"+cluster 2 (no regs)", [](cudaStream_t s) { go(s, (void*)clustered, 132, 384, S, 2, 0, 100); }},
      {"tiny then plain",
       [](cudaStream_t s) {
         go(s, (void*)tiny, 128, 128, 0, 1, 0, -1);
         go(s, (void*)plain, 132, 384, 0, 1, 0, -1);
       }},
      {"tiny then waits PDL no smem",
       [](cudaStream_t s) {
         go(s, (void*)tiny, 128, 128, 0, 1, 0, -1);
         go(s, (void*)waits, 132, 384, 0, 1, 1, -1);
       }},
      {"tiny then waits PDL 227KB",
       [](cudaStream_t s) {
         go(s, (void*)tiny, 128, 128, 0, 1, 0, -1);
         go(s, (void*)waits, 132, 384, S, 1, 1, 100);
       }},
      {"tiny then clustered waits PDL 227KB",
       [](cudaStream_t s) {
         go(s, (void*)tiny, 128, 128, 0, 1, 0, -1);
         go(s, (void*)clustered_waits, 132, 384, S, 2, 1, 100);
       }},
      {"tiny then clustered waits 227KB no PDL",
       [](cudaStream_t s) {
         go(s, (void*)tiny, 128, 128, 0, 1, 0, -1);
         go(s, (void*)clustered_waits, 132, 384, S, 2, 0, 100);
       }},
      {"clustered waits PDL 227KB alone", [](cudaStream_t s) { go(s, (void*)clustered_waits, 132, 384, S, 2, 1, 100); }},
  };
  for (int ker = 0; ker < 2; ker++) {
    printf(ker ? "flush by kernel\n" : "flush by memset\n");
    for (auto& x : v) {
      cudaGraphExec_t e = nullptr;
      if (x.f) {
        x.f(s);
        CK(cudaStreamSynchronize(s));
        e = graph(s, x.f);
      }
      std::vector<float> t;
      for (int r = -3; r < 60; r++) {
        cudaEvent_t a, b;
        cudaEventCreate(&a);
        cudaEventCreate(&b);
        if (ker)
          touch<<<1024, 512, 0, s>>>(fl, nb / 4);
        else
          CK(cudaMemsetAsync(fl, 0, nb, s));
        cudaEventRecord(a, s);
        if (e) CK(cudaGraphLaunch(e, s));
        cudaEventRecord(b, s);
        CK(cudaStreamSynchronize(s));
        float ms;
        cudaEventElapsedTime(&ms, a, b);
        if (r >= 0) t.push_back(ms * 1e3);
        cudaEventDestroy(a);
        cudaEventDestroy(b);
      }
      std::sort(t.begin(), t.end());
      printf("%-45s %.2f (%.2f to %.2f)\n", x.n, t[30], t[6], t[54]);
    }
  }
}
