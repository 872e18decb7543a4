// Kernels of tiercache, compiled at run time: by NVRTC for a GPU, by the C++ compiler for the CPU twin, from this one text.
// No shared memory and no barriers, so that the twin may run one thread after the other.

#ifdef TIERCACHE_TWIN
#define __global__
#define __device__
#define __constant__
struct Position { unsigned x; };
static thread_local Position blockIdx, threadIdx, blockDim, gridDim;
#endif

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
struct alignas(16) u128 { u64 low, high; };

// ---------------------------------------------------------------------------------------------------------------------
// Paged copies between an engine's blocks and a contiguous chunk, (planes, tokens, heads, row bytes).
// A plane is K or V (or MLA's latent) of one layer. Strides are in bytes.

struct Paged {
  u64 planes;        // device address of u64[plane_count]: where each plane begins
  u64 chunk;         // device address of the chunk
  u64 block_stride, token_stride, head_stride;
  u64 plane_count, tokens, heads, row_bytes;
  u64 block_tokens;
  u64 first_token;   // of the chunk, within its first block
  u64 chunk_tokens;  // tokens in a plane of the chunk
  u64 chunk_first;   // where in the chunk's planes the tokens begin
  u64 scatter;       // 0: blocks to chunk; 1: chunk to blocks
};

struct Blocks { u32 id[896]; };  // by value: a kernel's parameters may have 4 KiB

template <typename Word>
__device__ static inline void paged_copy(const Paged& p, const Blocks& blocks) {
  // 32-bit indices: a 64-bit division costs about a hundred instructions, and no chunk has 2^32 words.
  const u32 heads = (u32)p.heads, block_tokens = (u32)p.block_tokens, words_per_row = (u32)(p.row_bytes / sizeof(Word));
  const u32 words_per_plane = (u32)p.tokens * heads * words_per_row;
  const u32 words = (u32)p.plane_count * words_per_plane;
  const u64* planes = (const u64*)p.planes;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
    const u32 plane = i / words_per_plane, in_plane = i - plane * words_per_plane;
    const u32 row = in_plane / words_per_row, word = in_plane - row * words_per_row;
    const u32 token = row / heads, head = row - token * heads;
    const u32 position = (u32)p.first_token + token, block = position / block_tokens;
    const u64 paged = planes[plane] + blocks.id[block] * p.block_stride + (position - block * block_tokens) * p.token_stride +
                      head * p.head_stride + word * sizeof(Word);
    const u64 packed = p.chunk + ((plane * p.chunk_tokens + p.chunk_first + token) * heads + head) * p.row_bytes +
                       word * sizeof(Word);
    if (p.scatter) *(Word*)paged = *(const Word*)packed;
    else *(Word*)packed = *(const Word*)paged;
  }
}

extern "C" __global__ void paged_16(Paged p, Blocks blocks) { paged_copy<u128>(p, blocks); }
extern "C" __global__ void paged_8(Paged p, Blocks blocks) { paged_copy<u64>(p, blocks); }
extern "C" __global__ void paged_4(Paged p, Blocks blocks) { paged_copy<u32>(p, blocks); }
extern "C" __global__ void paged_2(Paged p, Blocks blocks) { paged_copy<u16>(p, blocks); }
extern "C" __global__ void paged_1(Paged p, Blocks blocks) { paged_copy<u8>(p, blocks); }

// ---------------------------------------------------------------------------------------------------------------------
// XXH3-64 (xxHash 0.8, seed 0, default secret) of more than 240 bytes.
// Between two scrambles the eight accumulators only add up, so the sums of all blocks of 1,024 bytes are computed side by
// side; what remains in sequence is a few instructions for each block and lane.

#define PRIME32_1 0x9E3779B1ULL
#define BLOCK_BYTES 1024
#define STRIPE_BYTES 64

__constant__ alignas(8) static const u8 secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

__device__ static inline u64 bytes_at(const u8* p) {  // eight bytes at any alignment
  u64 value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | p[i];
  return value;
}

__device__ static inline u64 stripe_term(u64 own, u64 neighbour, u64 key) {
  const u64 keyed = own ^ key;
  return neighbour + (keyed & 0xffffffffULL) * (keyed >> 32);
}

