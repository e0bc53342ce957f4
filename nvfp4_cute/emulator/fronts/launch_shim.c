/*
 * The CUDA entry points that CuTe DSL host code calls, switched between the emulator and the real runtime.
 *
 * While nvfp4_cute/emulator/fronts/driver.py has registered callbacks, they answer: a library handle is the address of its
 * code, a kernel handle is a record of library and name (interned, never freed). Otherwise every call goes on to CuTe
 * DSL's own runtime library, so that one process can use a GPU and the emulator. Signatures are those of the CUDA 12.8+
 * runtime functions of the same names.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef _WIN32
#include <dlfcn.h>
#endif

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101 };
enum { ATTRIBUTE_BYTES = 72, ATTRIBUTE_VALUE = 8 };
/* cudaLaunchAttributeID */
enum { ATTRIBUTE_COOPERATIVE = 2, ATTRIBUTE_CLUSTER_DIMENSION = 4, ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
enum { COOPERATIVE = 1, PROGRAMMATIC = 2 };

/* cudaLaunchConfig_t */
struct launch_config {
  uint32_t grid[3];
  uint32_t block[3];
  uint64_t shared_bytes;
  void *queue;
  const unsigned char *attributes; /* records of ATTRIBUTE_BYTES: id, padding, value */
  uint32_t attribute_count;
};

/* What the launch callback gets. Keep equal to LaunchRecord in driver.py. */
struct launch_record {
  const char *name;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t cluster[3]; /* zeros if the launch names no cluster */
  uint32_t attributes; /* COOPERATIVE | PROGRAMMATIC */
  uint64_t shared_bytes;
  void **arguments;
  const void *image; /* code of the library that the kernel comes from */
};

typedef int (*launch_callback)(const struct launch_record *record);
typedef int (*attribute_callback)(int *value, int attribute);

/* What the tensor map callback gets: the arguments of cuTensorMapEncodeTiled. Keep equal to TensorMapRecord in driver.py. */
struct tensor_map_record {
  void *descriptor; /* 128 bytes, to be written */
  uint64_t address;
  const uint64_t *dims;
  const uint64_t *strides;
  const uint32_t *box;
  const uint32_t *element_strides;
  uint32_t element;
  uint32_t rank;
  uint32_t interleave;
  uint32_t swizzle;
  uint32_t fill;
};
typedef int (*tensor_map_callback)(const struct tensor_map_record *record);

static launch_callback on_launch;
static attribute_callback on_attribute;
static tensor_map_callback on_tensor_map;

struct kernel {
  struct kernel *next;
  const void *image;
  char name[];
};
static struct kernel *kernels;

EXPORT void nvfp4_cute_set_callbacks(launch_callback launch, attribute_callback attribute,
                                     tensor_map_callback tensor_map) {
  on_launch = launch;
  on_attribute = attribute;
  on_tensor_map = tensor_map;
}

/* CuTe DSL's runtime library, loaded when the first call goes on to it. */
static char *runtime_path;
static void *runtime;

EXPORT void nvfp4_cute_set_runtime(const char *path) {
  free(runtime_path);
  runtime_path = strdup(path);
}

static void *real(const char *name) {
#ifndef _WIN32
  if (!runtime && runtime_path) runtime = dlopen(runtime_path, RTLD_NOW | RTLD_LOCAL);
  return runtime ? dlsym(runtime, name) : NULL;
#else
  (void)name;
  return NULL;
#endif
}

/* Unless the emulator is the device: return what the real function of this signature returns, or NO_DEVICE. */
#define FORWARD(name, signature, ...)                 \
  do {                                                \
    if (!on_launch) {                                 \
      int(*function) signature = real(name);          \
      return function ? function(__VA_ARGS__) : NO_DEVICE; \
    }                                                 \
  } while (0)

static const struct kernel *intern(const void *image, const char *name) {
  struct kernel *found;
  for (found = kernels; found; found = found->next)
    if (found->image == image && !strcmp(found->name, name)) return found;
  found = malloc(sizeof *found + strlen(name) + 1);
  if (!found) return NULL;
  found->image = image;
  strcpy(found->name, name);
  found->next = kernels;
  kernels = found;
  return found;
}

EXPORT int _cudaLibraryLoadData(void **library, const void *code, void *options, void **values, unsigned count,
                                void *library_options, void **library_values, unsigned library_count) {
  FORWARD("_cudaLibraryLoadData", (void **, const void *, void *, void **, unsigned, void *, void **, unsigned), library,
          code, options, values, count, library_options, library_values, library_count);
  (void)options, (void)values, (void)count;
  (void)library_options, (void)library_values, (void)library_count;
  *library = (void *)code;
  return SUCCESS;
}

EXPORT int _cudaLibraryGetKernel(const void **kernel, void *library, const char *name) {
  FORWARD("_cudaLibraryGetKernel", (const void **, void *, const char *), kernel, library, name);
  *kernel = intern(library, name);
  return *kernel ? SUCCESS : OUT_OF_MEMORY;
}

EXPORT int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  FORWARD("_cuKernelGetAttribute", (int *, int, void *, int), value, attribute, kernel, device);
  (void)attribute, (void)kernel, (void)device;
  *value = 0; /* no static shared memory, no spills, no registers worth counting */
  return SUCCESS;
}

EXPORT int _cudaFuncSetAttribute(const void *function, int attribute, int value) {
  FORWARD("_cudaFuncSetAttribute", (const void *, int, int), function, attribute, value);
  (void)function, (void)attribute, (void)value;
  return SUCCESS;
}

EXPORT int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  FORWARD("_cudaKernelSetAttributeForDevice", (void *, int, int, int), kernel, attribute, value, device);
  (void)kernel, (void)attribute, (void)value, (void)device;
  return SUCCESS;
}

