// Enough of the CUDA driver for CudaDriver to run on host memory: calls have the types of cuda.h (compile with -DCUDA_H
// against a toolkit to see that they do), work is done at once, and whatever would be an error on a GPU is one here.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef CUDA_H
#include <cuda.h>
#else
#define CUDAAPI
typedef int CUresult, CUdevice, CUdevice_attribute, CUstreamCaptureMode;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st* CUcontext;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
typedef void (*CUhostFn)(void*);
#endif

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };

// For tests: what is alive, and what fails from now on.
int stub_devices = 1, stub_contexts, stub_streams, stub_events, stub_allocations, stub_registered, stub_relaxed;
static const char* failing = "";
static int failing_with;
void stub_fail(const char* name, int status) { failing = strdup(name), failing_with = status; }
void stub_use_another_context(void);

struct CUctx_st { int retained; };
struct CUstream_st { uint32_t magic; };
struct CUevent_st { uint32_t magic; int recorded; };
#define STREAM 0x57EA11u
#define EVENT 0xE7E117u
static struct CUctx_st primary, other;
static __thread CUcontext current;
static int initialized;
static void* registered[16];

void stub_use_another_context(void) { current = &other; }

#define FAIL_IF_TOLD if (!strcmp(failing, __func__)) return failing_with
#define IN_CONTEXT do { FAIL_IF_TOLD; if (current != &primary || !primary.retained) return INVALID_CONTEXT; } while (0)
#define IS_STREAM(s) do { if (s && s->magic != STREAM) return INVALID_HANDLE; } while (0)
#define IS_EVENT(e) do { if (!e || e->magic != EVENT) return INVALID_HANDLE; } while (0)

CUresult CUDAAPI cuInit(unsigned int flags) { initialized = 1; return stub_devices ? OK : NO_DEVICE; }
CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  FAIL_IF_TOLD;
  if (!initialized) return NOT_INITIALIZED;
  if (ordinal < 0 || ordinal >= stub_devices) return 101;
  *device = ordinal;
  return OK;
}
CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
  if (error == 12345) return INVALID_VALUE;
  *text = error == OUT_OF_MEMORY ? "out of memory" : "an error of the stub";
  return OK;
}
CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == 75 ? 9 : 0;
  return attribute == 75 || attribute == 76 ? OK : INVALID_VALUE;
}
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  FAIL_IF_TOLD;
  *context = &primary, ++primary.retained, ++stub_contexts;
  return OK;
}
CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice device) { --primary.retained, --stub_contexts; return OK; }
CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) { FAIL_IF_TOLD; current = context; return OK; }
CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (*mode != 2) return INVALID_VALUE;
  ++stub_relaxed, *mode = 0;
  return OK;
}

