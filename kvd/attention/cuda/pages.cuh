// Writing into and reading out of pages in device memory. Python side and theory of operation: kernels.py.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace kvd {
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// bf16 bits of a finite float, ties to even, as kvd.quant.codec rounds.
__device__ __forceinline__ u32 bf16_bits(float x) {
  const u32 b = __float_as_uint(x);
  return (b + (0x7FFFu + ((b >> 16) & 1u))) >> 16;
}

// One 64-wide group of one head of one token, by one warp: two values a lane. The arithmetic is that of the codec,
// operation by operation (the rounding of each is named), so the bytes are its bytes. True: a value does not fit.
template <typename X, int BITS> __device__ __forceinline__ bool encode_group(const X* x, char* codes, char* scale, char* bias) {
  const int lane = threadIdx.x & 31;
  const float x0 = (float)x[2 * lane], x1 = (float)x[2 * lane + 1];
  float low = fminf(x0, x1), high = fmaxf(x0, x1);
  const bool odd = !(isfinite(x0) && isfinite(x1));
  for (int o = 16; o; o >>= 1) { low = fminf(low, __shfl_xor_sync(~0u, low, o)); high = fmaxf(high, __shfl_xor_sync(~0u, high, o)); }
  constexpr float LEVELS = (float)((1 << BITS) - 1);
  const float size = fmaxf(__fdiv_rn(__fsub_rn(high, low), LEVELS), 1e-7f);
  const bool low_is_edge = fabsf(low) > fabsf(high);
  float s = low_is_edge ? size : -size;
  const float edge = low_is_edge ? low : high;
  const float edge_code = rintf(__fdiv_rn(edge, s));
  const bool exact = edge_code != 0.f;
  s = exact ? __fdiv_rn(edge, edge_code) : s;
  const float b = exact ? edge : 0.f;
  const u32 sb = bf16_bits(s), bb = bf16_bits(b);
  const bool bad = __any_sync(~0u, odd) || !isfinite(s) || !isfinite(b) || (sb & 0x7F80u) == 0x7F80u || (bb & 0x7F80u) == 0x7F80u;
  const float bias_value = __uint_as_float(bb << 16), reciprocal = __frcp_rn(__uint_as_float(sb << 16));
  const u32 c0 = (u32)fminf(fmaxf(rintf(__fmul_rn(__fsub_rn(x0, bias_value), reciprocal)), 0.f), LEVELS);
  const u32 c1 = (u32)fminf(fmaxf(rintf(__fmul_rn(__fsub_rn(x1, bias_value), reciprocal)), 0.f), LEVELS);
  constexpr int LANES = 16 / BITS;  // lanes that share a word
  u32 word = (c0 | (c1 << BITS)) << ((lane % LANES) * 2 * BITS);
#pragma unroll
  for (int o = 1; o < LANES; o <<= 1) word |= __shfl_xor_sync(~0u, word, o);
  if (lane % LANES == 0) ((u32*)codes)[lane / LANES] = word;
  if (lane == 0) { *(u16*)scale = (u16)sb; *(u16*)bias = (u16)bb; }
  return bad;
}

// Rows of one side of one page of one KV head, as values: U words a thread are loaded before any is stored.
template <typename X, int BITS, int D> __device__ __forceinline__ void decode_rows(const char* codes, const char* scales, const char* biases, int rows, X* out) {
  constexpr int PER = 32 / BITS, W = D / PER, U = 4;
  const u32* c = (const u32*)codes; const u16* sp = (const u16*)scales; const u16* bp = (const u16*)biases;
  const int total = rows * W;
  for (int i0 = threadIdx.x; i0 < total; i0 += blockDim.x * U) {
    u32 word[U]; u16 s[U], b[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int i = i0 + u * blockDim.x;
      if (i < total) { word[u] = __ldg(c + i); s[u] = __ldg(sp + i / (64 / PER)); b[u] = __ldg(bp + i / (64 / PER)); }
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int i = i0 + u * blockDim.x;
      if (i < total) {
        const float sv = __uint_as_float((u32)s[u] << 16), bv = __uint_as_float((u32)b[u] << 16);
        __align__(16) X r[PER];
#pragma unroll
        for (int j = 0; j < PER; j++) r[j] = (X)__fadd_rn(__fmul_rn((float)((word[u] >> (BITS * j)) & ((1u << BITS) - 1)), sv), bv);
        constexpr int N = PER * sizeof(X) / 8;
#pragma unroll
        for (int j = 0; j < N; j++) ((uint2*)out)[i * N + j] = ((const uint2*)r)[j];
      }
    }
  }
}
}  // namespace kvd