EXPORT int _cudaGetDevice(int *device) {
  FORWARD("_cudaGetDevice", (int *), device);
  *device = 0;
  return SUCCESS;
}

EXPORT int _cudaGetDeviceCount(int *count) {
  FORWARD("_cudaGetDeviceCount", (int *), count);
  *count = 1;
  return SUCCESS;
}

EXPORT int _cudaSetDevice(int device) {
  FORWARD("_cudaSetDevice", (int), device);
  return device == 0 ? SUCCESS : INVALID_DEVICE;
}

EXPORT int _cudaLibraryUnload(void *library) {
  FORWARD("_cudaLibraryUnload", (void *), library);
  (void)library; /* the code belongs to the host program */
  return SUCCESS;
}

/* Launches are over when they return. */
EXPORT int _cudaDeviceSynchronize(void) {
  FORWARD("_cudaDeviceSynchronize", (void));
  return SUCCESS;
}

EXPORT int _cudaStreamSynchronize(void *stream) {
  FORWARD("_cudaStreamSynchronize", (void *), stream);
  (void)stream;
  return SUCCESS;
}

EXPORT int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  FORWARD("_cudaDeviceGetAttribute", (int *, int, int), value, attribute, device);
  return on_attribute(value, attribute);
}

EXPORT int _cuTensorMapEncodeTiled(void *descriptor, uint32_t element, uint32_t rank, void *address, const uint64_t *dims,
                                   const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                                   uint32_t interleave, uint32_t swizzle, uint32_t promotion, uint32_t fill) {
  struct tensor_map_record record = {descriptor, (uintptr_t)address, dims, strides, box, element_strides,
                                     element,    rank,               interleave, swizzle, fill};
  FORWARD("_cuTensorMapEncodeTiled",
          (void *, uint32_t, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *, const uint32_t *,
           uint32_t, uint32_t, uint32_t, uint32_t),
          descriptor, element, rank, address, dims, strides, box, element_strides, interleave, swizzle, promotion, fill);
  return on_tensor_map(&record);
}

EXPORT int _cudaLaunchKernelEx(const struct launch_config *config, const void *kernel, void **arguments) {
  struct launch_record record = {0};
  uint32_t i;
  FORWARD("_cudaLaunchKernelEx", (const struct launch_config *, const void *, void **), config, kernel, arguments);
  record.name = ((const struct kernel *)kernel)->name;
  record.image = ((const struct kernel *)kernel)->image;
  memcpy(record.grid, config->grid, sizeof record.grid);
  memcpy(record.block, config->block, sizeof record.block);
  record.shared_bytes = config->shared_bytes;
  record.arguments = arguments;
  for (i = 0; i < config->attribute_count; i++) {
    const unsigned char *attribute = config->attributes + (size_t)i * ATTRIBUTE_BYTES;
    int32_t id, value;
    memcpy(&id, attribute, sizeof id);
    memcpy(&value, attribute + ATTRIBUTE_VALUE, sizeof value);
    if (id == ATTRIBUTE_CLUSTER_DIMENSION) memcpy(record.cluster, attribute + ATTRIBUTE_VALUE, sizeof record.cluster);
    if (id == ATTRIBUTE_COOPERATIVE && value) record.attributes |= COOPERATIVE;
    if (id == ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION && value) record.attributes |= PROGRAMMATIC;
  }
  return on_launch(&record);
}

/*
 * Functions called through TVM-FFI load their device code by these two, whose originals call a CUDA runtime of their
 * own. `state` is a variable of the host code, 0 at first. `load` writes the library handle, `load_to_device` prepares its
 * kernels on a device.
 */
struct loaded_state {
  struct loaded_state *next;
  int64_t *state;
  void *library;
};
static struct loaded_state *loaded_states;

EXPORT int cuda_dialect_init_library_once(int64_t *state, int (*load)(void **), int (*load_to_device)(void **, int32_t),
                                          void (*set_error)(const char *, const char *)) {
  struct loaded_state *loaded;
  int error;
  FORWARD("cuda_dialect_init_library_once",
          (int64_t *, int (*)(void **), int (*)(void **, int32_t), void (*)(const char *, const char *)), state, load,
          load_to_device, set_error);
  if (*state) return SUCCESS;
  loaded = malloc(sizeof *loaded);
  if (!loaded) {
    set_error("MemoryError", "no memory for the state of a device library");
    return OUT_OF_MEMORY;
  }
  error = load(&loaded->library);
  if (error == SUCCESS && load_to_device) error = load_to_device(&loaded->library, 0);
  if (error != SUCCESS) {
    free(loaded);
    set_error("RuntimeError", "the emulated device could not load a device library");
    return error;
  }
  loaded->state = state;
  loaded->next = loaded_states;
  loaded_states = loaded;
  *state = 1;
  return SUCCESS;
}

EXPORT void cuda_dialect_unload_library_once(int64_t *state) {
  const struct loaded_state *loaded;
  void (*unload)(int64_t *);
  for (loaded = loaded_states; loaded; loaded = loaded->next)
    if (loaded->state == state) return; /* the code belongs to the host program */
  unload = real("cuda_dialect_unload_library_once");
  if (unload) unload(state);
}

/* The host code that version 4.3 makes for TVM-FFI asks for it when a call failed; its runtime library needs a driver. */
EXPORT const char *cuda_dialect_get_error_name(int error) {
  const char *(*name)(int) = real("cuda_dialect_get_error_name");
  return name ? name(error) : "failure on the emulated device";
}

/* Loaded with dlopen, never imported; the symbol satisfies build tools that expect an extension module. */
EXPORT void *PyInit__launch_shim(void) { return NULL; }