CUresult CUDAAPI cuMemGetInfo_v2(size_t* free, size_t* total) { IN_CONTEXT; *free = 3ull << 32, *total = 1ull << 36; return OK; }
CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr* address, size_t length) {
  IN_CONTEXT;
  if (length > 1ull << 32) return OUT_OF_MEMORY;
  char* memory = aligned_alloc(4096, (length + 256 + 4095) / 4096 * 4096);  // aligned to 256 and no better, as a GPU's
  *address = (CUdeviceptr)(memory + 256), ++stub_allocations;
  return OK;
}
CUresult CUDAAPI cuMemFree_v2(CUdeviceptr address) {
  IN_CONTEXT;
  if (address % 4096 != 256) return INVALID_VALUE;
  free((char*)address - 256), --stub_allocations;
  return OK;
}
CUresult CUDAAPI cuMemHostRegister_v2(void* memory, size_t length, unsigned int flags) {
  IN_CONTEXT;
  if (flags != 1 || !length) return INVALID_VALUE;
  for (int i = 0; i < 16; ++i) if (registered[i] == memory) return ALREADY_REGISTERED;
  for (int i = 0; i < 16; ++i) if (!registered[i]) { registered[i] = memory, ++stub_registered; return OK; }
  return OUT_OF_MEMORY;
}
CUresult CUDAAPI cuMemHostUnregister(void* memory) {
  IN_CONTEXT;
  for (int i = 0; i < 16; ++i) if (registered[i] == memory) { registered[i] = 0, --stub_registered; return OK; }
  return NOT_REGISTERED;
}

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned int flags) {
  IN_CONTEXT;
  if (flags != 1) return INVALID_VALUE;
  *stream = malloc(sizeof **stream), (*stream)->magic = STREAM, ++stub_streams;
  return OK;
}
CUresult CUDAAPI cuStreamDestroy_v2(CUstream stream) {
  IN_CONTEXT;
  IS_STREAM(stream);
  stream->magic = 0, free(stream), --stub_streams;
  return OK;
}
CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned int flags) {
  IN_CONTEXT;
  if (flags != 3) return INVALID_VALUE;
  *event = calloc(1, sizeof **event), (*event)->magic = EVENT, ++stub_events;
  return OK;
}
CUresult CUDAAPI cuEventDestroy_v2(CUevent event) {
  IN_CONTEXT;
  IS_EVENT(event);
  event->magic = 0, free(event), --stub_events;
  return OK;
}
CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) { IN_CONTEXT; IS_EVENT(event); IS_STREAM(stream); event->recorded = 1; return OK; }
CUresult CUDAAPI cuEventQuery(CUevent event) { IN_CONTEXT; IS_EVENT(event); return event->recorded ? OK : NOT_READY; }
CUresult CUDAAPI cuEventSynchronize(CUevent event) { IN_CONTEXT; IS_EVENT(event); return OK; }
CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
  IN_CONTEXT;
  IS_STREAM(stream);
  IS_EVENT(event);
  return flags ? INVALID_VALUE : OK;
}
CUresult CUDAAPI cuLaunchHostFunc(CUstream stream, CUhostFn function, void* argument) {
  IN_CONTEXT;
  IS_STREAM(stream);
  function(argument);
  return OK;
}
CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t length, CUstream stream) {
  IN_CONTEXT;
  IS_STREAM(stream);
  memmove((void*)to, (void*)from, length);
  return OK;
}
CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t length, CUstream stream) {
  IN_CONTEXT;
  IS_STREAM(stream);
  memset((void*)address, value, length);
  return OK;
}

// A module's image is the path of a library made for the CPU twin: its launchers take the driver's own parameter list.
CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
  IN_CONTEXT;
  *module = dlopen(image, RTLD_NOW | RTLD_LOCAL);
  return *module ? OK : 200;
}
CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  IN_CONTEXT;
  char launcher[64];
  snprintf(launcher, sizeof launcher, "launch_%s", name);
  *function = dlsym(module, launcher);
  return *function ? OK : NOT_FOUND;
}
CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                                unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void** parameters,
                                void** extra) {
  IN_CONTEXT;
  IS_STREAM(stream);
  if (!gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || extra) return INVALID_VALUE;
  ((void (*)(unsigned, unsigned, void**))function)(gx, bx, parameters);
  return OK;
}

// NVRTC, for the same: what it "compiles" is the path in STUB_KERNELS.
int nvrtcCreateProgram(void** program, const char* text, const char* name, int headers, const char* const* header_texts,
                       const char* const* header_names) {
  *program = (void*)text;
  return !strstr(text, "paged_16") || strcmp(name, "kernels.cu") || headers || header_texts || header_names;
}
int nvrtcCompileProgram(void* program, int count, const char* const* options) {
  return count != 2 || strcmp(options[0], "--gpu-architecture=sm_90") || strcmp(options[1], "--std=c++17") ? 6 : 0;
}
int nvrtcGetCUBINSize(void* program, size_t* size) { *size = strlen(getenv("STUB_KERNELS")) + 1; return 0; }
int nvrtcGetCUBIN(void* program, char* binary) { strcpy(binary, getenv("STUB_KERNELS")); return 0; }
int nvrtcGetProgramLogSize(void* program, size_t* size) { *size = 13; return 0; }
int nvrtcGetProgramLog(void* program, char* log) { strcpy(log, "bad options!"); return 0; }
int nvrtcDestroyProgram(void** program) { *program = 0; return 0; }