// Thread b * 8 + lane: what block b adds to accumulator `lane`. `payload` is aligned to 8 bytes.
extern "C" __global__ void xxh3_blocks(u64 payload, u64 block_count, u64 sums) {
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < block_count * 8; i += (u64)gridDim.x * blockDim.x) {
    const u32 lane = i & 7;
    const u64* words = (const u64*)(payload + (i >> 3) * BLOCK_BYTES);
    u64 sum = 0;
    for (int stripe = 0; stripe < BLOCK_BYTES / STRIPE_BYTES; ++stripe)
      sum += stripe_term(words[stripe * 8 + lane], words[stripe * 8 + (lane ^ 1)], ((const u64*)secret)[stripe + lane]);
    ((u64*)sums)[i] = sum;
  }
}

// Eight threads: the accumulators after the whole payload, to `result` (u64[8]).
extern "C" __global__ void xxh3_fold(u64 payload, u64 length, u64 block_count, u64 sums, u64 result) {
  const u32 lane = blockIdx.x * blockDim.x + threadIdx.x;
  if (lane >= 8) return;
  const u64 initial[8] = {0xC2B2AE3DULL, 0x9E3779B185EBCA87ULL, 0xC2B2AE3D27D4EB4FULL, 0x165667B19E3779F9ULL,
                          0x85EBCA77C2B2AE63ULL, 0x85EBCA77ULL, 0x27D4EB2F165667C5ULL, 0x9E3779B1ULL};
  u64 accumulator = initial[lane];
  const u64 scramble_key = ((const u64*)secret)[16 + lane];
  const u64* block_sums = (const u64*)sums;
#ifndef TIERCACHE_TWIN
#pragma unroll 32  // loads a few hundred cycles ahead of the arithmetic
#endif
  for (u64 block = 0; block < block_count; ++block) {
    accumulator += block_sums[block * 8 + lane];
    accumulator = (accumulator ^ (accumulator >> 47) ^ scramble_key) * PRIME32_1;
  }
  const u8* rest = (const u8*)payload + block_count * BLOCK_BYTES;
  const u64 stripes = (length - 1 - block_count * BLOCK_BYTES) / STRIPE_BYTES;
  for (u64 stripe = 0; stripe < stripes; ++stripe)
    accumulator += stripe_term(bytes_at(rest + stripe * STRIPE_BYTES + lane * 8),
                               bytes_at(rest + stripe * STRIPE_BYTES + (lane ^ 1) * 8), ((const u64*)secret)[stripe + lane]);
  const u8* last = (const u8*)payload + length - STRIPE_BYTES;
  accumulator += stripe_term(bytes_at(last + lane * 8), bytes_at(last + (lane ^ 1) * 8), bytes_at(secret + 121 + lane * 8));
  ((u64*)result)[lane] = accumulator;
}

#ifdef TIERCACHE_TWIN
// The twin's launcher: every thread of the grid, one after the other. `arguments` points to the parameters.
static void each(unsigned blocks, unsigned threads, void (*body)(void**), void** arguments) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) body(arguments);
}

#define PAGED(name) \
  extern "C" void launch_##name(unsigned blocks, unsigned threads, void** a) { \
    each(blocks, threads, [](void** a) { name(*(Paged*)a[0], *(Blocks*)a[1]); }, a); \
  }
PAGED(paged_16)
PAGED(paged_8)
PAGED(paged_4)
PAGED(paged_2)
PAGED(paged_1)

extern "C" void launch_xxh3_blocks(unsigned blocks, unsigned threads, void** a) {
  each(blocks, threads, [](void** a) { xxh3_blocks(*(u64*)a[0], *(u64*)a[1], *(u64*)a[2]); }, a);
}
extern "C" void launch_xxh3_fold(unsigned blocks, unsigned threads, void** a) {
  each(blocks, threads, [](void** a) { xxh3_fold(*(u64*)a[0], *(u64*)a[1], *(u64*)a[2], *(u64*)a[3], *(u64*)a[4]); }, a);
}
#endif
